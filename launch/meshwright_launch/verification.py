"""Command ``meshwright verify``: choose the model's size, samples and layouts,
and compare them on local ranks.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from meshwright.errors import ConfigError
from meshwright.system.atomic import check_place
from meshwright.terminal.output import put

if TYPE_CHECKING:
    from pathlib import Path

    from meshwright.config import RunConfig
    from meshwright.verify import Layout, Traits, Trial

MAX_RANKS = 8
"""Largest number of ranks of a layout: all run on this machine."""
SAMPLES_PER_SIZE = 8
"""Samples per step over micro-batch size, for a model that couples samples:
two replicas of four micro-batches.
"""
MOST_TOGETHER, FEW_TOGETHER = 16, 4
"""Largest dp x micro_batch_size of a run that verify keeps for nn.SyncBatchNorm, and what takes the
place of a larger one.
"""
SMALL_GLOBAL_BATCH, SMALL_SEQUENCE_LENGTH = 8, 32
"""Samples per step and tokens per sample of a shrunk model."""


class TrialPlan(NamedTuple):
    """Trials of a model, and the samples of a step."""

    trials: list[Trial]
    global_batch: int
    repeated: list[Layout] | None
    """Layouts of the first trial to run twice, with a stop and a resume in the second run; None:
    all.
    """


def verify(options: argparse.Namespace, overrides: list[str]) -> int:
    """Compare layouts with one process; print a line for each and the table.
    Return 1 if one differs, else 0.

    Default: a selection of layouts that covers the pair table, and variants of the model on a few
        of them.
    """
    from meshwright.config import load
    from meshwright.verify import Verification, join_reports, parse_layout
    from meshwright_launch.pool import RankPool

    _check_routing(options.routing, options.routing_directory)
    config, words = load(options.config, overrides), options.layouts or []
    for text in words:  # a misspelt word is an error before any process starts
        parse_layout(text)
    with RankPool(MAX_RANKS) as pool:
        plan = plan_trials(config, words, options.steps, options.dtype, whole=options.whole)
        reports = []
        for trial in plan.trials:
            verification = Verification(
                trial.config,
                global_batch=plan.global_batch,
                steps=trial.steps(options.steps),
                dtype=trial.dtype,
                random_tokens=not options.whole,
                routing=_routing_of(trial, options),
            )
            rows = []
            for layout in trial.layouts:
                is_repeated = not trial.name and (plan.repeated is None or layout in plan.repeated)
                row = verification.compare_layout(layout, pool, is_repeated=is_repeated)
                rows.append(row._replace(layout=trial.titled(layout)))
                put(f"  {rows[-1].layout}: {row.verdict}", flush=True)
            reports.append(verification.report(rows))
    report = join_reports(reports)
    put(report.table())
    return 0 if report.passed else 1


def _check_routing(mode: str | None, directory: Path | None) -> None:
    """Check ``--routing-directory`` before any training.

    Raises:
        ConfigError: it has no effect, cannot be written, or is not there to be replayed.
    """
    if directory is None:
        return
    if mode is None:
        raise ConfigError(
            "MW-LAUNCH-106",
            f"--routing-directory {directory} has no effect without --routing: add --routing record"
            " or replay",
        )
    if mode == "replay" and not directory.is_dir():
        raise ConfigError(
            "MW-LAUNCH-107",
            f"--routing-directory {directory}: there is no such directory, and --routing replay"
            " takes the experts from it: record them first, by --routing record, or leave it out",
        )
    check_place(directory, folder=True, example="routing", option="--routing-directory")


def _routing_of(trial: Trial, options: argparse.Namespace) -> tuple[str | None, Path | None]:
    """Return the mode of routing and the directory of a trial;
    the user's directory is the main trial's alone.
    """
    if trial.replays:
        return "replay", None
    return options.routing, None if trial.name else options.routing_directory


def plan_trials(
    config: RunConfig, words: list[str], steps: int, dtype: str, *, whole: bool
) -> TrialPlan:
    """Prepare the model, and choose layouts and variants;
    print what is changed and what is left out.

    Args:
        words: layouts as text; []: the default ones.

    Raises:
        UserError: no layout supports the model, or a layout has too many ranks.
    """
    from meshwright.verify import Trial, further_trials, parse_layout

    layouts, repeated = [parse_layout(text) for text in words], None
    global_batch = (config.batch.global_batch if whole else None) or SMALL_GLOBAL_BATCH
    config = prepare(config, whole=whole)
    traits = probe_traits(config, global_batch, dtype, random_tokens=not whole)
    own = _samples_together(config, traits, whole=whole)
    # the number of samples that see each other is part of the model
    if traits.couples_samples and not whole:
        global_batch = max(global_batch, SAMPLES_PER_SIZE * own)
    if traits.couples_samples and words:
        put(_of_coupling(traits, own))
        layouts = [
            layout if "mbs" in text else traits.with_samples(layout, own) or layout
            for text, layout in zip(words, layouts, strict=True)
        ]
    micro_batch_size = 1
    if traits.couples_samples:
        # default layouts have at least 2 samples in a micro-batch
        micro_batch_size = own if words else max(own, 2)
    config = magnify(config, steps, global_batch, micro_batch_size, whole=whole)
    if not words:
        layouts, repeated = choose_layouts(config, global_batch, traits)
    largest = max(layout.size for layout in layouts)
    if largest > MAX_RANKS:
        raise ConfigError(
            "MW-LAUNCH-052",
            f"--layouts needs {largest} ranks: verify runs all of them on this machine, at most"
            f" {MAX_RANKS}",
        )
    trials = [Trial("", config, layouts, dtype)]
    if not words and not whole:
        trials += further_trials(trials[0], traits, global_batch)
    return TrialPlan(trials, global_batch, repeated)


def _samples_together(config: RunConfig, traits: Traits, *, whole: bool) -> int:
    """Return the samples that see each other in the run, or fewer where these would take long."""
    from meshwright.verify import own_samples

    if config.batch.micro_batch_size is None:
        return FEW_TOGETHER if traits.is_synchronised else 2
    own = own_samples(config, traits)
    is_many = traits.is_synchronised and own > MOST_TOGETHER
    return FEW_TOGETHER if is_many and not whole else own


def _of_coupling(traits: Traits, together: int) -> str:
    """Return the line on layouts without a micro-batch size, in which samples see each other."""
    if traits.is_synchronised:
        return (
            f"dp x micro_batch_size {together}: nn.SyncBatchNorm takes the statistics of all"
            f" replicas{traits.of_coupling}"
        )
    why = f"the samples of a micro-batch depend on each other{traits.of_coupling}"
    return f"micro_batch_size {together}, as the run has it: {why}"


def magnify(
    config: RunConfig, steps: int, global_batch: int, micro_batch_size: int = 1, *, whole: bool
) -> RunConfig:
    """Return the configuration with settings under which faults show (magnify.py), and print them.

    The run's own batch-size ramp is left out: a trial of its own has one. With ``whole``, only the
    course of the learning rate is compressed. ``micro_batch_size``: see :func:`clip_first`.
    """
    from meshwright.verify import amplify, clip_first, compress, split_buckets

    if config.batch.ramp is not None:
        put("batch.ramp left out", flush=True)
        config = config.replace(batch={"ramp": None})
    changes = [partial(compress, steps=steps)]
    if not whole:
        clip = partial(clip_first, global_batch=global_batch, micro_batch_size=micro_batch_size)
        changes += [partial(amplify), clip, partial(split_buckets)]
    for change in changes:
        config, notes = change(config)
        for line in notes:
            put(line, flush=True)
    return config


def prepare(config: RunConfig, *, whole: bool) -> RunConfig:
    """Return the configuration to verify (shrunk, with dropout on),
    and print its differences from the given one.
    """
    from meshwright.optimizer import SMALLEST
    from meshwright.verify import make_small, turn_dropout_on

    if config.data.builder is not None:
        put("the model whole, on its own samples")
    elif not whole:
        config, notes = make_small(config, SMALL_SEQUENCE_LENGTH)
        put("\n".join(notes))
    if not whole:
        config, notes = turn_dropout_on(config)
        for line in notes:
            put(line, flush=True)
    if config.optimizer.has_blocks:
        put(
            f"optimizer.block_size = {SMALLEST}, which divides the rows of small matrices in most"
            " layouts"
        )
        config = config.replace(optimizer={"block_size": SMALLEST})
    return config


def probe_traits(
    config: RunConfig, global_batch: int, dtype: str, *, random_tokens: bool
) -> Traits:
    """Return the model's traits; refuse a model that no layout supports,
    before layouts are chosen.
    """
    from meshwright.blueprint import draw_blueprint
    from meshwright.verify import (
        Layout,
        layout_config,
        open_verify_source,
        probe_coupling,
        traits_of,
    )

    plain = layout_config(config, Layout(), global_batch, dtype)
    draw_blueprint(plain)
    return probe_coupling(traits_of(plain), plain, open_verify_source(plain, random_tokens))


def choose_layouts(
    config: RunConfig, global_batch: int, traits: Traits
) -> tuple[list[Layout], list[Layout]]:
    """Return the default layouts, and those of them to run twice;
    print the omitted layouts with reasons.
    """
    from meshwright.traits import left_out
    from meshwright.verify import default_layouts, run_twice

    layouts, missing = default_layouts(config, traits, global_batch, MAX_RANKS)
    for reason in left_out(traits):
        put(f"left out: {reason}", flush=True)
    for sentence in missing:
        put(sentence, flush=True)
    return layouts, run_twice(layouts)
