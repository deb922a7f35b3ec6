"""Sample sources of a configuration, the shapes of their samples,
and the data fingerprint of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from meshwright.config import Batch, Data, Model, RunConfig
from meshwright.data.blend import Blend
from meshwright.data.causal import CorpusSource
from meshwright.data.corpus import Corpus, DocumentRules
from meshwright.data.dataset import DatasetSource, open_dataset
from meshwright.data.hashes import hashes_of, hashes_of_stages, weight_text
from meshwright.data.live_files import LiveFiles
from meshwright.data.order import BlendOrder, OnceInOrder, SampleOrder, whole_weights
from meshwright.data.read_ahead import Steps
from meshwright.data.same_tokens import check_same_tokens
from meshwright.data.span_corruption import (
    SpanCorruptionSource,
    corrupt,
    lengths,
    open_corpus,
    spans_of,
)
from meshwright.data.stages import StageBlend, open_stages
from meshwright.data.stream import Stream
from meshwright.data.stream_source import StreamSource as StreamSource
from meshwright.data.tokenizer import end_of_document_id, load
from meshwright.data.worker_process import WorkerProcess
from meshwright.errors import ConfigError, DataError
from meshwright.model.builder import vocabulary_size
from meshwright.seeding import derive
from meshwright.terminal.format import format_number_of


class Source(Protocol):
    """Source of samples by index in the run, the same on any layout: one of :data:`AnySource`,
    or a tool's own.
    """

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        """Return (inputs, each tensor (B, ...), labels (B, ...)), on the CPU."""


AnySource = CorpusSource | SpanCorruptionSource | DatasetSource | StreamSource
"""Sources that a configuration can name."""
ValidationSources = Mapping[str, AnySource]
"""Validation sources by name; a single one has the name ""."""


def open_sources(config: RunConfig) -> tuple[AnySource, ValidationSources]:
    """Open the training source, shuffled by the seed, and the validation sources,
    read once in order.

    The launcher calls it too, so that a DataError is raised before any rank starts.
    """
    eod_id = _end_of_document_id(config.data.tokenizer, config.model)
    training = _open_training(config, eod_id)
    validations = _open_validations(config, eod_id)
    if config.data.builder is not None:
        for validation in validations.values():
            _check_like(training, validation)
    sources = (training, *validations.values())
    prefixes = [corpus.prefix for source in sources for corpus in _corpora(source)]
    check_same_tokens(prefixes, config.data.tokenizer)
    if isinstance(training, DatasetSource | StreamSource) and config.data.workers:
        start = partial(WorkerProcess, config) if config.data.processes else None
        training = training.with_workers(config.data.workers, Steps(config.batch), start)
    return training, validations


def expect_alternation(source: Source) -> None:
    """Make threads that read ahead expect the deal of a model with nn.SyncBatchNorm."""
    ahead = getattr(source, "ahead", None)
    if ahead is not None:
        ahead.expect_alternation()


def _check_like(training: AnySource, validation: AnySource) -> None:
    """Check that validation samples have the shapes of training:
    the stages are built for one shape.
    """
    first, second = (
        each.samples if isinstance(each, DatasetSource) else each.stream
        for each in (training, validation)
        if isinstance(each, DatasetSource | StreamSource)
    )
    like = second.collate._replace(like=first.collate.like)
    like.one(second.raw(0), 0)


def open_validations(config: RunConfig) -> ValidationSources:
    """Open the validation sources alone; the training corpus of a trained model may be missing."""
    if config.data.builder is not None:
        return open_sources(config)[1]
    return _open_validations(config, _end_of_document_id(config.data.tokenizer, config.model))


def open_files(*sources: Source) -> None:
    """Open the files of the sources' corpora now, so that the first step does not."""
    for source in sources:
        for corpus in _corpora(source):
            corpus.open()


def _corpora(source: Source | None) -> tuple[Corpus, ...]:
    """Return the corpora that a source reads: one, those of a blend, or none."""
    if not isinstance(source, CorpusSource | SpanCorruptionSource):
        return ()
    return source.corpus.corpora if isinstance(source.corpus, Blend) else (source.corpus,)


def causal_corpora(source: Source) -> tuple[Corpus, ...]:
    """Return the corpora of a causal source; none for other tasks and datasets."""
    return _corpora(source) if isinstance(source, CorpusSource) else ()


