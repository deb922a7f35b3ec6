"""Small models whose heads, lengths and batches fit a layout, references computed once,
and a pairwise selection.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest

from meshwright.config import RunConfig
from meshwright.model.build import build_model
from meshwright.verify import Layout, VerdictRow, compare, layout_config, parse_layout
from meshwright.verify.rank import merge, open_verify_source, run_layout
from meshwright.verify.run import Reference, micro_batch_sizes_of, reference_of
from meshwright.verify.tolerance import TOLERANCES, tolerance_of
from meshwright_launch.pool import RankPool
from tests.support.run import Break, run_broken

DECODERS = ("gpt2", "llama")
MODELS = (*DECODERS, "t5")
LATER = partial(pytest.param, marks=pytest.mark.all_layouts)
"""A case like others that are left: of ``make verify-all``."""
VOCAB_SIZE = 61
"""No degree but 1 divides it."""


class Case(NamedTuple):
    """One row of the table: a model, a layout, a precision."""

    model: str
    layout: Layout
    dtype: str = "float64"

    def __str__(self) -> str:
        return f"{self.model}-{self.layout}-{self.dtype}"


class Size(NamedTuple):
    """Heads that tp divides, a sequence that tp divides, a batch that dp divides,
    a layer for each stage.
    """

    heads: int
    sequence_length: int
    num_blocks: int
    global_batch: int


HEADS = {1: 8, 3: 6, 5: 5, 7: 7}
"""By the odd factor of the number of ranks."""

SEQUENCE_LENGTHS = {1: 8, 3: 12, 5: 10, 7: 14}


def size_for(layout: Layout) -> Size:
    """Return the smallest model and batch that a layout fits:
    more than four ranks of tp are slow on two cores.
    """
    odd = next((odd for odd in (3, 5, 7) if layout.size % odd == 0), 1)
    num_blocks = max(2, layout.num_stages - 3)  # embedding, norm and head are layers too
    chunks = 4 if layout.tp < 5 else 2
    return Size(
        HEADS[odd], SEQUENCE_LENGTHS[odd], num_blocks, chunks * layout.dp * layout.micro_batch_size
    )


def config_of(
    builder: str, options: dict[str, Any], sequence_length: int, **sections: Any
) -> RunConfig:
    """Return a config for verify: what it trains is random tokens."""
    return RunConfig.model_validate(
        {
            "model": {"builder": builder, "options": options},
            "data": {"train": "random", "sequence_length": sequence_length},
            "optimizer": {"warmup_steps": 2},
            "train": {"steps": 10},
            **sections,
        }
    )


def model_config(model: str, size: Size, **options: Any) -> RunConfig:
    """GPT-2 with dropout and a tie, Llama with two query heads to each key-value head,
    or T5 with dropout and its ties.

    The blocks of a T5 are shared out to its two stacks. Random tokens make some of its encoder's
    padding.
    """
    if model == "t5":
        depths = {
            "num_layers": max(1, size.num_blocks // 2),
            "num_decoder_layers": size.num_blocks // 2 + 1,
        }
        own = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 4 * size.heads,
            "num_heads": size.heads,
            "max_distance": 20,
        }
        data = {
            "train": "random",
            "sequence_length": size.sequence_length,
            "task": "span_corruption",
        }
        return config_of(
            "meshwright_models.t5:build", depths | own | options, size.sequence_length, data=data
        )
    common = {
        "vocab_size": VOCAB_SIZE,
        "num_layers": size.num_blocks,
        "max_sequence_length": size.sequence_length,
    }
    if model == "gpt2":
        own = {"hidden_size": 4 * size.heads, "num_heads": size.heads, "dropout": 0.1}
    else:
        own = {
            "hidden_size": 4 * size.heads,
            "num_heads": 2 * size.heads,
            "num_kv_heads": size.heads,
        }
        own["ffn_size"] = 6 * size.heads
    return config_of(
        f"meshwright_models.{model}:build", common | own | options, size.sequence_length
    )


def by_reference(cases: Iterable[Case], steps: int) -> list[Any]:
    """Rows of ``make verify-all``. Those of one reference go to one worker of one part,
    which computes it once.
    """
    return [
        pytest.param(
            case,
            marks=[
                pytest.mark.all_layouts,
                pytest.mark.xdist_group(
                    "-".join(map(str, (case.model, *size_for(case.layout), case.dtype, steps)))
                ),
            ],
        )
        for case in cases
    ]


class References:
    """What one plain process finds, computed once for each question."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int, str], Reference] = {}

    def expected(self, config: RunConfig, global_batch: int, steps: int, dtype: str) -> Reference:
        key = (config.model_dump_json(), global_batch, steps, dtype)
        if key not in self._found:
            plain = layout_config(config, Layout(), global_batch, dtype)
            others = micro_batch_sizes_of(global_batch)
            self._found[key] = reference_of(
                plain, open_verify_source(plain, True), steps, dtype, 1, others
            )
        return self._found[key]


