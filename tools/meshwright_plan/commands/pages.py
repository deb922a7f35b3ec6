"""Commands ``stages``, ``plot`` and ``report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.system.bounded import real_path
from meshwright.terminal.output import put


def stages(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print the cost of each layer and the balance of the stages."""
    from meshwright.config import load, resolve

    config = resolve(load(options.config, overrides))  # refused before seconds of imports
    from meshwright.blueprint import draw_blueprint
    from meshwright_plan.planner.balance import describe

    put(describe(draw_blueprint(config)))
    return 0


def plot(options: argparse.Namespace, _: list[str]) -> int:
    """Draw the loss curve of a run, with the unigram baseline of its validation corpus."""
    from meshwright.config import read_resolved
    from meshwright.data.fingerprint import read
    from meshwright.run.directory import METRICS, RESOLVED
    from meshwright.system.atomic import check_inside, check_place
    from meshwright_plan.report.loss_curve import loss_curve

    resolved = options.directory / RESOLVED
    unigram_entropy = None
    if resolved.is_file():
        data = read_resolved(resolved).data
        corpora = [each for each in (data.validation, data.train) if each]
        corpus = Path(corpora[0] if corpora and isinstance(corpora[0], str) else "")
        fingerprint = (
            read(corpus.parent) if data.task == "causal" and data.builder is None else None
        )
        split = fingerprint.splits.get(corpus.name) if fingerprint else None
        unigram_entropy = split.unigram_entropy_nats if split else None
    picture = options.out or options.directory / "loss.png"
    if not options.out:
        check_place(picture, folder=False, example="loss.png")
        check_inside(picture, options.directory)
    loss_curve(options.directory / METRICS, picture, unigram_entropy)
    put(picture)
    return 0


def report(options: argparse.Namespace, _: list[str]) -> int:
    """Write the HTML page of one run, or of several side by side.

    Raises:
        UserError: a run is named twice or cannot be read, or the page cannot be written.
    """
    from meshwright.system.atomic import check_inside, check_place, write_out
    from meshwright_plan.report.page import page
    from meshwright_plan.report.run import read_run

    runs = [read_run(directory) for directory in options.runs]
    if len({real_path(run.directory) for run in runs}) < len(runs):
        raise ConfigError(
            "MW-LAUNCH-006",
            f"{' '.join(map(str, options.runs))}: a run is named twice; name each once",
        )
    out = options.out or (
        runs[0].directory / "report.html" if len(runs) == 1 else Path("report.html")
    )
    if not options.out:
        check_place(out, folder=False, example="report.html")
        if len(runs) == 1:
            check_inside(out, runs[0].directory)
    write_out(out, page(runs))
    put(out)
    return 0