def example(data: Data, micro_batch_size: int) -> tuple[Any, Tensor]:
    """Return (inputs, labels) of one micro-batch on meta.
    A user-defined dataset is opened and its first sample read.

    Raises:
        DataError: the dataset cannot be opened, or its samples are not pairs of tensors.
    """
    if data.builder is not None:
        dataset = open_dataset(data, "train")
        assert dataset is not None
        inputs, labels = dataset.sample(0)
        return tree_map(lambda leaf: _batched(leaf, micro_batch_size), inputs), _batched(
            labels, micro_batch_size
        )
    if data.task == "span_corruption":
        shape = lengths(data.sequence_length)
        ids = {
            "encoder_ids": _ids(micro_batch_size, shape.encoder),
            "decoder_ids": _ids(micro_batch_size, shape.decoder),
        }
        return ids, _ids(micro_batch_size, shape.decoder)
    tokens, labels = (_ids(micro_batch_size, data.sequence_length) for _ in range(2))
    if data.document_boundaries:
        return {"tokens": tokens, "starts": torch.zeros_like(tokens, dtype=torch.bool)}, labels
    return tokens, labels


def _ids(samples: int, length: int) -> Tensor:
    return torch.zeros((samples, length), dtype=torch.int64, device="meta")


def _batched(leaf: Tensor, micro_batch_size: int) -> Tensor:
    return torch.empty((micro_batch_size, *leaf.shape), dtype=leaf.dtype, device="meta")


def span_corruption_sampler(
    draw: Callable[[int, int], Callable[[int], tuple[Tensor, Tensor]]],
    seed: int,
    vocab_size: int,
    sequence_length: int,
) -> Callable[[int], tuple[Any, Tensor]]:
    """Return a sampler of span corruption over drawn text: sample index -> (inputs, labels (Sd,)).

    ``draw(vocab_size, length)`` returns a sampler of text: sample index -> (ids (length,), labels).
    """
    shape = lengths(sequence_length)
    if vocab_size <= shape.sentinels + 1:
        raise ConfigError(
            "MW-DATA-104",
            f"a vocabulary of {vocab_size} has no room for {shape.sentinels} sentinels",
        )
    text = draw(vocab_size - shape.sentinels, shape.window)

    def sample(index: int) -> tuple[Any, Tensor]:
        corrupted = corrupt(
            text(index)[0].numpy(), spans_of(shape, seed, index), vocab_size, shape.decoder
        )
        encoder_ids, decoder_ids, labels = map(torch.from_numpy, corrupted)
        return {"encoder_ids": encoder_ids, "decoder_ids": decoder_ids}, labels

    return sample


def describe_source(source: Source, num_samples: int) -> str:
    """Describe, in lines, the share and epochs of each blended corpus in a run,
    and the truncated documents.
    """
    blend = source.corpus if isinstance(source, CorpusSource | SpanCorruptionSource) else None
    if isinstance(source, StreamSource):
        return (
            f"data       {source.stream.name} is a stream; a resume continues {source.stream.how}"
        )
    lines = blend.describe(num_samples) if isinstance(blend, StageBlend) else []
    for at, part in enumerate(_corpora(source)):
        notes = []
        if isinstance(blend, Blend) and blend.weights:
            share = blend.weights[at] / sum(blend.weights)
            notes.append(
                f"{share:.1%} of the samples, {share * num_samples / part.num_samples:.3g} times"
                " through it"
            )
        if part.packed is not None and part.packed.num_cut:
            cut, length = part.packed.num_cut, part.sequence_length
            notes.append(
                f"{cut:,} of {len(part.documents):,} documents are longer than {length:,} tokens"
                " and cut"
            )
        if notes:
            lines.append(f"data       {part.prefix}: {'; '.join(notes)}")
    return "\n".join(lines)


def warn_of_small_validation(validation: Source | None, global_batch: int, name: str = "") -> str:
    """Return a warning if validation has fewer samples than a global batch: its loss is noisy;
    empty otherwise. ``name``: that of the set, of several.
    """
    if not isinstance(validation, AnySource) or validation.num_samples >= global_batch:
        return ""
    samples = format_number_of(validation.num_samples, "sample")
    return (
        f"warning    validation{name and f' {name}'} has {samples}, less than one global batch ({global_batch:,}): its"
        " loss is noisy. Give it more text, such as a larger --validation-share of `meshwright"
        " data`"
    )


def data_fingerprint(source: Source | None) -> dict[str, str]:
    """Return the hashes that must not change between a checkpoint and its resume, by name."""
    if isinstance(source, DatasetSource):
        return source.samples.fingerprint()
    if isinstance(source, StreamSource):
        return source.stream.fingerprint()
    if not isinstance(source, CorpusSource | SpanCorruptionSource):
        return {}
    corpus = source.corpus
    if isinstance(corpus, Corpus):
        return hashes_of(corpus)
    if isinstance(corpus, StageBlend):
        return hashes_of_stages(corpus)
    return {
        f"{name} of data.train[{i}] (weight {weight_text(weight)})": value
        for i, (each, weight) in enumerate(zip(corpus.corpora, corpus.weights, strict=True))
        for name, value in hashes_of(each).items()
    }


