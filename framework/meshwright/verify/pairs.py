"""Layouts that cover the proven pairs of the table, as far as the model allows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwright.config.combinations.features import (
    BY_DOCUMENTS,
    EACH_SCHEDULE,
    HEADS,
    LAYOUT,
    OF_DOCUMENTS,
    Traits,
    features_of,
)
from meshwright.config.combinations.layout import Layout
from meshwright.config.combinations.proven import (
    RECOMPUTES,
    SHARED,
    SHARED_BY_EXPERTS,
    features_of_table,
)
from meshwright.config.combinations.refused import find_excluding, find_refused
from meshwright.config.combinations.sizes import LayoutSizes, fits
from meshwright.verify.layouts import is_possible

CONTEXTS = (("zigzag", "keys"), ("zigzag", HEADS), (BY_DOCUMENTS, "keys"))
"""Orders and exchanges of layouts with cp > 1."""
GATHERS = ((1, False), (2, False), (1, True))
"""Layers of a unit, and whether their weights stay gathered, of layouts with ZeRO-3."""
EPS = (1, 2, 4)
"""Degrees of expert parallelism to prove."""

Pair = tuple[str, str]


def eps_of(traits: Traits) -> tuple[int, ...]:
    """Return the degrees of expert parallelism to prove: those that divide the experts of every
    layer; 1 alone where the model or the optimizer rules it out.
    """
    if find_excluding("ep", traits) is not None:
        return (1,)
    return tuple(ep for ep in EPS if all(count % ep == 0 for count in traits.experts))


def wanted_pairs(traits: Traits) -> dict[Pair, str]:
    """Return each pair with its reason; a feature paired with itself means the feature on its own.

    Samples without document starts have no order by documents, and models without experts no expert
    parallelism.
    """
    table = (*SHARED, *SHARED_BY_EXPERTS) if len(eps_of(traits)) > 1 else SHARED
    reasons: dict[Pair, str] = {
        (name, name): "the feature by itself" for name in features_of_table(table)
    }
    for shared in table:
        reasons |= dict.fromkeys(itertools.product(shared.some, shared.others), shared.why)
    return {
        pair: why
        for pair, why in reasons.items()
        if traits.has_documents or OF_DOCUMENTS not in pair
    }


def candidates(
    max_ranks: int, micro_batch_sizes: Sequence[int], eps: Sequence[int] = (1,)
) -> list[Layout]:
    """Return all layouts to choose from, ordered by ep, then by number of ranks."""
    degrees = [
        degrees
        for degrees in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2))
        if math.prod(degrees) <= max_ranks
    ]
    switches = itertools.product(
        sorted(degrees, key=math.prod),
        ("1f1b", "gpipe", "interleaved_1f1b", *EACH_SCHEDULE),
        (0, 1, 2, 3),
        (False, True),
        micro_batch_sizes,
        ("none", *RECOMPUTES),
        (0, 2),
        (False, True),
        (False, True),
    )
    layouts = []
    for of_axes, schedule, zero, sequence, size, recompute, shard, once, offload in switches:
        dp, pp, tp, cp = of_axes
        has_no_effect = (
            (pp == 1 and schedule != "1f1b")
            or (dp == 1 and zero != 1)
            or (shard and (dp * cp <= shard or zero == 0))
            or (once and (zero < 2 or dp == 1))
            or (sequence and tp == 1)
        )
        if not has_no_effect:
            rest = schedule, zero, sequence, size, 0, recompute, shard, once, offload
            contexts = CONTEXTS if cp > 1 else CONTEXTS[:1]
            gathers = GATHERS if zero == 3 else GATHERS[:1]
            layouts += [
                Layout(dp, pp, tp, *rest, cp, *each, 1, *of_units)
                for of_units in gathers
                for each in contexts
            ]
    return [
        layout._replace(ep=ep) for ep in eps for layout in layouts if shares_experts(layout, ep)
    ]


def shares_experts(layout: Layout, ep: int) -> bool:
    """Return True if the layout allows expert parallelism of degree ``ep``."""
    if ep == 1:
        return True
    with_experts = layout._replace(ep=ep)
    names = frozenset(name for name, holds in LAYOUT.items() if holds(with_experts))
    return fits(with_experts, LayoutSizes()) and find_refused(names) is None


def is_full(layout: Layout, global_batch: int) -> bool:
    """Return True if a step has enough micro-batches to test gradient accumulation and
    to fill the pipeline.

    dualpipe_v needs twice as many for its pairs of a forward and a backward.
    """
    needed = 2 * layout.pp if layout.schedule == "dualpipe_v" else max(2, layout.pp)
    return global_batch // (layout.dp * layout.micro_batch_size) >= needed


class LayoutChoice(NamedTuple):
    """Layouts that cover the pair table, and what they leave uncovered."""

    layouts: list[Layout]
    missing: list[str]
    """Sentences on features that no layout of this model has,
    and on pairs that no layout combines.
    """


def choose(
    first: Sequence[Layout],
    traits: Traits,
    global_batch: int,
    sequence_length: int,
    max_ranks: int,
    sizes: Sequence[int],
    refusal_of: Callable[[Layout], str | None],
) -> LayoutChoice:
    """Choose layouts that cover every pair of any possible layout,
    by a deterministic greedy search.

    Each round takes the candidate with the most uncovered pairs, then the fewest ranks, then the
    first in order.

    Args:
        first: Layouts that are taken in any case.
        sizes: Micro-batch sizes; of a model with nn.SyncBatchNorm those of all replicas together.
        refusal_of: Function that returns the reason why this model cannot have a layout, or None.
    """
    sized = candidates(max_ranks, sizes, eps_of(traits))
    alike = (traits.with_samples(layout, layout.micro_batch_size) for layout in sized)
    possible = [
        layout
        for layout in alike
        if layout is not None
        and is_possible(layout, traits, global_batch, sequence_length)
        and is_full(layout, global_batch)
    ]
    numbers = {pair: 1 << at for at, pair in enumerate(wanted_pairs(traits))}
    masks = {layout: _mask(layout, traits, numbers) for layout in possible}
    masks |= {
        layout: _mask(layout, traits, numbers) * is_full(layout, global_batch) for layout in first
    }
    layouts = list(dict.fromkeys(first))
    covered = 0
    for layout in layouts:
        covered |= masks[layout]
    possible, refused = _drop_refused_head_exchange(possible, refusal_of)
    while True:
        gains = {layout: (masks[layout] & ~covered).bit_count() for layout in possible}
        best = max(possible, key=lambda layout: (gains[layout], -layout.size), default=None)
        if best is None or not gains[best]:
            break
        possible.remove(best)
        reason = refusal_of(best)
        if reason is None:
            layouts.append(best)
            covered |= masks[best]
        else:
            refused[best] = reason
    missing = {pair for pair, number in numbers.items() if not covered & number}
    return LayoutChoice(
        _needed(layouts, len(first), masks), _uncovered_lines(missing, masks, numbers, refused)
    )


def _drop_refused_head_exchange(
    possible: list[Layout], refusal_of: Callable[[Layout], str | None]
) -> tuple[list[Layout], dict[Layout, str]]:
    """Drop the head-exchange layouts of each tp whose smallest one is refused;
    return (remaining layouts, refusals).
    """
    refused: dict[Layout, str] = {}
    for tp in sorted({layout.tp for layout in possible if layout.exchange == HEADS}):
        alike = [layout for layout in possible if layout.exchange == HEADS and layout.tp == tp]
        reason = refusal_of(alike[0])
        if reason is not None:
            refused[alike[0]] = reason
            possible = [
                layout for layout in possible if layout.exchange != HEADS or layout.tp != tp
            ]
    return possible, refused


def _mask(layout: Layout, traits: Traits, numbers: dict[Pair, int]) -> int:
    features = features_of(layout, traits)
    return sum(number for (a, b), number in numbers.items() if a in features and b in features)


def _needed(layouts: list[Layout], num_first: int, masks: dict[Layout, int]) -> list[Layout]:
    """Remove layouts that later choices have made superfluous; the first ``num_first`` stay."""
    kept = list(layouts)
    for layout in reversed(layouts[num_first:]):
        others = 0
        for other in kept:
            others |= masks[other] if other != layout else 0
        if not masks[layout] & ~others:
            kept.remove(layout)
    return kept


def _uncovered_lines(
    missing: set[Pair],
    masks: dict[Layout, int],
    numbers: dict[Pair, int],
    refused: dict[Layout, str],
) -> list[str]:
    """Describe uncovered features in one line,
    then each uncovered pair of covered features with its reason.
    """
    alone = {a for a, b in missing if a == b}
    lines = []
    if alone:
        lines = [f"not covered, in no layout of this model: {', '.join(sorted(alone))}"]
    for pair in sorted(missing):
        if alone & set(pair):
            continue
        reasons = [why for layout, why in refused.items() if masks[layout] & numbers[pair]]
        because = f"refused: {reasons[0]}" if reasons else "no possible layout has both"
        lines.append(f"not covered: {pair[0]} with {pair[1]} ({because})")
    return lines
