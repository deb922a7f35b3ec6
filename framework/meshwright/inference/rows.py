"""Forward of rows of tokens that are no samples of a corpus, such as texts to score and prompts to
continue, on the ranks of any layout.

    rows of ids -> micro-batches of every replica -> stages -> an ending on the last stage, in place of the loss

A row is padded at its end, up to the shortest of a few lengths (windows): messages between stages
have fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from meshwright.blueprint import Blueprint, WholeModel, describe, draw_blueprint
from meshwright.checkpoint import CheckpointReader
from meshwright.config import RunConfig
from meshwright.context_parallel.key_cache import KeyCache
from meshwright.context_parallel.plan import apply as apply_cut
from meshwright.data.fingerprint import Fingerprint
from meshwright.data.tokenizer import begin_id
from meshwright.errors import ModelError
from meshwright.inference.choice import EQUAL
from meshwright.inference.load import ModelLocation, open_trained
from meshwright.inference.prompts import with_starts
from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import Mesh
from meshwright.parts import ForwardParts, StepFeed
from meshwright.pipeline.plan import describe_boundaries
from meshwright.pipeline.values import IGNORED_LABEL, Loss, ValueSpec
from meshwright.tensor_parallel.cross_entropy import split_vocab_size
from meshwright.tensor_parallel.layers import vocab_slice
from meshwright.terminal.output import tell

SHORTEST = 16
"""Tokens of the shortest window; each longer one is twice as long, up to data.sequence_length."""
PROBED = 12
"""Number of tokens of the row by which a key-value cache is tried."""
PROBE_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.02,
}
"""Difference, relative to the largest logit, up to which it counts as rounding."""
SCORED_AT_ONCE = 256
"""Number of tokens whose likeliest continuation is searched at a time."""


class Window(NamedTuple):
    """Lengths of the rows of a forward."""

    length: int
    """Tokens of a row, with its padding."""
    new: int
    """Number of them that run through the layers: all, or one, whose keys join a key-value cache."""

    @property
    def is_whole(self) -> bool:
        """True if all tokens run."""
        return self.length == self.new


def draw_with_cache(config: RunConfig, mesh: Mesh) -> tuple[Blueprint, KeyCache | None]:
    """Draw the blueprint with a key-value cache at its attention cores;
    None where the model or the layout allows none, see :func:`_cached`.
    """
    whole = describe(config)
    cache = KeyCache(config.data.sequence_length)
    if not _cached(config, whole, cache):
        whole, cache = describe(config), None  # type: ignore[assignment]  # without hooks
    return draw_blueprint(config, mesh.tp, mesh.cp, mesh.ep, whole=whole), cache


def _cached(config: RunConfig, whole: WholeModel, cache: KeyCache) -> bool:
    """Give the model's attention cores the cache, in place; return whether it can be used.

    It can where context parallelism could cut the samples: the plan names the attention cores, and
    no layer mixes tokens elsewhere. Sequence parallelism leaves no rank a single token.
    """
    parallel, model = config.parallel, whole.plain
    if parallel.sequence or parallel.cp > 1 or "cp" in model.impossible:
        return False
    length, inputs = config.data.sequence_length, whole.shapes.inputs
    stages = [range(len(model.layers))]
    try:
        cache.begin(length, 0, length // 2)  # the search for mixing layers tries both halves
        apply_cut(config.model.builder, model.layers, model.plan, inputs, cache)
        cache.begin(length, length - 1, 1)
        describe_boundaries(model.layers, stages, inputs)
    except Exception:  # whatever a layer of the user's raises: it runs without a cache
        return False
    cache.begin(length, 0, length)
    return True


def windows_of(blueprint: Blueprint, cache: KeyCache | None) -> dict[Window, list[ValueSpec]]:
    """Return window -> specs of the values sent between stages, from forwards on meta.

    Call it before the layers get their weights.
    """
    length, size = blueprint.config.data.sequence_length, blueprint.config.batch.micro_batch_size
    lengths = [length]
    if blueprint.grid.cp == 1:  # its cut is that of whole samples
        while (shorter := SHORTEST * 2 ** (len(lengths) - 1)) < length:
            lengths.append(shorter)
    parallel = blueprint.config.parallel
    parts = parallel.tp if parallel.sequence else 1
    lengths = [each for each in lengths if each % parts == 0]
    windows = [Window(each, each) for each in sorted(lengths)]
    if cache is not None:
        windows += [Window(each, 1) for each in sorted(lengths)]
    found: dict[Window, list[ValueSpec]] = {}
    assert size is not None
    for window in windows:
        found[window] = []
        if len(blueprint.stages) > 1:
            ids = torch.zeros((size, window.length), dtype=torch.int64, device="meta")
            inputs: Any = ids
            if blueprint.config.data.document_boundaries:
                inputs = {"tokens": ids, "starts": ids.bool()}
            with _in_cache(cache, window, 0):
                found[window], _ = describe_boundaries(
                    blueprint.model.layers, blueprint.stages, inputs
                )
    return found


@contextmanager
def _in_cache(
    cache: KeyCache | None, window: Window, first: int, *, fills: bool = False
) -> Iterator[None]:
    """Set the tokens of a forward in the cache within the block; afterwards all tokens run."""
    if cache is not None:
        cache.begin(window.length, first, window.new, keeps=fills)
    try:
        yield
    finally:
        if cache is not None:
            cache.begin(window.length, 0, window.length)


def open_rows(
    config: RunConfig,
    mesh: Mesh,
    place: ModelLocation,
    tokenizer: Tokenizer,
    known: Fingerprint | None,
    ends: set[int],
) -> tuple[RowForward, CheckpointReader]:
    """Open a trained model for rows. Every rank calls it; blocks.

    ``known``, ``ends``: of the corpus beside the tokenizer, and tokens that end a document.
    """
    inputs_of = _inputs_function(config, tokenizer, known, ends)
    blueprint, cache = draw_with_cache(config, mesh)
    windows = windows_of(blueprint, cache)
    parts, checkpoint = open_trained(blueprint, mesh, place)
    forward = RowForward(parts, windows, inputs_of, cache)
    forward.uses_cache = cache is not None and cache_agrees(forward, tokenizer.get_vocab_size())
    if cache is not None and not forward.uses_cache and mesh.rank == 0:
        tell(
            "note: the layers of this model give other logits for a token alone than for a whole"
            " row, so every new token runs the whole row"
        )
    return forward, checkpoint


def cache_agrees(forward: RowForward, vocabulary: int) -> bool:
    """Return whether two tokens have the same logits with the cache as in whole rows; the same on
    every rank. Every rank calls it; blocks.

    Layers that count or index tokens by the shape of their input pass the search for layers that
    mix tokens, and see one token at position 0 here.
    """
    window = forward.window(min(PROBED, forward.longest))
    row = [(3 + 7 * at) % min(PROBED, vocabulary) for at in range(min(PROBED, window.length))]
    ending = NextTokenLogits(forward.parts, num_tokens=None)

    def run(seen: Sequence[int], of: Window, at: int, first: int, *, fills: bool = False) -> Tensor:
        ending.found.clear()
        labels = torch.full((1, of.new), IGNORED_LABEL)
        labels[0, at - first] = 0
        forward.run([seen], labels, of, ending, first=first, fills=fills)
        return ending.found.get(0, torch.zeros(1))

    differs = torch.zeros(1, device=forward.parts.mesh.device)
    places = range(max(1, len(row) - 2), len(row))
    expected = [run(row, window, at, 0) for at in places]
    run(row[: places.start], window, places.start - 1, 0, fills=True)
    for at, whole in zip(places, expected, strict=True):
        alone = run(row, Window(window.length, 1), at, at)
        limit = PROBE_TOLERANCE[whole.dtype] * whole.abs().max()
        differs += ((alone - whole).abs() > limit).any().to(differs.dtype)
    forward.parts.mesh.world.all_reduce(differs).wait()
    if forward.cache is not None:
        forward.cache.clear()
    return not differs.item()


def rows_of_training(
    parts: ForwardParts, tokenizer: Tokenizer, known: Fingerprint | None, ends: set[int]
) -> RowForward:
    """Return the forward of rows through a training's own stages, in the shapes of its samples and
    without a cache. Use it in :func:`meshwright.run.observers.evaluation_mode`.
    """
    length = parts.config.data.sequence_length
    windows = {Window(length, length): parts.blueprint.boundaries}
    return RowForward(parts, windows, _inputs_function(parts.config, tokenizer, known, ends))


def _inputs_function(
    config: RunConfig, tokenizer: Tokenizer, known: Fingerprint | None, ends: set[int]
) -> Callable[[Tensor], Any]:
    """Return the function of ids (B, S) that returns the model's inputs: with document starts, if
    the training had them.
    """
    if config.data.document_boundaries:
        return partial(with_starts, ends=ends, begin=begin_id(known, tokenizer))
    return lambda ids: ids


@dataclass
class RowForward:
    """Forward of rows through this rank's stages, for all ranks together."""

    parts: ForwardParts
    windows: Mapping[Window, Sequence[ValueSpec]]
    """Specs of the values between stages; those of the training where there are no others."""
    inputs_of: Callable[[Tensor], Any]
    """Function of the ids (B, S) int64 that returns the model's inputs."""
    cache: KeyCache | None = None
    uses_cache: bool = False
    """True if generation runs one token of a row at a time, see :func:`cache_agrees`."""

    @property
    def num_rows(self) -> int:
        """Rows of one forward, over all replicas."""
        size = self.parts.config.batch.micro_batch_size
        assert size is not None
        return self.parts.mesh.grid.dp * self.parts.executor.schedule.chunks * size

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return max(window.length for window in self.windows)

    def window(self, length: int, *, is_whole: bool = True) -> Window:
        """Return the shortest window for rows of this length."""
        lengths = {window.length for window in self.windows}
        found = min(each for each in lengths if each >= length)
        return Window(found, found if is_whole else 1)

    def run(
        self,
        rows: Sequence[Sequence[int]],
        labels: Tensor,
        window: Window,
        ending: Loss,
        first: int = 0,
        *,
        fills: bool = False,
    ) -> None:
        """Run a forward over at most ``num_rows`` rows; ``ending`` keeps what it is for.
        Every rank calls it, with the same rows; blocks.

        Args:
            rows: ids, each at most ``window.length``.
            labels: (rows, window.new) int64, IGNORED_LABEL where the ending is to skip a token.
            ending: called on the last stage with the output and the labels of a micro-batch; the
                rows are ``current.sample_indices``.
            first: position of the first token that runs.
            fills: keep the keys and values of all tokens in the cache.
        """
        ids = torch.zeros((self.num_rows, window.length), dtype=torch.int64)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
        padded = torch.full((self.num_rows, window.new), IGNORED_LABEL)
        padded[: len(labels)] = labels
        source = _Rows(ids, padded, self.inputs_of)
        cached = _in_cache(self.cache, window, first, fills=fills)
        with self._shaped(window), self._ended(ending), cached:
            self.parts.executor.validate(StepFeed(self.parts, source, 0))

    @contextmanager
    def _shaped(self, window: Window) -> Iterator[None]:
        """Set the shapes of the messages of this window."""
        executor, boundaries = self.parts.executor, self.windows[window]
        for index, stage in executor.stages.items():
            stage.input_spec = boundaries[index - 1] if index > 0 else None
            stage.output_spec = boundaries[index] if index < len(boundaries) else None
        executor.set_schedule(executor.schedule)
        yield

    @contextmanager
    def _ended(self, ending: Loss) -> Iterator[None]:
        """Replace the loss of the last stage within the block."""
        stages = self.parts.executor.stages.values()
        losses = [(stage, stage.validation_loss) for stage in stages]
        for stage in stages:
            stage.validation_loss = ending
        try:
            yield
        finally:
            for stage, loss in losses:
                stage.validation_loss = loss


