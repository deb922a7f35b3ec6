"""Tolerances of a comparison, by precision."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.config.combinations.layout import Layout


class Tolerance(NamedTuple):
    """Tolerances: the largest relative differences that pass. None: reported only."""

    loss: float
    """Tolerance of the loss of step 1."""
    gradient: float
    """Tolerance of each parameter's gradient, and of the gradient norm, in step 1."""
    weights: float | None
    """Tolerance of the weights, or master weights, after the last step."""
    later: float
    """Tolerance of the losses of later steps and of validation losses."""
    later_norm: float
    """Tolerance of the gradient norms of later steps."""


TOLERANCES = {
    "float64": Tolerance(1e-12, 1e-10, 1e-9, 1e-9, 1e-8),
    "float32": Tolerance(1e-6, 1e-5, 1e-4, 1e-4, 1e-3),
    "bfloat16": Tolerance(1e-2, 2e-2, None, 1e-2, 2e-2),
    "float16": Tolerance(2e-3, 4e-3, None, 2e-3, 4e-3),
}
SAME_ROUNDING = Tolerance(1e-6, 1e-5, None, 1e-2, 2e-2)
"""bfloat16 tolerances of layouts that round every activation as the plain run does: one whole
sample at a time. float16 has none. Probably CPU products round differently by the memory layout of
their operands; this was not isolated. Gradients are summed in float32 on both sides, so a faulty
sum in 16 bits (off by a percent) exceeds them.
"""


def tolerance_of(dtype: str, layout: Layout) -> Tolerance:
    """Return the tolerances of a precision, for a layout."""
    whole = layout.tp == layout.cp == layout.ep == layout.micro_batch_size == 1
    if dtype == "bfloat16" and whole:
        return SAME_ROUNDING
    return TOLERANCES[dtype]
