"""Models of the jobs of this folder."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

import models.gpt2
from tests.end_to_end.builders import in_front


class Pause(nn.Module):
    """Lets everything through, later."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            time.sleep(self.pause_s)
        return x


def slow(pause_s: float, **options: Any) -> nn.Sequential:
    """GPT-2 that pauses in front of its head for every micro-batch: the same numbers as without."""
    return in_front(models.gpt2.build(**options), "head", lambda: Pause(pause_s))
