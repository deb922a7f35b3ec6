"""Default layouts of verify: the configuration's own, one rank, and a set that covers the pair table (pairs.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from meshwright.config import RunConfig
from meshwright.tools.verify.layouts import Layout, is_possible, own_layout, refusal
from meshwright.tools.verify.pairs import LayoutChoice, choose
from meshwright.tools.verify.traits import Traits


def default_layouts(config: RunConfig, traits: Traits, global_batch: int, max_ranks: int = 8) -> LayoutChoice:
    """Return the configuration's own layout (if it fits), a single rank, and layouts that cover every legal pair."""
    first = [own_layout(config, global_batch), Layout()]
    micro_batch_sizes: tuple[int, ...] = (1, 2)
    if traits.couples_samples:  # the micro-batch size is part of the model: the same in all layouts
        own = config.batch.micro_batch_size or 1
        micro_batch_sizes = (own,) if 1 < own <= global_batch // 4 and global_batch % own == 0 else (2,)
        first = [layout._replace(micro_batch_size=micro_batch_sizes[0]) for layout in first]
    length = config.data.sequence_length
    first = [
        layout for layout in first if layout.size <= max_ranks and is_possible(layout, traits, global_batch, length)
    ]
    refusal_of = partial(refusal, config, global_batch=global_batch)
    return choose(first, traits, global_batch, length, max_ranks, micro_batch_sizes, refusal_of)


def run_twice(layouts: Sequence[Layout]) -> list[Layout]:
    """Return a small subset that uses every schedule, ZeRO stage and switch; verify runs these twice.

    The two runs must agree bit for bit. Message arrival order could make them differ, and it depends on these features.
    """

    def choices(layout: Layout) -> set[tuple[object, object]]:
        degrees = (layout.cp > 1, layout.ep > 1)
        switches = (layout.schedule, layout.sequence, layout.offload, layout.recompute, layout.shard > 0, *degrees)
        return {*enumerate(switches), ("zero", layout.zero if layout.dp > 1 else None), ("once", layout.reduces_once)}

    uncovered = set[tuple[object, object]]().union(*map(choices, layouts))
    chosen: list[Layout] = []
    while uncovered:
        best = max(layouts, key=lambda layout: (len(choices(layout) & uncovered), -layout.size))
        chosen.append(best)
        uncovered -= choices(best)
    return chosen
