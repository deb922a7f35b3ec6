"""Largest expert load with which a layout fits;
the load is the busiest rank's rows over the mean of its ep group.
"""

from __future__ import annotations

from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import RankedLayout, backend_of, usable_bytes

ROUNDS = 3
"""Evaluations of the memory after those of the planned and of the largest load."""


def room_for_skew(cache: ModelCache, hardware: Hardware, layout: RankedLayout) -> list[str]:
    """Return a line on the largest load with which a layout fits;
    no line without expert parallelism.
    """
    ep = layout.choice.ep
    if ep == 1:
        return []
    most = largest_skew(cache, hardware, layout)
    if most is None and cache.load_limit < ep:
        return [
            f"load of the experts: fits up to their capacity, {cache.load_limit:g} times the mean"
            f" of {ep} ranks"
        ]
    if most is None:
        return [
            f"load of the experts: fits even if one of {ep} ranks has all rows ({ep} times the"
            " mean)"
        ]
    text = f"fits until the busiest of {ep} ranks has {most:.2f} times the rows of the mean"
    return [f"load of the experts: {text}; planned with {min(cache.skew, ep):.2f} (--skew)"]


def largest_skew(cache: ModelCache, hardware: Hardware, layout: RankedLayout) -> float | None:
    """Return a load with which a layout fits, close to the largest; None: it fits with any.

    A rank's peak is the largest of sums that grow linearly with the load. A chord between two loads
    is therefore never below it, and the load at which the chord reaches the limit fits.
    """
    room, high = usable_bytes(hardware), min(float(layout.choice.ep), cache.load_limit)
    low = min(cache.skew, high)

    def peak(skew: float) -> int:
        drawn = cache.replaced(skew=skew).layout(layout.config, layout.layout.schedule)
        return max(drawn.memory(rank, backend_of(hardware)).total for rank in drawn.unlike_ranks())

    least, most = peak(low), peak(high)
    if most <= room:
        return None
    for _ in range(ROUNDS):
        between = low + (high - low) * max(0, room - least) / max(1, most - least)
        if between <= low:
            break
        low, least = between, peak(between)
    return low
