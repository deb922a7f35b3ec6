"""From the model on meta to the real weights of one stage: a rank never holds another's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from meshwright.blueprint import DTYPES, Blueprint
from meshwright.data_parallel.replica import members_of
from meshwright.data_parallel.sharded import Member, Tie
from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import Mesh
from meshwright.parameters import ParameterInfo


def materialise(
    blueprint: Blueprint,
    stage: int,
    device: torch.device,
    local_of: Callable[[ParameterInfo], Tensor] | None = None,
) -> nn.Sequential:
    """The layers of one stage with their weights: this tp rank's slices, in the training dtype, on the device. Tied
    parameters inside the stage stay one object.

    ``local_of``: gives what this rank holds of a parameter. None: the initial weights. Each whole tensor is then drawn
    in float32 on CPU by the parameter's name, one at a time, then sliced and cast: the same bits in every layout.
    """

    def drawn(info: ParameterInfo) -> Tensor:
        return info.take(blueprint.model.initial(info.name))

    local_of = local_of or drawn
    layers = blueprint.stage_layers(stage)
    dtype = DTYPES[blueprint.config.train.dtype]
    made: dict[str, nn.Parameter] = {}
    for name, outline in list(layers.named_parameters(remove_duplicate=False)):
        canonical = blueprint.model.canonical(name)
        if canonical not in made:
            local = local_of(blueprint.infos[canonical])
            assert local.shape == outline.shape, (name, tuple(local.shape), tuple(outline.shape))
            made[canonical] = nn.Parameter(local.to(device=device, dtype=dtype), requires_grad=outline.requires_grad)
        owner_name, _, attribute = name.rpartition(".")
        layers.get_submodule(owner_name)._parameters[attribute] = made[canonical]
    is_here = all(buffer.device == device for buffer in layers.buffers())
    return layers if is_here else layers.to(device)


def tied_groups(blueprint: Blueprint, mesh: Mesh) -> dict[str, Group]:
    """Canonical name -> the ranks (with my dp and tp coordinates) that hold copies of a weight tied across stages.

    Every rank calls this, in step: it makes process groups.
    """
    groups: dict[tuple[int, ...], Group] = {}
    found: dict[str, Group] = {}
    for name, stages in sorted(blueprint.stage_of_parameter().items()):
        pp_ranks = tuple(sorted({blueprint.schedule.rank_of(stage) for stage in stages}))
        if len(stages) > 1:
            if pp_ranks not in groups:
                groups[pp_ranks] = mesh.stage_group(pp_ranks)
            found[name] = groups[pp_ranks]
    return found


def stage_members(blueprint: Blueprint, stage: int, layers: nn.Sequential, tied: Mapping[str, Group]) -> list[Member]:
    """The parameters of a stage, frozen ones too, with what the data-parallel axis must know of each."""
    members = []
    stages = blueprint.stage_of_parameter()
    for name, parameter, layer in members_of(layers):
        canonical = blueprint.model.canonical(name)
        tie = Tie(canonical, tied[canonical], stages[canonical][0] == stage) if canonical in tied else None
        members.append(Member(blueprint.infos[canonical], parameter, layer, tie))
    return members
