"""Evaluation of a trained model on text: loss, perplexity and bits per byte, the same on every layout.

    checkpoint -> stages of this layout -> forward over the validation set, once, in order -> sums over all ranks

Loss is the mean over the labels that count. Validation during training uses the first train.validate_steps global
batches of the validation set. They are reported apart, and give the same number as the run's metrics.jsonl.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from meshwright.blueprint import batch_numbers, draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.data import fingerprint
from meshwright.data.causal import CorpusSource, validation_steps
from meshwright.data.corpus import IGNORE, Blend, Corpus
from meshwright.data.indexed import idx_path
from meshwright.data.sources import AnySource, open_validation, unigram_nats
from meshwright.data.token_bytes import beginnings, blank_of, bytes_of_tokens
from meshwright.data.tokenizer import load
from meshwright.data.tokenizer_files import TOKENIZER_FILE, begin_id
from meshwright.errors import ConfigError, DataError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.parts import ForwardParts
from meshwright.run.directory import METRICS
from meshwright.step import TotalLoss, total_loss
from meshwright.system.atomic import write_out
from meshwright.system.process import GiveUp, end_process
from meshwright.terminal.format import format_duration
from meshwright.terminal.output import say, tell
from meshwright.tools.inference.load import ModelLocation, open_trained
from meshwright.tracking.jsonl import read_records
from meshwright.tracking.record import perplexity
from meshwright.watch.hang.watchdog import LATER_S

SAY_EVERY_S = 10.0
"""Seconds between two progress messages."""
WINDOWS_AT_ONCE = 256
"""Number of samples whose label bytes are counted together."""


class TextSize(NamedTuple):
    """Number of labels that are not ignored, and the bytes of their text."""

    tokens: int
    bytes: int


@dataclass(frozen=True)
class EvaluationResult:
    """Result of an evaluation. Losses are in nats."""

    checkpoint: str
    step: int
    layout: str
    dtype: str
    data: str
    samples: int
    """Number of samples evaluated, each once."""
    tokens: int
    """Number of labels that count; the loss is their mean."""
    loss: float
    perplexity: float
    bytes: int | None
    """Bytes of text that these tokens stand for; None if unknown."""
    bits_per_byte: float | None
    unigram_entropy: float | None
    """Unigram baseline: nats per token of the same text under token frequencies alone."""
    while_training: dict[str, float | int | None] | None
    """Loss of the first batches, which validation in training uses, and the loss that the run logged for this step.
    None for other data, or if fewer batches were evaluated.
    """

    def lines(self) -> str:
        """Return the result as text for a terminal."""
        said = [
            f"checkpoint     {self.checkpoint}, step {self.step}, on {self.layout} in {self.dtype}",
            f"data           {self.data}: {self.samples:,} samples, {self.tokens:,} tokens",
            f"loss           {self.loss:.4f} nats per token",
            f"perplexity     {self.perplexity:,.4g}",
        ]
        if self.bits_per_byte is not None:
            said.append(f"bits per byte  {self.bits_per_byte:.4f}, of {self.bytes:,} bytes of text")
        if self.unigram_entropy is not None:
            said.append(f"unigrams       {self.unigram_entropy:.4f} nats per token: who knows token frequencies alone")
        if self.while_training is not None:
            logged = self.while_training["logged"]
            knows = "" if logged is None else f"; metrics.jsonl says {logged:.4f}"
            said.append(
                f"in training    {self.while_training['loss']:.4f}, of the first {self.while_training['batches']} "
                f"global batches, which the training looks at{knows}"
            )
        return "\n".join(said)

    def to_json(self) -> str:
        """Return the result as strict JSON, with NaN and Inf as text, as in ``metrics.jsonl``."""

        def encoded(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: encoded(each) for name, each in value.items()}
            if isinstance(value, float) and not math.isfinite(value):
                return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
            return value

        return json.dumps(encoded(vars(self)), indent=2, allow_nan=False) + "\n"


@dataclass(frozen=True)
class EvaluationJob:
    """Work of each rank; the launcher sends it to the ranks."""

    place: ModelLocation
    is_own_data: bool
    """True if the data are the run's own validation set."""
    out: Path | None = None
    steps: int | None = None
    """Number of global batches to evaluate; None: all."""

    def __call__(self, config: RunConfig, give_up: GiveUp = end_process) -> None:
        """Run one rank; rank 0 prints the result and writes it to ``out``. ``config``: resolved.

        Raises:
            UserError: a fault of the checkpoint or the data; on every rank.
        """
        parallel = config.parallel
        assert isinstance(parallel.dp, int)
        mesh = open_mesh(
            Grid(parallel.pp, parallel.dp, parallel.tp),
            config.train.device,
            timeout_s=config.launch.timeout_s + LATER_S,
            tp_across_nodes=parallel.tp_across_nodes,
        )
        forward, checkpoint = open_trained(config, mesh, self.place)
        found = self._look(forward, str(checkpoint.path), checkpoint.manifest.step)
        close_mesh(mesh)
        if mesh.rank != 0:
            return
        say(found.lines())
        if self.out is not None:
            write_out(self.out, found.to_json())

    def _look(self, forward: ForwardParts, path: str, step: int) -> EvaluationResult:
        config, mesh = forward.config, forward.mesh
        source = open_validation(config)
        assert source is not None  # it was opened before the ranks began
        batches = batches_of(source, config, self.steps)
        logged = validation_steps(source.num_samples, batch_numbers(config).global_batch, config.train.validate_steps)
        told = batches_with_progress(batches, mesh.rank == 0)
        first = total_loss(forward, source, itertools.islice(told, min(logged, batches)))
        rest = total_loss(forward, source, told)
        found = TotalLoss(first.loss_sum + rest.loss_sum, first.num_tokens + rest.num_tokens)
        text = count_text(source, config, batches) if mesh.rank == 0 else None
        assert text is None or text.tokens == found.num_tokens, (text, found)
        loss = found.loss_sum / max(found.num_tokens, 1)
        grid = mesh.grid
        return EvaluationResult(
            checkpoint=path,
            step=step,
            layout=f"dp{grid.dp} x pp{grid.pp} x tp{grid.tp}",
            dtype=config.train.dtype,
            data=config.data.validation or str(config.data.builder),
            samples=min(source.num_samples, batches * batch_numbers(config).global_batch),
            tokens=found.num_tokens,
            loss=loss,
            perplexity=perplexity(loss),
            bytes=text.bytes if text else None,
            bits_per_byte=found.loss_sum / math.log(2) / text.bytes if text and text.bytes else None,
            unigram_entropy=unigram_nats(source) if self.steps is None else None,
            while_training={
                "loss": first.loss_sum / max(first.num_tokens, 1),
                "batches": logged,
                "logged": logged_loss(self.place.run, step),
            }
            if self.is_own_data and logged <= batches
            else None,
        )


