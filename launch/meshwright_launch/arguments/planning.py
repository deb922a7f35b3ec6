"""Commands before a run: write its configuration, and draw the placement of its ranks."""

from __future__ import annotations

from pathlib import Path

from meshwright_launch.arguments.common import Added, command, config_file, nodes_of_job


def init(added: Added) -> None:
    parser = command(
        added,
        "init",
        "init:init",
        "write a small complete configuration, and the corpus that it trains on",
        "Writes a commented TOML file that `meshwright train` runs as it is, on one CPU or on all GPUs of the machine, "
        "and prepares its corpus in runs/data: the text files named with --text, or Python's own source text. An "
        "existing file is never overwritten.",
        "meshwright init\n"
        "  meshwright train first.toml\n"
        "  meshwright init mine.toml --model llama --text notes/ book.txt",
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=Path("first.toml"),
        metavar="FILE",
        help="the new file; the run gets its name (default: first.toml)",
    )
    parser.add_argument("--model", choices=("gpt2", "llama", "t5"), default="gpt2", help="default: gpt2")
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="text files, or folders of them (default: the source text of Python's standard library)",
    )


def mesh(added: Added) -> None:
    parser = command(
        added,
        "mesh",
        "mesh:mesh",
        "draw the placement of ranks on nodes",
        "Needs no GPU, no torch and no cluster. A tensor-parallel group that straddles nodes is an error.",
        "meshwright mesh configs/llama3-70b.toml --nodes 4 --devices-per-node 8",
    )
    config_file(parser)
    nodes_of_job(parser)
