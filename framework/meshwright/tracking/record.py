"""Record of one step, and the public names of its metrics.

One table, :data:`METRICS`, maps metric names to values of a :class:`StepRecord`. Every sink uses
it, so ``metrics.jsonl``, wandb and the plots have the same names.

A line of ``metrics.jsonl`` is strict JSON and survives the round trip exactly. Python writes the
shortest decimal that reads back as the same float. ``train/loss_hex`` contains the exact bits of
the loss, for comparisons with other tools. JSON has no NaN/Inf: they are written as the strings
``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float()`` in Python and ``Number()`` in
JavaScript read back. ``null`` is not used, because it could mean a diverged loss or one never
measured. Values that were not measured are left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshwright.system.bounded import parse_json
from meshwright.terminal.format import GIB

EXPERT_LOAD = "expert-load.jsonl"
"""File with the tokens of each expert in some steps."""

Number = int | float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Metrics of one optimizer step of the whole mesh, unless a field is "per device". ``None``:
    not measured.
    """

    step: int
    """Number of steps done, this one included; the first record of a run has 1."""
    samples_seen: int
    tokens: int
    """Labels that counted since the run began, over all replicas; for text, tokens trained on."""
    loss: float
    """Mean loss over the labels of the global batch; in nats for a cross-entropy."""
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
    """Model FLOPs utilisation, 0..1: the model's FLOP/s, full attention counted,
    over the device's peak.
    """
    bubble_share: float | None = None
    """Pipeline bubble: share, 0..1, of the time until the pipeline's last computation
    that its ranks were idle.
    """
    validation_loss: float | None = None
    """Mean loss over the validation labels, with the weights after this step."""
    skipped: bool = False
    """True if loss or gradient contained NaN/Inf and the weights are unchanged by this step."""
    restarts: int = 0
    """Number of starts of the run before the present one."""
    save_s: float | None = None
    """Seconds from the start of a save to its publication,
    in the first record after rank 0 saw it published.
    """
    validation_s: float | None = None
    """Seconds of the validation after this step."""
    straggler: str | None = None
    """Straggler since the last check; "": none; None: no check in this step."""
    straggler_rank: int | None = None
    """Rank of the straggler; for a slow link its sender."""
    straggler_share: float | None = None
    """Share of a step, 0..1, that the straggler made other ranks wait; 0 without a straggler."""
    validation_perplexity: float | None = None
    """``exp(validation_loss)``; None if the loss is no cross-entropy over tokens."""
    loss_scale: float | None = None
    """Loss scale of the step; None unless the run computes in float16."""
    mfu_causal: float | None = None
    """Model FLOPs utilisation with causal attention counted half."""
    recoveries: int | None = None
    """Recoveries in place so far, in the first record after rank 0 saw one completed."""
    recovery_s: float | None = None
    """Seconds from when its failure was seen to the first step of all ranks."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Metrics of callbacks, of the model and of GPUs, by name."""


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``, or infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


METRICS: dict[str, Callable[[StepRecord], Number | None]] = {
    "train/loss": lambda r: r.loss,  # nats/token for a cross-entropy
    "train/grad_norm": lambda r: r.grad_norm,
    "train/lr": lambda r: r.learning_rate,
    "train/tokens": lambda r: r.tokens,
    "train/samples": lambda r: r.samples_seen,
    "train/skipped": lambda r: 1 if r.skipped else None,
    "train/restarts": lambda r: r.restarts or None,
    "train/recoveries": lambda r: r.recoveries,
    "optimizer/loss_scale": lambda r: r.loss_scale,
    "perf/step_s": lambda r: r.step_s,
    "perf/data_s": lambda r: r.data_s,
    "perf/tokens_per_sec": lambda r: r.tokens_per_s,
    "perf/tokens_per_sec_per_device": lambda r: r.tokens_per_s / r.num_devices,
    "perf/devices": lambda r: r.num_devices,
    "perf/tflops_per_device": lambda r: r.tflops_per_device,  # TFLOP/s
    "perf/mfu": lambda r: r.mfu,  # share, 0..1
    "perf/mfu_causal": lambda r: r.mfu_causal,
    "perf/bubble_share": lambda r: r.bubble_share,
    "perf/save_s": lambda r: r.save_s,
    "perf/recovery_s": lambda r: r.recovery_s,
    "perf/validation_s": lambda r: r.validation_s,
    "perf/straggler_rank": lambda r: r.straggler_rank,
    "perf/straggler_share": lambda r: r.straggler_share,
    "memory/peak_gib": lambda r: r.memory_bytes / GIB,
    "validation/loss": lambda r: r.validation_loss,
    "validation/perplexity": lambda r: r.validation_perplexity,
}
"""Public name of each metric -> its value in a record."""