def batches_with_progress(batches: int, speaks: bool) -> Iterator[int]:
    """Yield 0, 1, ... batches - 1; rank 0 prints the progress to stderr every ``SAY_EVERY_S`` seconds."""
    begun_s = said_s = time.monotonic()
    for batch in range(batches):
        yield batch
        now_s = time.monotonic()
        if speaks and now_s - said_s > SAY_EVERY_S and batch + 1 < batches:
            said_s, left_s = now_s, (now_s - begun_s) / (batch + 1) * (batches - batch - 1)
            tell(f"{batch + 1:,} of {batches:,} global batches, {format_duration(left_s)} left")


def batches_of(source: AnySource, config: RunConfig, at_most: int | None) -> int:
    """Return the number of global batches that cover every sample once, at most ``at_most``."""
    whole = -(-source.num_samples // batch_numbers(config).global_batch)
    return whole if at_most is None else min(whole, at_most)


def check(config: RunConfig, world_size: int) -> RunConfig:
    """Check before any process exists that the evaluation can work; return the resolved configuration.

    Raises:
        UserError: one message with all faults.
    """
    config = resolve(config, world_size)
    draw_blueprint(config)
    source = open_validation(config)
    if source is None:
        raise ConfigError(
            "MW-INFERENCE-001",
            "the run has no validation set (data.validation): name a prepared corpus with --data, such as the folder "
            "that `meshwright data` has written",
        )
    _check_tokenizer(config, source)
    return config


def _check_tokenizer(config: RunConfig, source: AnySource) -> None:
    """Check that the tokenizer is the one that made the tokens; another one would count the bytes of another text."""
    if not isinstance(source, CorpusSource) or config.data.tokenizer is None:
        return
    named = Path(config.data.tokenizer)
    for corpus in corpora_of(source):
        known, beside = fingerprint.read(corpus.prefix.parent), corpus.prefix.with_name(TOKENIZER_FILE)
        made_by = None if known is None else known.files.get(TOKENIZER_FILE)
        if made_by is None or fingerprint.file_sha256(named) == made_by:
            continue
        is_same = beside.is_file() and fingerprint.file_sha256(beside) == made_by
        if not is_same or load(beside).to_str() != load(named).to_str():
            raise DataError(
                "MW-INFERENCE-002",
                f"data.tokenizer = {named} is not the tokenizer that made {corpus.prefix}, as its "
                f"{fingerprint.FILE_NAME} has it: name that one, or prepare the text again with this one",
            )


def with_corpus(config: RunConfig, place: Path) -> RunConfig:
    """Return the configuration with another corpus as its validation set.

    ``place``: path of a .bin/.idx pair without its suffix, or a folder with one pair, or with one called validation.

    Raises:
        ConfigError: the model was not trained on tokens of a corpus.
        DataError: there is no corpus, or several, or it was made with another tokenizer.
    """
    if config.data.builder is not None:
        raise ConfigError(
            "MW-INFERENCE-003",
            f"the run reads its samples with data.builder = {config.data.builder!r}: --data has no use",
        )
    prefix = place
    if place.is_dir():
        names = sorted(path.stem for path in place.glob("*.idx"))
        if not names:
            raise DataError(
                "MW-INFERENCE-004",
                f"--data {place}: the folder holds no corpus (a .bin/.idx pair); `meshwright data` makes one",
            )
        if "validation" not in names and names[1:]:
            raise DataError(
                "MW-INFERENCE-005",
                f"--data {place}: the folder holds {', '.join(names)}: name one, as in {place / names[0]}",
            )
        prefix = place / ("validation" if "validation" in names else names[0])
    tokenizer, own = config.data.tokenizer, prefix.parent / "tokenizer.json"
    if own.is_file() and idx_path(prefix).is_file():
        if tokenizer is None:
            tokenizer = str(own)
        elif Path(tokenizer).is_file() and load(own).to_str() != load(Path(tokenizer)).to_str():
            raise DataError(
                "MW-INFERENCE-006",
                f"--data {place}: its tokens were made with {own}, which is another tokenizer than the run's, "
                f"{tokenizer}: prepare that text with the run's own",
            )
    data = config.data.model_copy(update={"validation": str(prefix), "tokenizer": tokenizer})
    return config.model_copy(update={"data": data})


def count_text(source: AnySource, config: RunConfig, batches: int) -> TextSize | None:
    """Return the number of labels that are not ignored in ``batches`` global batches, and the bytes of their text.

    None if the labels are not plain text: a user's dataset, span corruption, or no tokenizer.

    Raises:
        DataError: a token that the tokenizer does not have.
    """
    if not isinstance(source, CorpusSource) or config.data.tokenizer is None:
        return None
    tokenizer, corpora = load(Path(config.data.tokenizer)), corpora_of(source)
    table = bytes_of_tokens(tokenizer)
    blank, before = blank_of(tokenizer, table), _before_texts(corpora, tokenizer)
    num_samples = min(source.num_samples, batches * batch_numbers(config).global_batch)
    tokens = total = 0
    for start in range(0, num_samples, WINDOWS_AT_ONCE):
        inputs, found = source.read(range(start, min(start + WINDOWS_AT_ONCE, num_samples)))
        ids, labels = (inputs["tokens"] if isinstance(inputs, dict) else inputs).numpy(), found.numpy()
        counted = labels[labels != IGNORE]
        if counted.size and int(counted.max()) >= len(table):
            names = ", ".join(str(each.prefix) for each in corpora)
            raise DataError(
                "MW-INFERENCE-007",
                f"{names} holds token id {int(counted.max()):,}, and {config.data.tokenizer} has "
                f"{len(table):,}: it is not the tokenizer that made the corpus; prepare it again with it",
            )
        tokens += counted.size
        total += int(table[counted].sum())
        if blank:
            first = beginnings(ids, labels, before, has_mask=any(each.mask for each in corpora))
            total -= blank * int((table[labels[first]] > 0).sum())
    return TextSize(tokens, total)


def _before_texts(corpora: Sequence[Corpus], tokenizer: Tokenizer) -> set[int]:
    """Return the tokens after which a text begins: ends of documents, and tokens that precede each document."""
    found = {each.eod_id for each in corpora}
    found |= {begin_id(fingerprint.read(each.prefix.parent), tokenizer) for each in corpora}
    return {number for number in found if number is not None}


def corpora_of(source: CorpusSource) -> tuple[Corpus, ...]:
    """Return the corpora of a feed: one, or those of a blend."""
    return source.corpus.corpora if isinstance(source.corpus, Blend) else (source.corpus,)


def logged_loss(run: Path, step: int) -> float | None:
    """Return the validation loss that the run has logged for this step, or None."""
    try:
        found = [record.validation_loss for record in read_records(run / METRICS) if record.step == step]
    except DataError:
        return None
    return found[-1] if found else None
