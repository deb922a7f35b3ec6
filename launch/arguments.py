"""The words of the command line: every command with its options, its help and an example."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from framework.versions import own_version
from launch import commands, data, jobs

WIDTH = 100

Command = Callable[[argparse.Namespace, list[str]], int]


def build_parser() -> argparse.ArgumentParser:
    """All commands, each with an example."""
    parser = argparse.ArgumentParser(
        prog="meshwright",
        description="3D-parallel training of transformers: one model, any layout, the same numbers.",
        epilog="`meshwright COMMAND --help` tells more of each, with an example; docs/tasks has a page for each task.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"meshwright {own_version()}")
    added = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)

    train = _command(
        added,
        "train",
        jobs.train,
        "train, or go on where the same command stopped",
        "Starts the ranks of this machine by itself; under torchrun or srun it is one of their ranks. Any key of the "
        "configuration can be given after the file. The same command again resumes.",
        "meshwright train configs/demo.toml --parallel.tp=4 --parallel.pp=1\n"
        "  torchrun --nproc-per-node=8 -m launch train configs/demo.toml\n"
        "  srun --ntasks-per-node=8 meshwright train configs/demo.toml",
        takes_overrides=True,
    )
    _config(train)

    mesh = _command(
        added,
        "mesh",
        commands.mesh,
        "draw where the ranks stand on nodes",
        "Needs no GPU, no torch and no cluster: for planning. Refuses a tensor-parallel group that straddles nodes.",
        "meshwright mesh configs/llama3-70b.toml --nodes 4 --devices-per-node 8",
        takes_overrides=True,
    )
    _config(mesh)
    mesh.add_argument("--nodes", type=_count, metavar="N", help="number of nodes (default: what the degrees need)")
    mesh.add_argument("--devices-per-node", type=_count, default=8, metavar="M", help="ranks on each (default: 8)")

    doctor = _command(
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
    _config(doctor)

    slurm = _command(
        added,
        "slurm",
        jobs.slurm,
        "write a job script for Slurm, and submit it",
        "Into the run's directory, for srun with one task for each rank; print it, or submit it with --submit. The job "
        "is told to save before its time ends, goes back into the queue by itself, and gives up when it gets no "
        "further. Degrees that do not fill the nodes are refused here and not after hours in the queue.",
        "meshwright slurm configs/llama3-8b.toml --nodes 4 --devices-per-node 8 --time 4:00:00 --submit",
        takes_overrides=True,
    )
    _config(slurm)
    slurm.add_argument("--nodes", type=_count, required=True, metavar="N")
    slurm.add_argument("--devices-per-node", type=_count, required=True, metavar="M", help="ranks on each")
    slurm.add_argument("--time", metavar="T", help="as sbatch has it: minutes, h:mm:ss, days-hours")
    for name in ("partition", "account", "qos", "constraint", "exclude"):
        slurm.add_argument(f"--{name}", metavar="TEXT", help=f"for sbatch's --{name}")
    slurm.add_argument("--cpus-per-task", type=_count, metavar="N", help="for sbatch's --cpus-per-task")
    slurm.add_argument("--container", metavar="IMAGE", help="run the ranks in it, where Slurm has pyxis")
    slurm.add_argument("--mounts", metavar="LIST", help="of the container (default: this directory and the runs)")
    slurm.add_argument("--torchrun", action="store_true", help="one torchrun on each node instead of a task per rank")
    slurm.add_argument(
        "--doctor", action="store_true", help="look at nodes and links before each start, and leave bad nodes out"
    )
    slurm.add_argument("--no-requeue", dest="requeue", action="store_false", help="never back into the queue by itself")
    slurm.add_argument(
        "--chain", type=_count, default=1, metavar="N", help="submit N jobs of which one runs at a time (default: 1)"
    )
    slurm.add_argument("--submit", action="store_true", help="call sbatch")

    draw = _command(
        added,
        "draw",
        commands.draw,
        "draw a schedule, or where the time of a run went",
        "Of a configuration: who computes what when, the bubble and the activations in flight, in ticks and without "
        "torch; with --out or --format also as SVG, PNG and a trace for ui.perfetto.dev. Of a run: the step that was "
        "traced, over its simulation, and per rank how long it computed, waited and communicated.",
        "meshwright draw configs/demo.toml --parallel.pp=4 --batch.chunks=8 --costs f=1,b=2,comm=0.1 --out pictures\n"
        "  meshwright draw runs/demo",
        takes_overrides=True,
    )
    draw.add_argument(
        "drawn", metavar="CONFIG|RUN", help="a TOML file, a run directory, or one of its traces/step-*.json"
    )
    draw.usage = f"{draw.prog} CONFIG|RUN [options] [--section.key=value ...]"
    draw.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write files (default: for a run its traces/, for a CONFIG with --format here)",
    )
    draw.add_argument("--format", metavar="LIST", help="of text, svg, png, trace, with commas between (default: all)")
    draw.add_argument(
        "--costs",
        metavar="LIST",
        help="of f, b, i, w, comm, reduce, step (default: f=1,b=2,i=1,w=1 and 0 for the rest)",
    )

    stages = _command(
        added,
        "stages",
        commands.stages,
        "tell what each layer costs and how even the stages are",
        "Counts FLOPs and bytes of every layer on the meta device: any size in seconds, without GPU, data or memory. "
        "Then the stages, and how far each pipeline.balance is from equal ones.",
        "meshwright stages configs/llama3-405b.toml --parallel.pp=8",
        takes_overrides=True,
    )
    _config(stages)

    plan = _command(
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
    _config(plan)
    plan.add_argument(
        "--cluster", required=True, metavar="NAME|FILE", help="a100, h100, h200, b200, or a TOML file (see calibrate)"
    )
    plan.add_argument("--nodes", type=_count, required=True, metavar="N")
    plan.add_argument("--devices-per-node", type=_count, metavar="M", help="default: what the hardware's file says")
    plan.add_argument("--global-batch", type=_count, metavar="N", help="samples of a step (default: the config's)")
    plan.add_argument("--best", type=_count, metavar="N", help="how many layouts to list (default: 10)")
    plan.add_argument("--out", type=Path, metavar="DIR", help="where to write plan.toml and plan.html")

    calibrate = _command(
        added,
        "calibrate",
        commands.calibrate,
        "measure this machine, for plan --cluster",
        "Products, copies, the cost of an operation and the links between processes, measured with all cores busy; "
        "written as a hardware file.",
        "meshwright calibrate --out runs/this-machine.toml",
    )
    calibrate.add_argument("--out", type=Path, required=True, metavar="FILE", help="a TOML file")
    calibrate.add_argument("--ranks", type=_count, default=8, metavar="N", help="that a node is to have (default: 8)")

    dryrun = _command(
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
    _config(dryrun)
    dryrun.add_argument("--nodes", type=_count, metavar="N", help="number of nodes (default: what the degrees need)")
    dryrun.add_argument("--devices-per-node", type=_count, default=8, metavar="M", help="ranks on each (default: 8)")
    dryrun.add_argument(
        "--seed-fault",
        action="append",
        metavar="FAULT",
        help="schedule:RANK=NAME: this rank runs another schedule; missing:AXIS:RANK: the others of its group do not "
        "know this rank. May be given several times",
    )
    dryrun.add_argument("--out", type=Path, metavar="FILE", help="a picture: .svg, .png or .pdf")
    dryrun.add_argument(
        "--cluster", metavar="NAME|FILE", help="whose device tells seconds and MFU (default: h100, for a run on GPUs)"
    )

    verify = _command(
        added,
        "verify",
        commands.verify,
        "prove that layouts give the numbers of one process",
        "Trains the model in one plain process and in each layout, in float64, and compares losses, gradients and "
        "weights. Exit code 1 when a bar is missed.",
        "meshwright verify configs/demo.toml --layouts dp2,pp2,tp2 pp4,gpipe tp2,sequence",
        takes_overrides=True,
    )
    _config(verify)
    verify.add_argument(
        "--layouts", nargs="+", metavar="LAYOUT", help="such as dp2,pp2,tp2 (default: the file's own and a spread)"
    )
    verify.add_argument("--steps", type=_count, default=10, metavar="N", help="optimizer steps (default: 10)")
    verify.add_argument("--whole", action="store_true", help="the model at its full size; otherwise it is shrunk")

    of_data = _command(
        added,
        "data",
        None,
        "turn text into tokens, and look at them",
        "Writes Megatron .bin/.idx pairs, split by document: `prepare` with a tokenizer that exists, from text, JSONL "
        "and parquet of any size; `stdlib` and `files` train a byte-level BPE tokenizer first. `show` prints what is "
        "there.",
        "meshwright data prepare pages/*.jsonl.gz --tokenizer ~/models/llama-3.1-8b --out data/pages\n"
        "  meshwright data show data/pages",
    )
    _data_commands(of_data)

    config = _command(
        added,
        "config",
        None,
        "read another framework's configuration; show what one of ours means",
        "Without torch, a device or the data.",
        "meshwright config show configs/demo.toml",
    )
    _config_commands(config)

    checkpoint = _command(
        added,
        "checkpoint",
        None,
        "what a run has saved, and whether it is sound",
        "Reads checkpoints of any layout without starting a rank, and changes none.",
        "meshwright checkpoint verify runs/demo",
    )
    _checkpoint_commands(checkpoint)

    convert = _command(
        added,
        "convert",
        commands.convert,
        "bring a model of Hugging Face's form, or take one away in it",
        "GPT-2, Llama (2, 3, 3.1), Mistral, Qwen2, Qwen3 and T5. --from writes a new run directory, which `meshwright "
        "train` fine-tunes from these weights on any layout, and `meshwright sample` writes with; keys of the "
        "configuration may follow. --to writes the newest checkpoint of a run, or that of --step, as transformers, "
        "vLLM and lm-eval open it. One tensor at a time, the same bits both ways; no network, nothing is unpickled.",
        "meshwright convert --from hf models/Llama-3.1-8B runs/llama --data.train=runs/data/mine/train\n"
        "  meshwright train runs/llama/config.toml --parallel.tp=8\n"
        "  meshwright convert runs/llama --to hf models/mine --dtype bfloat16",
        takes_overrides=True,
    )
    convert.add_argument(
        "place",
        type=Path,
        metavar="RUN",
        help="the run directory to be written; with --to a run, or a checkpoints/step-*",
    )
    direction = convert.add_mutually_exclusive_group(required=True)
    direction.add_argument("--from", dest="source", nargs=2, metavar=("hf", "PATH"), help="a directory to read")
    direction.add_argument("--to", dest="target", nargs=2, metavar=("hf", "PATH"), help="a directory to be written")
    convert.add_argument("--step", type=_whole, metavar="N", help="with --to: the checkpoint of this step")
    convert.add_argument(
        "--dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        help="with --to: of the tensors (default: as saved; float32 of a bfloat16 run: its master weights)",
    )
    convert.add_argument(
        "--shard-size", type=_bytes, metavar="SIZE", help="with --to: of a file, as in 500MB or 2GiB (default: 5GB)"
    )
    convert.usage = f"{convert.prog} (--from hf PATH RUN | RUN --to hf PATH) [options] [--section.key=value ...]"

    status = _command(
        added,
        "status",
        commands.status,
        "where a run stands: its step, the time left, what each rank does",
        "Reads what the run's first rank writes down every few seconds, from any machine that sees the run's "
        "directory: no torch, and nothing is asked of the run itself.",
        "meshwright status runs/demo",
    )
    status.add_argument("directory", metavar="RUN", type=Path, help="a run directory, such as runs/demo")

    evaluated = _command(
        added,
        "eval",
        jobs.evaluate,
        "measure a trained model: loss, perplexity, bits per byte",
        "On the run's validation set, or another corpus, whole and in order; on the layout of the run or, with "
        "parallel.* keys, on any other: the same numbers. Ranks are started as `train` starts them. The run may go on "
        "meanwhile: the newest sound checkpoint is taken, and none is written into.",
        "meshwright eval runs/demo --parallel.tp=2 --parallel.pp=1 --parallel.dp=1\n"
        "  meshwright eval runs/demo --step 40 --data runs/data/other --out demo-40.json\n"
        "  torchrun --nproc-per-node=8 -m launch eval runs/demo",
        takes_overrides=True,
    )
    evaluated.add_argument(
        "--data", type=Path, metavar="DIR", help="a prepared corpus: its folder, or DIR/NAME of a pair"
    )
    evaluated.add_argument("--batches", type=_count, metavar="N", help="global batches to look at (default: all)")
    evaluated.add_argument("--out", type=Path, metavar="FILE", help="where to write the result as JSON")

    sample = _command(
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
    sample.add_argument(
        "--prompt", required=True, action="append", metavar="TEXT", help="what it should continue; may be given again"
    )
    sample.add_argument("--tokens", type=_count, default=100, metavar="N", help="tokens to write (default: 100)")
    sample.add_argument(
        "--temperature", type=_temperature, default=0.8, metavar="T", help="0: always the likeliest (default: 0.8)"
    )
    sample.add_argument(
        "--top-k", type=_whole, default=40, metavar="K", help="choose of so many likeliest; 0: of all (default: 40)"
    )
    sample.add_argument(
        "--top-p", type=_share, default=1.0, metavar="P", help="of those that together have this share (default: 1)"
    )
    sample.add_argument("--seed", type=_whole, metavar="N", help="of the draws (default: the run's)")
    sample.add_argument("--out", type=Path, metavar="FILE", help="where to write the texts as JSON lines")
    for parser_ in (evaluated, sample):
        parser_.add_argument(
            "place", metavar="RUN", type=Path, help="a run directory, or one of its checkpoints/step-*"
        )
        parser_.add_argument(
            "--step", type=_whole, metavar="N", help="the checkpoint of this step (default: the newest)"
        )
        parser_.usage = f"{parser_.prog} RUN [options] [--section.key=value ...]"

    report = _command(
        added,
        "report",
        commands.report,
        "a page for a run, or several side by side",
        "One HTML file that needs no network: curves, where the time went, the schedule simulated and measured, where "
        "the ranks stand, starts and checkpoints, the configuration; of several runs also their curves over each "
        "other, their figures and what differs in their configurations. Of a run that goes on, too. No torch.",
        "meshwright report runs/demo\n  meshwright report runs/demo runs/deep --out compared.html",
    )
    report.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories, such as runs/demo")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="default: report.html in the run directory, of several runs here"
    )

    plot = _command(
        added,
        "plot",
        commands.plot,
        "draw the loss curve of a run",
        "Reads metrics.jsonl and writes a PNG beside it.",
        "meshwright plot runs/demo",
    )
    plot.add_argument("directory", metavar="RUN", type=Path, help="a run directory, such as runs/demo")
    plot.add_argument("--out", type=Path, metavar="PNG", help="default: loss.png in the run directory")

    completion = _command(
        added,
        "completion",
        commands.completion,
        "a script with which a shell completes commands, options and keys",
        "For bash, zsh or fish: commands, options, files, and the keys of the configuration with the words they allow. "
        "Evaluate it when the shell starts, as in the example (fish: meshwright completion fish | source).",
        "meshwright completion bash\n  echo 'eval \"$(meshwright completion bash)\"' >> ~/.bashrc",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def _command(
    added: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Command | None,
    summary: str,
    description: str,
    example: str,
    *,
    takes_overrides: bool = False,
) -> argparse.ArgumentParser:
    parser = added.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, WIDTH),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, takes_overrides=takes_overrides)
    return parser


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, such as configs/demo.toml")
    parser.usage = f"{parser.prog} CONFIG [options] [--section.key=value ...]"


def _data_commands(of_data: argparse.ArgumentParser) -> None:
    sources = of_data.add_subparsers(title="commands", dest="source", metavar="WHAT", required=True)
    _data_prepare(sources)
    _data_show(sources)
    stdlib = _command(
        sources,
        "stdlib",
        commands.data_stdlib,
        "the source text of this Python's own library: no download",
        "Prepares the .py files of the running Python's standard library.",
        "meshwright data stdlib --out runs/data/stdlib --vocab-size 4096",
    )
    files = _command(
        sources,
        "files",
        commands.data_files,
        "text files and folders of them",
        "A document per file; a folder stands for all files below it.",
        "meshwright data files notes/ book.txt --out runs/data/notes --vocab-size 8192",
    )
    files.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="text files, or folders of them")
    for parser in (stdlib, files):
        parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the corpus is written")
        parser.add_argument("--vocab-size", type=_count, default=4096, metavar="N", help="default: 4096")
        parser.add_argument(
            "--validation-share", type=float, default=0.05, metavar="X", help="of the documents (default: 0.05)"
        )
        parser.add_argument("--replace", action="store_true", help="build anew over a corpus of other text or settings")


def _config_commands(config: argparse.ArgumentParser) -> None:
    commands_of = config.add_subparsers(title="commands", dest="what", metavar="WHAT", required=True)
    imported = _command(
        commands_of,
        "import",
        commands.config_import,
        "one of torchtitan, nanotron or Megatron-LM as one of ours",
        "Reads torchtitan's TOML (job_config), nanotron's YAML, and Megatron-LM's flags, in a shell script (which is "
        "not run) or as they stand. Says what was decided, and each key that could not come along, with the reason. "
        "Keys of ours on the command line go on top. Without --out the file goes to stdout.",
        "meshwright config import llama3_8b.toml --from torchtitan --ranks 64 --out configs/imported.toml",
        takes_overrides=True,
    )
    imported.add_argument("file", metavar="FILE", type=Path, help="a .toml, a .yaml, or a script or list of flags")
    imported.add_argument(
        "--from", choices=("torchtitan", "nanotron", "megatron"), help="whose it is (default: by the end of its name)"
    )
    imported.add_argument("--ranks", type=_count, metavar="N", help="of the whole job, where the file leaves dp open")
    imported.add_argument("--out", type=Path, metavar="FILE", help="a TOML file (default: on stdout)")
    imported.add_argument("--replace", action="store_true", help="write over a file that is there")
    shown = _command(
        commands_of,
        "show",
        commands.config_show,
        "what a configuration comes to, and where each value comes from",
        "The file, the command line, a default, or what follows from the others for so many ranks.",
        "meshwright config show configs/demo.toml --parallel.tp=4 --parallel.pp=1",
        takes_overrides=True,
    )
    _config(shown)
    shown.add_argument("--ranks", type=_count, metavar="N", help="that would run it (default: what the degrees say)")
    shown.add_argument("--all", action="store_true", help="also what stands at its default")


def _data_prepare(sources: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    prepared = _command(
        sources,
        "prepare",
        data.prepare,
        "text, JSONL and parquet of any size, with any tokenizer.json",
        "Reads files in their order (folders: all files below, sorted), encodes in parallel and writes "
        "train, validation and test as Megatron .bin/.idx pairs, each document in one of them. Killed at any moment, "
        "the same command goes on, and the result is byte for byte the same, for any number of workers.",
        "meshwright data prepare books/ pages.jsonl.gz --tokenizer ~/models/gpt2 --out data/books\n"
        "  meshwright data prepare crawl/*.parquet --text-key content --tokenizer tok/tokenizer.json --eod '</s>' \\\n"
        "      --validation-share 0.001 --test-share 0.001 --workers 32 --out data/crawl\n"
        "  meshwright data prepare chats.jsonl --format messages --tokenizer ~/models/qwen3-0.6b --out data/chats",
    )
    prepared.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="SOURCE",
        help=".jsonl (also .gz): a document per line; .parquet: per row; a folder; any other file: one text",
    )
    prepared.add_argument(
        "--tokenizer", type=Path, required=True, metavar="T", help="a tokenizer.json, or the folder of one"
    )
    prepared.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the corpus is written")
    prepared.add_argument(
        "--format",
        choices=["text", "pairs", "messages"],
        default="text",
        help="pairs (prompt, response) and messages (role, content) train on responses only (default: text)",
    )
    prepared.add_argument("--text-key", default="text", metavar="KEY", help="of JSONL and parquet (default: text)")
    prepared.add_argument(
        "--glob", action="append", default=[], metavar="PATTERN", help="of folders only such files; several times"
    )
    prepared.add_argument(
        "--eod", metavar="TOKEN", help="ends a document (default: eos_token of tokenizer_config.json, or a usual one)"
    )
    prepared.add_argument("--bos", metavar="TOKEN", help="stands before each document (default: nothing does)")
    for name, default in (("validation", 0.05), ("test", 0.0)):
        prepared.add_argument(
            f"--{name}-share", type=float, default=default, metavar="X", help=f"of the documents (default: {default})"
        )
    prepared.add_argument("--seed", type=int, default=1234, metavar="N", help="of the split (default: 1234)")
    prepared.add_argument("--workers", type=_count, default=0, metavar="N", help="processes (default: one per core)")
    prepared.add_argument(
        "--skip-broken", action="store_true", help="leave out broken records, count them and list them in skipped.txt"
    )
    prepared.add_argument("--replace", action="store_true", help="build anew over a corpus of other text or settings")


def _data_show(sources: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    shown = _command(
        sources,
        "show",
        data.show,
        "samples of a corpus as text, with counts",
        "Prints what a model would be trained on: where documents begin, and dimmed (in a file: in braces) what does "
        "not count as label. Damaged files are named. Reads a few tokens of a corpus of any size.",
        "meshwright data show data/chats --samples 5\n"
        "  meshwright data show data/pages/validation --sequence-length 512 --packing documents",
    )
    shown.add_argument("place", type=Path, metavar="DIR", help="a prepared folder, or one .bin/.idx without its suffix")
    shown.add_argument("--samples", type=_count, default=3, metavar="N", help="of each split (default: 3)")
    shown.add_argument("--sequence-length", type=_count, default=256, metavar="S", help="tokens (default: 256)")
    shown.add_argument("--packing", choices=["stream", "documents"], default="stream", help="as data.packing has it")
    shown.add_argument("--tokenizer", type=Path, metavar="T", help="default: the tokenizer.json beside the corpus")


def _checkpoint_commands(checkpoint: argparse.ArgumentParser) -> None:
    commands_of = checkpoint.add_subparsers(title="commands", dest="what", metavar="WHAT", required=True)
    listed = _command(
        commands_of,
        "list",
        commands.checkpoint_list,
        "a line for each",
        "Step, samples seen, the layout that saved it, tensors, files, bytes. What is missing or cut short is named; "
        "every byte is read by `verify`.",
        "meshwright checkpoint list runs/demo",
    )
    verified = _command(
        commands_of,
        "verify",
        commands.checkpoint_verify,
        "read every byte and hold it against its hash",
        "All checkpoints of a run, or one. Exit code 1 when a file is not what was written.",
        "meshwright checkpoint verify runs/demo --step 160",
    )
    shown = _command(
        commands_of,
        "show",
        commands.checkpoint_show,
        "what is in one",
        "The newest of a run, or that of --step: what it is of, and its tensors.",
        "meshwright checkpoint show runs/demo --tensor embedding.token.weight",
    )
    shown.add_argument("--tensor", metavar="NAME", help="only this parameter, with its pieces and their files")
    resharded = _command(
        commands_of,
        "reshard",
        commands.checkpoint_reshard,
        "rewrite one as another layout would have saved it",
        "Reads the newest checkpoint of a run, or that of --step, and writes it into another run directory, which "
        "`meshwright train` goes on from: a file or more for each rank of the new layout, or one in all. Any layout "
        "reads any checkpoint without it. Only parallel.*, pipeline.*, run.name and run.directory may change.",
        "meshwright checkpoint reshard runs/demo --out runs/one-file --parallel.pp=1 --parallel.tp=1",
        takes_overrides=True,
    )
    resharded.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run directory to be written")
    for parser in (listed, verified, shown, resharded):
        parser.add_argument("place", type=Path, metavar="RUN", help="a run directory, or one of its checkpoints/step-*")
        if parser is not listed:
            parser.add_argument("--step", type=_whole, metavar="N", help="the checkpoint of this step")


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return number


def _whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is not a whole number from 0 up")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0.0 < number <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return number


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    size = 0
    if found:
        base = 1024 if found[3] else 1000
        size = int(float(found[1]) * base ** " kmgt".index(found[2] or " "))
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: as in 500MB, 5GB or 2GiB")
    return size


def _temperature(text: str) -> float:
    number = float(text)
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up")
    return number
