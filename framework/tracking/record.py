"""Record of one step, and the public names of its metrics.

One table, :data:`METRICS`, maps fields of :class:`StepRecord` to metric names. Every sink uses it, so
``metrics.jsonl``, wandb and the plots have the same names.

A line of ``metrics.jsonl`` is strict JSON and survives the round trip exactly. Python writes the shortest decimal that
reads back as the same float. ``train/loss_hex`` contains the exact bits of the loss, for comparisons with other tools.
JSON has no NaN/Inf: they are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float()`` in
Python and ``Number()`` in JavaScript read back. ``null`` is not used, because it could mean a diverged loss or one
never measured. Values that were not measured are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.system.bounded import parse_json

GIB = 2**30

Number = int | float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Metrics of one optimizer step of the whole mesh, unless a field is "per device". ``None``: not measured."""

    step: int
    """Number of steps done, this one included; the first record of a run has 1."""
    samples_seen: int
    tokens: int
    """Tokens trained on since the run began, over all replicas."""
    loss: float
    """Mean loss over the tokens of the global batch, in nats."""
    grad_norm: float
    """L2 norm of the whole model's gradient, before clipping."""
    learning_rate: float
    step_s: float
    """Wall time of the step, waiting for data included."""
    data_s: float
    """Part of ``step_s`` spent waiting for data."""
    tokens_per_s: float
    """Throughput over all devices."""
    num_devices: int
    memory_bytes: int
    """Peak memory of the device (CUDA: allocated by torch; CPU: resident set of the process)."""
    tflops_per_device: float | None = None
    mfu: float | None = None
    """Model FLOPs utilisation, 0..1: the model's FLOP/s over the device's peak."""
    bubble_share: float | None = None
    """Pipeline bubble: share of the step, 0..1, that pipeline ranks were idle."""
    validation_loss: float | None = None
    """Mean loss over the validation tokens in nats, with the weights after this step."""
    skipped: bool = False
    """True if loss or gradient contained NaN/Inf and the weights are unchanged by this step."""
    restarts: int = 0
    """Number of starts of the run before the present one."""
    save_s: float | None = None
    """Duration of the save whose publication was seen in the step before, from its beginning until it was published."""
    straggler: str | None = None
    """Straggler since the last check; "": none; None: no check in this step."""
    straggler_rank: int | None = None
    """Rank of the straggler; for a slow link its sender."""
    straggler_share: float | None = None
    """Share of a step, 0..1, that the straggler made other ranks wait; 0 without a straggler."""


class Metric(NamedTuple):
    """A public metric: name, unit, and its value from a record."""

    name: str
    unit: str
    value: Callable[[StepRecord], Number | None]


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``, or infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


METRICS: tuple[Metric, ...] = (
    Metric("train/loss", "nats/token", lambda r: r.loss),
    Metric("train/grad_norm", "", lambda r: r.grad_norm),
    Metric("train/lr", "", lambda r: r.learning_rate),
    Metric("train/tokens", "tokens", lambda r: r.tokens),
    Metric("train/samples", "samples", lambda r: r.samples_seen),
    Metric("train/skipped", "", lambda r: 1 if r.skipped else None),
    Metric("train/restarts", "", lambda r: r.restarts or None),
    Metric("perf/step_s", "s", lambda r: r.step_s),
    Metric("perf/data_s", "s", lambda r: r.data_s),
    Metric("perf/tokens_per_sec", "tokens/s", lambda r: r.tokens_per_s),
    Metric("perf/tokens_per_sec_per_device", "tokens/s", lambda r: r.tokens_per_s / r.num_devices),
    Metric("perf/devices", "", lambda r: r.num_devices),
    Metric("perf/tflops_per_device", "TFLOP/s", lambda r: r.tflops_per_device),
    Metric("perf/mfu", "share", lambda r: r.mfu),
    Metric("perf/bubble_share", "share", lambda r: r.bubble_share),
    Metric("perf/save_s", "s", lambda r: r.save_s),
    Metric("perf/straggler_rank", "", lambda r: r.straggler_rank),
    Metric("perf/straggler_share", "share", lambda r: r.straggler_share),
    Metric("memory/peak_gib", "GiB", lambda r: r.memory_bytes / GIB),
    Metric("validation/loss", "nats/token", lambda r: r.validation_loss),
    Metric("validation/perplexity", "", lambda r: None if r.validation_loss is None else perplexity(r.validation_loss)),
)


def metrics(record: StepRecord) -> dict[str, Number]:
    """Return the measured values of a record under the names of :data:`METRICS`, without the step."""
    values = {metric.name: metric.value(record) for metric in METRICS}
    return {name: value for name, value in values.items() if value is not None}


def to_json(record: StepRecord) -> str:
    """Return one line of ``metrics.jsonl``, without the newline."""
    line: dict[str, Number | str] = {"step": record.step}
    for name, value in metrics(record).items():
        line[name] = _encode(value)
        if name == "train/loss":
            line["train/loss_hex"] = float(value).hex()
        if name == "perf/straggler_share":
            line["perf/straggler"] = record.straggler or ""
    return json.dumps(line, allow_nan=False)


def from_json(line: str) -> StepRecord:
    """Parse a line of :func:`to_json`; the result is equal to the last bit. Raises ValueError for any other text."""
    found = parse_json(line)
    if not isinstance(found, dict):
        raise ValueError(f"a line of metrics is a JSON object, not {type(found).__name__}")
    try:
        return _from_metrics(found)
    except (KeyError, TypeError, OverflowError) as missing:
        raise ValueError(f"not a whole record: {missing}") from missing


def _encode(value: Number) -> Number | str:
    if isinstance(value, int) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _from_metrics(found: Mapping[str, Number | str]) -> StepRecord:
    def optional(name: str) -> float | None:
        return None if name not in found else float(found[name])

    return StepRecord(
        step=int(found["step"]),
        samples_seen=int(found["train/samples"]),
        tokens=int(found["train/tokens"]),
        loss=float(found["train/loss"]),
        grad_norm=float(found["train/grad_norm"]),
        learning_rate=float(found["train/lr"]),
        step_s=float(found["perf/step_s"]),
        data_s=float(found["perf/data_s"]),
        tokens_per_s=float(found["perf/tokens_per_sec"]),
        num_devices=int(found["perf/devices"]),
        memory_bytes=round(float(found["memory/peak_gib"]) * GIB),
        tflops_per_device=optional("perf/tflops_per_device"),
        mfu=optional("perf/mfu"),
        bubble_share=optional("perf/bubble_share"),
        validation_loss=optional("validation/loss"),
        skipped="train/skipped" in found,
        restarts=int(found.get("train/restarts", 0)),
        save_s=optional("perf/save_s"),
        straggler=str(found["perf/straggler"]) if "perf/straggler" in found else None,
        straggler_rank=int(found["perf/straggler_rank"]) if "perf/straggler_rank" in found else None,
        straggler_share=optional("perf/straggler_share"),
    )
