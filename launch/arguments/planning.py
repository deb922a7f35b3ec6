"""Commands that describe or predict a run before it starts, without its ranks or devices."""

from __future__ import annotations

from pathlib import Path

from meshwright.launch import commands
from meshwright.launch.arguments.common import Added, command, config_file, count, trust_code


def mesh(added: Added) -> None:
    parser = command(
        added,
        "mesh",
        commands.mesh,
        "draw where the ranks stand on nodes",
        "Needs no GPU, no torch and no cluster: for planning. Refuses a tensor-parallel group that straddles nodes.",
        "meshwright mesh configs/llama3-70b.toml --nodes 4 --devices-per-node 8",
        takes_overrides=True,
    )
    config_file(parser)
    parser.add_argument("--nodes", type=count, metavar="N", help="number of nodes (default: what the degrees need)")
    parser.add_argument("--devices-per-node", type=count, default=8, metavar="M", help="ranks on each (default: 8)")


def draw(added: Added) -> None:
    parser = command(
        added,
        "draw",
        commands.draw,
        "draw a schedule, or where the time of a run went",
        "Of a configuration: who computes what when, the bubble and the activations in flight, in ticks and without "
        "torch; with --out or --format also as SVG, PNG and a trace for ui.perfetto.dev. Of a run: the step that was "
        "traced, over its simulation, and per rank how long it computed, waited and communicated.",
        "meshwright draw configs/demo.toml --parallel.pp=4 --costs f=1,b=2,comm=0.1 --out pictures\n"
        "  meshwright draw runs/demo",
        takes_overrides=True,
    )
    parser.add_argument(
        "drawn", metavar="CONFIG|RUN", help="a TOML file, a run directory, or one of its traces/step-*.json"
    )
    parser.usage = f"{parser.prog} CONFIG|RUN [options] [--section.key=value ...]"
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write files (default: for a run its traces/, for a CONFIG with --format here)",
    )
    parser.add_argument("--format", metavar="LIST", help="of text, svg, png, trace, with commas between (default: all)")
    parser.add_argument(
        "--costs",
        metavar="LIST",
        help="of f, b, i, w, comm, reduce, step (default: f=1,b=2,i=1,w=1 and 0 for the rest)",
    )


def stages(added: Added) -> None:
    parser = command(
        added,
        "stages",
        commands.stages,
        "tell what each layer costs and how even the stages are",
        "Counts FLOPs and bytes of every layer on the meta device: any size in seconds, without GPU, data or memory. "
        "Then the stages, and how far each pipeline.balance is from equal ones.",
        "meshwright stages configs/llama3-405b.toml --parallel.pp=8",
        takes_overrides=True,
    )
    config_file(parser)
    trust_code(parser)


def plan(added: Added) -> None:
    parser = command(
        added,
        "plan",
        commands.plan,
        "find the best layout of a model on a cluster, before there is one",
        "Looks at every legal layout (degrees, schedule, micro-batch, ZeRO stage, recompute), rejects what breaks a "
        "rule or does not fit with the number, ranks the rest by predicted time and says why the first is first. Needs "
        "no GPU. With --out also plan.toml, which `meshwright train` runs, and plan.html, a page with the pictures.",
        "meshwright plan configs/llama3-70b.toml --cluster h100 --nodes 64 --out runs/plan",
        takes_overrides=True,
    )
    config_file(parser)
    parser.add_argument(
        "--cluster", required=True, metavar="NAME|FILE", help="a100, h100, h200, b200, or a TOML file (see calibrate)"
    )
    parser.add_argument("--nodes", type=count, required=True, metavar="N")
    parser.add_argument("--devices-per-node", type=count, metavar="M", help="default: what the hardware's file says")
    parser.add_argument("--global-batch", type=count, metavar="N", help="samples of a step (default: the config's)")
    parser.add_argument("--best", type=count, metavar="N", help="how many layouts to list (default: 10)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write plan.toml and plan.html")
    trust_code(parser)


def calibrate(added: Added) -> None:
    parser = command(
        added,
        "calibrate",
        commands.calibrate,
        "measure this machine, for plan --cluster",
        "Products, copies, the cost of an operation and the links between processes, measured with all cores busy; "
        "written as a hardware file.",
        "meshwright calibrate --out runs/this-machine.toml",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a TOML file")
    parser.add_argument("--ranks", type=count, default=8, metavar="N", help="that a node is to have (default: 8)")


def dryrun(added: Added) -> None:
    parser = command(
        added,
        "dryrun",
        commands.dryrun,
        "rehearse every rank of a job on paper: memory, messages, deadlocks",
        "Runs the code of each kind of rank on tensors without numbers, for a job of any size, in one process and "
        "without a device. Tells memory at the peak, FLOPs and bytes on the wire of each pipeline rank, and holds all "
        "ranks against each other: exit code 1 when they do not agree. --seed-fault shows that this can fail.",
        "meshwright dryrun configs/llama3-405b.toml --nodes 2048 --devices-per-node 8 --out 405b.svg\n"
        "  meshwright dryrun configs/demo.toml --seed-fault schedule:4=gpipe",
        takes_overrides=True,
    )
    config_file(parser)
    parser.add_argument("--nodes", type=count, metavar="N", help="number of nodes (default: what the degrees need)")
    parser.add_argument("--devices-per-node", type=count, default=8, metavar="M", help="ranks on each (default: 8)")
    parser.add_argument(
        "--seed-fault",
        action="append",
        metavar="FAULT",
        help="schedule:RANK=NAME: this rank runs another schedule; missing:AXIS:RANK: the others of its group do not "
        "know this rank. May be given several times",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="a picture: .svg, .png or .pdf")
    parser.add_argument(
        "--cluster", metavar="NAME|FILE", help="whose device tells seconds and MFU (default: h100, for a run on GPUs)"
    )
    trust_code(parser)
