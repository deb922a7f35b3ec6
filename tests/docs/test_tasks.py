"""The pages for tasks say what is so: their commands are run, in order,
and print what the pages show.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.marks import marked_rows

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "tasks"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONG = ("train-my-model.md", "move-a-checkpoint.md", "fine-tune-with-adapters.md")
"""They train for most of a minute: run by `make torture`."""
LINK = re.compile(r"\]\(([^)#:]+)(?:#([^)]+))?\)")


class Block(NamedTuple):
    """A fenced block of a page."""

    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text())]


def commands(text: str) -> list[str]:
    """Return the commands of a block; one goes on where its quotes are not closed yet."""
    found: list[str] = []
    for line in text.splitlines():
        if found and _open(found[-1]):
            found[-1] += f"\n{line}"
        elif line.strip():
            found.append(line)
    return found


def _open(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def same(text: str) -> str:
    """Return what is compared of a line: numbers and spaces do not count."""
    return re.sub(r"\d[\d.,]*", "#", " ".join(text.split()))


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A copy of what the pages name of the repository, and the commands on the path."""
    for name in ("configs", "docs", "examples", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    bin_ = tmp_path / ".bin"
    bin_.mkdir()
    for name, module in (
        ("meshwright", "-m meshwright_launch"),
        ("torchrun", "-m torch.distributed.run"),
        ("python", ""),
    ):
        (bin_ / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        (bin_ / name).chmod(0o755)
    return tmp_path


def run(command: str, desk: Path) -> str:
    """Return what a command in bash prints; it ends as the page says."""
    names = ("RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "WANDB")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    environment |= {
        "PATH": f"{desk / '.bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{desk}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    words = ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(
        words, cwd=desk, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    wanted = re.search(r"# exit code (\d+)", command)
    shown = done.stdout + done.stderr
    assert done.returncode == (int(wanted[1]) if wanted else 0), f"$ {command}\n{shown}"
    return shown


@marked_rows(
    "long",
    *("choose-a-layout.md", "come-from-elsewhere.md", "go-to-the-cluster.md", "read-a-hang.md"),
    *("start-from-weights.md", "fine-tune-on-conversations.md", "from-a-question-to-a-key.md"),
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            page.name, marks=pytest.mark.torture if page.name in LONG else pytest.mark.slow
        )
        for page in sorted(PAGES.glob("*.md"))
    ],
)
def test_what_a_page_says_is_so(name: str, desk: Path) -> None:
    shown, ran = "", 0
    for block in blocks(PAGES / name):
        if block.kind in ("python", "toml"):
            file, _ = block.text.removeprefix("# ").split("\n", 1)
            (desk / file).write_text(block.text)
        elif block.kind == "sh":
            outputs = [run(command, desk) for command in commands(block.text)]
            shown, ran = "\n".join(outputs), ran + len(outputs)
        elif block.kind == "text":
            there = same(shown)
            for line in filter(None, map(same, block.text.splitlines())):
                assert line in there, f"{name} shows {line!r}, but its commands print\n{shown}"
    assert ran


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, part in LINK.findall(page.read_text()):
        there = (page.parent / target).resolve()
        assert there.exists(), f"{page.name}: there is no {target}"
        if part:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            names = {
                re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
                for heading in headings
            }
            assert part in names, f"{page.name}: {target} has no part {part}"


def test_every_page_is_listed() -> None:
    listed = {target for target, _ in LINK.findall((PAGES / "README.md").read_text())}
    assert listed == {page.name for page in PAGES.glob("*.md")} - {"README.md"}
