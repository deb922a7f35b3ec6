"""Planned layouts of the configurations of large models, with memory and speed, beside published peers.

    python benchmarks/recipes.py [--only llama3-8b] [--out FILE.json]
    python benchmarks/recipes.py --small               configs/recipes, on two devices of each cluster file

For each recipe `meshwright plan` searches the layout, and `meshwright dryrun` runs it on fake tensors.
A peer is a row of published_runs.csv: the same model, in another framework, on other numbers of devices
or in another precision.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "benchmarks" / "published_runs.csv"


class Recipe(NamedTuple):
    """A configuration on a cluster."""

    config: str
    cluster: str
    nodes: int
    peers: tuple[str, ...]
    """Names of rows of published_runs.csv."""


RECIPES = (
    Recipe("llama3-8b", "h100", 8, ("tt-8B-128g-fsdp-compile", "bridge-h100-llama3-8b")),
    Recipe("llama3-70b", "h100", 64, ("bridge-h100-llama3-70b",)),
    Recipe("llama3-405b", "h100", 2048, ("llama3-405B-16384", "bridge-h100-405B-1024g-cp2")),
    Recipe("mixtral-8x7b", "h100", 8, ("mcoremoe-mixtral-8x7b-64g",)),
    Recipe("qwen3-30b-a3b", "h100", 16, ("bridgemoe-h100-qwen3-30b-16g",)),
    Recipe("deepseek-v3", "gb200", 64, ("bridgemoe-gb200-deepseek-v3-bf16",)),
)
SMALL = ("pretrain", "moe", "continue", "chat", "lora", "long-context")
"""Of configs/recipes."""
CLUSTERS = ("a100", "h100", "h200", "b200")
FIRST = re.compile(
    r"^ *1 +(?P<step_s>[\d.]+) ±(?P<error_s>[\d.]+) +(?P<mfu>[\d.]+)% +(?P<tokens>[\d,]+) +(?P<memory>[\d.]+ [KMGT]iB)",
    re.MULTILINE,
)
"""First row of the table of `plan`."""


def meshwright(*words: str) -> str:
    """Return what a command prints.

    Raises:
        SystemExit: it fails.
    """
    command = [sys.executable, "-m", "meshwright_launch", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def predict(recipe: Recipe) -> dict[str, Any]:
    """Search the layout of a recipe, and dry-run it."""
    config = f"configs/{recipe.config}.toml"
    with tempfile.TemporaryDirectory() as folder:
        on = ("--cluster", recipe.cluster, "--nodes", str(recipe.nodes))
        planned = meshwright("plan", config, *on, "--out", folder)
        file = Path(folder) / "plan.toml"
        title = file.read_text().splitlines()[0]
        dry = meshwright("dryrun", str(file), *on)
    first = FIRST.search(planned)
    devices = re.search(r"= ([\d,]+) x ", planned)
    memory = re.search(r"^most memory +([\d.]+ \w+)", dry, re.MULTILINE)
    assert first is not None and devices is not None and memory is not None, planned
    num_devices = int(devices[1].replace(",", ""))
    return {
        "config": recipe.config,
        "command": f"meshwright plan {config} --cluster {recipe.cluster} --nodes {recipe.nodes}",
        "devices": num_devices,
        "layout": title.rpartition(": ")[2].rstrip("."),
        "step_s": float(first["step_s"]),
        "error_s": float(first["error_s"]),
        "mfu_percent": float(first["mfu"]),
        "tokens_per_s_per_device": round(int(first["tokens"].replace(",", "")) / num_devices),
        "memory_planned": first["memory"],
        "memory_dry_run": memory[1],
        "agrees": "all ranks    agree" in dry,
        "peers": [peer_of(name) for name in recipe.peers],
    }


def predict_small(name: str) -> dict[str, Any]:
    """Dry-run a small recipe as it is, and predict its speed on two devices of each cluster."""
    config = f"configs/recipes/{name}.toml"
    dry = meshwright("dryrun", config)
    memory = re.search(r"^most memory +([\d.]+ \w+)", dry, re.MULTILINE)
    layout = re.search(r" on (pp .*) = 2 ranks", dry)
    assert memory is not None and layout is not None, dry
    axis = "--cp" if "cp 2" in layout[1] else "--dp"
    speeds = {}
    for cluster in CLUSTERS:
        on = ("--cluster", cluster, "--nodes", "1", "--devices-per-node", "2", axis, "2")
        first = FIRST.search(meshwright("plan", config, *on))
        assert first is not None
        speeds[cluster] = int(first["tokens"].replace(",", ""))
    return {
        "config": name,
        "layout": layout[1],
        "memory_dry_run": memory[1],
        "tokens_per_s": speeds,
    }


def show_small(row: dict[str, Any]) -> str:
    """Return a row of the table of small recipes, in Markdown."""
    speeds = (f"{row['tokens_per_s'][cluster]:,}" for cluster in CLUSTERS)
    cells = (f"`{row['config']}`", row["layout"], row["memory_dry_run"], *speeds)
    return "| " + " | ".join(cells) + " |"


def peer_of(name: str) -> dict[str, Any]:
    """Return the published figures of a row of published_runs.csv."""
    with RUNS.open(encoding="utf-8") as file:
        found = next((row for row in csv.DictReader(file) if row["id"] == name), None)
    if found is None:
        raise SystemExit(f"{RUNS.name} has no row {name}")
    per_s = found["tokens_per_s_per_gpu"]
    if not per_s:
        tokens = float(found["global_batch"]) * float(found["seq"])
        per_s = str(tokens / float(found["iter_time_s"]) / float(found["gpus"]))
    layout = [
        f"{axis} {found[axis]}"
        for axis in ("pp", "dp", "cp", "tp", "ep")
        if (found[axis] or "1") != "1"
    ]
    return {
        "id": found["id"],
        "source": found["source"],
        "devices": f"{int(found['gpus']):,} {found['gpu']}",
        "precision": found["precision"],
        "layout": " x ".join(layout),
        "tokens_per_s_per_device": round(float(per_s)),
    }


def show(row: dict[str, Any]) -> str:
    """Return a row of the table, in Markdown."""
    peers = "; ".join(
        f"{peer['tokens_per_s_per_device']:,}: {peer['devices']}, {peer['layout']}, {peer['precision']}"
        for peer in row["peers"]
    )
    cells = (
        f"`{row['command']}`",
        f"{row['layout']}",
        f"{row['memory_dry_run']} (`plan`: {row['memory_planned']})",
        f"{row['step_s']:.2f} ± {row['error_s']:.2f} s",
        f"{row['tokens_per_s_per_device']:,}, MFU {row['mfu_percent']:.1f} %",
        peers,
    )
    return "| " + " | ".join(cells) + " |"


def main(argv: list[str]) -> int:
    """Run the command. Returns 1 if the ranks of a layout disagree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=[each.config for each in RECIPES])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if options.small:
        for name in SMALL:
            print(show_small(predict_small(name)), flush=True)
        return 0
    rows = []
    for recipe in RECIPES:
        if not options.only or recipe.config in options.only:
            rows.append(predict(recipe))
            print(show(rows[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
