"""Evaluation of a trained model: loss and, over tokens, perplexity and bits per byte,
the same on every layout.

    checkpoint -> stages of this layout -> forward over the validation set, once, in order -> sums over all ranks

Loss is the mean over the labels that count. Validation during training uses the first
train.validate_steps global batches of the validation set. Their loss is reported separately, and
equals that in the run's metrics.jsonl.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.blueprint import draw_blueprint
from meshwright.config import Data, RunConfig, batch_numbers, resolve
from meshwright.config.batch import validation_steps
from meshwright.data.sources import AnySource, open_validations, unigram_nats
from meshwright.errors import ConfigError, DataError
from meshwright.inference.corpora import check_tokenizer, count_text
from meshwright.inference.load import ModelLocation, open_inference_mesh, open_trained
from meshwright.mesh import Axis
from meshwright.mesh.mesh import close_mesh
from meshwright.parts import ForwardParts
from meshwright.run.directory import METRICS
from meshwright.run.observers import TotalLoss, mean_of_sets, set_loss_name, total_loss
from meshwright.system.atomic import write_out
from meshwright.system.process import GiveUp, end_process
from meshwright.system.store import Place, StorePath
from meshwright.terminal.format import format_duration
from meshwright.terminal.output import print_lines, tell
from meshwright.tracking.jsonl import read_records
from meshwright.tracking.observer import has_perplexity, loss_unit
from meshwright.tracking.record import encode_number, perplexity

PROGRESS_EVERY_S = 10.0
"""Seconds between two progress messages."""


@dataclass(frozen=True)
class EvaluationResult:
    """Result of an evaluation."""

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
    loss_unit: str
    """Nats for a cross-entropy; a model's own loss has a unit of its own."""
    perplexity: float | None
    """None, as are bits per byte and the unigram baseline,
    if the loss is no cross-entropy over tokens.
    """
    bytes: int | None
    """Bytes of the text that these tokens encode; None if unknown."""
    bits_per_byte: float | None
    unigram_entropy: float | None
    """Unigram baseline: nats per token of the whole text under token frequencies alone;
    None with ``steps``.
    """
    while_training: dict[str, float | int | None] | None
    """Loss over the first batches, those of validation in training, and the loss that the run
    logged for this step; None for other data, or if fewer batches were evaluated.
    """
    sets: Mapping[str, EvaluationResult] = field(default_factory=dict)
    """Results of several validation sets by name; ``loss`` is their weighted mean then, and samples
    and tokens are sums.
    """

    def lines(self) -> str:
        """Return the result as text for a terminal."""
        place = f"{self.checkpoint}, step {self.step}, on {self.layout} in {self.dtype}"
        of_sets = [
            f"validation set {name}\n{found._loss_lines()}" for name, found in self.sets.items()
        ]
        of_all = [f"weighted mean of {len(self.sets)} sets"] if self.sets else []
        return "\n".join([f"checkpoint     {place}", *of_sets, *of_all, self._loss_lines()])

    def _loss_lines(self) -> str:
        lines = [
            f"data           {self.data}: {self.samples:,} samples, {self.tokens:,} tokens",
            f"loss           {self.loss:.4f} {self.loss_unit}",
        ]
        if self.perplexity is not None:
            lines.append(f"perplexity     {self.perplexity:,.4g}")
        if self.bits_per_byte is not None:
            lines.append(
                f"bits per byte  {self.bits_per_byte:.4f}, of {self.bytes:,} bytes of text"
            )
        if self.unigram_entropy is not None:
            lines.append(
                f"unigrams       {self.unigram_entropy:.4f} nats per token, the unigram baseline"
            )
        if self.while_training is not None:
            logged = self.while_training["logged"]
            in_log = "" if logged is None else f"; metrics.jsonl has {logged:.4f}"
            lines.append(
                f"in training    {self.while_training['loss']:.4f}, of the first"
                f" {self.while_training['batches']} global batches, which validation in training"
                f" uses{in_log}"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the result as strict JSON, with NaN and Inf as text, as in ``metrics.jsonl``."""

        def encoded(value: Any) -> Any:
            if isinstance(value, EvaluationResult):
                return encoded({name: each for name, each in vars(value).items() if each != {}})
            if isinstance(value, Mapping):
                return {name: encoded(each) for name, each in value.items()}
            return encode_number(value) if isinstance(value, float) else value

        return json.dumps(encoded(self), indent=2, allow_nan=False) + "\n"


@dataclass(frozen=True)
class EvaluationJob:
    """Picklable job that the launcher runs on each rank."""

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
        result = self.evaluate(config)
        if result is not None:
            print_lines(result.lines())
            if self.out is not None:
                write_out(self.out, result.to_json())

    def evaluate(self, config: RunConfig) -> EvaluationResult | None:
        """Evaluate on the ranks of a resolved ``config``; return the result on rank 0,
        and None on the others.
        """
        mesh = open_inference_mesh(config.parallel, config.launch, config.train.device)
        blueprint = draw_blueprint(config, mesh.tp, mesh.cp, mesh.ep)
        forward, checkpoint = open_trained(blueprint, mesh, self.place)
        found = {
            name: self._evaluate(
                forward, source, name, str(checkpoint.path), checkpoint.manifest.step
            )
            for name, source in open_validations(config).items()
        }
        close_mesh(mesh)
        if mesh.rank != 0:
            return None
        return found[""] if "" in found else of_sets(found, config.data)

    def _evaluate(
        self, forward: ForwardParts, source: AnySource, name: str, path: str, step: int
    ) -> EvaluationResult:
        config, mesh = forward.config, forward.mesh
        global_batch = batch_numbers(config.batch).global_batch
        batches = num_batches(source, global_batch, self.steps)
        logged = validation_steps(source.num_samples, global_batch, config.train.validate_steps)
        numbers = batches_with_progress(batches, mesh.rank == 0)
        first = total_loss(
            forward, forward.feeds(source, itertools.islice(numbers, min(logged, batches)))
        )
        rest = total_loss(forward, forward.feeds(source, numbers))
        total = TotalLoss(first.loss_sum + rest.loss_sum, first.num_tokens + rest.num_tokens)
        has_tokens = has_perplexity(forward.blueprint)
        samples = min(source.num_samples, batches * global_batch)
        text = None
        if mesh.rank == 0 and has_tokens:
            text = count_text(source, config.data.tokenizer, samples)
        assert text is None or text.tokens == total.num_tokens, (text, total)
        loss = total.loss_sum / max(total.num_tokens, 1)
        grid = mesh.grid
        return EvaluationResult(
            checkpoint=path,
            step=step,
            layout=" x ".join(
                f"{axis}{grid.degree(axis)}" for axis in (Axis.DP, Axis.PP, *grid.axes[2:])
            ),
            dtype=config.train.dtype,
            data=_data_name(config.data, name),
            samples=samples,
            tokens=total.num_tokens,
            loss=loss,
            loss_unit=loss_unit(forward.blueprint),
            perplexity=perplexity(loss) if has_tokens else None,
            bytes=text.bytes if text else None,
            bits_per_byte=(
                total.loss_sum / math.log(2) / text.bytes if text and text.bytes else None
            ),
            unigram_entropy=unigram_nats(source) if self.steps is None and has_tokens else None,
            while_training=(
                {
                    "loss": first.loss_sum / max(first.num_tokens, 1),
                    "batches": logged,
                    "logged": logged_loss(self.place.run, step, name),
                }
                if self.is_own_data and logged <= batches
                else None
            ),
        )


def _data_name(data: Data, name: str) -> str:
    """Return the path of a validation set, or the builder of the dataset."""
    return data.validation_sets[name].path if data.validation_sets else str(data.builder)


def of_sets(found: Mapping[str, EvaluationResult], data: Data) -> EvaluationResult:
    """Return the result over several validation sets."""
    first = next(iter(found.values()))
    loss = mean_of_sets({name: each.loss for name, each in found.items()}, data)
    return replace(
        first,
        data=", ".join(found),
        samples=sum(each.samples for each in found.values()),
        tokens=sum(each.tokens for each in found.values()),
        loss=loss,
        perplexity=None if first.perplexity is None else perplexity(loss),
        bytes=None,
        bits_per_byte=None,
        unigram_entropy=None,
        while_training=None,
        sets=found,
    )


def batches_with_progress(batches: int, is_printing: bool) -> Iterator[int]:
    """Yield 0, 1, ... batches - 1; rank 0 prints the progress
    to stderr every ``PROGRESS_EVERY_S`` seconds.
    """
    start_s = printed_s = time.monotonic()
    for batch in range(batches):
        yield batch
        now_s = time.monotonic()
        if is_printing and now_s - printed_s > PROGRESS_EVERY_S and batch + 1 < batches:
            printed_s, left_s = now_s, (now_s - start_s) / (batch + 1) * (batches - batch - 1)
            tell(f"{batch + 1:,} of {batches:,} global batches, {format_duration(left_s)} left")


def num_batches(source: AnySource, global_batch: int, at_most: int | None) -> int:
    """Return the number of global batches that cover every sample once, at most ``at_most``."""
    whole = -(-source.num_samples // global_batch)
    return whole if at_most is None else min(whole, at_most)


def check(config: RunConfig, world_size: int) -> RunConfig:
    """Check before any process exists that the evaluation can work;
    return the resolved configuration.

    Raises:
        UserError: one message with all faults.
    """
    config = resolve(config, world_size)
    draw_blueprint(config)
    sources = open_validations(config)
    if not sources:
        raise ConfigError(
            "MW-INFERENCE-001",
            "the run has no validation set (data.validation): name a prepared corpus with --data,"
            " such as the folder that `meshwright data` has written",
        )
    for source in sources.values():
        check_tokenizer(config.data, source)
    return config


def logged_loss(run: Place, step: int, name: str = "") -> float | None:
    """Return the validation loss that the run has logged for this step, or None.

    ``name``: that of the validation set, of several.
    """
    if isinstance(run, StorePath):  # records stay on a file system
        return None
    try:
        records = [record for record in read_records(run / METRICS) if record.step == step]
    except DataError:
        return None
    if not records:
        return None
    return records[-1].extra.get(set_loss_name(name)) if name else records[-1].validation_loss
