"""Tokenised Hugging Face datasets: map-style and streamed, on layouts and over a resume,
without any network.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.data.sources import open_sources
from meshwright.data.stream_source import StreamSource
from meshwright.errors import DataError
from meshwright.verify import parse_layout, verify
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import changed, exact_losses, train
from tests.examples.test_streams import config_of
from tests.support.layouts import samples
from tests.support.marks import long_row

datasets = pytest.importorskip(
    "datasets", reason="needs the package datasets (pip install datasets)"
)
LENGTH, ROWS = 8, 29


def row(number: int) -> dict[str, list[int]]:
    ids = [(number * 7 + at) % 300 for at in range(LENGTH + 1 - number % 3)]
    return {"input_ids": ids, "labels": [-100, *ids[1:]]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    whole = datasets.Dataset.from_list([row(number) for number in range(ROWS)])
    few = datasets.Dataset.from_list([row(number) for number in range(100, 105)])
    datasets.DatasetDict({"train": whole, "validation": few}).save_to_disk(str(folder / "both"))
    whole.save_to_disk(str(folder / "one"))
    (folder / "files").mkdir()
    whole.select(range(15)).to_parquet(str(folder / "files" / "train-0.parquet"))
    whole.select(range(15, ROWS)).to_parquet(str(folder / "files" / "train-1.parquet"))
    return folder


def hf_config(runs: Path, path: Path | str, name: str = "run", **options: Any) -> RunConfig:
    ignore = [] if "labels" in options else ["labels"]
    options = {"path": str(path), "length": LENGTH, "ignore": ignore, **options}
    data = {"builder": "meshwright.data.huggingface:build", "options": options}
    return config_of(runs, name=name, data=data, parallel={"dp": 2})


def expected(number: int) -> tuple[list[int], list[int]]:
    ids = row(number)["input_ids"]
    return (ids[:LENGTH] + [0] * LENGTH)[:LENGTH], (ids[1:] + [-100] * LENGTH)[:LENGTH]


@pytest.mark.parametrize("place", ["both", "one", "files"])
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_become_tokens_and_next_tokens(
    saved: Path, tmp_path: Path, place: str, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("a connection"))
    source, validation = open_sources(hf_config(tmp_path, saved / place, streaming=streaming))
    assert (not validation) == (place != "both") and isinstance(source, StreamSource) == streaming
    found = samples(source, 0, ROWS)
    numbers = [
        index if isinstance(source, StreamSource) else source.order(index) or 0
        for index in range(ROWS)
    ]
    for at, number in enumerate(numbers):
        assert (found.inputs[at].tolist(), found.labels[at].tolist()) == expected(number)
    assert sorted(numbers) == list(range(ROWS))


@pytest.mark.parametrize("shards", [1, 4])
def test_a_place_in_a_streamed_dataset(saved: Path, tmp_path: Path, shards: int) -> None:
    config = hf_config(tmp_path, saved / "one", streaming=True, shards=shards)
    source, other = (open_sources(config)[0] for _ in range(2))
    assert isinstance(source, StreamSource) and isinstance(other, StreamSource)
    wanted = samples(source, 32, 8).labels
    other.restore(source.state_at(32))
    assert torch.equal(samples(other, 32, 8).labels, wanted)


def shuffled(split: str, path: str, length: int, ignore: Sequence[str]) -> Any:
    from meshwright.data.huggingface import RowStream, build

    stream = build(split, path, length, streaming=True, ignore=ignore)
    assert split != "train" or isinstance(stream, RowStream)
    if isinstance(stream, RowStream):
        stream.dataset = stream.dataset.shuffle(seed=3, buffer_size=6)
    return stream


def test_a_shuffle_buffer_is_refused(saved: Path, tmp_path: Path) -> None:
    config = hf_config(tmp_path, saved / "one")
    config = config.replace(data={"builder": "tests.examples.test_huggingface_data:shuffled"})
    with pytest.raises(DataError, match="shuffles in a BufferShuffledExamplesIterable, which"):
        open_sources(config)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "hf://datasets/x"}, "is no folder on this machine"),
        ({"tokens": "ids"}, "has no column 'ids', only input_ids, labels"),
    ],
)
def test_what_cannot_be_opened(
    saved: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        draw_blueprint(hf_config(tmp_path, **{"path": saved / "one", **options}))


@pytest.mark.parametrize("streaming", [long_row(False), True])
def test_layouts_and_a_resume(pool: RankPool, saved: Path, tmp_path: Path, streaming: bool) -> None:
    config = hf_config(tmp_path, saved / "both", streaming=streaming, labels="labels")
    layouts = [parse_layout(text) for text in ("dp2,pp2,tp2", "dp2,zero3")]
    report = verify(config, layouts, pool, global_batch=8, steps=2)
    assert report.passed, report.table()
    whole, parts = (
        hf_config(tmp_path, saved / "both", name, streaming=streaming)
        for name in ("whole", "parts")
    )
    train(pool, whole)
    train(pool, changed(parts, train={"steps": 3}))
    train(pool, changed(parts, train={"steps": 6}))
    assert exact_losses(whole) == exact_losses(parts)