def prove(
    config: RunConfig,
    layout: Layout,
    pool: RankPool,
    references: References,
    *,
    global_batch: int,
    steps: int,
    dtype: str = "float64",
    twice: bool = True,
) -> VerdictRow:
    """What ``verify`` does for one layout, with the reference remembered; ``twice``:
    also whether it repeats.
    """
    expected = references.expected(config, global_batch, steps, dtype)
    model = build_model(config.model.builder, config.model.options, config.run.seed)
    noise = expected.noise_in(layout, {names[0] for names in model.tied})
    text = layout_config(config, layout, global_batch, dtype).model_dump_json()
    found = merge(pool.run(run_layout, layout.size, text, steps, True))
    again = merge(pool.run(run_layout, layout.size, text, steps, True)) if twice else None
    return compare(
        str(layout),
        found,
        again,
        expected.findings,
        tolerance_of(dtype, layout),
        expected.rounding,
        noise,
    )


def assert_agrees(
    config: RunConfig,
    layout: Layout | str,
    pool: RankPool,
    references: References,
    *,
    twice: bool = False,
    **options: Any,
) -> None:
    """Assert that a layout has the numbers of one process; ``options`` as for :func:`prove`."""
    layout = parse_layout(layout) if isinstance(layout, str) else layout
    row = prove(config, layout, pool, references, twice=twice, **options)
    assert row.passed, "\n".join(row.problems)


def problems_of(
    config: RunConfig,
    layout: str,
    broken: Break,
    pool: RankPool,
    references: References,
    *,
    global_batch: int,
    steps: int,
) -> list[str]:
    """Return the problems that verify finds in a layout whose ranks have a changed code."""
    chosen = parse_layout(layout)
    expected = references.expected(config, global_batch, steps, "float64").findings
    text = layout_config(config, chosen, global_batch, "float64").model_dump_json()
    findings = merge(pool.run(run_broken, chosen.size, broken, text, steps))
    return compare(layout, findings, None, expected, TOLERANCES["float64"]).problems


DEGREES = [d for d in itertools.product(range(1, 9), repeat=3) if d[0] * d[1] * d[2] <= 8]
"""(dp, pp, tp) with a product of at most 8."""

LATER_SCHEDULES = ("interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min")


def suits(model: str, layout: Layout) -> bool:
    """Sequence parallelism cuts T5's decoder too, whose length is a multiple of 8."""
    return model != "t5" or not layout.sequence or 8 % layout.tp == 0


def every_layout() -> list[Layout]:
    """Return all that differ in 1F1B and GPipe: degrees,
    and what can be chosen besides where it has an effect.
    """
    return [
        Layout(dp, pp, tp, schedule, zero, sequence, micro_batch_size)
        for dp, pp, tp in DEGREES
        for schedule in ("1f1b", "gpipe")
        for zero in ((0, 1) if dp > 1 else (1,))
        for sequence in ((False, True) if tp > 1 else (False,))
        for micro_batch_size in (1, 2)
    ]


def every_other_schedule() -> list[Layout]:
    """Return the other schedules on all degrees, with and without sequence parallelism."""
    return [
        Layout(dp, pp, tp, schedule, sequence=sequence)
        for dp, pp, tp in DEGREES
        for schedule in LATER_SCHEDULES
        for sequence in ((False, True) if tp > 1 else (False,))
    ]


def other_choices() -> list[Layout]:
    """What a pairwise selection of the other schedules is made of: with recomputation,
    few ranks but along pp.
    """
    return [
        layout._replace(recompute=recompute)
        for layout in every_other_schedule()
        if {layout.dp, layout.tp} <= {1, 2} and layout.pp in (1, 2, 4) and layout.num_stages <= 8
        for recompute in ("none", "selective", "full")
    ]


def sharded_choices(schedules: Sequence[str]) -> list[Layout]:
    """What a pairwise selection of the ways to shard over replicas is made of, beside all else."""
    return [
        Layout(dp, pp, tp, schedule, zero, sequence, 1, 0, recompute, shard, reduces_once, offload)
        for dp, pp, tp in itertools.product((2, 4), (1, 2), (1, 2))
        if dp * pp * tp <= 8
        for schedule in schedules
        for zero in (1, 2, 3)
        for shard in ((0, 1, 2) if dp == 4 else (0,))
        for reduces_once in ((False, True) if zero >= 2 else (False,))
        for sequence in ((False, True) if tp > 1 else (False,))
        for recompute in ("none", "full")
        for offload in (False, True)
        if Layout(dp, pp, tp, schedule).num_stages <= 8
    ]


def pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Return every two of the choices that a case makes."""
    chosen = {"model": case.model, **case.layout._asdict()}
    if case.layout.dp == 1:
        del chosen["zero"]  # it has no effect there
    return set(itertools.combinations(sorted(chosen.items()), 2))


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Few of the cases, such that any two choices that occur together in some case do so
    in one of the few.

    Greedy: again and again the case with most pairs not yet seen, of those the one with fewest
        ranks, of those the
    first.
    """
    missing = {case: pairs(case) for case in sorted(cases, key=lambda case: case.layout.size)}
    selected: list[Case] = []
    while missing:
        best = max(missing, key=lambda case: len(missing[case]))
        selected.append(best)
        seen = missing.pop(best)
        missing = {case: rest for case, left in missing.items() if (rest := left - seen)}
    return selected
