"""Plot of a run: the loss curve, and small panels of learning rate,
gradient norm and throughput.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import DataError
from meshwright.system.atomic import writing
from meshwright.tracking.jsonl import read_records
from meshwright.tracking.record import StepRecord
from meshwright_plan.page.points import drawable
from meshwright_plan.picture.library import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#2b2f36"
BLUE = "#2563c9"
ORANGE = "#d9580d"
GREEN = "#1e7d4f"
GREY = "#6b7280"
SMOOTHED_FROM = 150
"""Number of records from which a running mean of the loss is drawn too."""


def loss_curve(metrics_jsonl: Path, png: Path, unigram_entropy: float | None = None) -> None:
    """Draw training and validation loss, with learning rate, gradient norm and tokens/s below,
    as a 1200 x 800 PNG.

    NaN/Inf values leave a gap.

    Args:
        metrics_jsonl: The metrics of a run.
        png: The picture to write.
        unigram_entropy: Unigram baseline in nats per token, the loss of a model that only uses
            token frequencies.

    Raises:
        UserError: matplotlib is missing, or ``png`` cannot be written.
        DataError: The file has no records.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    records = list(read_records(metrics_jsonl))
    if not records:
        raise DataError(
            "MW-TRACKING-005",
            f"{metrics_jsonl}: no records yet. Draw it when the run has made a step.",
        )

    figure = Figure(figsize=(12, 8), dpi=100, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    FigureCanvasAgg(figure)  # pyplot would keep the figure in a global and require a display
    axes = figure.subplot_mosaic([["loss"] * 3, ["lr", "norm", "speed"]], height_ratios=[2.6, 1])
    _loss_panel(axes["loss"], records, unigram_entropy)
    _small_panel(axes["lr"], records, [r.learning_rate for r in records], "learning rate", GREEN)
    _small_panel(axes["norm"], records, [r.grad_norm for r in records], "gradient norm (L2)", BLUE)
    _small_panel(axes["speed"], records, [r.tokens_per_s for r in records], "tokens/s", GREY)
    axes["lr"].ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    axes["lr"].set_ylim(bottom=0)
    axes["speed"].set_ylim(bottom=0)
    axes["speed"].yaxis.set_major_formatter(EngFormatter(sep=" "))
    with writing(png) as file:
        figure.savefig(file)


def loss_unit(records: Sequence[StepRecord]) -> str:
    """Return the unit of the loss: nats if a validation has a perplexity,
    as for a cross-entropy over tokens.
    """
    has_perplexity = any(record.validation_perplexity is not None for record in records)
    return "nats per token" if has_perplexity else "mean over the labels"


def smoothing_reach(values: Sequence[object]) -> int:
    """Return the number of neighbours on each side in the running mean of a curve."""
    return len(values) // 60


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Return the centred mean of the finite values at most ``reach`` positions away;
    NaN where there are none.

    The window is symmetric, so that a falling curve is not delayed. Near an end it shrinks to the
    positions left there.
    """
    total, count = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        total.append(total[-1] + (value if finite else 0.0))
        count.append(count[-1] + finite)
    means = []
    for index in range(len(values)):
        here = min(reach, index, len(values) - 1 - index)
        first, end = index - here, index + here + 1
        number = count[end] - count[first]
        means.append((total[end] - total[first]) / number if number else math.nan)
    return means


def _loss_panel(axes: Axes, records: Sequence[StepRecord], unigram_entropy: float | None) -> None:
    steps = [r.step for r in records]
    losses = _drawable([r.loss for r in records])
    is_long = len(records) >= SMOOTHED_FROM
    axes.plot(
        steps,
        losses,
        color=BLUE,
        lw=1.0 if is_long else 1.8,
        alpha=0.3 if is_long else 1,
        label="training",
    )
    if is_long:
        reach = smoothing_reach(records)
        label = f"training, mean of {2 * reach + 1} steps"
        axes.plot(steps, running_mean(losses, reach), color=BLUE, lw=2, label=label)
    validated = [(r.step, r.validation_loss) for r in records if r.validation_loss is not None]
    if validated:
        at, values = zip(*validated, strict=True)
        label = f"validation (last {_in_nats(values[-1])})"
        axes.plot(
            at, _drawable(values), color=ORANGE, marker="o", ms=6, lw=1.4, label=label, zorder=3
        )
    if unigram_entropy is not None:
        label = f"unigram baseline ({_in_nats(unigram_entropy)})"
        axes.axhline(unigram_entropy, color=GREY, ls=(0, (5, 4)), lw=1.4, label=label)
    axes.set_title("Loss", loc="left", color=INK, fontsize=15, fontweight="bold")
    axes.set_ylabel(f"loss ({loss_unit(records)})", color=INK, fontsize=12)
    axes.set_xlabel(f"step ({_tokens(records[-1].tokens)} tokens in all)", color=INK, fontsize=12)
    axes.legend(fontsize=11, frameon=False, loc="upper right")
    _style_axes(axes, labels=11)


def _small_panel(
    axes: Axes, records: Sequence[StepRecord], values: Sequence[float], title: str, colour: str
) -> None:
    axes.plot([r.step for r in records], _drawable(values), color=colour, lw=1.3)
    axes.set_ylabel(title, color=INK, fontsize=10)
    axes.set_xlabel("step", color=INK, fontsize=10)
    _style_axes(axes, labels=9)


def _style_axes(axes: Axes, labels: int) -> None:
    axes.grid(color="#e5e7eb", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=labels, length=0)
    axes.margins(x=0.01)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#9ca3af")


def _drawable(values: Sequence[Any]) -> list[float]:
    return [drawable(value) for value in values]


def _in_nats(loss: float) -> str:
    """Format a loss: three decimals, or three digits of one that is no loss of a model."""
    return f"{loss:.3f}" if abs(loss) < 1e6 else f"{loss:.3g}"


def _tokens(number: int) -> str:
    for letter, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)
