"""What one layout writes any other reads, bit for bit;
and what the files are to somebody who has only safetensors.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from meshwright.checkpoint import (
    AsyncWriter,
    HostSlab,
    SaveAttempt,
    TensorKind,
    TensorPiece,
    begin,
    find,
    newest_valid,
    open_checkpoint,
    publish,
    write_shard,
)
from meshwright.checkpoint.check import coverage
from meshwright.checkpoint.files import final_directory
from meshwright.checkpoint.manifest import Dtype, PieceEntry, TensorEntry
from meshwright.parameters import ParameterInfo, Slice
from tests.framework.checkpoint.conftest import KINDS
from tests.support.errors import raises


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("written", [1, 4])
def test_any_layout_reads_any_other(
    tmp_path: Path, fake: Any, written: int, dtype: torch.dtype
) -> None:
    state = fake.state(7, dtype)
    path = fake.save(tmp_path, 100, tp=written, state=state)
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        # 7: the last ranks hold no row of the vocabulary at all, only padding
        for tp in (1, 2, 3, 4, 7):
            for tp_rank, (kind, info) in itertools.product(
                range(tp), itertools.product(KINDS, fake.infos(tp, 0))
            ):
                info = fake.info(info.name, tp, tp_rank)
                local = checkpoint.read(kind, info)
                expected = info.take(state[kind, info.name])
                assert local is not None and local.dtype == expected.dtype
                assert torch.equal(local, expected), (kind, info)


def test_head_comes_back(tmp_path: Path, fake: Any) -> None:
    manifest = open_checkpoint(fake.save(tmp_path, 12)).manifest
    head = fake.head(12)
    assert (manifest.step, manifest.samples_seen, manifest.seed) == (12, 96, 1234)
    assert (manifest.config, manifest.state) == (head.config, head.state)
    assert manifest.data_fingerprint == head.data_fingerprint
    # metadata may leave out the build, as in 2.15.0+cu132
    release = manifest.versions["torch"].partition("+")[0]
    assert release == torch.__version__.partition("+")[0]


def test_padding_is_not_in_the_files(tmp_path: Path, fake: Any) -> None:
    path = fake.save(tmp_path, 1, tp=3)
    rows = []
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            rows += [
                opened.get_slice(key).get_shape()[0]
                for key in opened.keys()  # noqa: SIM118
                if key == "weights/embedding.weight"
            ]
    assert sorted(rows) == [2, 4, 4]  # 10 rows in shards of 4


def test_read_by_safetensors_alone(tmp_path: Path, fake: Any) -> None:
    """The recipe in the package's docstring, and ``sha256sum``, with nothing of ours."""
    state = fake.state(3)
    path = fake.save(tmp_path, 3, tp=4, state=state)
    manifest = json.loads((path / "manifest.json").read_text())
    for (kind, name), full in state.items():
        entry = manifest["tensors"][f"{kind}/{name}"]
        whole = torch.full(entry["shape"], torch.nan, dtype=full.dtype)
        for piece in entry["pieces"]:
            with safe_open(path / piece["file"], framework="pt") as file:
                box = tuple(
                    slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"], strict=True)
                )
                whole[box] = file.get_tensor(piece["key"])
        assert torch.equal(whole, full), name
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=path, check=True
    )
    listed = {line.split()[1] for line in (path / "SHA256SUMS").read_text().splitlines()}
    assert listed == {file.name for file in path.iterdir()} - {"SHA256SUMS"}


def test_ranks_save_together(tmp_path: Path, fake: Any) -> None:
    """As ranks do: each behind its own training, the first one publishes,
    a replica writes nothing.
    """
    state = fake.state(5)
    attempt = SaveAttempt(
        tmp_path, fake.head(5), "7f", frozenset({"tp0", "tp1", "tp2"}), max_file_bytes=500
    )
    begin(tmp_path, 5, "7f")
    ranks = [AsyncWriter() for _ in range(4)]
    for tp_rank in (1, 0, 2):
        assert not attempt.final.exists()
        pieces = HostSlab().copy(fake.pieces(state, 3, tp_rank))
        ranks[tp_rank].start(attempt, f"tp{tp_rank}", pieces, is_first=tp_rank == 0)
    ranks[3].start(attempt, None, [], is_first=False)
    for rank in ranks:
        while not rank.is_share_done():
            time.sleep(0.01)
        assert rank.problem is None
        rank.end()
    published, *others = [rank.take_published() for rank in ranks]
    assert (
        published is not None and published[0] == final_directory(tmp_path, 5) and published[1] > 0
    )
    assert others == [None, None, None]
    found = newest_valid(tmp_path)
    assert found is not None and found.manifest.step == 5
    for (kind, name), full in state.items():
        local = found.read(kind, fake.info(name, 1, 0))
        assert local is not None and torch.equal(local, full)


