"""Data stages: from a sample of the run on, samples come from another corpus or mixture.

    data.train        samples 0 .. a - 1                  a, b: starts of data.stages, in samples of the run
    data.stages[0]    samples a .. b - 1
    data.stages[1]    samples b ..

A sample index of the run alone gives the stage, the corpus and the sample, so a resume needs one
number, in the middle of a stage and across stages. A corpus that occurs in several stages continues
in its order where the earlier stage
stopped: no sample repeats before its whole corpus was read once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import realpath
from typing import NamedTuple

from meshwright.config import Batch, RunConfig, samples_after, step_of
from meshwright.data.blend import Blend
from meshwright.data.corpus import Corpus
from meshwright.data.order import BlendOrder, SampleOrder, whole_weights
from meshwright.errors import DataError
from meshwright.seeding import derive


class StageCorpora(NamedTuple):
    """One data stage."""

    first: int
    """Index in the run of its first sample."""
    key: str
    """Its place in the configuration, such as ``data.stages[0].train``."""
    corpora: tuple[int, ...]
    """Index of each of its corpora among those of all stages."""
    weights: tuple[float, ...]
    is_mixture: bool
    """The configuration has a list of corpora, perhaps of one."""
    order: BlendOrder
    """Choice of a corpus for each sample of the stage."""
    offsets: tuple[int, ...]
    """Number of samples that earlier stages drew from each of its corpora."""


@dataclass(frozen=True)
class StageOrder:
    """Order of the samples of all stages; the samples of all corpora are numbered consecutively."""

    stages: tuple[StageCorpora, ...]
    orders: tuple[SampleOrder, ...]
    """Order of each corpus."""

    def __call__(self, global_index: int) -> int:
        """Return the number of the run's sample ``global_index``."""
        stage = self.stages[
            bisect_right(self.stages, global_index, key=lambda each: each.first) - 1
        ]
        at, place = stage.order.place(global_index - stage.first)
        corpus = stage.corpora[at]
        before = sum(order.num_samples for order in self.orders[:corpus])
        return before + self.orders[corpus](stage.offsets[at] + place)


class StageBlend(Blend):
    """All corpora of a run with data stages, with consecutive sample numbers."""

    def __init__(
        self, corpora: Sequence[Corpus], stages: tuple[StageCorpora, ...], batch: Batch
    ) -> None:
        super().__init__(corpora)
        self.stages = stages
        self.batch = batch

    def describe(self, num_samples: int) -> list[str]:
        """Return a line for each corpus of each stage in a run of ``num_samples`` samples."""
        lines = []
        ends = [*(stage.first for stage in self.stages[1:]), num_samples]
        for stage, end in zip(self.stages, ends, strict=True):
            first_step, last_step = step_of(self.batch, stage.first), step_of(self.batch, end - 1)
            lines.append(
                f"data       {stage.key}, steps {first_step:,} to {last_step:,},"
                f" {end - stage.first:,} samples:"
            )
            for index, drawn in zip(
                stage.corpora, stage.order.drawn(end - stage.first), strict=True
            ):
                corpus = self.corpora[index]
                share, times = drawn / max(end - stage.first, 1), drawn / corpus.num_samples
                lines.append(
                    f"           {share:.1%} of {corpus.prefix}, {times:.3g} times through it"
                )
        return lines


def open_stages(
    config: RunConfig, open_corpus: Callable[[str], Corpus]
) -> tuple[StageBlend, StageOrder]:
    """Open the corpora of all stages of a resolved configuration, each once, and draw their order.

    Raises:
        DataError: a corpus is damaged or does not fit the model, or the last stage begins after the
            last sample.
    """
    data, seed = config.data, config.run.seed
    starts = [
        each.from_samples or samples_after(config.batch, (each.from_step or 1) - 1)
        for each in data.stages
    ]
    num_samples = samples_after(config.batch, config.train.steps)
    if starts[-1] >= num_samples:
        raise DataError(
            "MW-DATA-105",
            f"data.stages: a stage from sample {starts[-1]:,} on never starts in the"
            f" {num_samples:,} samples of train.steps = {config.train.steps:,}: leave it out, or"
            " train longer",
        )
    keys = ["data.train", *(f"data.stages[{at}].train" for at in range(len(data.stages)))]
    corpora: list[Corpus] = []
    orders: list[SampleOrder] = []
    place: dict[tuple[str, int], int] = {}
    """Corpus, by its path and its occurrence in a mixture -> its index."""
    stages: list[StageCorpora] = []
    drawn: Counter[int] = Counter()
    mixtures = [data.train, *(each.train for each in data.stages)]
    for at, (first, mixture) in enumerate(zip([0, *starts], mixtures, strict=True)):
        if isinstance(mixture, str):
            parts = [(mixture, 1.0)]
        else:
            parts = [(each.path, each.weight) for each in mixture]
        found: list[int] = []
        for i, (path, _) in enumerate(parts):
            name = realpath(path), [realpath(other) for other, _ in parts[:i]].count(realpath(path))
            if name not in place:
                place[name] = len(corpora)
                corpora.append(open_corpus(path))
                if at == 0:
                    own_seed = derive(seed, "data set", i)
                else:
                    own_seed = derive(seed, "data stage", at, i)
                is_alone = at == 0 and isinstance(mixture, str)
                orders.append(SampleOrder(corpora[-1].num_samples, seed if is_alone else own_seed))
            found.append(place[name])
        weights = tuple(weight for _, weight in parts)
        order = BlendOrder(tuple(orders[index] for index in found), whole_weights(weights))
        is_mixture, offsets = not isinstance(mixture, str), tuple(drawn[index] for index in found)
        stages.append(
            StageCorpora(first, keys[at], tuple(found), weights, is_mixture, order, offsets)
        )
        if at < len(starts):
            drawn.update(dict(zip(found, order.drawn(starts[at] - first), strict=True)))
    return StageBlend(corpora, tuple(stages), config.batch), StageOrder(
        tuple(stages), tuple(orders)
    )
