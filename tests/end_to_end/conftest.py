"""A small prepared corpus for all runs of this folder."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.data.prepare.stdlib import prepare_files
from meshwright.data.splits import SplitRule
from meshwright_launch.leftovers import MEMORY
from tests.end_to_end.shell import Shell

WORDS = [
    "the",
    "a",
    "mesh",
    "rank",
    "stage",
    "step",
    "loss",
    "of",
    "in",
    "then",
    "waits",
    "sends",
    "gives",
    "holds",
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 KB of sentences in 300 documents, byte-level BPE with 300 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(5)
    texts = folder / "texts"
    texts.mkdir()
    for number in range(300):
        sentences = [
            " ".join(draw.choices(WORDS, k=draw.randint(3, 12))) + ".\n" for _ in range(15)
        ]
        (texts / f"{number}.txt").write_text("".join(sentences))
    prepare_files([texts], folder / "prepared", 300, 0.05, split=SplitRule.DOCUMENTS)
    return folder / "prepared"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell whose commands leave no process behind: the test fails if one does."""
    shell = Shell(tmp_path)
    try:
        yield shell
        shell.wait_until_none_is_left()
    finally:
        shell.end_all()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, in which each node has one."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        yield Path(place)
