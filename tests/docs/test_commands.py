"""Every command of meshwright that a page or a help text prints is one that there is,
and its configuration fits it.

The pages of docs/tasks are run as they stand by test_tasks.py. What stands elsewhere is read by the
real parser, its configuration loaded with the words that follow, and laid out on the ranks that it
asks for.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.config import load, resolve
from meshwright.mesh import Grid, check_placement, nodes_of
from meshwright_launch.arguments import build_parser
from meshwright_launch.cli import main, split_overrides

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").rglob("*.md"))
START = re.compile(r"^\s*(?:\$ )?((?:meshwright|torchrun|srun) [a-z-].*)$")
LAUNCHER = re.compile(r"^(?:torchrun (?:--\S+ )*-m meshwright_launch|srun (?:--\S+ )*meshwright) ")
CONTINUED = re.compile(r"\s*\\\n\s*")
REMARK = re.compile(r"\s{2,}\S.*$")
REFUSED = {
    (
        "meshwright mesh configs/llama3-8b.toml --parallel.tp=4 --parallel.dp=4 --nodes 8"
        " --devices-per-node 2"
    ),
    "meshwright plan configs/llama3-405b.toml --cluster h100 --nodes 1",
}
"""Shown because they are refused, beside what they say."""


def printed() -> Iterator[tuple[str, str]]:
    """(where, command), one for each."""
    for page in PAGES:
        lines = CONTINUED.sub(" ", page.read_text()).splitlines()
        for line in lines:
            if found := START.match(line):
                yield page.relative_to(ROOT).as_posix(), cleaned(found[1])
    for parser in parsers(build_parser()):
        shown = (parser.epilog or "").partition("example:\n")[2]
        for line in CONTINUED.sub(" ", shown).splitlines():
            if found := START.match(line):
                yield f"{parser.prog} --help", cleaned(found[1])


def cleaned(command: str) -> str:
    """Without the launcher before it, and the remark behind."""
    words = shlex.split(REMARK.sub("", LAUNCHER.sub("meshwright ", command)), comments=True)
    return shlex.join(words)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        for inner in (
            action.choices.values() if isinstance(action, argparse._SubParsersAction) else ()
        ):
            yield inner
            yield from parsers(inner)


COMMANDS = sorted({(where, command) for where, command in printed()})


def test_pages_are_read() -> None:
    assert len(COMMANDS) > 100 and {where for where, _ in COMMANDS} > {
        "README.md",
        "docs/use.md",
        "docs/cluster.md",
    }


@pytest.mark.parametrize(("where", "command"), COMMANDS, ids=lambda text: text)
def test_each_is_one_that_there_is(
    where: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words, overrides = split_overrides(shlex.split(command)[1:])
    try:
        options, unknown = build_parser().parse_known_args(words)
    except SystemExit:
        pytest.fail(f"{where}: {command} does not parse")
    assert not unknown and (not overrides or options.takes_overrides), (
        f"{where}: {command}: {unknown}"
    )
    file = getattr(options, "config", None)
    if file is None or not Path(file).is_file() or command in REFUSED:
        return
    config = load(file, overrides)
    nodes, per_node = getattr(options, "nodes", None), getattr(options, "devices_per_node", None)
    if options.command == "slurm":
        resolved = resolve(config, nodes * per_node)
        parallel = resolved.parallel
        assert isinstance(parallel.dp, int)
        grid = Grid(pp=parallel.pp, dp=parallel.dp, tp=parallel.tp)
        check_placement(grid, nodes_of(nodes, per_node), tp_across_nodes=parallel.tp_across_nodes)
    elif options.command == "mesh":
        assert main(shlex.split(command)[1:]) == 0, f"{where}: {command}"
    elif options.command != "plan":
        resolve(config)


def test_what_is_refused_is_still_printed() -> None:
    assert {command for _, command in COMMANDS} >= REFUSED
