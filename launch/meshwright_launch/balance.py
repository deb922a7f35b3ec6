"""Balance of attention over context-parallel ranks and over replicas in the first step of a start,
from its documents.
"""

from __future__ import annotations

from meshwright.context_parallel.balance import batch_imbalance
from meshwright.context_parallel.cut import STARTS
from meshwright.context_parallel.order import ORDERS
from meshwright.data.causal import CorpusSource
from meshwright.data.sources import causal_corpora
from meshwright.data.work import by_index, deal, replica_excess
from meshwright.parts import Parts, StepFeed
from meshwright.terminal.format import format_number_of

MOST_SAMPLES = 8
"""Samples whose documents are read."""


def describe_rows(parts: Parts) -> str:
    """Return how evenly the next step's rows are dealt to the replicas, in a line; empty for a
    single replica, without documents, or with nn.SyncBatchNorm, which rules out ``"work"``.

    Reads document starts of a corpus. No communication. Ignores the sliding window of a model.
    """
    config, source, dp = parts.config, parts.source, parts.mesh.grid.dp
    is_even = dp == 1 or not config.data.document_boundaries
    if is_even or parts.blueprint.is_synchronised or not isinstance(source, CorpusSource):
        return ""
    size, chunks = config.batch.micro_batch_size or 1, parts.executor.schedule.chunks
    num_rows = dp * chunks * size
    first = parts.state.samples_seen
    work = source.work(range(first, first + num_rows))
    found = {
        "index": replica_excess(work, by_index(num_rows, dp, chunks)),
        "work": replica_excess(work, deal(work, dp, chunks, size)),
    }
    own = config.batch.balance
    (other,) = found.keys() - {own}
    return (
        f"rows       next {num_rows} samples, by {own}: the busiest replica sees {found[own]:.1%}"
        f" more keys of their documents than the mean (by {other} {found[other]:.1%};"
        " batch.balance)"
    )


def describe_padding(parts: Parts) -> str:
    """Return the part of their rows to which the next micro-batches are trimmed, in a line; empty
    where rows stay whole, or come from a dataset, which may be a stream.

    Reads samples of this rank's next step from a corpus. No communication.
    """
    if not parts.blueprint.trim_multiple or not causal_corpora(parts.source):
        return ""
    feed = StepFeed(parts, parts.source, parts.state.samples_seen)
    number = max(1, min(parts.executor.schedule.chunks, MOST_SAMPLES))
    whole = parts.blueprint.example.labels.shape[1]
    share = sum(feed.length(m) or whole for m in range(number)) / (number * whole)
    return (
        f"padding    the next {format_number_of(number, 'micro-batch')} of a replica are trimmed to"
        f" {share:.1%} of their rows' {whole:,} tokens (batch.padding)"
    )


def describe_balance(parts: Parts) -> str:
    """Return the imbalance of each order of tokens, in a line;
    empty without context parallelism or documents.

    Reads samples of this rank's next step from a corpus. No communication. Ignores the sliding
    window of a model.
    """
    cut, config = parts.blueprint.cut, parts.config
    if (
        cut.group.size == 1
        or not config.data.document_boundaries
        or not causal_corpora(parts.source)
    ):
        return ""
    feed, size = (
        StepFeed(parts, parts.source, parts.state.samples_seen),
        config.batch.micro_batch_size or 1,
    )
    number = max(1, min(parts.executor.schedule.chunks, MOST_SAMPLES // size))
    batches = [list(parts.source.read(feed.indices(m))[0][STARTS].numpy()) for m in range(number)]
    orders = sorted(ORDERS, key=lambda order: order != cut.order)  # the run's own first
    found = {order: batch_imbalance(order, cut.group.size, batches) for order in orders}
    others = ", ".join(
        f"{order} {uneven:.1%}" for order, uneven in found.items() if order != cut.order
    )
    return (
        f"context    next {number * size} samples, {cut.order}: the busiest rank sees"
        f" {found[cut.order]:.1%} more keys of their documents than the mean ({others})"
    )
