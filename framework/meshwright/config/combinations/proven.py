"""Pairs of features that share code, each with the reason: a layout of verify proves them.

Faults hide in the interaction of two features: dropout in a middle stage needs the dp rank, ZeRO-3
sums over tp. The default layouts of verify are therefore chosen so that each of these pairs occurs
in one of them, as far as the model allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from meshwright.config.combinations.features import (
    COPIED,
    EACH_SCHEDULE,
    GROUPED,
    OF_DOCUMENTS,
    WHOLE,
)

ZEROS = ("zero1", "zero2", "zero3")
"""ZeRO stages on their own; combinations with offload and
with ``reduce = "step"`` are separate features.
"""
OFFLOADS = tuple(f"zero{zero}, offload" for zero in range(4))
ONCE = ("zero2, reduce = step", "zero3, reduce = step")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "split backward", "V")
RECOMPUTES = ("selective", "full")
TIES = ("tie across ranks", "tie inside a rank")


class ProvenPairs(NamedTuple):
    """Pairs that a layout of verify proves: each feature of ``some`` shares code with each of
    ``others``.
    """

    some: tuple[str, ...]
    others: tuple[str, ...]
    why: str


SHARED = (
    ProvenPairs(
        ("dp",),
        ("middle stage", "middle rank", "micro-batch > 1"),
        "a stage that does not read its samples numbers them from the dp rank; dropout draws by"
        " those numbers",
    ),
    ProvenPairs(
        ("dropout",),
        ("dp", "tp", "sequence", "micro-batch > 1", "middle rank"),
        "masks by sample and position",
    ),
    ProvenPairs(
        ("dropout",),
        ("split backward", *RECOMPUTES),
        "a forward that runs again must draw the same masks",
    ),
    ProvenPairs(
        ("zero0", *ZEROS),
        ("tp", "sequence"),
        "gradients of weights that tp replicates are summed over tp on the replica's shard",
    ),
    ProvenPairs(
        ("zero0", *ZEROS, "offload"),
        ("padded vocabulary",),
        "padded rows lie in flat shards, and count nowhere",
    ),
    ProvenPairs(
        ZEROS,
        SCHEDULES,
        "a stage's gradients are reduced when its last backward, or weight backward, is done",
    ),
    ProvenPairs(
        ("zero0", *ZEROS), TIES, "copies of a tied weight sum their gradients, whole or in shards"
    ),
    ProvenPairs(
        ("shard factor",),
        (*ZEROS, "tp", "sequence", "middle stage", TIES[0]),
        "sums within and across shard groups",
    ),
    ProvenPairs(
        ("units of layers", "kept weights"),
        ("zero3", "split backward", "full"),
        "weights of a unit are gathered and freed around the forwards and backwards of its layers",
    ),
    ProvenPairs(
        ONCE,
        ("gpipe", "split backward", "tp", TIES[0]),
        "gradients stay whole on the replica until the step",
    ),
    ProvenPairs(
        ("offload",),
        (*OFFLOADS, "shard factor", "reduce = step", "tp", "sequence", TIES[0]),
        "shards on the host",
    ),
    ProvenPairs(
        RECOMPUTES,
        ("tp", "sequence"),
        "collectives of tp run again in backward, in the same order on all ranks",
    ),
    ProvenPairs(
        RECOMPUTES,
        SCHEDULES,
        "which micro-batch is recomputed, and whether weight gradients come apart",
    ),
    ProvenPairs(
        RECOMPUTES,
        ("zero3", "micro-batch > 1", "dp", "middle rank"),
        "weights and samples of the second forward",
    ),
    ProvenPairs(
        ("tp", "sequence"),
        SCHEDULES,
        "shapes between stages, and weight gradients of sharded linears",
    ),
    ProvenPairs(
        ("sequence",),
        ("middle rank", "micro-batch > 1", "tp > 2"),
        "the sharded dim of activations",
    ),
    ProvenPairs(
        ("padded vocabulary",),
        ("sequence", "tp > 2", *TIES),
        "rows of the last rank, ranks without rows",
    ),
    ProvenPairs(
        ("micro-batch > 1",), ("pp > 2", "tp", "V"), "batch dim of messages between stages"
    ),
    ProvenPairs(("split backward",), TIES[:1], "weight gradients of both uses of a tied weight"),
    ProvenPairs(EACH_SCHEDULE, (), "each is a builder of rows of its own, and runs other actions"),
    ProvenPairs(
        ("cp",),
        ("dp", *ZEROS, "shard factor"),
        "gradients are summed, and states sharded, over dp x cp replicas",
    ),
    ProvenPairs(
        ("cp",),
        ("tp", "sequence"),
        "tokens are cut over cp, then over tp; keys of a tp rank's heads are gathered",
    ),
    ProvenPairs(
        ("cp",),
        (*SCHEDULES, "middle rank"),
        "shapes between stages, whose samples and documents stay whole",
    ),
    ProvenPairs(
        ("cp",), RECOMPUTES, "keys are gathered again in backward, in the same order on all ranks"
    ),
    ProvenPairs(
        ("cp",),
        ("dropout", "micro-batch > 1"),
        "masks by place in the sample, which is not that on the rank",
    ),
    ProvenPairs(
        ("cp heads",),
        ("tp", "dropout", "split backward"),
        "some heads of a tp rank, and their part of the masks",
    ),
    ProvenPairs(
        ("cp documents",),
        ("dropout", "micro-batch > 1"),
        "each sample has its own tokens, and masks by their places",
    ),
    ProvenPairs(
        (OF_DOCUMENTS,),
        ("middle rank", "full"),
        "tokens are read by every stage, and restored by recompute",
    ),
)
"""Pairs that are proven for every model. Each feature is also proven on its own."""
SHARED_BY_EXPERTS = (
    ProvenPairs(
        ("ep",),
        ("dp", "zero0", *ZEROS, "shard factor"),
        "sums and shards over the ranks with the same experts alone",
    ),
    ProvenPairs(
        ("ep",), ("tp", "sequence", "cp"), "ranks of a group have parts of the same sequences"
    ),
    ProvenPairs(
        ("ep",),
        (*SCHEDULES, "middle rank"),
        "rows are exchanged in each forward and backward, in one order",
    ),
    ProvenPairs(
        ("ep",),
        (*RECOMPUTES, "offload"),
        "the exchange runs again in backward; shards of experts on the host",
    ),
    ProvenPairs(
        ("ep",),
        ("dropout", "micro-batch > 1"),
        "rows of several samples, which come back to their places",
    ),
    ProvenPairs(
        ("ep > 2",), ("ep",), "more than two ranks to number experts on, and to order rows of"
    ),
    ProvenPairs(
        ("ep",),
        ("dualpipe_v",),
        "exchanges of one micro-batch run beside the computation of another, in turns",
    ),
    ProvenPairs(
        (COPIED,),
        ("zero0", *ZEROS),
        "ranks with the same experts sum their gradients and share their states",
    ),
    ProvenPairs(
        (GROUPED,), ("zero1", "zero3"), "sums of experts within and across their shard groups"
    ),
    ProvenPairs(
        (WHOLE,), (COPIED,), "experts that the shards do not divide keep whole weights under ZeRO-3"
    ),
)
"""More of the table, for models with experts."""


def features_of_table(table: Iterable[ProvenPairs]) -> tuple[str, ...]:
    """Return the features of proven pairs, in order."""
    names: dict[str, None] = {}
    for shared in table:
        names |= dict.fromkeys((*shared.some, *shared.others))
    return tuple(names | {"dp > 2": None})


FEATURES = features_of_table((*SHARED, *SHARED_BY_EXPERTS))
"""Features of proven pairs."""
