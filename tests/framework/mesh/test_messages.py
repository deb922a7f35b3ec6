"""Small values between ranks: the same Python objects come out,
and nothing that arrives can name code.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.mesh.messages import decode, encode
from tests.support.errors import raises
from tests.support.sources import files

ROOT = Path(__file__).parents[3]
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


class Colour(StrEnum):
    RED = "red"


class Point(NamedTuple):
    x: float
    names: tuple[str, ...]
    colour: Colour
    path: Path | None = None


@given(plain)
def test_values_come_out_as_they_went_in(value: Any) -> None:
    assert decode(encode(value)) == value


def test_named_kinds_paths_and_numbers_that_are_none() -> None:
    value = Point(0.1 + 0.2, ("a", "b"), Colour.RED, Path("/tmp/\udcff"))
    found = decode(encode([value, {1, 2}], (Point, Colour)), (Point, Colour))
    assert found == [value, {1, 2}] and type(found[0]) is Point and type(found[0].colour) is Colour
    assert math.isnan(decode(encode(math.nan))) and decode(encode(-math.inf)) == -math.inf


def test_what_was_not_announced_is_not_sent() -> None:
    with pytest.raises(TypeError, match="Point"):
        encode(Point(1.0, (), Colour.RED))


class Payload:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"{",
        b'{"": "Point", "of": [1, [], "red"]}',
        b'{"": "os:system", "of": ["true"]}',
        b'{"": "tuple", "of": 3}',
        b'{"": "tuple"}',
        b'{"": ["tuple"], "of": []}',
        b'{"": "dict", "of": [[1]]}',
        b'{"": "path", "of": [1]}',
        b'{"": "tuple", "of": [], "more": 1}',
        b"[" * 100_000,
        b"9" * 10_000,
        json.dumps({"": "set", "of": [[1]]}).encode(),
    ],
)
def test_other_messages_are_refused(message: bytes) -> None:
    with raises("MW-MESH-012"):
        decode(message)


def test_a_pickle_is_no_message(tmp_path: Path) -> None:
    with raises("MW-MESH-012"):
        decode(pickle.dumps(Payload(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


PICKLES = {
    "launch/meshwright_launch/pool.py": (
        "parent and child over an inherited pipe, of which no third process has an end"
    ),
    "launch/meshwright_launch/worker.py": "the child's end of that pipe",
    "framework/meshwright/data/worker_process.py": (
        "rank and worker process over two such pipes (data.processes)"
    ),
    "framework/meshwright/data/worker_main.py": "the worker's ends of those pipes",
}
UNPICKLES = re.compile(
    r"\bpickle\b|(?<!lookup)_object\(|_object_list\(|torch\.load\(|\bmarshal\b|\bshelve\b|allow_pickle=True"
)


@pytest.mark.long
def test_nothing_else_unpickles() -> None:
    """What comes from another rank, a file or a socket is JSON or a tensor."""
    found = {
        str(file.relative_to(ROOT))
        for file in files()
        if UNPICKLES.search("\n".join(line.partition("#")[0] for line in _code(file)))
    }
    assert found == set(PICKLES)


def _code(file: Path) -> list[str]:
    """Return the lines of a file without its docstrings and texts."""
    import ast

    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree).splitlines()
