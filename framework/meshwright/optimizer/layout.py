"""Places of the weights in flat shards, for optimizers whose updates depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from meshwright.mesh.holders import Holders
from meshwright.optimizer.codecs import Allocate
from meshwright.optimizer.matrix_plan import MatrixShard
from meshwright.optimizer.rounded import ShardPlace


class ShardLayout(NamedTuple):
    """Layout of the weights in a flat shard,
    for optimizers whose updates depend on indices or on whole weights.
    """

    place: ShardPlace | None = None
    """Position of the shard in its bucket: random bits of an element, and whole parameters."""
    matrices: MatrixShard | None = None
    """Matrices of the shard, which are stepped as a whole."""
    holders: Holders = Holders()
    """Ranks with parts and copies of the shard's weights."""


class Shards(NamedTuple):
    """Facts of the flat shards of an optimizer."""

    layouts: Mapping[Tensor, ShardLayout]
    """Parameter, which is a flat shard -> its layout."""
    allocate: Allocate | None = None
    """Function that allocates states; None: on the device of the weights."""

    def of(self, field: str) -> dict[Tensor, Any]:
        """Return parameter -> this field of its layout, without parameters that have none."""
        values = {parameter: getattr(layout, field) for parameter, layout in self.layouts.items()}
        return {parameter: value for parameter, value in values.items() if value is not None}
