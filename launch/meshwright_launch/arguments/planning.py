"""Commands before a run: write its configuration, and draw the placement of its ranks."""

from __future__ import annotations

from pathlib import Path

from meshwright_launch.arguments.common import (
    Added,
    command,
    config_file,
    nodes_of_job,
    rank_count,
    trust_code,
)


def init(added: Added) -> None:
    parser = command(
        added,
        "init",
        "init:init",
        "write a small complete configuration, and the corpus that it trains on",
        "Writes a commented TOML file that `meshwright train` runs as it is, on one CPU or on all"
        " GPUs of the machine, and prepares its corpus in runs/data: the text files named with"
        " --text, or Python's own source text. An existing file is never overwritten.",
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
    parser.add_argument(
        "--model", choices=("gpt2", "llama", "t5"), default="gpt2", help="default: gpt2"
    )
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        metavar="PATH",
        help=(
            "text files, or folders of them (default: the source text of Python's standard library)"
        ),
    )


def layouts(added: Added) -> None:
    parser = command(
        added,
        "layouts",
        "layouts:layouts",
        "list the layouts that a model can have, and why not the others",
        "Needs no GPU and no cluster: the model is built on the meta device, and each degree and"
        " each word of a layout is tried as a launch tries it. Each refusal has its code and its"
        " reason. With --layout: says of these layouts alone whether they are possible; exit code 1"
        " if one is not.",
        "meshwright layouts configs/demo.toml\n"
        "  meshwright layouts configs/moe-demo.toml --ranks 16\n"
        "  meshwright layouts configs/demo.toml --layout dp2,pp2,tp2,sequence,zb_v",
    )
    config_file(parser)
    trust_code(parser)
    parser.add_argument(
        "--ranks",
        type=rank_count,
        metavar="N",
        help="number of ranks (default: that of the configuration)",
    )
    parser.add_argument(
        "--layout",
        nargs="+",
        metavar="WORDS",
        help="layouts to try, such as dp2,pp2,zb_v: the words of `meshwright verify --layouts`",
    )


def mesh(added: Added) -> None:
    parser = command(
        added,
        "mesh",
        "mesh:mesh",
        "draw the placement of ranks on nodes",
        "Needs no GPU, no torch and no cluster. A tensor-parallel group that straddles nodes is an"
        " error.",
        "meshwright mesh configs/llama3-70b.toml --nodes 4 --devices-per-node 8",
    )
    config_file(parser)
    nodes_of_job(parser)
