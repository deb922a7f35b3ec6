"""Where a run's samples come from: the feeds that a configuration names, training and validation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from meshwright.config import RunConfig
from meshwright.data.corpus import Blend, Corpus, whole_weights
from meshwright.data.dataset import DatasetFeed, open_dataset
from meshwright.data.order import BlendOrder, OnceInOrder, SampleOrder
from meshwright.data.samples import Feed
from meshwright.data.span_corruption import SpanCorruptionFeed, open_corpus
from meshwright.data.tokenizer import end_of_document_id, load
from meshwright.errors import DataError
from meshwright.model.build import vocabulary
from meshwright.seeding import derive


class Source(Protocol):
    """Where micro-batches come from: one of :data:`AnyFeed`, or verify's own."""

    def microbatch(
        self, samples_seen: int, dp_rank: int, dp: int, micro_batch_size: int, chunks: int, m: int
    ) -> tuple[Any, Tensor, Tensor]:
        """(inputs, each tensor (B, ...), labels (B, ...), global sample indices (B,)) of micro-batch m of a replica."""


AnyFeed = Feed | SpanCorruptionFeed | DatasetFeed
"""What the data room reads a run's own samples with."""


def open_feeds(config: RunConfig) -> tuple[AnyFeed, AnyFeed | None]:
    """The training feed, shuffled by the seed, and the validation feed, once in order.

    Raises:
        DataError: before anything distributed exists when called by the launcher.
    """
    eod_id = _end_of_document_id(config)
    training, held_out = (_open(config, split, eod_id) for split in ("train", "validation"))
    assert training is not None
    if isinstance(training, DatasetFeed) and isinstance(held_out, DatasetFeed):
        alike = held_out.samples._replace(like=training.samples.like)  # the stages know one shape
        alike.sample(0)
        held_out = held_out._replace(samples=alike)
    return training, held_out


def open_validation(config: RunConfig) -> AnyFeed | None:
    """The validation feed alone: the training corpus of a model that is done with it need not be there any more."""
    if config.data.builder is not None:
        return open_feeds(config)[1]
    return _open(config, "validation", _end_of_document_id(config))


def describe_feed(feed: Source, num_samples: int) -> str:
    """What is not to be seen in the configuration, for a run of so many samples: how often each of several corpora is
    gone through, documents that are cut. Lines, or nothing."""
    corpus = feed.corpus if isinstance(feed, Feed | SpanCorruptionFeed) else None
    if corpus is None:
        return ""
    parts = corpus.corpora if isinstance(corpus, Blend) else (corpus,)
    lines = []
    for at, part in enumerate(parts):
        said = []
        if isinstance(corpus, Blend):
            share = corpus.weights[at] / sum(corpus.weights)
            said.append(f"{share:.1%} of the samples, {share * num_samples / part.num_samples:.3g} times through it")
        if part.packed is not None and part.packed.num_cut:
            cut, length = part.packed.num_cut, part.sequence_length
            said.append(f"{cut:,} of {len(part.documents):,} documents are longer than {length:,} tokens and cut")
        if said:
            lines.append(f"data       {part.prefix}: {'; '.join(said)}")
    return "\n".join(lines)


def _end_of_document_id(config: RunConfig) -> int | None:
    """Of ``data.tokenizer``, for corpora that do not say it themselves; None without one."""
    if config.data.tokenizer is None:
        return None
    tokenizer, vocab_size = load(Path(config.data.tokenizer)), vocabulary(config.model.builder, config.model.options)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise DataError(
            f"the tokenizer {config.data.tokenizer} has token ids up to {largest:,}, and the model's vocabulary "
            f"{vocab_size:,} (ids 0 to {vocab_size - 1:,}): set model.options.vocab_size to {largest + 1:,} or more, "
            f"or data.tokenizer to the one that belongs to the model"
        )
    return end_of_document_id(tokenizer)


def _open(config: RunConfig, split: str, eod_id: int | None) -> AnyFeed | None:
    """The feed of one split; None where there is none."""
    data, seed = config.data, config.run.seed

    def order(num_samples: int) -> SampleOrder | OnceInOrder:
        return SampleOrder(num_samples, seed) if split == "train" else OnceInOrder(num_samples)

    if data.builder is not None:
        samples = open_dataset(config, split)
        return None if samples is None else DatasetFeed(samples, order(samples.num_samples))
    where = data.train if split == "train" else data.validation
    if where is None:
        return None
    if isinstance(where, str):
        corpus = _open_corpus(config, where, eod_id)
        return _feed(config, corpus, order(corpus.num_samples))
    corpora = [_open_corpus(config, each.path, eod_id) for each in where]
    blend = Blend(corpora, [each.weight for each in where])
    orders = tuple(SampleOrder(each.num_samples, derive(seed, "data set", i)) for i, each in enumerate(corpora))
    return _feed(config, blend, BlendOrder(orders, whole_weights(blend.weights)))


def _open_corpus(config: RunConfig, prefix: str, eod_id: int | None) -> Corpus:
    data, vocab_size = config.data, vocabulary(config.model.builder, config.model.options)
    if data.task == "span_corruption":
        return open_corpus(prefix, data.sequence_length, vocab_size)
    return Corpus(
        prefix,
        data.sequence_length,
        vocab_size,
        eod_id,
        data.eod_mask_loss,
        packing=data.packing,
        document_boundaries=data.document_boundaries,
    )


def _feed(config: RunConfig, corpus: Corpus | Blend, order: Callable[[int], int | None]) -> Feed | SpanCorruptionFeed:
    if config.data.task == "span_corruption":
        return SpanCorruptionFeed(corpus, order, config.data.sequence_length, config.run.seed)
    return Feed(corpus, order)
