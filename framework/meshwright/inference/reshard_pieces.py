"""Tensors of the shards that the ranks of a layout write, read from a checkpoint of any layout, without ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.adapters.attach import is_adapter
from meshwright.blueprint import Blueprint, draw_blueprint
from meshwright.checkpoint import CheckpointReader, TensorKind, TensorPiece
from meshwright.config import Optimizer, RunConfig, bucket_bytes, leaves_out_base
from meshwright.data_parallel.members import plan_buckets, stage_members
from meshwright.data_parallel.sharding import StageParameter, accumulation_dtype
from meshwright.mesh import Coordinates, Grid
from meshwright.mesh.comm import Group
from meshwright.model.buffers import is_saved
from meshwright.optimizer import factor_infos, saved_states_of
from meshwright.parameters import ParameterInfo


def draw_blueprints(config: RunConfig, grid: Grid) -> list[Blueprint]:
    """Draw a blueprint for each rank of a stage that writes a shard: with the slices of its tp and its ep rank."""
    return [
        draw_blueprint(
            config,
            tp=Group("tp", tuple(range(grid.tp)), rank % grid.tp),
            ep=Group("ep", tuple(range(grid.ep)), rank % grid.ep),
        )
        for rank in range(max(grid.tp, grid.ep))
    ]


class ShardTensor(NamedTuple):
    """Tensor that one rank writes: its kind, name and slice."""

    kind: TensorKind
    info: ParameterInfo


def shard_tensors(
    blueprint: Blueprint, at: Coordinates, is_fresh: bool = False, added: Sequence[TensorKind] = ()
) -> Iterator[ShardTensor]:
    """Yield the tensors that the rank at ``at`` writes, in the order of ``run.tensors.pieces``.

    Args:
        blueprint: drawn for its tp and ep rank.
        at: of the first replica, or of another that writes experts alone.
        is_fresh: the checkpoint is an imported model, with weights alone.
        added: kinds of tensors that callbacks have added, such as ema; and an optimizer of the user.
    """
    stages, optimizer = blueprint.schedule.stages_of(at.pp_rank), blueprint.config.optimizer
    is_first = at.dp_rank == at.cp_rank == 0
    if is_first and at.tp_rank == 0:
        for stage in stages:
            inside = {name for name, _ in blueprint.stage_layers(stage).named_children()}
            for name in blueprint.running:
                if name.partition(".")[0] in inside and is_saved(blueprint.model.layers, name):
                    shape = tuple(blueprint.model.layers.get_buffer(name).shape)
                    yield ShardTensor(TensorKind.WEIGHTS, ParameterInfo(name, shape))
    for stage in stages:
        members = [member for member in _members(blueprint, stage) if is_first or member.info.is_expert]
        for member in members:
            if leaves_out_base(blueprint.config) and not is_adapter(member.info.name):
                continue
            if not member.parameter.requires_grad and member.kind.owns(at.tp_rank):
                yield ShardTensor(TensorKind.WEIGHTS, member.info)
        trained = [member for member in members if member.parameter.requires_grad]
        for together in plan_buckets(trained, bucket_bytes(blueprint.config)):
            if not together[0].kind.owns(at.tp_rank):
                continue
            dtype = together[0].parameter.dtype
            names = _known_states(optimizer, is_matrix=together[0].kind.is_matrix)
            kinds = [TensorKind.WEIGHTS, *map(TensorKind, names), *added]
            if dtype != accumulation_dtype(dtype):
                kinds.append(TensorKind.MASTER)
            if is_fresh:
                kinds = [TensorKind.WEIGHTS]
            for of in kinds:
                for member in together:
                    yield ShardTensor(of, member.info)
            for member in together if at.tp_rank == 0 and not is_fresh else ():
                for name, info in factor_infos(optimizer, member.info.name, member.info.global_shape):
                    yield ShardTensor(TensorKind(name), info)


def pieces(
    checkpoint: CheckpointReader, blueprint: Blueprint, at: Coordinates, is_fresh: bool
) -> Iterator[TensorPiece]:
    """Yield the tensors of :func:`shard_tensors` with their values, read one by one."""
    added = added_states(checkpoint, blueprint)
    for kind, info in shard_tensors(blueprint, at, is_fresh, added):
        tensor = checkpoint.read(kind, info)
        assert tensor is not None, (kind, info)  # guaranteed by reshard._check_names
        yield TensorPiece(kind, info, info.unpadded(tensor))


def added_states(checkpoint: CheckpointReader, blueprint: Blueprint) -> list[TensorKind]:
    """Return the kinds of tensors in a checkpoint that callbacks, or an optimizer of the user, have added."""
    own = {TensorKind.WEIGHTS, TensorKind.MASTER, *_known_states(blueprint.config.optimizer)}
    return [kind for kind in checkpoint.kinds() if kind not in own]


def _known_states(optimizer: Optimizer, *, is_matrix: bool | None = None) -> tuple[str, ...]:
    """Return the names of meshwright's own optimizers' states. Those of a user's are what the checkpoint has."""
    return saved_states_of(optimizer, is_matrix=is_matrix) if optimizer.builder is None else ()


def _members(blueprint: Blueprint, stage: int) -> list[StageParameter]:
    """Return the parameters of a stage, each once. Tied weights get a group of one rank: nothing is reduced here."""
    stages_of = blueprint.stage_of_parameter()
    tied = {name: Group("pp", (0,), 0) for name, stages in stages_of.items() if len(stages) > 1}
    of_stage = stage, blueprint.stage_layers(stage), blueprint.infos, blueprint.model.canonical
    found: dict[str, StageParameter] = {}
    for member in stage_members(*of_stage, stages_of, tied):
        found.setdefault(member.info.name, member)
    return list(found.values())
