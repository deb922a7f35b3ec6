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
LAST = 50
"""Steps of the final training loss: their mean."""
SMOOTH = 25
"""Steps of a point of a curve: their mean."""


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


def draw(found: dict[str, dict[int, dict[str, Any]]], file: Path) -> None:
    """Draw the curves of the smallest seed, and below them their differences from plain torch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    seed = min(found["plain"])
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 7), sharex=True, height_ratios=[2, 1], layout="constrained"
    )
    base = found["plain"][seed]
    at = [SMOOTH * (i + 1) for i in range(len(smooth(base["losses"])))]
    for name, runs in found.items():
        if seed not in runs or name.startswith("plain-as"):
            continue
        curve = smooth(runs[seed]["losses"])
        style = "--" if name.startswith("ours") else "-"
        above.plot(at, curve, style, label=TITLES[name], linewidth=1.4)
        gaps = [a - b for a, b in zip(curve, smooth(base["losses"]), strict=True)]
        below.plot(at, gaps, style, linewidth=1.4)
    above.set_ylabel("training loss, nats per token")
    above.set_title(
        f"Llama of 5.0 million parameters, the same batches and first weights, seed {seed}"
    )
    above.legend(fontsize=8)
    below.set_ylabel("minus plain torch")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=130)


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
    print(f"| contender | seeds | training loss, last {LAST} steps | validation loss", end="")
    print(" | from plain torch, same seed: validation | curve |\n|---|---|---|---|---|---|")
    for each in rows:
        gaps = (f"{each[key]:.1e}" for key in ("validation_difference", "curve_difference"))
        cells = (each["contender"], len(each["seeds"]), each["training"], each["validation"], *gaps)
        print("| " + " | ".join(map(str, cells)) + " |")
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
