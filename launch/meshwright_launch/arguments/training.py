"""Commands that start ranks (train, doctor, verify, eval, sample),
or write the job that does (slurm, kubernetes).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright_launch.arguments.common import (
    Added,
    command,
    config_file,
    count,
    output,
    parse_count_from_0,
    rank_count,
    run_or_checkpoint,
    seed,
    share,
    temperature,
    text,
    trust_code,
    whole,
)

MAX_CHAIN = 1000
"""Maximum number of jobs of a chain."""
SBATCH_OPTIONS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "exclude",
    "gres",
    "mem",
    "reservation",
)
"""Options of sbatch that `meshwright slurm` has under the same name."""
MAX_VERIFIED_STEPS = 10_000
MAX_NEW_TOKENS = 10**6


def train(added: Added) -> None:
    parser = command(
        added,
        "train",
        "jobs:train",
        "train, or resume the run of the same command",
        "Starts the ranks on this machine; under torchrun, srun or mpirun it runs as one rank. Any"
        " configuration key can follow the file. The same command again resumes the run.",
        "meshwright train configs/demo.toml --parallel.tp=4 --parallel.pp=1\n"
        "  torchrun --nproc-per-node=8 -m meshwright_launch train configs/demo.toml\n"
        "  srun --ntasks-per-node=8 meshwright train configs/demo.toml",
    )
    config_file(parser)
    routing(
        parser,
        "the experts of each token: write them to train.routing_directory, or take them from there",
    )
    trust_code(parser)


def routing(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--routing", choices=("record", "replay"), help=text)


def doctor(added: Added) -> None:
    parser = command(
        added,
        "doctor",
        "jobs:doctor",
        "find a bad node or link before a run",
        "Measures on the ranks of the run: versions, memory, clocks, the run's disk, the links"
        " within and between nodes, an all-reduce of each axis. Reports each fault (exit code 3)"
        " and writes the figures to the run's links.toml. Start it in the same way as `train`.",
        "srun --ntasks-per-node=8 meshwright doctor configs/llama3-8b.toml",
    )
    config_file(parser)
    trust_code(parser)


def slurm(added: Added) -> None:
    parser = command(
        added,
        "slurm",
        "slurm:slurm",
        "write a job script for Slurm, and submit it",
        "Writes the script to the run's directory, for srun with one task per rank (with watch.mirror"
        " one agent per node), and prints it or submits it (--submit). The job saves before its time"
        " limit, requeues itself, and stops when it makes no progress. Degrees that do not fill the"
        " nodes are an error now, not after hours in the queue.",
        "meshwright slurm configs/llama3-8b.toml --nodes 8 --devices-per-node 8 --time 4:00:00"
        " --submit",
    )
    config_file(parser)
    parser.add_argument(
        "--nodes", type=rank_count, required=True, metavar="N", help="number of nodes"
    )
    parser.add_argument(
        "--devices-per-node", type=rank_count, required=True, metavar="M", help="ranks on each"
    )
    parser.add_argument(
        "--spares",
        type=parse_count_from_0,
        default=0,
        metavar="N",
        help="further nodes, as far as they are free, for the ranks of dead ones (watch.mirror)",
    )
    parser.add_argument(
        "--time", metavar="T", help="time limit, as for sbatch: minutes, h:mm:ss, days-hours"
    )
    _sbatch_options(parser)
    _container_options(parser)
    parser.add_argument(
        "--torchrun",
        action="store_true",
        help="one torchrun on each node instead of a task per rank",
    )
    parser.add_argument(
        "--doctor",
        action="store_true",
        help="run `doctor` before each start, and exclude bad nodes",
    )
    parser.add_argument(
        "--no-requeue", dest="requeue", action="store_false", help="do not requeue the job"
    )
    parser.add_argument(
        "--chain",
        type=whole(1, MAX_CHAIN),
        default=1,
        metavar="N",
        help="submit N jobs that run one after another (default: 1)",
    )
    parser.add_argument("--submit", action="store_true", help="call sbatch")
    parser.add_argument("--force", action="store_true", help="replace a job script that was edited")
    trust_code(parser)


def _sbatch_options(parser: argparse.ArgumentParser) -> None:
    """Add options that are written to the head of the job script."""
    for name in SBATCH_OPTIONS:
        parser.add_argument(f"--{name}", metavar="TEXT", help=f"for sbatch's --{name}")
    parser.add_argument(
        "--exclusive", action="store_true", help="whole nodes, for sbatch's --exclusive"
    )
    parser.add_argument(
        "--cpus-per-task",
        type=rank_count,
        metavar="N",
        help=(
            "for sbatch and srun: CPUs of a rank, with --torchrun of a node (default: an equal"
            " share of the job's)"
        ),
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        metavar="OPTION",
        help="any other option, as in --sbatch=--mail-type=END",
    )
    parser.add_argument(
        "--prologue",
        metavar="FILE",
        help="lines of bash to run before the ranks: modules, NCCL's environment",
    )


def _container_options(parser: argparse.ArgumentParser) -> None:
    """Add options for ranks in a container."""
    parser.add_argument(
        "--container", metavar="IMAGE", help="container image of the ranks (see --runtime)"
    )
    parser.add_argument(
        "--runtime",
        choices=("pyxis", "apptainer"),
        default="pyxis",
        help="what starts the container (default: pyxis)",
    )
    parser.add_argument(
        "--mounts",
        metavar="LIST",
        help="mounts of the container (default: this directory and the runs)",
    )


def kubernetes(added: Added) -> None:
    parser = command(
        added,
        "kubernetes",
        "kubernetes:kubernetes",
        "print a JobSet for Kubernetes",
        "Prints one pod per node with one torchrun each, for `kubectl apply -f -` on a cluster with"
        " JobSet. Runs must lie on a volume that all pods share (--claim). A failed job is"
        " restarted, and resumes.",
        "meshwright kubernetes configs/llama3-8b.toml --nodes 8 --devices-per-node 8 --image"
        " team/train:1 --claim runs",
    )
    config_file(parser)
    parser.add_argument(
        "--nodes", type=rank_count, required=True, metavar="N", help="number of nodes"
    )
    parser.add_argument(
        "--devices-per-node", type=rank_count, required=True, metavar="M", help="ranks on each"
    )
    parser.add_argument(
        "--image", required=True, metavar="IMAGE", help="container image with meshwright"
    )
    parser.add_argument(
        "--claim",
        metavar="NAME",
        help="PersistentVolumeClaim with the configuration, corpus and runs",
    )
    parser.add_argument(
        "--mount", default="/work", metavar="DIR", help="where it is mounted; the ranks start there"
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory of a pod, such as 512Gi")
    parser.add_argument(
        "--name", metavar="NAME", help="name of the JobSet (default: run- and run.name)"
    )
    parser.add_argument(
        "--namespace", metavar="NAME", help="namespace of the JobSet (default: that of kubectl)"
    )
    parser.add_argument(
        "--max-restarts", type=parse_count_from_0, default=3, metavar="N", help="default: 3"
    )
    trust_code(parser)


def weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        default="weights",
        metavar="KIND",
        help="tensors to use as weights, such as a callback's ema",
    )


def verify(added: Added) -> None:
    parser = command(
        added,
        "verify",
        "verification:verify",
        "prove that layouts give the numbers of one process",
        "Trains the model in one plain process and in each layout, in float64, and compares initial"
        " values, losses, gradients, weights and validation. Exit code 1 when a tolerance is"
        " exceeded or a layout cannot run.",
        "meshwright verify configs/demo.toml --layouts dp2,pp2,tp2 pp4,gpipe tp2,sequence",
    )
    config_file(parser)
    parser.add_argument(
        "--layouts",
        nargs="+",
        action="extend",
        metavar="LAYOUT",
        help=(
            "words joined by commas, such as dp2,pp2,tp2: dpN, ppN, tpN, cpN, epN, zero0 to zero3,"
            " mbsN, a schedule, sequence, offload, ...; docs/verify.md lists them (default: the"
            " layout of CONFIG and a selection)"
        ),
    )
    parser.add_argument(
        "--steps",
        type=whole(1, MAX_VERIFIED_STEPS),
        default=10,
        metavar="N",
        help="optimizer steps (default: 10)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        default="float64",
        help="precision of both runs; each has its own tolerances (default: float64)",
    )
    parser.add_argument(
        "--whole", action="store_true", help="keep the model at its full size (default: shrunk)"
    )
    routing(
        parser,
        "record: compare the experts of each token with the plain run's; replay: all runs take its"
        " experts",
    )
    parser.add_argument(
        "--routing-directory",
        type=Path,
        metavar="DIR",
        help=(
            "directory of the plain run's recording, to write or to replay (default: a temporary"
            " one)"
        ),
    )
    trust_code(parser)


def evaluate(added: Added) -> None:
    parser = command(
        added,
        "eval",
        "jobs:evaluate",
        "measure a trained model: loss, perplexity, bits per byte",
        "Evaluates on the whole validation set of the run, or on another corpus, in order."
        " parallel.* keys choose another layout, with the same result. Ranks start as for `train`."
        " The run may be live: the newest sound checkpoint is read, and none is changed.",
        "meshwright eval runs/demo --parallel.tp=2 --parallel.pp=1 --parallel.dp=1\n"
        "  meshwright eval runs/demo --step 40 --data runs/data/other --out demo-40.json\n"
        "  torchrun --nproc-per-node=8 -m meshwright_launch eval runs/demo",
        takes_overrides=True,
    )
    weights(parser)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a prepared corpus: its folder, or DIR/NAME of a pair",
    )
    parser.add_argument(
        "--batches", type=count, metavar="N", help="number of global batches (default: all)"
    )
    output(parser, "FILE", "file for the result, as JSON", "eval.json")
    _run_to_read(parser)


def sample(added: Added) -> None:
    parser = command(
        added,
        "sample",
        "jobs:sample",
        "generate text with a trained model",
        "Continues one or several prompts until the model ends the document or after --tokens"
        " tokens, in one process or, with parallel.* keys, on the ranks of any layout. With"
        " temperature 0 all layouts give the same text. For a look at a model, not for serving.",
        'meshwright sample runs/demo --prompt "def main" --tokens 60 --temperature 0\n  meshwright'
        ' sample runs/demo --prompt "import" --prompt "class" --top-p 0.9 --seed 7 --parallel.tp=2',
        takes_overrides=True,
    )
    weights(parser)
    parser.add_argument(
        "--prompt",
        required=True,
        action="append",
        type=text,
        metavar="TEXT",
        help="text to continue; may be repeated",
    )
    parser.add_argument(
        "--tokens",
        type=whole(1, MAX_NEW_TOKENS),
        default=100,
        metavar="N",
        help="maximal number of new tokens (default: 100)",
    )
    parser.add_argument(
        "--temperature",
        type=temperature,
        default=0.8,
        metavar="T",
        help="sampling temperature; 0: always the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=parse_count_from_0,
        default=40,
        metavar="K",
        help="sample from the K likeliest tokens; 0: from all (default: 40)",
    )
    parser.add_argument(
        "--top-p",
        type=share,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens whose probabilities add up to P (default: 1)",
    )
    parser.add_argument(
        "--seed", type=seed, metavar="N", help="seed of the sampling (default: that of the run)"
    )
    output(parser, "FILE", "file for the texts, as JSON lines", "texts.jsonl")
    _run_to_read(parser)


def _run_to_read(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose a trained model: run, step and trust."""
    run_or_checkpoint(parser)
    parser.add_argument(
        "--step",
        type=parse_count_from_0,
        metavar="N",
        help="the checkpoint of this step (default: the newest)",
    )
    trust_code(parser)
    parser.usage = f"{parser.prog} RUN [options] [--section.key=value ...]"
