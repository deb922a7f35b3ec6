"""Commands that start ranks: training, and the steps before, beside and after it."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.launch import commands, jobs
from meshwright.launch.arguments.common import (
    Added,
    command,
    config_file,
    count,
    parse_count_from_0,
    share,
    temperature,
    text,
    trust_code,
)


def train(added: Added) -> None:
    parser = command(
        added,
        "train",
        jobs.train,
        "train, or go on where the same command stopped",
        "Starts the ranks of this machine by itself; under torchrun or srun it is one of their ranks. Any key of the "
        "configuration can be given after the file. The same command again resumes.",
        "meshwright train configs/demo.toml --parallel.tp=4 --parallel.pp=1\n"
        "  torchrun --nproc-per-node=8 -m meshwright.launch train configs/demo.toml\n"
        "  srun --ntasks-per-node=8 meshwright train configs/demo.toml",
        takes_overrides=True,
    )
    config_file(parser)
    trust_code(parser)


def doctor(added: Added) -> None:
    parser = command(
        added,
        "doctor",
        jobs.doctor,
        "look for the bad node or link before a run does",
        "Measures with the ranks that will run: versions, memory, clocks, the run's disk, the links inside nodes and "
        "across, an all-reduce of each axis. What is wrong is named (exit code 3), the figures go into the run's "
        "links.toml. Start it as `train` is started.",
        "srun --ntasks-per-node=8 meshwright doctor configs/llama3-8b.toml",
        takes_overrides=True,
    )
    config_file(parser)
    trust_code(parser)


def slurm(added: Added) -> None:
    parser = command(
        added,
        "slurm",
        jobs.slurm,
        "write a job script for Slurm, and submit it",
        "Into the run's directory, for srun with one task for each rank; print it, or submit it with --submit. The job "
        "is told to save before its time ends, goes back into the queue by itself, and gives up when it gets no "
        "further. Degrees that do not fill the nodes are refused here and not after hours in the queue.",
        "meshwright slurm configs/llama3-8b.toml --nodes 8 --devices-per-node 8 --time 4:00:00 --submit",
        takes_overrides=True,
    )
    config_file(parser)
    parser.add_argument("--nodes", type=count, required=True, metavar="N")
    parser.add_argument("--devices-per-node", type=count, required=True, metavar="M", help="ranks on each")
    parser.add_argument("--time", metavar="T", help="as sbatch has it: minutes, h:mm:ss, days-hours")
    for name in ("partition", "account", "qos", "constraint", "exclude"):
        parser.add_argument(f"--{name}", metavar="TEXT", help=f"for sbatch's --{name}")
    parser.add_argument("--cpus-per-task", type=count, metavar="N", help="for sbatch's --cpus-per-task")
    parser.add_argument("--container", metavar="IMAGE", help="run the ranks in it, where Slurm has pyxis")
    parser.add_argument("--mounts", metavar="LIST", help="of the container (default: this directory and the runs)")
    parser.add_argument("--torchrun", action="store_true", help="one torchrun on each node instead of a task per rank")
    parser.add_argument(
        "--doctor", action="store_true", help="look at nodes and links before each start, and leave bad nodes out"
    )
    parser.add_argument(
        "--no-requeue", dest="requeue", action="store_false", help="never back into the queue by itself"
    )
    parser.add_argument(
        "--chain", type=count, default=1, metavar="N", help="submit N jobs of which one runs at a time (default: 1)"
    )
    parser.add_argument("--submit", action="store_true", help="call sbatch")
    trust_code(parser)


def verify(added: Added) -> None:
    parser = command(
        added,
        "verify",
        commands.verify,
        "prove that layouts give the numbers of one process",
        "Trains the model in one plain process and in each layout, in float64, and compares initial values, losses, "
        "gradients, weights and validation. Exit code 1 when a bar is missed or a layout cannot be run.",
        "meshwright verify configs/demo.toml --layouts dp2,pp2,tp2 pp4,gpipe tp2,sequence",
        takes_overrides=True,
    )
    config_file(parser)
    parser.add_argument(
        "--layouts", nargs="+", metavar="LAYOUT", help="such as dp2,pp2,tp2 (default: the file's own and a spread)"
    )
    parser.add_argument("--steps", type=count, default=10, metavar="N", help="optimizer steps (default: 10)")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        default="float64",
        help="precision of both sides, each with bars of its own (default: float64)",
    )
    parser.add_argument("--whole", action="store_true", help="the model at its full size; otherwise it is shrunk")
    trust_code(parser)


def evaluate(added: Added) -> None:
    parser = command(
        added,
        "eval",
        jobs.evaluate,
        "measure a trained model: loss, perplexity, bits per byte",
        "On the run's validation set, or another corpus, whole and in order; on the layout of the run or, with "
        "parallel.* keys, on any other: the same numbers. Ranks are started as `train` starts them. The run may go on "
        "meanwhile: the newest sound checkpoint is taken, and none is written into.",
        "meshwright eval runs/demo --parallel.tp=2 --parallel.pp=1 --parallel.dp=1\n"
        "  meshwright eval runs/demo --step 40 --data runs/data/other --out demo-40.json\n"
        "  torchrun --nproc-per-node=8 -m meshwright.launch eval runs/demo",
        takes_overrides=True,
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="a prepared corpus: its folder, or DIR/NAME of a pair")
    parser.add_argument("--batches", type=count, metavar="N", help="global batches to look at (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the result as JSON")
    _run_to_read(parser)


def sample(added: Added) -> None:
    parser = command(
        added,
        "sample",
        jobs.sample,
        "let a trained model write",
        "Continues one prompt or several, until the model ends the document or --tokens are written; in one process, "
        "or with parallel.* keys in the ranks of any layout. With temperature 0 the text is the same on all of them. "
        "For each token the whole window goes through the model: for looking at one, not for serving it.",
        'meshwright sample runs/demo --prompt "def main" --tokens 60 --temperature 0\n'
        '  meshwright sample runs/demo --prompt "import" --prompt "class" --top-p 0.9 --seed 7 --parallel.tp=2',
        takes_overrides=True,
    )
    parser.add_argument(
        "--prompt",
        required=True,
        action="append",
        type=text,
        metavar="TEXT",
        help="what it should continue; may be given again",
    )
    parser.add_argument("--tokens", type=count, default=100, metavar="N", help="tokens to write (default: 100)")
    parser.add_argument(
        "--temperature", type=temperature, default=0.8, metavar="T", help="0: always the likeliest (default: 0.8)"
    )
    parser.add_argument(
        "--top-k",
        type=parse_count_from_0,
        default=40,
        metavar="K",
        help="choose of so many likeliest; 0: of all (default: 40)",
    )
    parser.add_argument(
        "--top-p", type=share, default=1.0, metavar="P", help="of those that together have this share (default: 1)"
    )
    parser.add_argument("--seed", type=parse_count_from_0, metavar="N", help="of the draws (default: the run's)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the texts as JSON lines")
    _run_to_read(parser)


def _run_to_read(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose a trained model: run, step and trust."""
    parser.add_argument("place", metavar="RUN", type=Path, help="a run directory, or one of its checkpoints/step-*")
    parser.add_argument(
        "--step", type=parse_count_from_0, metavar="N", help="the checkpoint of this step (default: the newest)"
    )
    trust_code(parser)
    parser.usage = f"{parser.prog} RUN [options] [--section.key=value ...]"
