"""Parsers of the commands that predict a run, draw it, or measure the machine for it."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright_launch.arguments.common import (
    Added,
    command,
    config_file,
    count,
    counts,
    load,
    nodes_of_job,
    output,
    price,
    rank_count,
    trust_code,
)


def draw(added: Added) -> None:
    parser = command(
        added,
        "draw",
        "meshwright_plan.commands.drawing:draw",
        "draw a schedule, or the measured step of a run",
        "For a configuration: the schedule in ticks, its bubble and its activations in flight,"
        " without torch; with --out or --format also as SVG, PNG and a trace for ui.perfetto.dev."
        " For a run: the traced step above its simulation, and the time of each rank in"
        " computation, communication and idle.",
        "meshwright draw configs/demo.toml --parallel.pp=4 --costs f=1,b=2,comm=0.1 --out"
        " pictures\n  meshwright draw runs/demo",
        takes_overrides=True,
    )
    parser.add_argument(
        "drawn",
        metavar="CONFIG|RUN",
        help="a TOML file, a run directory, or one of its traces/step-*.json",
    )
    trust_code(parser)
    parser.usage = f"{parser.prog} CONFIG|RUN [options] [--section.key=value ...]"
    default = "traces/ of a run; this directory for a CONFIG with --format"
    output(
        parser, "DIR", f"directory for the files (default: {default})", "pictures", is_folder=True
    )
    parser.add_argument(
        "--format",
        metavar="LIST",
        help="formats among text, svg, png, trace, separated by commas (default: all)",
    )
    parser.add_argument(
        "--costs",
        metavar="LIST",
        help=(
            "ticks of f, b, i, w, comm, reduce, step (default: f=1,b=2,i=1,w=1, others 0); for"
            " overlapped pairs: exchanges (expert all-to-alls in F, and in B or I), exchange_f,"
            " exchange_b (their ticks in all)"
        ),
    )


def stages(added: Added) -> None:
    parser = command(
        added,
        "stages",
        "meshwright_plan.commands.pages:stages",
        "print the cost of each layer and the balance of the stages",
        "Counts FLOPs and bytes of every layer on the meta device, without GPU or data, in seconds"
        " for a model of any size. Prints the stages, and the imbalance with each value of"
        " pipeline.balance.",
        "meshwright stages configs/llama3-405b.toml --parallel.pp=8",
    )
    config_file(parser)
    trust_code(parser)


def plan(added: Added) -> None:
    parser = command(
        added,
        "plan",
        "meshwright_plan.commands.plans:plan",
        "search for the fastest layout of a model on a cluster",
        "Searches all layouts (degrees, schedule, micro-batch size, ZeRO stage, recompute), rejects"
        " those that break a rule or exceed the memory, ranks the others by predicted step time and"
        " explains the first. A key of the layout, such as --parallel.zero=3, holds its value. Needs no"
        " GPU. --out writes plan.toml, for `meshwright train`, and plan.html, a page with pictures.",
        "meshwright plan configs/llama3-70b.toml --cluster h100 --nodes 64 --out runs/plan\n "
        " meshwright plan configs/llama3-8b.toml --cluster h100 --nodes 4 --why tp=8,pp=1\n "
        " meshwright plan configs/llama3-8b.toml --cluster h100 --nodes 4 --sweep-nodes 2,4,8",
    )
    config_file(parser)
    _add_devices(parser)
    parser.add_argument(
        "--global-batch", type=count, metavar="N", help="samples of a step (default: as in CONFIG)"
    )
    parser.add_argument(
        "--best", type=count, metavar="N", help="number of layouts to list (default: 10)"
    )
    for axis in ("pp", "dp", "cp", "tp", "ep"):
        pinned = parser.add_mutually_exclusive_group()
        pinned.add_argument(
            f"--{axis}", type=count, metavar="N", help=f"search only layouts with this {axis}"
        )
        pinned.add_argument(
            f"--no-{axis}", dest=axis, action="store_const", const=1, help=f"the same as --{axis} 1"
        )
    _add_skew(parser)
    parser.add_argument(
        "--why",
        metavar="FIELDS",
        help="explain why layouts with these values, such as tp=8,schedule=1f1b, are not first:"
        " compare the best of them with the first, or name the rules that they break",
    )
    _add_sweep(parser)
    output(parser, "DIR", "directory for plan.toml and plan.html", "plan", is_folder=True)
    trust_code(parser)


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="NAME|FILE",
        help="a100, h100, h200, b200, or a TOML file (see calibrate)",
    )
    parser.add_argument(
        "--nodes", type=rank_count, required=True, metavar="N", help="number of nodes"
    )
    parser.add_argument(
        "--devices-per-node", type=rank_count, metavar="M", help="default: as in the hardware file"
    )


def _add_skew(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skew",
        type=load,
        default=1.0,
        metavar="LOAD",
        help="rows of the busiest rank's experts over the mean (1.0)",
    )


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sweep-nodes",
        type=counts,
        metavar="LIST",
        help="plan for each of these numbers of nodes, such as 2,4,8",
    )
    parser.add_argument(
        "--sweep-batch", type=counts, metavar="LIST", help="plan for each of these global batches"
    )
    parser.add_argument(
        "--device-hour",
        type=price,
        metavar="COST",
        help="cost of a device for an hour: a sweep then prints costs",
    )


def calibrate(added: Added) -> None:
    parser = command(
        added,
        "calibrate",
        "meshwright_plan.commands.calibration:calibrate",
        "measure this machine, for plan --cluster",
        "Measures matrix products, copies, the overhead of an operation and the links between"
        " processes, with all cores busy, and writes a hardware file. --device cuda measures"
        " products, attention and copies of one GPU.",
        "meshwright calibrate --out runs/this-machine.toml",
    )
    output(parser, "FILE", "a TOML file", "this-machine.toml", is_required=True)
    parser.add_argument(
        "--ranks",
        type=rank_count,
        default=8,
        metavar="N",
        help="ranks of a node in the hardware file (default: 8)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="measure the cores (default), or the first GPU",
    )


def dryrun(added: Added) -> None:
    parser = command(
        added,
        "dryrun",
        "meshwright_plan.commands.dryrun:dryrun",
        "run every rank of a job on fake tensors: memory, messages, deadlocks",
        "Runs the code of each kind of rank on fake tensors, for a job of any size, in one process"
        " and without a device. Prints peak memory, FLOPs and bytes on the wire of each pipeline"
        " rank, and compares the collectives and messages of all ranks: exit code 1 when they"
        " disagree, and when a rank needs more memory than its device has. --seed-fault shows that"
        " this check can fail.",
        "meshwright dryrun configs/llama3-405b.toml --nodes 2048 --devices-per-node 8"
        " --pipeline.recompute=full --out 405b.svg\n  meshwright dryrun configs/demo.toml"
        " --seed-fault schedule:4=gpipe",
    )
    config_file(parser)
    nodes_of_job(parser, of_cluster=True)
    parser.add_argument(
        "--seed-fault",
        action="append",
        metavar="FAULT",
        help="schedule:RANK=NAME: this rank runs another schedule. May be repeated",
    )
    output(parser, "FILE", "a picture: .svg, .png or .pdf", "job.svg")
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="hardware for predicted seconds and MFU (default: h100 for a run on GPUs)",
    )
    _add_skew(parser)
    trust_code(parser)


def report(added: Added) -> None:
    parser = command(
        added,
        "report",
        "meshwright_plan.commands.pages:report",
        "write an HTML page for a run, or for several side by side",
        "Writes one HTML file that needs no network: curves, time by activity, the schedule"
        " simulated and measured, placement of ranks, starts, checkpoints and the configuration."
        " For several runs: their curves in one chart, their figures, and the differences of their"
        " configurations. The run may be live. Needs no torch.",
        "meshwright report runs/demo\n  meshwright report runs/demo runs/deep --out compared.html",
    )
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="run directories, such as runs/demo"
    )
    default = "report.html in the run directory; for several runs in this directory"
    output(parser, "FILE", f"default: {default}", "report.html")


def plot(added: Added) -> None:
    parser = command(
        added,
        "plot",
        "meshwright_plan.commands.pages:plot",
        "draw the loss curve of a run",
        "Reads metrics.jsonl and writes a PNG beside it.",
        "meshwright plot runs/demo",
    )
    parser.add_argument(
        "directory", metavar="RUN", type=Path, help="a run directory, such as runs/demo"
    )
    output(parser, "PNG", "default: loss.png in the run directory", "loss.png")
