"""The table of losses, and the picture of the curves, of the runs in a directory.

python benchmarks/convergence/table.py DIR [--picture FILE.png] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

TITLES = {
    "plain": "plain torch loop, Hugging Face's Llama",
    "plain-exact": "plain torch loop with an exact gradient norm",
    "ours:one": "meshwright, 1 rank",
    "ours:dp2-zero3": "meshwright, dp 2, ZeRO-3",
    "ours:pp2-tp2": "meshwright, pp 2 x tp 2, sequence parallel, 1f1b",
    "ours:dp2-pp2-cp2": "meshwright, dp 2 x pp 2 x cp 2, zb_h1",
    "trainer": "Hugging Face Trainer",
    "core": "megatron-core's GPT, optimizer and schedule",
    "titan": "torchtitan's Llama, optimizer and schedule",
    "plain-as-trainer": "plain torch with the Trainer's learning rates",
    "plain-as-core": "plain torch with megatron-core's learning rates",
    "plain-as-titan": "plain torch with torchtitan's learning rates and decay of norms",
}
COLORS = {
    "plain": "black",
    "trainer": "#e69f00",
    "core": "#009e73",
    "titan": "#cc79a7",
    "ours:one": "#0072b2",
    "ours:dp2-zero3": "#56b4e9",
    "ours:pp2-tp2": "#3d5a80",
    "ours:dp2-pp2-cp2": "#7a9cc6",
}
"""Curves of the picture (Okabe and Ito's colours, which colour-blind readers tell apart)."""
LAST = 50
"""Steps of the final training loss: their mean."""
SMOOTH = 25
"""Steps of a point of a curve: their mean."""
COLUMNS = (
    "trained by",
    "seeds",
    f"training loss, last {LAST} steps",
    "validation loss",
    "validation, from plain torch",
    "training curve, from plain torch",
)


def load(folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the records of each contender by seed."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for file in sorted(folder.glob("*-seed*.json")):
        record = json.loads(file.read_text())
        found[record["contender"]][record["seed"]] = record
    return {name: found[name] for name in TITLES if name in found}


def final(record: dict[str, Any]) -> float:
    """Return the mean loss of the last steps."""
    return statistics.fmean(record["losses"][-LAST:])


def spread(values: list[float]) -> str:
    """Return the mean, and the least and the most of several."""
    text = f"{statistics.fmean(values):.4f}"
    return text if len(values) == 1 else f"{text} [{min(values):.4f} .. {max(values):.4f}]"


def smooth(losses: list[float]) -> list[float]:
    """Return means of SMOOTH steps each."""
    size = min(SMOOTH, len(losses))
    starts = range(0, len(losses) - size + 1, size)
    return [statistics.fmean(losses[start : start + size]) for start in starts]


def far(record: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two smoothed curves."""
    pairs = zip(smooth(record["losses"]), smooth(other["losses"]), strict=True)
    return max(abs(a - b) for a, b in pairs)


def row(
    name: str, runs: dict[int, dict[str, Any]], plain: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """Return a contender's row: losses over its seeds, and differences from plain torch, seed by seed."""
    shared = sorted(runs.keys() & plain.keys())
    return {
        "contender": TITLES[name],
        "seeds": sorted(runs),
        "training": spread([final(run) for run in runs.values()]),
        "validation": spread([run["validation"] for run in runs.values()]),
        "validation_difference": max(
            (abs(runs[seed]["validation"] - plain[seed]["validation"]) for seed in shared),
            default=None,
        ),
        "curve_difference": max((far(runs[seed], plain[seed]) for seed in shared), default=None),
    }


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of Markdown."""
    gaps = (
        "" if row[key] is None else f"{row[key]:.1e}"
        for key in ("validation_difference", "curve_difference")
    )
    cells = (row["contender"], len(row["seeds"]), row["training"], row["validation"], *gaps)
    return "| " + " | ".join(map(str, cells)) + " |"


def draw(found: dict[str, dict[int, dict[str, Any]]], file: Path) -> None:
    """Draw the curves of the smallest seed, and below them their differences from plain torch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    seed = min(found["plain"])
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, height_ratios=[3, 2], layout="constrained"
    )
    base = smooth(found["plain"][seed]["losses"])
    at = [SMOOTH * (i + 1) for i in range(len(base))]
    shown = [name for name in COLORS if seed in found.get(name, {})]
    for name in shown:
        curve = smooth(found[name][seed]["losses"])
        style = "--" if name.startswith("ours") else ":" if name == "core" else "-"
        line = {
            "color": COLORS[name],
            "linewidth": 2.4 if name == "core" else 1.6,
            "linestyle": style,
        }
        above.plot(at, curve, label=TITLES[name], **line)
        if name != "plain":
            gaps = [a - b for a, b in zip(curve, base, strict=True)]
            below.plot(at, gaps, **line)
    above.set_ylabel("training loss, nats per token")
    above.set_title(
        f"Llama of 5.0 million parameters, the same batches and first weights, seed {seed}"
    )
    above.legend(frameon=False)
    below.axhline(0.0, color=COLORS["plain"], linewidth=1.6)
    below.set_ylabel("minus plain torch")
    below.set_xlabel(f"step (means of {SMOOTH})")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    found = load(options.folder)
    if "plain" not in found:
        parser.error(
            f"{options.folder} has no run of plain torch: run.py plain --out {options.folder}"
        )
    rows = [row(name, runs, found["plain"]) for name, runs in found.items()]
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for each in rows:
        print(line(each))
    if options.picture:
        draw(found, options.picture)
    if options.out:
        records = [
            {**run, "losses": smooth(run["losses"]), "rates": run["rates"][:3]}
            for runs in found.values()
            for run in runs.values()
        ]
        options.out.write_text(json.dumps({"rows": rows, "runs": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