FORMAT = 1
"""Version of the format of a line; lines without one have it too. It rises when an older reader
could misinterpret a newer line; new names do not.
"""
OTHER_NAMES = frozenset({"format", "step", "train/loss_hex", "perf/straggler"})
"""Names in a line of ``metrics.jsonl`` besides those of :data:`METRICS`."""
MAX_COUNT = 2**63
"""Bound of counts in a line: 64 bits hold them."""
MAX_EXTRA = 100
"""Maximum number of metrics of callbacks in a step;
those of the model and of GPUs have the same limit each.
"""
_EXTRA_NAME = re.compile(r"[A-Za-z][\w.-]*(/[\w.-]+)*", re.ASCII)


def is_extra_name(name: object) -> bool:
    """Return whether a metric of a callback may have this name."""
    if not isinstance(name, str) or len(name) > 100 or _EXTRA_NAME.fullmatch(name) is None:
        return False
    return name not in METRICS and name not in OTHER_NAMES


def metrics(record: StepRecord) -> dict[str, Number]:
    """Return the measured values of a record under the names of :data:`METRICS`, without the step;
    then callbacks'.
    """
    return {
        name: value for name, of in METRICS.items() if (value := of(record)) is not None
    } | dict(record.extra)


def to_json(record: StepRecord) -> str:
    """Return one line of ``metrics.jsonl``, without the newline."""
    line: dict[str, Number | str] = {"format": FORMAT, "step": record.step}
    for name, value in metrics(record).items():
        line[name] = encode_number(value)
        if name == "train/loss":
            line["train/loss_hex"] = float(value).hex()
        if name == "perf/straggler_share":
            line["perf/straggler"] = record.straggler or ""
    return json.dumps(line, allow_nan=False)


def from_json(line: str) -> StepRecord:
    """Parse a line of :func:`to_json`; the result is equal to the last bit.
    Raises ValueError for any other text.
    """
    content = parse_json(line)
    if not isinstance(content, dict):
        raise ValueError(f"a line of metrics is a JSON object, not {type(content).__name__}")
    if (written := content.get("format", FORMAT)) != FORMAT:
        raise ValueError(f"format {written!r:.20}, this meshwright reads {FORMAT}")
    try:
        return _from_metrics(content)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"not a whole record: {error}") from error


def encode_number(value: Number) -> Number | str:
    """Return a number as strict JSON holds it: NaN and Inf as text."""
    if isinstance(value, int) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _from_metrics(content: Mapping[str, Number | str]) -> StepRecord:
    def optional(name: str) -> float | None:
        return None if name not in content else float(content[name])

    return StepRecord(
        step=_count(content["step"]),
        samples_seen=_count(content["train/samples"]),
        tokens=_count(content["train/tokens"]),
        loss=float(content["train/loss"]),
        grad_norm=float(content["train/grad_norm"]),
        learning_rate=float(content["train/lr"]),
        step_s=float(content["perf/step_s"]),
        data_s=float(content["perf/data_s"]),
        tokens_per_s=float(content["perf/tokens_per_sec"]),
        num_devices=_count(content["perf/devices"]),
        memory_bytes=round(float(content["memory/peak_gib"]) * GIB),
        tflops_per_device=optional("perf/tflops_per_device"),
        mfu=optional("perf/mfu"),
        mfu_causal=optional("perf/mfu_causal"),
        bubble_share=optional("perf/bubble_share"),
        validation_loss=optional("validation/loss"),
        skipped="train/skipped" in content,
        restarts=_count(content.get("train/restarts", 0)),
        save_s=optional("perf/save_s"),
        recoveries=_count(content["train/recoveries"]) if "train/recoveries" in content else None,
        recovery_s=optional("perf/recovery_s"),
        validation_s=optional("perf/validation_s"),
        straggler=str(content["perf/straggler"]) if "perf/straggler" in content else None,
        straggler_rank=_count(content["perf/straggler_rank"])
        if "perf/straggler_rank" in content
        else None,
        straggler_share=optional("perf/straggler_share"),
        validation_perplexity=optional("validation/perplexity"),
        loss_scale=optional("optimizer/loss_scale"),
        extra=_extra(content),
    )


def _count(value: Number | str) -> int:
    """Return a count of a line. Raises OverflowError for one that no run reaches:
    a chart divides by it.
    """
    count = int(value)
    if abs(count) >= MAX_COUNT:
        raise OverflowError("a count of 2^63 or more")
    return count


def _extra(content: Mapping[str, Number | str]) -> dict[str, float]:
    """Return the metrics of callbacks, model and GPUs in a line,
    without text and other values of a newer version.
    """
    found: dict[str, float] = {}
    counts = {"model": 0, "gpu": 0, "": 0}  # "": those of callbacks
    for name, value in content.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        kind = name.partition("/")[0] if name.startswith(("model/", "gpu/")) else ""
        if is_number and counts[kind] < MAX_EXTRA and is_extra_name(name):
            counts[kind] += 1
            found[name] = float(value)
    return found
