"""Load of a model's experts: metrics of each step,
and a file with the counts of each expert for the report.

The counts are the step sums called ``counts`` (tokens of each expert of one router, over the global
batch), ``dropped`` (those of them beyond its capacity) and ``entropy`` (sum over tokens, and
tokens). Every rank has those of all layers, because they travel with the step's loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from meshwright.parts import Observer, Parts, StepEvent
from meshwright.tracking.record import EXPERT_LOAD

COUNTS, DROPPED, ENTROPY = ".counts", ".dropped", ".entropy"
MAX_LINES = 200
"""Approximate number of steps with a line in the file, evenly spaced over the run."""


def counts_of(sums: Mapping[str, Tensor], kind: str = COUNTS) -> dict[str, list[int]]:
    """Return the tokens of each expert, or those dropped (``kind``), by the name of its router,
    from a step's sums.
    """
    found = {
        name.removesuffix(kind): sums[name]
        for name in sums
        if name.endswith(kind) and sums[name].dim() == 1
    }
    return {name: [round(count) for count in counts.tolist()] for name, counts in found.items()}


def load_metrics(counts: Mapping[str, list[int]]) -> dict[str, float]:
    """Return the metrics of a step.

    ``experts/skew``: tokens of the most loaded expert over the mean, in the worst layer; 1 is
    balanced. ``experts/entropy``: entropy of the load, normalised to 0..1, mean over layers; 1 is
    balanced, 0 a single expert. ``experts/idle_share``: share of the experts of all layers without
    a token.
    """
    layers = [layer for layer in counts.values() if sum(layer) and len(layer) > 1]
    if not layers:
        return {}
    shares = [[count / sum(layer) for count in layer] for layer in layers]
    entropies = [
        -sum(s * math.log(s) for s in layer if s) / math.log(len(layer)) for layer in shares
    ]
    idle = sum(share == 0.0 for layer in shares for share in layer)
    return {
        "experts/skew": max(max(layer) * len(layer) for layer in shares),
        "experts/entropy": sum(entropies) / len(entropies),
        "experts/idle_share": idle / sum(map(len, shares)),
    }


def choice_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of a step's choices, from its sums;
    those that no router counts are left out.

    ``experts/token_entropy``: entropy of a token's scores over the experts, mean over tokens and
    layers; 1: all scores are equal, 0: one expert has all.
    ``experts/dropped_share``: share of the choices of all layers that were dropped, since the
    expert was full.
    """
    of_tokens = [
        sums[name].tolist() for name in sums if name.endswith(ENTROPY) and sums[name].numel() == 2
    ]
    entropies = [entropy / tokens for entropy, tokens in of_tokens if tokens]
    found = {"experts/token_entropy": sum(entropies) / len(entropies)} if entropies else {}
    counts, dropped = counts_of(sums), counts_of(sums, DROPPED)
    chosen = sum(sum(counts.get(name, ())) for name in dropped)
    if chosen:
        found["experts/dropped_share"] = sum(map(sum, dropped.values())) / chosen
    return found


class ExpertLoad(Observer):
    """Metrics of the experts' load in each step, and lines of ``expert-load.jsonl``,
    written by rank 0.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / EXPERT_LOAD

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Add the metrics of the step. A skipped step has none."""
        sums = {} if event.stats.skipped else parts.step_state.step_sums()
        counts, dropped = counts_of(sums), counts_of(sums, DROPPED)
        event.metrics |= load_metrics(counts) | choice_metrics(sums)
        every = max(1, parts.config.train.steps // MAX_LINES)
        is_due = event.is_first or event.is_last or parts.state.step % every == 0
        if counts and is_due and parts.mesh.rank == 0:
            lost = {"dropped": dropped} if dropped else {}
            self._append(json.dumps({"step": parts.state.step, "counts": counts, **lost}))

    def _append(self, line: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:  # the run goes on without a picture; metrics.jsonl has the figures
            return
