"""Boxes of tensors, read by ranges of a file's bytes: the same numbers as safetensors', and no byte
too many.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from meshwright.checkpoint import CheckpointReader, TensorKind, open_checkpoint, ranges
from meshwright.checkpoint.ranges import RangedFile, RangedSlice
from tests.framework.checkpoint.conftest import Fake
from tests.support.errors import raises


class Counted:
    """Reader of a file's ranges that records them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, start: int, stop: int) -> bytes:
        self.ranges.append((start, stop))
        return self.path.read_bytes()[start:stop]

    def open(self) -> RangedFile:
        return RangedFile(str(self.path), self.path.stat().st_size, self)


@pytest.fixture
def saved(tmp_path: Path) -> Counted:
    tensors = {
        "a": torch.arange(7 * 5 * 3, dtype=torch.float32).view(7, 5, 3),
        "b": torch.randn(64, 33).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    return Counted(tmp_path / "x.safetensors")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_boxes_are_those_of_the_library(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    path = tmp_path_factory.mktemp("box") / "x.safetensors"
    save_file({"x": torch.randn(shape), "y": torch.zeros(3, dtype=torch.uint8)}, path)
    bounds = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    box = tuple(slice(start, stop) for start, stop in bounds)
    gap, most = data.draw(st.integers(0, 40)), data.draw(st.integers(4, 60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "MAX_GAP_BYTES", gap)
        patch.setattr(ranges, "MAX_REQUEST_BYTES", most)
        found = Counted(path).open().get_slice("x")[box]
    with safe_open(path, framework="pt") as file:
        assert torch.equal(found, file.get_tensor("x")[box] if shape else file.get_tensor("x"))


def test_only_the_bytes_of_a_box_are_read(saved: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "MAX_GAP_BYTES", 0)
    tensor = saved.open().get_slice("b")
    saved.ranges.clear()
    tensor[slice(10, 20), slice(0, 33)]
    assert sum(stop - start for start, stop in saved.ranges) == 10 * 33 * 2
    assert len(saved.ranges) == 1
    saved.ranges.clear()
    tensor[slice(10, 20), slice(4, 8)]
    assert len(saved.ranges) == 10
    assert sum(stop - start for start, stop in saved.ranges) == 10 * 4 * 2
    monkeypatch.setattr(ranges, "MAX_GAP_BYTES", 2 * 33)
    saved.ranges.clear()
    tensor[slice(10, 20), slice(4, 8)]
    assert len(saved.ranges) == 1, "near runs are one request"


def test_a_long_box_is_several_requests(saved: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "MAX_REQUEST_BYTES", 1000)
    tensor = saved.open().get_slice("b")
    saved.ranges.clear()
    tensor[slice(0, 64), slice(0, 33)]
    assert len(saved.ranges) == math.ceil(64 * 33 * 2 / 1000)


def test_a_checkpoint_is_read_by_ranges(tmp_path: Path, fake: Fake) -> None:
    path = fake.save(tmp_path, 3, tp=2)
    mapped = open_checkpoint(path)
    ranged = CheckpointReader(
        path, mapped.manifest, mapped.digest, lambda name: Counted(path / name).open()
    )
    for tp_rank in range(3):
        for kind in map(TensorKind, ("weights", "exp_avg")):
            for info in fake.infos(3, tp_rank):
                mine, theirs = (each.read(kind, info) for each in (ranged, mapped))
                assert mine is not None and theirs is not None and torch.equal(mine, theirs)


HEADERS = {
    "no JSON": b"{",
    "no table": b"[]",
    "another dtype": {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
    "a negative offset": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
    "beyond the end": {"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}},
    "fewer bytes than elements": {"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 4]}},
    "booleans": {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
    "no such tensor": {"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    "a tensor that is text": {"a": "F32"},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_refused(tmp_path: Path, name: str) -> None:
    header = HEADERS[name]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with raises("MW-CHECKPOINT-033", path):
        Counted(path).open().get_slice("a")


@pytest.mark.parametrize("length", [2**63, 10**8 + 1, 40])
def test_a_header_longer_than_the_file_is_not_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + bytes(8))
    counted = Counted(path)
    with raises("MW-CHECKPOINT-033", f"{length:,}"):
        counted.open().get_slice("a")
    assert counted.ranges == [(0, 16)]


def test_a_scalar_and_an_empty_tensor(saved: Counted) -> None:
    file = saved.open()
    scalar, empty = file.get_slice("scalar"), file.get_slice("empty")
    assert isinstance(scalar, RangedSlice)
    assert scalar[()].item() == 3 and scalar.get_dtype() == "I64"
    assert empty[slice(0, 0), slice(0, 4)].shape == (0, 4)