def test_files_are_split_and_memory_is_bounded(tmp_path: Path) -> None:
    """Never is more held back than one file:
    what was given and is not on disk stays below the bound.
    """
    temporary = begin(tmp_path, 1, "a1")
    given_bytes, limit = 0, 4096
    held = []

    def pieces() -> Any:
        nonlocal given_bytes
        for index in range(40):
            written = sum(path.stat().st_size for path in temporary.glob("*.safetensors"))
            held.append(given_bytes - written)
            given_bytes += 1024
            yield TensorPiece(
                TensorKind.WEIGHTS,
                ParameterInfo(f"layer{index}.weight", (16, 16)),
                torch.full((16, 16), float(index)),
            )

    report = write_shard(temporary, "only", pieces(), max_file_bytes=limit)
    assert len(report.files) == 10
    assert max(held) <= limit


def test_numbers_are_aligned_to_their_size(tmp_path: Path) -> None:
    """Three bfloat16 given before a float64: whoever maps the file as an array finds both
    where an array may start.
    """
    pieces = [
        TensorPiece(
            TensorKind.WEIGHTS, ParameterInfo("a", (3,)), torch.ones(3, dtype=torch.bfloat16)
        ),
        TensorPiece(
            TensorKind.WEIGHTS, ParameterInfo("b", (2,)), torch.ones(2, dtype=torch.float64)
        ),
    ]
    temporary = begin(tmp_path, 1, "a1")
    write_shard(temporary, "only", pieces)
    data = (temporary / "only-00000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, size in (("weights/a", 2), ("weights/b", 8)):
        assert header[name]["data_offsets"][0] % size == 0


def test_dtype_on_reading(tmp_path: Path, fake: Any) -> None:
    state = fake.state(1)
    checkpoint = open_checkpoint(fake.save(tmp_path, 1, state=state))
    info = fake.info("block0.norm.weight", 1, 0)
    local = checkpoint.read(TensorKind.WEIGHTS, info, torch.float32)
    assert local is not None and torch.equal(local, state[TensorKind.WEIGHTS, info.name].float())


def test_a_kind_that_was_not_saved_is_none_and_a_name_that_is_missing_is_not(
    tmp_path: Path, fake: Any
) -> None:
    state = {key: full for key, full in fake.state(1).items() if key[0] != TensorKind.MASTER}
    checkpoint = open_checkpoint(fake.save(tmp_path, 1, state=state))
    assert checkpoint.read(TensorKind.MASTER, fake.info("block0.norm.weight", 1, 0)) is None
    with raises("MW-CHECKPOINT-017", "'weights/block1.norm.weight'", "[6]"):
        checkpoint.read(TensorKind.WEIGHTS, ParameterInfo("block1.norm.weight", (6,)))
    with raises("MW-CHECKPOINT-018", "'exp_avg/embedding.weight'", "[10, 6]", "[12, 6]"):
        checkpoint.read(
            TensorKind("exp_avg"), ParameterInfo("embedding.weight", (12, 6), Slice(0, 6, 12, 6))
        )
    assert checkpoint.parameters(TensorKind("exp_avg")) == sorted({name for _, name in state})
    assert checkpoint.shape(TensorKind.WEIGHTS, "embedding.weight") == (10, 6)


def test_candidates_newest_first_and_nothing_else_counts(tmp_path: Path, fake: Any) -> None:
    assert find(tmp_path) == [] and newest_valid(tmp_path) is None
    for step in (9, 100, 20):
        fake.save(tmp_path, step)
    directory = tmp_path / "checkpoints"
    for name in (
        ".tmp-step-00000200-a1",
        "broken-step-00000300-a1",
        "step-400",
        "step-000000500",
        "step-0000060x",
    ):
        (directory / name).mkdir()
    (directory / "step-00000700").write_text("a file")
    assert [candidate.step for candidate in find(tmp_path)] == [100, 20, 9]


# What publish refuses


def shards(run: Path, fake: Any, ranks: list[tuple[int, int]]) -> tuple[Path, Path]:
    state = fake.state(1)
    temporary = begin(run, 1, "a1")
    for index, (tp, tp_rank) in enumerate(ranks):
        write_shard(temporary, f"shard{index}", fake.pieces(state, tp, tp_rank))
    return temporary, final_directory(run, 1)


@pytest.mark.parametrize(
    ("ranks", "value"),
    [
        ([(4, 0), (4, 1), (4, 3)], "108 of the 144"),
        ([(2, 0), (4, 1), (4, 2), (4, 3)], "'weights/embedding.weight'"),
        ([(1, 0), (1, 0)], "'master/block0.norm.weight'"),
        ([(4, 1), (4, 2), (4, 3)], "pieces"),
    ],
)
def test_a_gap_or_an_overlap_is_not_published(
    tmp_path: Path, fake: Any, ranks: Any, value: str
) -> None:
    temporary, final = shards(tmp_path, fake, ranks)
    with raises("MW-CHECKPOINT-024", value):
        publish(temporary, final, fake.head(1))
    assert find(tmp_path) == [] and not final.exists()


def test_shards_of_two_models_are_not_published(tmp_path: Path, fake: Any) -> None:
    temporary = begin(tmp_path, 1, "a1")
    for index, size in enumerate((4, 6)):
        info = ParameterInfo("w", (size,), Slice(0, 2 * index, 2 * index + 2, 2))
        write_shard(
            temporary, f"shard{index}", [TensorPiece(TensorKind.WEIGHTS, info, torch.zeros(2))]
        )
    with raises("MW-CHECKPOINT-026", "'weights/w'", "F32[4]", "F32[6]"):
        publish(temporary, final_directory(tmp_path, 1), fake.head(1))


def test_experts_numbered_from_0_on_every_rank_are_not_published(tmp_path: Path, fake: Any) -> None:
    temporary = begin(tmp_path, 1, "a1")
    for index in range(2):
        part = Slice(0, 0, 2, 2, over="ep")
        info = ParameterInfo("block0.mlp.experts.down", (4, 2, 2), part)
        write_shard(
            temporary,
            f"shard{index}",
            [TensorPiece(TensorKind.WEIGHTS, info, torch.zeros(2, 2, 2))],
        )
    with raises("MW-CHECKPOINT-024", "'weights/block0.mlp.experts.down'"):
        publish(temporary, final_directory(tmp_path, 1), fake.head(1))


def test_a_shard_that_lost_bytes_is_not_published(tmp_path: Path, fake: Any) -> None:
    temporary, final = shards(tmp_path, fake, [(1, 0)])
    os.truncate(temporary / "shard0-00000.safetensors", 100)
    with raises("MW-CHECKPOINT-024", "shard0-00000.safetensors", 100):
        publish(temporary, final, fake.head(1))


def test_a_tied_weight_given_twice_is_refused(tmp_path: Path) -> None:
    piece = TensorPiece(TensorKind.WEIGHTS, ParameterInfo("embedding.weight", (2,)), torch.zeros(2))
    with raises("MW-CHECKPOINT-027", "'weights/embedding.weight'"):
        write_shard(begin(tmp_path, 1, "a1"), "shard", [piece, piece])


def test_an_overlap_of_boxes_that_are_no_neighbours_is_found() -> None:
    """As many elements as the tensor has, and no two neighbours in order overlap;
    still one corner is there twice.
    """
    boxes = [((0, 0), (4, 2)), ((0, 2), (1, 2)), ((1, 0), (1, 2)), ((2, 2), (2, 2))]
    parts = tuple(
        PieceEntry(file="f.safetensors", key="k", offset=offset, shape=shape)
        for offset, shape in boxes
    )
    problem = coverage(TensorEntry(shape=(4, 4), dtype=Dtype.F32, pieces=parts))
    assert problem is not None and "overlap" in problem


@settings(max_examples=150, deadline=None)
@given(
    cuts=st.tuples(*[st.sets(st.integers(1, size - 1), max_size=2) for size in (5, 4)]),
    damage=st.sampled_from(["none", "drop", "repeat", "move", "grow", "shrink"]),
    pick=st.integers(0, 99),
)
def test_coverage_agrees_with_counting(
    cuts: tuple[set[int], set[int]], damage: str, pick: int
) -> None:
    """Oracle: add one to each element of a tensor for every piece that holds it;
    all must be exactly one.
    """
    shape = (5, 4)
    edges = [[0, *sorted(cut), size] for cut, size in zip(cuts, shape, strict=True)]
    boxes = [
        [[a, b], [c, d]]
        for a, b in itertools.pairwise(edges[0])
        for c, d in itertools.pairwise(edges[1])
    ]
    chosen = boxes[pick % len(boxes)]
    if damage == "drop":
        boxes.remove(chosen)
    elif damage == "repeat":
        boxes.append([list(side) for side in chosen])
    elif damage == "move":
        chosen[1] = [chosen[1][0] + 1, chosen[1][1] + 1]
    elif damage == "grow":
        chosen[0][1] += 1
    elif damage == "shrink":
        chosen[0][0] += 1
    counted = torch.zeros(shape)
    inside = all(b <= 5 and d <= 4 and a < b for (a, b), (_, d) in boxes)
    for (a, b), (c, d) in boxes:
        counted[a:b, c:d] += 1
    parts = tuple(
        PieceEntry(file="f.safetensors", key="k", offset=(a, c), shape=(max(b - a, 0), d - c))
        for (a, b), (c, d) in boxes
    )
    problem = coverage(TensorEntry(shape=shape, dtype=Dtype.F32, pieces=parts))
    assert (problem is None) == (inside and bool((counted == 1).all())), (problem, boxes)
