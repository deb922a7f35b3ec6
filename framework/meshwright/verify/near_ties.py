"""Near ties of routers in the plain run: the smallest change of a score that changes a choice.

Layouts round differently. If that change is smaller than the rounding, a layout may choose another
expert, and its numbers then differ by far more than rounding. Scores that count as equal are no
near tie: their place decides.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

from torch import nn

ROUNDING = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Changes of a score (scores are in 0..1) that rounding may reverse between two layouts,
by dtype.
"""


class NearestTie(NamedTuple):
    """Smallest change of a score that changes a choice."""

    gap: float = math.inf
    router: str = ""

    def sentence(self, dtype: str) -> str:
        """Return the sentence of the report; "" for a model without routers that choose."""
        if not self.router or math.isinf(self.gap):
            return ""
        text = (
            f"nearest tie of a router: {self.gap:.1e}, the least change of a score for another"
            f" choice, in {self.router}"
        )
        if self.gap >= ROUNDING[dtype]:
            return f"{text}, which is larger than {dtype} rounding"
        return (
            f"{text}: a layout may choose other experts by rounding alone, and then differ; try"
            " another run.seed"
        )


class TieWatch:
    """Smallest gap over all routers and training forwards.
    Routers are the modules with a method ``choice_gap(x)``.
    """

    def __init__(self, layers: nn.Module) -> None:
        self.nearest = NearestTie()
        for name, module in layers.named_modules():
            if callable(getattr(module, "choice_gap", None)):
                module.register_forward_hook(partial(self._update, name))

    def _update(self, name: str, module: Any, args: tuple[Any, ...], output: Any) -> None:
        gap = float(module.choice_gap(args[0]))
        if module.training and gap < self.nearest.gap:
            self.nearest = NearestTie(gap, name)
