"""Where a run's samples come from: the feeds that a configuration names, training and validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from framework.config import RunConfig
from framework.data.dataset import DatasetFeed, open_dataset
from framework.data.order import OnceInOrder, SampleOrder
from framework.data.samples import Corpus, Feed
from framework.data.span_corruption import SpanCorruptionFeed, open_corpus
from framework.data.tokenizer import end_of_document_id, load
from framework.model import vocabulary


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
    tokenizer = config.data.tokenizer
    eod_id = None if tokenizer is None else end_of_document_id(load(Path(tokenizer)))
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
    tokenizer = config.data.tokenizer
    eod_id = None if tokenizer is None else end_of_document_id(load(Path(tokenizer)))
    return _open(config, "validation", eod_id)


def _open(config: RunConfig, split: str, eod_id: int | None) -> AnyFeed | None:
    """The feed of one split; None where there is none."""
    data, seed = config.data, config.run.seed

    def order(num_samples: int) -> SampleOrder | OnceInOrder:
        return SampleOrder(num_samples, seed) if split == "train" else OnceInOrder(num_samples)

    if data.builder is not None:
        samples = open_dataset(config, split)
        return None if samples is None else DatasetFeed(samples, order(samples.num_samples))
    prefix = data.train if split == "train" else data.validation
    if prefix is None:
        return None
    vocab_size = vocabulary(config.model.builder, config.model.options)
    if data.task == "span_corruption":
        corpus = open_corpus(prefix, data.sequence_length, vocab_size)
        return SpanCorruptionFeed(corpus, order(corpus.num_samples), data.sequence_length, seed)
    corpus = Corpus(prefix, data.sequence_length, vocab_size, eod_id, data.eod_mask_loss)
    return Feed(corpus, order(corpus.num_samples))
