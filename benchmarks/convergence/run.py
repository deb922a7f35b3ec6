"""One contender's training run, to a file of losses.

    python benchmarks/convergence/run.py CONTENDER --corpus DIR --seed 0 --out DIR [--tiny] [--steps N]
    python benchmarks/convergence/run.py plain-as-titan --corpus DIR --seed 0 --out DIR

Contenders: plain (torch), trainer (Hugging Face), core (megatron-core), titan (torchtitan 0.2.2),
ours:LAYOUT. ``plain-exact`` is plain torch with a gradient norm that is summed in float64, as ours is.
``plain-as-NAME`` is plain torch with the learning rates that NAME's file in DIR has, and with what
else differs in NAME's defaults: it shows that nothing else does. ``corpus.py`` prepares the
corpus; ``table.py`` draws the files that are there.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import importlib
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path

import plain
import torch
from ours import LAYOUTS
from task import TASK, TINY, Result, Task

MODULES = {
    "plain": "transformers",
    "trainer": "transformers",
    "core": "megatron-core",
    "titan": "torchtitan",
}
"""Contender -> the package that it is of."""
AS = "plain-as-"
EXACT = "plain-exact"
CONTENDERS = (
    *MODULES,
    EXACT,
    *(f"{AS}{name}" for name in MODULES if name != "plain"),
    *(f"ours:{layout}" for layout in LAYOUTS),
)


def train(contender: str, task: Task, corpus: Path, seed: int, out: Path) -> Result:
    """Train one contender; ``out`` has the files of others."""
    if contender == EXACT:
        return plain.train(task, corpus, seed, exact_norm=True)
    if contender.startswith(AS):
        other = contender.removeprefix(AS)
        record = json.loads(file_of(out, other, seed).read_text())
        return plain.train(task, corpus, seed, record["rates"], other == "titan")
    name, _, layout = contender.partition(":")
    module = importlib.import_module(name)
    arguments = (task, corpus, seed, layout) if layout else (task, corpus, seed)
    result: Result = module.train(*arguments)
    return result


def file_of(out: Path, contender: str, seed: int) -> Path:
    """Return the file of a contender's run."""
    return out / f"{contender.replace(':', '-')}-seed{seed}.json"


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tiny", action="store_true", help="toy sizes: exercises the code")
    options = parser.parse_args(argv)
    task = TINY if options.tiny else TASK
    task = task if options.steps is None else task._replace(steps=options.steps)
    torch.set_num_threads(1)
    begun_s = time.monotonic()
    result = train(options.contender, task, options.corpus, options.seed, options.out)
    name = "plain" if options.contender.startswith((AS, EXACT)) else options.contender
    package = MODULES.get(name, "meshwright")
    record = {
        "contender": options.contender,
        "seed": options.seed,
        "task": task._asdict(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", package)},
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "wall_s": round(time.monotonic() - begun_s, 1),
        "corpus": json.loads((options.corpus / "fingerprint.json").read_text()),
        **result._asdict(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = file_of(options.out, options.contender, options.seed)
    file.write_text(json.dumps(record) + "\n")
    print(
        f"{file}: first loss {result.losses[0]:.6f}, last {result.losses[-1]:.6f}, validation {result.validation:.6f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