class _Rows(NamedTuple):
    """Source of rows, read by index."""

    ids: Tensor
    labels: Tensor
    inputs_of: Callable[[Tensor], Any]

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        picked = list(indices)
        return self.inputs_of(self.ids[picked]), self.labels[picked]


class NextTokenLogits:
    """Ending that keeps the logits of one token of each row, the one whose label counts."""

    def __init__(self, parts: ForwardParts, num_tokens: int | None) -> None:
        """Create the ending. ``num_tokens``: vocabulary of the tokenizer; None: the model's, which
        may be larger, padded for the device.
        """
        self._logits = _Logits(parts)
        self._num_tokens = num_tokens
        self.found: dict[int, Tensor] = {}
        """Row -> its logits (V,), on the ranks of the last stage."""

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        """Keep the logits; return zeros as the losses."""
        rows, at = (labels != IGNORED_LABEL).nonzero(as_tuple=True)
        mine = self._logits.of(output, labels)[rows, at].contiguous()  # (n, V) or (n, V/tp)
        whole = self._logits.gathered(mine)[:, : self._num_tokens]
        numbers = self._logits.rows()[rows]
        self.found |= dict(zip(numbers.tolist(), whole, strict=True))
        return labels.new_zeros(labels.shape, dtype=torch.float32)