def corpus_times(source: Source) -> dict[str, int]:
    """Return the modification times of a run's corpus files in ns, by path."""
    return {path: at for corpus in _corpora(source) for path, at in corpus.modified_ns().items()}


def live_files(*sources: Source | None) -> LiveFiles:
    """Return the files of the sources' corpora as they are now."""
    return LiveFiles(
        path for source in sources for corpus in _corpora(source) for path in corpus.files()
    )


def unigram_nats(source: Source | None) -> float | None:
    """Return the unigram baseline of a corpus in nats per token; None without a fingerprint,
    and for blends.
    """
    if (
        isinstance(source, CorpusSource)
        and isinstance(source.corpus, Corpus)
        and source.corpus.known
    ):
        return source.corpus.known.unigram_baseline_nats
    return None


def _end_of_document_id(file: str | None, model: Model) -> int | None:
    """Return the end-of-document id of a tokenizer, for corpora without a fingerprint;
    or None. ``file``: ``data.tokenizer``.
    """
    if file is None:
        return None
    tokenizer = load(Path(file))
    vocab_size = vocabulary_size(model.builder, model.options)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise DataError(
            "MW-DATA-090",
            f"the tokenizer {file} has token ids up to {largest:,}, and the"
            f" model's vocabulary {vocab_size:,} (ids 0 to {vocab_size - 1:,}): set"
            f" model.options.vocab_size to {largest + 1:,} or more, or data.tokenizer to the one"
            " that belongs to the model",
        )
    return end_of_document_id(tokenizer)


def _open_training(config: RunConfig, eod_id: int | None) -> AnySource:
    """Open the training source."""
    data, seed = config.data, config.run.seed
    if data.builder is not None:
        source = _open_dataset_source(config, "train")
        assert source is not None
        return source
    open_corpus_at = partial(_open_corpus, data, config.model, eod_id)
    if data.stages:
        return _source_of(data, seed, *open_stages(config, open_corpus_at))
    if isinstance(data.train, str):
        corpus = open_corpus_at(data.train)
        return _source_of(data, seed, corpus, SampleOrder(corpus.num_samples, seed))
    corpora = [open_corpus_at(each.path) for each in data.train]
    blend = Blend(corpora, [each.weight for each in data.train])
    orders = tuple(
        SampleOrder(each.num_samples, derive(seed, "data set", i)) for i, each in enumerate(corpora)
    )
    return _source_of(data, seed, blend, BlendOrder(orders, whole_weights(blend.weights)))


def _open_validations(config: RunConfig, eod_id: int | None) -> ValidationSources:
    """Open the validation sources, each read once in order."""
    data = config.data
    if data.builder is not None:
        source = _open_dataset_source(config, "validation")
        return {} if source is None else {"": source}
    found: dict[str, AnySource] = {}
    for name, each in data.validation_sets.items():
        corpus = _open_corpus(data, config.model, eod_id, each.path)
        found[name] = _source_of(data, config.run.seed, corpus, OnceInOrder(corpus.num_samples))
    return found


def _open_dataset_source(config: RunConfig, split: str) -> DatasetSource | StreamSource | None:
    """Open one split of ``data.builder``; None if it has none."""
    samples = open_dataset(config.data, split)
    if samples is None:
        return None
    if isinstance(samples, Stream):
        return _open_stream(config.batch, split, samples, config.train.validate_steps)
    is_training, num_samples = split == "train", samples.num_samples
    order = SampleOrder(num_samples, config.run.seed) if is_training else OnceInOrder(num_samples)
    return DatasetSource(samples, order)


def _open_stream(batch: Batch, split: str, stream: Stream, validate_steps: int) -> StreamSource:
    """Return the source of a stream: endless for training,
    counted for validation up to train.validate_steps.
    """
    global_batch = batch.global_batch
    assert global_batch is not None, "resolve the configuration first"
    if split == "train":
        stream.is_due = Steps(batch).begins_at
        return StreamSource(stream, global_batch)
    return StreamSource(stream, global_batch, stream.count(validate_steps * global_batch))


def _open_corpus(data: Data, model: Model, eod_id: int | None, prefix: str) -> Corpus:
    vocab_size = vocabulary_size(model.builder, model.options)
    if data.task == "span_corruption":
        return open_corpus(prefix, data.sequence_length, vocab_size)
    rules = DocumentRules(data.packing, data.document_boundaries, data.eod_mask_loss, eod_id)
    return Corpus(prefix, data.sequence_length, vocab_size, rules=rules)


def _source_of(
    data: Data, seed: int, corpus: Corpus | Blend, order: Callable[[int], int | None]
) -> CorpusSource | SpanCorruptionSource:
    if data.task == "span_corruption":
        return SpanCorruptionSource(corpus, order, data.sequence_length, seed)
    return CorpusSource(corpus, order)
