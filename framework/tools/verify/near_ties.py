"""Near ties of routers in the plain run: the closest that a choice of experts came to another one.

Layouts round differently. Where the last chosen expert and the next have scores closer than that, a layout may choose
another expert, and its numbers then differ by far more than rounding.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

from torch import nn

ROUNDING = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Differences of scores, in 0..1, that layouts of a precision may round away."""


class NearestTie(NamedTuple):
    """Smallest gap between the scores of a chosen expert and of one left out."""

    gap: float = math.inf
    router: str = ""

    def sentence(self, dtype: str) -> str:
        """Return the sentence of the report; "" for a model without routers that choose."""
        if not self.router or math.isinf(self.gap):
            return ""
        text = f"nearest tie of a router: {self.gap:.1e} between the last chosen score and the next, in {self.router}"
        if self.gap >= ROUNDING[dtype]:
            return f"{text}, further than {dtype} rounds"
        return f"{text}: layouts may choose other experts by rounding, and then differ; try another run.seed"


class TieWatch:
    """Watch of the routers of a model: modules with ``choice_gap(x)``, called with the input of each forward."""

    def __init__(self, layers: nn.Module) -> None:
        self.nearest = NearestTie()
        for name, module in layers.named_modules():
            if callable(getattr(module, "choice_gap", None)):
                module.register_forward_hook(partial(self._see, name))

    def _see(self, name: str, module: Any, args: tuple[Any, ...], output: Any) -> None:
        gap = float(module.choice_gap(args[0]))
        if module.training and gap < self.nearest.gap:
            self.nearest = NearestTie(gap, name)
