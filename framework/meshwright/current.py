"""The micro-batch that is in the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class CurrentMicrobatch:
    """Samples of the micro-batch whose forward runs, and the tokens of each that this rank has.

    The executor sets them. Dropouts draw their masks by them, routers find a recorded routing, and
    the token cut of context parallelism selects tokens. Recompute restores them.
    """

    sample_indices: Tensor | None = None
    """(B,) int64, global: samples_seen + position in the global batch."""
    tokens: Any = None
    """Tokens of each sample that this rank has, where samples differ: those of the Microbatch, see
    NOTE [order by documents].
    """
    corpora: Tensor | None = None
    """Training corpus of each sample, (B,) int64, on the last stage; None: one corpus."""
    is_recompute: bool = False
    """True while a forward runs inside backward (recompute), or while only costs are counted."""
