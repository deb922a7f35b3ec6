"""Layers and parameters of a model as one rank holds them."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from meshwright.mesh.fake import CountingGroup
from meshwright.tools.planner.context import ContextMeter
from meshwright.tools.planner.matrix_step import MatrixSize


class LocalParameter(NamedTuple):
    """Parameter of a layer, as one tp rank holds it."""

    name: str
    """Name within the layer."""
    num_elements: int
    in_blocks: bool
    """True if its optimizer state is held in 8-bit blocks."""
    trained: bool
    matrices: tuple[MatrixSize, ...] = ()
    """Whole matrices that Muon steps."""


class SplitLayers(NamedTuple):
    """Layers of a model on one tp and cp rank; of equal layers, the first."""

    layers: nn.Sequential
    group: CountingGroup
    parameters: dict[str, list[LocalParameter]]
    """Parameters of each layer."""
    meter: ContextMeter | None = None
    """Meter of the attention cores, where context parallelism or the corpus' documents count."""
