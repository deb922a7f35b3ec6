"""Layers and parameters of a model as one rank holds them."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from meshwright.config import RunConfig
from meshwright.expert_parallel import plan as experts
from meshwright.mesh.fake import CountingGroup
from meshwright.model.buffers import cast_parameters
from meshwright.model.build import PlainModel
from meshwright.optimizer import with_settings
from meshwright.parameters import DTYPES, ParameterInfo
from meshwright.tensor_parallel import plan as sharding
from meshwright_plan.planner.context import ContextMeter
from meshwright_plan.planner.matrix_step import MatrixSize, sizes_of


class LocalParameter(NamedTuple):
    """Parameter of a layer, as one tp rank holds it."""

    name: str
    """Name within the layer."""
    info: ParameterInfo
    trained: bool
    matrices: tuple[MatrixSize, ...] = ()
    """Matrices that are stepped as a whole."""

    @property
    def num_elements(self) -> int:
        """Elements in memory on this rank."""
        return math.prod(self.info.local_shape)


class SplitLayers(NamedTuple):
    """Layers of a model on one tp and cp rank; of equal layers, the first."""

    layers: nn.Sequential
    group: CountingGroup
    parameters: dict[str, list[LocalParameter]]
    """Parameters of each layer."""
    meter: ContextMeter | None = None
    """Meter of the attention cores, where context parallelism or the corpus' documents count."""
    load: tuple[int, float] = (1, 1.0)
    """(ep, rows of the busiest rank's experts over the mean)."""


def shard(
    config: RunConfig,
    model: PlainModel,
    layers: nn.Sequential,
    tp: CountingGroup,
    ep: CountingGroup,
    *,
    sequence: bool,
) -> dict[str, list[LocalParameter]]:
    """Shard layers on meta over tp and their experts over ep, in the training dtype, in place;
    return their parameters.

    Raises:
        UserError: the model cannot be sharded so.
    """
    tied = [
        names for names in model.tied if all(n.partition(".")[0] in layers._modules for n in names)
    ]
    infos = sharding.apply(
        layers,
        plan=model.plan,
        tied=tied,
        group=tp,
        sequence=sequence,
        divisible=model.divisible,
        shared=model.shared_units,
    )
    alike = None if sequence else tp
    infos = experts.apply(config.model.builder, layers, model.plan, infos, ep, tied, alike)
    infos = with_settings(infos, config.optimizer, model.groups, model.matrices, model.canonical)
    cast_parameters(layers, DTYPES[config.train.dtype])
    parameters: dict[str, list[LocalParameter]] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        layer, _, rest = name.partition(".")
        info = infos[name]
        local = LocalParameter(rest, info, parameter.requires_grad, sizes_of(info))
        parameters.setdefault(layer, []).append(local)
    return parameters