class LabelScores:
    """Ending that adds up the log-probabilities of the labels of each row,
    and counts the labels that are not the likeliest token.
    """

    def __init__(self, forward: RowForward, loss: Loss) -> None:
        """Create the ending of one forward.

        ``loss``: the model's loss at the end of the last stage.
        """
        self._logits, self._loss = _Logits(forward.parts), loss
        self.sums = torch.zeros(
            (forward.num_rows, 2), dtype=torch.float64, device=forward.parts.mesh.device
        )
        """Log-probability in nats, and number of labels that are not the likeliest, of each row."""

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        """Add the row's labels; return their losses."""
        losses: Tensor = self._loss(output, labels)
        is_counted = labels != IGNORED_LABEL
        rows = self._logits.rows()
        log_probabilities = -losses.double().masked_fill(~is_counted, 0).sum(1)
        at = is_counted.nonzero(as_tuple=True)
        logits = self._logits.of(output, labels)[at]
        likeliest = [self._logits.likeliest(part) for part in torch.split(logits, SCORED_AT_ONCE)]
        is_missed = torch.zeros_like(is_counted)
        if likeliest:
            is_missed[at] = torch.cat(likeliest) != labels[at]
        self.sums.index_add_(
            0, rows, torch.stack([log_probabilities, is_missed.sum(1).double()], dim=1)
        )
        return losses


