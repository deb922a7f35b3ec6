"""Pairs of features that share code, each with the reason, and the layouts that cover all of them.

Faults hide in the interaction of two features: dropout in a middle stage needs the dp rank, ZeRO-3 sums over tp. The
default layouts are therefore chosen so that each pair of this table occurs in one of them, as far as the model allows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwright.config import V_SCHEDULES
from meshwright.context_parallel.order import BY_DOCUMENTS
from meshwright.verify.layouts import Layout, is_possible
from meshwright.verify.traits import Traits

ZEROS = ("zero1", "zero2", "zero3")
"""ZeRO stages on their own; combinations with offload and with ``reduce = "step"`` are separate features."""
OFFLOADS = tuple(f"zero{zero}, offload" for zero in range(4))
ONCE = ("zero2, reduce = step", "zero3, reduce = step")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "split backward", "V")
RECOMPUTES = ("selective", "full")
HEADS, OF_DOCUMENTS = "heads", "cp documents"
CONTEXTS = (("zigzag", "keys"), ("zigzag", HEADS), (BY_DOCUMENTS, "keys"))
"""Orders and exchanges of layouts with cp > 1."""
TIES = ("tie across ranks", "tie inside a rank")
EACH_SCHEDULE = ("zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v")
"""Schedules that share a feature ("split backward", "V") with others; each is a feature by itself too."""
COPIED, GROUPED, WHOLE = "copies of experts", "expert shard groups", "zero3, whole experts"


def features_of(layout: Layout, traits: Traits) -> frozenset[str]:
    """Return the features that a layout of this model uses."""
    has_v = layout.schedule in V_SCHEDULES
    once = layout.zero > 1 and layout.dp > 1 and layout.reduces_once
    copies = layout.dp * layout.cp * layout.tp // layout.ep if layout.ep > 1 else 1
    expert_shards = math.gcd(layout.shard or layout.dp * layout.cp, copies) if layout.zero else 1

    def of_dp(zero: int) -> bool:
        return layout.dp > 1 and layout.zero == zero

    uses = {
        "dp": layout.dp > 1,
        "dp > 2": layout.dp > 2,
        "pp > 2": layout.pp > 2,
        "cp": layout.cp > 1,
        "cp heads": layout.cp > 1 and layout.exchange == HEADS,
        OF_DOCUMENTS: layout.cp > 1 and layout.order == BY_DOCUMENTS,
        "ep": layout.ep > 1,
        "ep > 2": layout.ep > 2,
        COPIED: copies > 1,
        GROUPED: 1 < expert_shards < copies,
        WHOLE: layout.zero == 3 and any(count // layout.ep % expert_shards for count in traits.experts),
        "tp": layout.tp > 1,
        "tp > 2": layout.tp > 2,
        "sequence": layout.sequence,
        "padded vocabulary": any(size % layout.tp for size in traits.vocab_sizes),
        "middle stage": layout.pp > 1 and layout.num_stages > 2,
        "middle rank": layout.pp > 2 or (layout.pp > 1 and has_v),
        "micro-batch > 1": layout.micro_batch_size > 1,
        "tie across ranks": traits.is_tied and layout.pp > 1 and not has_v,
        "tie inside a rank": traits.is_tied and layout.pp > 1 and has_v,
        "offload": layout.offload,
        "shard factor": layout.zero > 0 and 1 < layout.shard < layout.dp * layout.cp,
        "reduce = step": once,
        "selective": layout.recompute == "selective",
        "full": layout.recompute == "full",
        "dropout": traits.has_dropout,
        **{f"zero{zero}": of_dp(zero) and not layout.offload and not once for zero in range(4)},
        **{f"zero{zero}, offload": of_dp(zero) and layout.offload for zero in range(4)},
        **{f"zero{zero}, reduce = step": of_dp(zero) and once and not layout.offload for zero in (2, 3)},
        **{name: layout.pp > 1 and layout.schedule == name for name in ("1f1b", "gpipe")},
        "interleaved": layout.pp > 1 and layout.schedule == "interleaved_1f1b",
        "split backward": layout.pp > 1 and layout.schedule in ("zb_h1", "zb_h2"),
        "V": layout.pp > 1 and has_v,
        **{name: layout.pp > 1 and layout.schedule == name for name in EACH_SCHEDULE},
    }
    return frozenset(name for name, is_used in uses.items() if is_used)


class Shared(NamedTuple):
    """Code shared by each feature of ``some`` with each of ``others``."""

    some: tuple[str, ...]
    others: tuple[str, ...]
    why: str


SHARED = (
    Shared(
        ("dp",),
        ("middle stage", "middle rank", "micro-batch > 1"),
        "a stage that does not read its samples numbers them from the dp rank; dropout draws by those numbers",
    ),
    Shared(("dropout",), ("dp", "tp", "sequence", "micro-batch > 1", "middle rank"), "masks by sample and position"),
    Shared(("dropout",), ("split backward", *RECOMPUTES), "a forward that runs again must draw the same masks"),
    Shared(
        ("zero0", *ZEROS),
        ("tp", "sequence"),
        "gradients of weights that tp replicates are summed over tp on the replica's shard",
    ),
    Shared(("zero0", *ZEROS, "offload"), ("padded vocabulary",), "padded rows lie in flat shards, and count nowhere"),
    Shared(ZEROS, SCHEDULES, "a stage's gradients are reduced when its last backward, or weight backward, is done"),
    Shared(("zero0", *ZEROS), TIES, "copies of a tied weight sum their gradients, whole or in shards"),
    Shared(
        ("shard factor",), (*ZEROS, "tp", "sequence", "middle stage", TIES[0]), "sums within and across shard groups"
    ),
    Shared(ONCE, ("gpipe", "split backward", "tp", TIES[0]), "gradients stay whole on the replica until the step"),
    Shared(("offload",), (*OFFLOADS, "shard factor", "reduce = step", "tp", "sequence", TIES[0]), "shards on the host"),
    Shared(RECOMPUTES, ("tp", "sequence"), "collectives of tp run again in backward, in the same order on all ranks"),
    Shared(RECOMPUTES, SCHEDULES, "which micro-batch is recomputed, and whether weight gradients come apart"),
    Shared(RECOMPUTES, ("zero3", "micro-batch > 1", "dp", "middle rank"), "weights and samples of the second forward"),
    Shared(("tp", "sequence"), SCHEDULES, "shapes between stages, and weight gradients of sharded linears"),
    Shared(("sequence",), ("middle rank", "micro-batch > 1", "tp > 2"), "the sharded dim of activations"),
    Shared(("padded vocabulary",), ("sequence", "tp > 2", *TIES), "rows of the last rank, ranks without rows"),
    Shared(("micro-batch > 1",), ("pp > 2", "tp", "V"), "batch dim of messages between stages"),
    Shared(("split backward",), TIES[:1], "weight gradients of both uses of a tied weight"),
    Shared(EACH_SCHEDULE, (), "each is a builder of rows of its own, and runs other actions"),
    Shared(("cp",), ("dp", *ZEROS, "shard factor"), "gradients are summed, and states sharded, over dp x cp replicas"),
    Shared(("cp",), ("tp", "sequence"), "tokens are cut over cp, then over tp; keys of a tp rank's heads are gathered"),
    Shared(("cp",), (*SCHEDULES, "middle rank"), "shapes between stages, whose samples and documents stay whole"),
    Shared(("cp",), RECOMPUTES, "keys are gathered again in backward, in the same order on all ranks"),
    Shared(("cp",), ("dropout", "micro-batch > 1"), "masks by place in the sample, which is not that on the rank"),
    Shared(("cp heads",), ("tp", "dropout", "split backward"), "some heads of a tp rank, and their part of the masks"),
    Shared(
        ("cp documents",), ("dropout", "micro-batch > 1"), "each sample has its own tokens, and masks by their places"
    ),
    Shared((OF_DOCUMENTS,), ("middle rank", "full"), "tokens are read by every stage, and restored by recompute"),
)
"""Table of shared code. Each feature is also covered on its own: see :func:`wanted_pairs`."""
SHARED_BY_EXPERTS = (
    Shared(
        ("ep",), ("dp", "zero0", *ZEROS, "shard factor"), "sums and shards over the ranks with the same experts alone"
    ),
    Shared(("ep",), ("tp", "sequence", "cp"), "ranks of a group have parts of the same sequences"),
    Shared(("ep",), (*SCHEDULES, "middle rank"), "rows are exchanged in each forward and backward, in one order"),
    Shared(("ep",), (*RECOMPUTES, "offload"), "the exchange runs again in backward; shards of experts on the host"),
    Shared(("ep",), ("dropout", "micro-batch > 1"), "rows of several samples, which come back to their places"),
    Shared(("ep > 2",), ("ep",), "more than two ranks to number experts on, and to order rows of"),
    Shared(("ep",), ("dualpipe_v",), "exchanges of one micro-batch run beside the computation of another, in turns"),
    Shared((COPIED,), ("zero0", *ZEROS), "ranks with the same experts sum their gradients and share their states"),
    Shared((GROUPED,), ("zero1", "zero3"), "sums of experts within and across their shard groups"),
    Shared((WHOLE,), (COPIED,), "experts that the shards do not divide keep whole weights under ZeRO-3"),
)
"""More of the table, for models with experts."""


def _features(table: Sequence[Shared]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*(name for shared in table for name in (*shared.some, *shared.others)), "dp > 2"]))


FEATURES = _features((*SHARED, *SHARED_BY_EXPERTS))

Pair = tuple[str, str]


def wanted_pairs(traits: Traits) -> dict[Pair, str]:
    """Return each pair with its reason; a feature paired with itself means the feature on its own.

    Samples without document starts have no order by documents, and models without experts no expert parallelism.
    """
    table = (*SHARED, *SHARED_BY_EXPERTS) if len(traits.eps) > 1 else SHARED
    reasons: dict[Pair, str] = {(name, name): "the feature by itself" for name in _features(table)}
    for shared in table:
        reasons |= dict.fromkeys(itertools.product(shared.some, shared.others), shared.why)
    return {pair: why for pair, why in reasons.items() if traits.has_documents or OF_DOCUMENTS not in pair}


def candidates(max_ranks: int, micro_batch_sizes: Sequence[int], eps: Sequence[int] = (1,)) -> list[Layout]:
    """Return all layouts to choose from, ordered by ep, then by number of ranks."""
    degrees = [d for d in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2)) if math.prod(d) <= max_ranks]
    layouts = []
    for (dp, pp, tp, cp), schedule, zero, sequence, size, recompute, shard, once, offload in itertools.product(
        sorted(degrees, key=math.prod),
        ("1f1b", "gpipe", "interleaved_1f1b", *EACH_SCHEDULE),
        (0, 1, 2, 3),
        (False, True),
        micro_batch_sizes,
        ("none", *RECOMPUTES),
        (0, 2),
        (False, True),
        (False, True),
    ):
        has_no_effect = (
            (pp == 1 and schedule != "1f1b")
            or (dp == 1 and zero != 1)
            or (shard and (dp * cp <= shard or zero == 0))
            or (once and (zero < 2 or dp == 1))
            or (sequence and tp == 1)
        )
        if not has_no_effect:
            rest = schedule, zero, sequence, size, 0, recompute, shard, once, offload
            layouts += [Layout(dp, pp, tp, *rest, cp, *each) for each in CONTEXTS[: len(CONTEXTS) if cp > 1 else 1]]
    return [layout._replace(ep=ep) for ep in eps for layout in layouts if shares_experts(layout, ep)]


def shares_experts(layout: Layout, ep: int) -> bool:
    """Return True if the layout allows expert parallelism of degree ``ep``."""
    is_whole = layout.dp * layout.cp * layout.tp % ep == 0 and ep % layout.tp == 0
    return ep == 1 or (is_whole and (layout.tp == 1 or layout.sequence))


def is_full(layout: Layout, global_batch: int) -> bool:
    """Return True if a step has enough micro-batches to test gradient accumulation and to fill the pipeline.

    dualpipe_v needs twice as many for its pairs of a forward and a backward.
    """
    needed = 2 * layout.pp if layout.schedule == "dualpipe_v" else max(2, layout.pp)
    return global_batch // (layout.dp * layout.micro_batch_size) >= needed


class LayoutChoice(NamedTuple):
    """Layouts that cover the pair table, and what they leave uncovered."""

    layouts: list[Layout]
    missing: list[str]
    """Sentences on features that no layout of this model has, and on pairs that no layout combines."""


def choose(
    first: Sequence[Layout],
    traits: Traits,
    global_batch: int,
    sequence_length: int,
    max_ranks: int,
    micro_batch_sizes: Sequence[int],
    refusal_of: Callable[[Layout], str | None],
) -> LayoutChoice:
    """Choose layouts that cover every pair of any possible layout, by a deterministic greedy search.

    Each round takes the candidate with the most uncovered pairs, then the fewest ranks, then the first in order.

    Args:
        first: Layouts that are taken in any case.
        refusal_of: Function that returns the reason why this model cannot have a layout, or None.
    """
    possible = [
        layout
        for layout in candidates(max_ranks, micro_batch_sizes, traits.eps)
        if is_possible(layout, traits, global_batch, sequence_length) and is_full(layout, global_batch)
    ]
    numbers = {pair: 1 << at for at, pair in enumerate(wanted_pairs(traits))}
    masks = {layout: _mask(layout, traits, numbers) for layout in possible}
    masks |= {layout: _mask(layout, traits, numbers) * is_full(layout, global_batch) for layout in first}
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
    return LayoutChoice(_needed(layouts, len(first), masks), _uncovered_lines(missing, masks, numbers, refused))


def _drop_refused_head_exchange(
    possible: list[Layout], refusal_of: Callable[[Layout], str | None]
) -> tuple[list[Layout], dict[Layout, str]]:
    """Drop the head-exchange layouts of each tp whose smallest one is refused; return (remaining layouts, refusals)."""
    refused: dict[Layout, str] = {}
    for tp in sorted({layout.tp for layout in possible if layout.exchange == HEADS}):
        alike = [layout for layout in possible if layout.exchange == HEADS and layout.tp == tp]
        reason = refusal_of(alike[0])
        if reason is not None:
            refused[alike[0]] = reason
            possible = [layout for layout in possible if layout.exchange != HEADS or layout.tp != tp]
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
    missing: set[Pair], masks: dict[Layout, int], numbers: dict[Pair, int], refused: dict[Layout, str]
) -> list[str]:
    """Describe uncovered features in one line, then each uncovered pair of covered features with its reason."""
    alone = {a for a, b in missing if a == b}
    lines = [f"not covered, in no layout of this model: {', '.join(sorted(alone))}"] if alone else []
    for pair in sorted(missing):
        if alone & set(pair):
            continue
        reasons = [why for layout, why in refused.items() if masks[layout] & numbers[pair]]
        because = f"refused: {reasons[0]}" if reasons else "no possible layout has both"
        lines.append(f"not covered: {pair[0]} with {pair[1]} ({because})")
    return lines
