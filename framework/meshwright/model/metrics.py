"""Metrics that layers and losses record, as sums of values and of counts:
model code needs no rank for them.

    record("accuracy", correct, count)     from a layer's forward or from model.loss
    Recorder                               the sums of this rank's step, on the device
    means                                  sum of values / sum of counts, over micro-batches, stages and all ranks

The sums run over tp ranks too. Replicated values then count tp times in both sums, which leaves the
mean unchanged; of split sequences or features each rank adds its part. Names are collected on meta
before step 1, and must not change.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from numbers import Real

import torch
from torch import Tensor

from meshwright.errors import ModelError

MAX_NAMES = 50
OF_CORPUS = "train/loss/"
"""Beginning of the metric of a training corpus, which is no metric of the model."""
_NAME = re.compile(r"(?!validation/)[A-Za-z][\w.-]{0,63}(/[\w.-]{1,16})?", re.ASCII)
_NOTHING = torch.zeros(2, dtype=torch.float64)


class Recorder:
    """Sums by name. ``names``: those allowed; None: any. ``is_planning``: collect names,
    without tensor operations.
    """

    def __init__(self, names: Collection[str] | None = None, *, is_planning: bool = False) -> None:
        self.names, self.is_planning = names, is_planning
        self.sums: dict[str, Tensor] = {}  # (2,) float64: values, counts

    def add(self, name: str, value_sum: Tensor | float, count: Tensor | float) -> None:
        """Add to the sums of a name, without a device synchronisation.
        Raises ModelError for a bad name or value.
        """
        given = [leaf for leaf in (value_sum, count) if isinstance(leaf, Tensor)]
        is_full = self.names is None and len(self.sums) == MAX_NAMES and name not in self.sums
        is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None
        if (
            is_full
            or (self.names is None and not is_name)
            or not (_is_one(value_sum) and _is_one(count))
        ):
            raise ModelError(
                "MW-MODEL-032",
                f"meshwright.record({name!r}, ...) with {_text(value_sum)} and {_text(count)}: a"
                " name is a letter and up to 63 of letters, digits, _, - and ., then perhaps / and"
                " up to 16 of these; not validation/...; value_sum and count are one real number"
                f" each; and a model has at most {MAX_NAMES} names",
            )
        if self.names is not None and name not in self.names:
            raise ModelError(
                "MW-MODEL-033",
                f"meshwright.record({name!r}, ...) was not called when the run was planned on the"
                f" meta device; there it found {', '.join(self.names) or 'no names'}: record the"
                " same names in every forward, in training and in eval mode",
            )
        if self.is_planning:
            self.sums[name] = _NOTHING
            return
        device = given[0].device if given else torch.device("cpu")
        with torch.no_grad():
            pair = torch.stack([_number(leaf, device) for leaf in (value_sum, count)])
            self.sums[name] = self.sums[name].add_(pair) if name in self.sums else pair

    def vector(self, device: torch.device) -> Tensor:
        """Return the sums (values, counts) of the allowed names, in their order: (2 x names,)
        float64.
        """
        zero = torch.zeros(2, dtype=torch.float64, device=device)
        return torch.cat(
            [zero[:0], *(self.sums.get(name, zero).to(device) for name in self.names or ())]
        )


def means(names: Collection[str], sums: list[float]) -> dict[str, float]:
    """Return the means from all ranks' sums, ordered as in :meth:`Recorder.vector`,
    without those of count 0.
    """
    pairs = zip(names, sums[::2], sums[1::2], strict=True)
    return {name: value / count for name, value, count in pairs if count}


def model_metrics(metrics: Mapping[str, float], kind: str = "") -> dict[str, float]:
    """Return recorded metrics under their names in a step's record; NaN and Inf are left out."""
    return {
        name if name.startswith(OF_CORPUS) else f"model/{kind}{name}": value
        for name, value in metrics.items()
        if math.isfinite(value)
    }


def _is_one(leaf: object) -> bool:
    """Return whether a value is one real number."""
    if isinstance(leaf, Tensor):
        return leaf.numel() == 1 and not leaf.is_complex()
    return isinstance(leaf, Real)


def _text(leaf: object) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else reprlib.repr(leaf)


def _number(leaf: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach().to(device, torch.float64).reshape(())
    # filled on the device: no copy to it
    return torch.full((), float(leaf), dtype=torch.float64, device=device)


_RECORDER: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


class Recording:
    """Context in which :func:`record` adds to this recorder. Not entered in backward,
    so recompute adds nothing.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder

    def __enter__(self) -> None:
        self._token = _RECORDER.set(self.recorder)

    def __exit__(self, *error: object) -> None:
        _RECORDER.reset(self._token)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each step's recorder would be compiled anew
def record(name: str, value_sum: Tensor | float, count: Tensor | float = 1) -> None:
    """Record a metric of the model from a layer's forward or from ``model.loss``.
    Without a run it does nothing.

    A step's record has ``model/NAME``: the sum of all ``value_sum`` divided by the sum of all
    ``count``.
    """
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.add(name, value_sum, count)
