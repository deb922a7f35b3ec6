"""Explanation of a plan: the parallelism that the model needs, the first layout's lead by cause."""

from __future__ import annotations

from meshwright.optimizer.at_rest import held_at_rest
from meshwright.parameters import DTYPES
from meshwright.terminal.format import format_size
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import Plan, RankedLayout, usable_bytes
from meshwright_plan.planner.ranking import TIE_SHARE, is_tie
from meshwright_plan.planner.stage_time import stages_by_rank

ALIKE_SHARE = 1e-4
"""Fraction of a step's time below which two layouts count as equally fast."""


def strategy(cache: ModelCache, plan: Plan) -> list[str]:
    """Return sentences on the simplest parallelism that the model's size and the links call for."""
    hardware, room = plan.hardware, usable_bytes(plan.hardware)
    counts = cache.total_elements(1, False)
    elements, width = counts.trained, DTYPES[cache.config.train.dtype].itemsize
    states = sum(
        held_at_rest(
            cache.config.parallel, cache.config.optimizer, cache.config.train.dtype, counts
        )
    )
    name = cache.config.optimizer.spec.title
    layers = cache.split(1, False).parameters.values()
    largest_bytes = max(sum(parameter.num_elements for parameter in layer) for layer in layers) * (
        width + 4
    )
    lines = [
        f"weights, gradients and {name} of {elements:,} parameters are {format_size(states)}; a"
        f" device has room for {format_size(room)}, a node for"
        f" {format_size(room * hardware.devices_per_node)}"
    ]
    if states <= 0.7 * room:
        lines.append(
            "fits one device: plain replicas (DDP) or ZeRO-1; tensor and pipeline parallelism are"
            " not needed"
        )
    elif states <= 0.7 * room * hardware.devices_per_node:
        lines.append(
            "fits one node, not one device: ZeRO-1 to -3 inside the node, or tensor parallelism"
            " there"
        )
    else:
        lines.append("fits no node: pipeline stages across nodes, or ZeRO-3 over many of them")
    if largest_bytes > room:
        lines.append(
            f"the largest layer, {format_size(largest_bytes)} alone, fits no device: tensor"
            " parallelism needed"
        )
    elif largest_bytes > room / 2:
        lines.append(
            f"the largest layer takes {format_size(largest_bytes)}: tensor parallelism makes room"
        )
    if plan.nodes > 1:
        ratio = hardware.node_link.bytes_per_s / hardware.cluster_link.bytes_per_s
        lines.append(
            f"links inside a node are {ratio:.0f} times as fast as those between: tensor"
            f" parallelism stays inside (tp <= {hardware.devices_per_node}), pipeline stages go"
            " across"
        )
    return lines


def why(first: RankedLayout, other: RankedLayout) -> str:
    """Explain the lead of the first layout over the other, in seconds by cause."""
    ours, theirs = parts(first), parts(other)
    lead = {what: theirs[what] - seconds for what, seconds in ours.items() if what != "waiting"}
    lost = other.time.total - first.time.total
    if abs(lost) < ALIKE_SHARE * first.time.total:
        return f"the first and the second take the same time, {duration(first.time.total)} per step"
    if lost < 0:
        what, least = min(lead.items(), key=lambda each: each[1])
        text = (
            f"the second is predicted to be {duration(-lost, 3)} faster ({signed_duration(least)}"
            f" in {what})"
        )
        return f"{text}, a tie (below {TIE_SHARE:.0%}): the first is simpler"
    what, most = max(lead.items(), key=lambda each: each[1])
    gain, least = min(lead.items(), key=lambda each: each[1])
    text = f"the first beats the second by {duration(lost, 3)}: {signed_duration(most)} in {what}"
    text += f", {signed_duration(least)} in {gain}" if least < -0.05 * abs(most) else ""
    return text + (
        f", a tie (below {TIE_SHARE:.0%})" if is_tie(first.time.total, other.time.total) else ""
    )


def parts(layout: RankedLayout) -> dict[str, float]:
    """Split the seconds of a step by cause."""
    found = {
        "computation": _busy(layout),
        "tensor-parallel messages": _tp(layout),
        "context-parallel messages": _cp(layout),
        "expert-parallel messages": _ep(layout),
        "bubble and messages between stages": _idle(layout),
        "gradient reduction and weight all-gathers": _dp(layout),
        "the optimizer": layout.time.optimizer,
    }
    return found | {"waiting": layout.time.total - sum(found.values())}


def duration(seconds: float, digits: int = 4) -> str:
    """Format seconds as s, ms or us."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:,.{digits}g} {unit}"
    return f"{seconds * 1e6:,.{digits}g} us"


def signed_duration(seconds: float) -> str:
    """Format a difference of seconds with its sign."""
    return ("+" if seconds >= 0 else "") + duration(seconds, 3)


def _tp(layout: RankedLayout) -> float:
    """Return the seconds of tensor-parallel messages on the rank with most."""
    return max(_by_rank(layout, "tp")) * layout.choice.chunks


def _cp(layout: RankedLayout) -> float:
    """Return the seconds of context-parallel messages on the rank with most."""
    return max(_by_rank(layout, "cp")) * layout.choice.chunks


def _ep(layout: RankedLayout) -> float:
    """Return the seconds of expert-parallel messages on the rank with most,
    without those hidden by F/B pairs.
    """
    return max(_by_rank(layout, "ep")) * layout.choice.chunks - layout.time.hidden


def _messages(layout: RankedLayout) -> float:
    return _tp(layout) + _cp(layout) + _ep(layout)


def _busy(layout: RankedLayout) -> float:
    """Return the seconds of computation on the busiest rank."""
    parts = (_by_rank(layout, field) for field in ("forward", "backward", "weight_half"))
    return (
        max(map(sum, zip(*parts, strict=True))) * layout.choice.chunks
        - _messages(layout)
        - layout.time.hidden
    )


def _by_rank(layout: RankedLayout, field: str) -> list[float]:
    """Sum a field of StageTime over the stages of each pipeline rank."""
    times = layout.time.stages
    return [
        sum(getattr(times[stage], field) for stage in own)
        for own in stages_by_rank(layout.layout.schedule)
    ]


def _idle(layout: RankedLayout) -> float:
    return layout.time.pipeline - _busy(layout) - _messages(layout)


def _dp(layout: RankedLayout) -> float:
    return layout.time.reduce + layout.time.gather
