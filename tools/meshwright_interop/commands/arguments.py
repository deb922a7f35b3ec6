"""Parsers of the commands that exchange configurations,
checkpoints and models with other frameworks.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from meshwright_launch.arguments.common import (
    Added,
    RunsInstead,
    command,
    count,
    output,
    parse_count_from_0,
    place,
    rank_count,
    run_or_checkpoint,
    size,
)


def import_config(added: Added) -> None:
    imported = command(
        added,
        "import",
        "meshwright_interop.commands.configs:import_config",
        "convert a configuration of torchtitan, nanotron, Megatron-LM or -Bridge",
        "Reads torchtitan's TOML and JSON, nanotron's YAML, Megatron-Bridge's run_config.yaml,"
        " Megatron-LM's flags in a model_config.yaml or a text file: a list, or a printed command"
        " line. Prints all decisions, each value that is left to be set, and each key that was not"
        " carried over, with the reason. A key that changes the training and has no counterpart is"
        " an error. meshwright's keys on the command line win over the file. Without --out the file"
        " goes to stdout.",
        "meshwright config import llama3_8b.toml --from torchtitan --ranks 64 --out"
        " configs/imported.toml",
        takes_overrides=True,
    )
    imported.add_argument(
        "file", metavar="FILE", type=Path, help="a .toml, .json or .yaml, or a text file with flags"
    )
    imported.add_argument(
        "--from",
        choices=("torchtitan", "nanotron", "megatron", "bridge"),
        help="source framework (default: by the suffix and the sections of FILE)",
    )
    imported.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="KEY",
        help="key of FILE to leave out instead of refusing it",
    )
    imported.add_argument(
        "--ranks", type=rank_count, metavar="N", help="ranks of the whole job, if the file lacks dp"
    )
    output(imported, "FILE", "TOML file to write (default: stdout)", "imported.toml")
    imported.add_argument("--replace", action="store_true", help="overwrite an existing file")


def export(added: Added) -> None:
    parser = command(
        added,
        "export",
        "meshwright_interop.commands.export:export",
        "write a checkpoint in PyTorch's DCP format",
        "Writes the weights of the newest checkpoint of a run, or of the one of --step, under the"
        " model's own names, as torchtitan does; torch.distributed.checkpoint.load reads them into"
        " the plain model. One tensor is in memory at a time. Such files hold pickles and are never"
        " read here: there is no import.",
        "meshwright checkpoint export runs/demo --out exported/demo",
    )
    output(parser, "DIR", "the new directory", "exported", is_folder=True, is_required=True)
    parser.add_argument(
        "--weights",
        default="weights",
        metavar="KIND",
        help="tensors to export: weights, master, or a callback's ema",
    )
    run_or_checkpoint(parser, has_step=True)


def convert(added: Added) -> None:
    parser = command(
        added,
        "convert",
        "meshwright_interop.commands.conversion:run_conversion",
        "import or export a model in Hugging Face format",
        "GPT-2, Llama 2 and 3, Mistral, Qwen2, Qwen3, Mixtral, OLMoE, Qwen3-MoE, DeepSeek-V3, T5,"
        " and peft adapters. --from writes a new run directory for `meshwright train`, on any"
        " layout, and `meshwright sample`; configuration keys may follow. --to exports the newest"
        " checkpoint of a run, or the one of --step, for transformers, vLLM and lm-eval, also of a"
        " run of an hf: model. Converts one tensor at a time, bit for bit in both directions; needs"
        " no network, and unpickles nothing.",
        "meshwright convert --from hf models/Llama-3.1-8B runs/llama"
        " --data.train=runs/data/mine/train\n  meshwright train runs/llama/config.toml"
        " --parallel.tp=8\n  meshwright convert runs/llama --to hf models/mine --dtype bfloat16",
        takes_overrides=True,
    )
    parser.add_argument(
        "place",
        type=place,
        metavar="RUN",
        help=(
            "with --from the new run directory; with --to a run or one of its checkpoints/step-*, or"
            " either in an object store"
        ),
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--from", dest="source", nargs=2, metavar=("hf|peft", "PATH"), help="a directory to read"
    )
    direction.add_argument(
        "--to",
        dest="target",
        nargs=2,
        metavar=("hf|peft", "PATH"),
        help="a directory to write (peft: adapters only)",
    )
    parser.add_argument(
        "--base",
        type=place,
        metavar="RUN",
        help=(
            "with --from peft: a run of a model of meshwright's, such as an import, whose linears"
            " get the adapters"
        ),
    )
    _export_options(parser)
    parser.usage = (
        f"{parser.prog} (--from hf PATH RUN | RUN --to hf PATH) [options] [--section.key=value ...]"
    )


def _export_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only an export has."""
    parser.add_argument(
        "--step",
        type=parse_count_from_0,
        metavar="N",
        help="with --to: the checkpoint of this step",
    )
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        help=(
            "with --to: dtype of the tensors (default: as saved; float32 of a bfloat16 run: its"
            " master weights)"
        ),
    )
    parser.add_argument(
        "--shard-size",
        type=size,
        metavar="SIZE",
        help="with --to: maximal size of a file, such as 500MB or 2GiB (default: 5GB)",
    )
    parser.add_argument(
        "--merge", action="store_true", help="with --to hf: add a run's adapters to its weights"
    )


def tasks_of_eval(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``meshwright eval --tasks``."""
    group = parser.add_argument_group("tasks of lm-evaluation-harness, in place of the loss")
    run = "meshwright_interop.commands.tasks:evaluate_tasks"
    of_tasks = partial(group.add_argument, action=RunsInstead, run=run)
    of_tasks(
        "--tasks",
        type=_names,
        metavar="T[,T]",
        help="names of tasks or groups, such as arc_easy,hellaswag",
    )
    of_tasks(
        "--task-folder",
        type=Path,
        metavar="DIR",
        help="tasks of your own; the files may name functions, which are imported",
    )
    of_tasks(
        "--shots",
        type=parse_count_from_0,
        metavar="N",
        help="examples before each question (default: the task's)",
    )
    of_tasks("--questions", type=count, metavar="N", help="questions of each task (default: all)")
    of_tasks(
        "--chat-template",
        metavar="NAME",
        help=(
            "write the prompts with a chat template: `tokenizer`, for the one beside the run's"
            " tokenizer, or a .jinja file"
        ),
    )
    of_tasks("--system", metavar="TEXT", help="system message, or text before each prompt")
    of_tasks(
        "--shots-as",
        choices=("turns", "text"),
        help=(
            "with a chat template: examples as turns of user and assistant (the default), or in"
            " one message with the question"
        ),
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError("name a task, such as arc_easy")
    return names