class _Logits:
    """The logits at the end of the last stage, full or split over tp by the vocabulary."""

    def __init__(self, parts: ForwardParts) -> None:
        blueprint = parts.blueprint
        self._current = blueprint.model.current
        self._has_heads = bool(blueprint.model.loss_heads)
        self._tp: Group = parts.mesh.tp
        self._vocab_size = split_vocab_size(blueprint.model.layers, blueprint.infos)
        """Vocabulary of logits that are split; None: each rank has all logits."""

    def rows(self) -> Tensor:
        """Return the rows of the current micro-batch, (B,) int64."""
        assert self._current.sample_indices is not None
        return self._current.sample_indices

    def of(self, output: Any, labels: Tensor) -> Tensor:
        """Return the logits of the next token, (B, S, V) or (B, S, V/tp)."""
        logits = output[0] if self._has_heads else output
        if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
            raise ModelError(
                "MW-INFERENCE-016",
                "the last layer does not return logits for each token, (batch, sequence,"
                " vocabulary): the model cannot generate text",
            )
        return logits

    def gathered(self, mine: Tensor) -> Tensor:
        """All-gather logits (n, V/tp) -> (n, V) over tp; full ones as they are. Blocks."""
        if self._vocab_size is None or not len(mine):
            return mine
        parts = mine.new_empty((self._tp.size * len(mine), mine.shape[1]))
        self._tp.all_gather(parts, mine).wait()
        joined = parts.view(self._tp.size, len(mine), -1).transpose(0, 1).flatten(1)
        return joined[:, : self._vocab_size]

    def likeliest(self, logits: Tensor) -> Tensor:
        """Return the likeliest token by logits (n, V) or (n, V/tp) -> (n,) int64. Collective over
        tp where they are split; blocks.

        Of those that count as equal the lowest id is taken, as in generation (choice.py).
        """
        is_split = self._vocab_size is not None
        start, stop = 0, logits.shape[1]
        if self._vocab_size is not None:
            mine_of_all = vocab_slice(self._vocab_size, self._tp.rank, self._tp.size)
            start, stop = mine_of_all.start, mine_of_all.stop
        mine = logits[:, : stop - start].float()
        # this rank may have padding alone
        highest = mine.amax(-1) if stop > start else mine.new_full((len(mine),), -torch.inf)
        if is_split:
            self._tp.all_reduce(highest, "max").wait()
        is_tied = mine > (highest - EQUAL * highest.abs())[:, None]
        nowhere = torch.iinfo(torch.int64).max
        first = torch.full((len(mine),), nowhere, device=mine.device)
        has_tied = is_tied.any(-1)
        first[has_tied] = start + is_tied[has_tied].int().argmax(-1)  # of equal values the first
        if is_split:
            self._tp.all_reduce(first, "min").wait()
        return first
