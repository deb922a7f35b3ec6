"""Default layouts of verify: the configuration's own, one rank,
and a set that covers the pair table (pairs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from meshwright.config import RunConfig
from meshwright.config.combinations.features import Traits
from meshwright.config.combinations.layout import Layout
from meshwright.verify.layouts import is_possible, own_layout, own_samples, refusal
from meshwright.verify.pairs import LayoutChoice, choose


def default_layouts(
    config: RunConfig, traits: Traits, global_batch: int, max_ranks: int = 8
) -> LayoutChoice:
    """Return the configuration's own layout, a single rank,
    and layouts that cover every legal pair.

    An own layout of too many ranks is scaled down, and keeps its axes and switches
    (:func:`scaled_down`).
    """
    own_one = own_layout(config, global_batch)
    first = [
        own_one if own_one.size <= max_ranks else scaled_down(own_one, global_batch, max_ranks),
        Layout(),
    ]
    sizes: tuple[int, ...] = (1, 2)
    if traits.couples_samples:  # how many samples see each other is part of the model
        own = own_samples(config, traits)
        fallback = 4 if traits.is_synchronised else 2  # for one sample on each of four replicas
        fits_often = 1 < own <= global_batch // 4 and global_batch % own == 0
        sizes = (own if fits_often else fallback,)
        alike = (traits.with_samples(layout, sizes[0]) for layout in first)
        first = [layout for layout in alike if layout is not None]
    length = config.data.sequence_length
    refusal_of = partial(refusal, config, global_batch=global_batch)
    first = [
        layout
        for layout in first
        if layout.size <= max_ranks and is_possible(layout, traits, global_batch, length)
    ]
    if own_one.size > max_ranks:
        first = [layout for layout in first if layout == Layout() or refusal_of(layout) is None]
    return choose(first, traits, global_batch, length, max_ranks, sizes, refusal_of)


def scaled_down(own: Layout, global_batch: int, max_ranks: int) -> Layout:
    """Return a layout of at most ``max_ranks`` ranks with the switches of a larger one,
    and degrees of 2 on its axes.

    If these are too many ranks, dp is left out first: cp makes replicas too. It is left out as well
    if it does not divide the global batch.
    """
    dp, pp, tp, cp = (min(degree, 2) for degree in (own.dp, own.pp, own.tp, own.cp))
    if dp * pp * tp * cp > max_ranks or global_batch % dp:
        dp = 1
    if pp * tp * cp > max_ranks:
        cp = 1
    if pp * tp > max_ranks:
        tp = 1
    eps = (ep for ep in (4, 2) if ep <= own.ep and (dp * cp * tp) % ep == 0 and ep % tp == 0)
    micro_batch_size = min(own.micro_batch_size, max(1, global_batch // (dp * max(2, pp))))
    while global_batch % (dp * micro_batch_size):
        micro_batch_size -= 1
    small = own._replace(
        dp=dp, pp=pp, tp=tp, cp=cp, ep=next(eps, 1), micro_batch_size=micro_batch_size
    )
    shard = 2 if own.shard and dp * cp > 2 else 0
    return small._replace(shard=shard, sequence=own.sequence and tp > 1)


KIND_OF = {"zb_h2": "zb_h1", "v_half": "zb_v", "v_min": "zb_v"}
"""Schedules that are not run twice by themselves, to save time -> the related one that is."""


def run_twice(layouts: Sequence[Layout]) -> list[Layout]:
    """Return a small subset that uses every kind of schedule, ZeRO stage and switch;
    verify runs these twice.

    The two runs must agree bit for bit, although the second is stopped in the middle, saved and
    resumed. Message arrival order could make them differ, and it depends on these features, as the
    shards in a checkpoint do.
    """

    def choices(layout: Layout) -> set[tuple[object, object]]:
        degrees = (layout.cp > 1, layout.ep > 1)
        switches = (
            KIND_OF.get(layout.schedule, layout.schedule),
            layout.sequence,
            layout.offload,
            layout.recompute,
            layout.shard > 0,
            layout.unit_layers > 1,
            layout.keeps_gathered,
            *degrees,
        )
        return {
            *enumerate(switches),
            ("zero", layout.zero if layout.dp > 1 else None),
            ("once", layout.reduces_once),
        }

    uncovered = set[tuple[object, object]]().union(*map(choices, layouts))
    chosen: list[Layout] = []
    while uncovered:
        # per rank: a run twice of a large layout, with its resumes, costs as much as several small
        # ones
        best = max(
            layouts,
            key=lambda layout: (len(choices(layout) & uncovered) / layout.size, -layout.size),
        )
        chosen.append(best)
        uncovered -= choices(best)
    return chosen
