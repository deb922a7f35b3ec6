"""Streams, collate functions and workers: the same samples on any layout and after a resume,
or an error before.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.blueprint import draw_blueprint
from meshwright.checkpoint import find, open_checkpoint
from meshwright.config import Batch, RunConfig, load, samples_after, to_toml
from meshwright.data.dataset import DatasetSource
from meshwright.data.read_ahead import ReadAhead, Steps
from meshwright.data.sources import Source, describe_source, open_sources
from meshwright.data.stream_source import StreamSource
from meshwright.errors import ConfigError, DataError
from meshwright.run.directory import run_directory
from meshwright.verify import parse_layout, verify
from meshwright_launch.pool import RankPool
from meshwright_launch.python import run_training
from tests.end_to_end.driving import GPT2, changed, differing, exact_losses, lines, tensors, train
from tests.examples import streams
from tests.support.errors import has_code
from tests.support.layouts import samples
from tests.support.marks import long_row, marked_rows

ROOT = Path(__file__).parents[2]
STREAMS = "tests.examples.streams"


def config_of(
    runs: Path, kind: str = "stateful", name: str = "run", **sections: dict[str, Any]
) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"name": name, "directory": str(runs)},
        "model": {"options": {**GPT2, "dropout": 0.0}},
        "data": {"builder": f"{STREAMS}:build", "options": {"kind": kind}},
        "batch": {"micro_batch_size": 1, "chunks": 4, "global_batch": 8},
        "parallel": {"dp": 2, "bucket_bytes": 8192},
        "optimizer": {"schedule": "constant"},
        "train": {"steps": 6, "device": "cpu", "validate_every": 3, "validate_steps": 2},
        "tracking": {"console": False},
    }
    for section, keys in sections.items():
        tree[section] = tree.get(section, {}) | keys
    return RunConfig.model_validate(tree)


def opened(runs: Path, kind: str = "stateful", **sections: dict[str, Any]) -> StreamSource:
    source = open_sources(config_of(runs, kind, **sections))[0]
    assert isinstance(source, StreamSource)
    return source


def expected(kind: str, first: int, count: int) -> torch.Tensor:
    """Return the labels of samples by arithmetic: epoch after epoch."""
    pairs = [divmod(number, streams.LENGTH) for number in range(first, first + count)]
    return torch.stack(
        [streams.sample(at, 0 if kind == "from" else epoch)[1] for epoch, at in pairs]
    )


PROCESSES = {"workers": 2, "processes": True}


KINDS_READ = [
    (kind, keys) for kind in ("stateful", "plain", "from") for keys in ({}, {"workers": 3})
]


@marked_rows("long", "stateful-workers6")
@pytest.mark.parametrize(("kind", "workers"), [*KINDS_READ, ("stateful", PROCESSES)])
def test_any_order_of_reads_gives_the_samples_of_their_indices(
    tmp_path: Path, kind: str, workers: dict[str, Any]
) -> None:
    source = opened(tmp_path, kind, data=workers | base(kind))
    # forward, again, back, over several epochs
    for first in (4, 5, 6, 7, 5, 12, 13, 0, 60, 61, 3, 40):
        assert torch.equal(samples(source, first, 1).labels, expected(kind, first, 1)), first
    assert torch.equal(samples(source, 17, 9).labels, expected(kind, 17, 9))


def base(kind: str) -> dict[str, Any]:
    return {"builder": f"{STREAMS}:build", "options": {"kind": kind}}


@pytest.mark.parametrize("kind", ["stateful", "plain", "from"])
def test_a_place_continues_elsewhere(tmp_path: Path, kind: str) -> None:
    source = opened(tmp_path, kind)
    samples(source, 30, 1)
    for seen in (0, 8, 24, 48, 13):  # 48: further than it has read; 13: no end of a global batch
        other = opened(tmp_path, kind)
        other.restore(state := source.state_at(seen))
        assert state["number"] == seen and len(str(state)) < 250
        assert torch.equal(samples(other, seen, 2).labels, expected(kind, seen, 2))
        later = opened(tmp_path, kind)
        later.restore(state)  # of a checkpoint with an older position
        assert torch.equal(samples(later, seen + 5, 2).labels, expected(kind, seen + 5, 2))
    assert torch.equal(samples(source, 31, 1).labels, expected(kind, 31, 1))


def test_a_place_saves_reading_again(tmp_path: Path) -> None:
    """With a state nothing before the place is read; without one the begin of the epoch is."""
    state = opened(tmp_path).state_at(16)
    assert {**state, "next": None} == {
        "number": 16,
        "epoch": 0,
        "read": 16,
        "state": {"at": 16},
        "next": None,
    }
    other = opened(tmp_path)
    other.restore({**state, "state": {"at": 3}, "next": None})
    assert torch.equal(samples(other, 16, 1).labels, expected("stateful", 3, 1))
    other = opened(tmp_path)
    other.restore({**state, "state": {"at": 3}})
    with pytest.raises(
        DataError,
        match=r"by load_state_dict, its sample 16 differs from the one read without a break",
        check=has_code("MW-DATA-110"),
    ):
        samples(other, 16, 1)


def test_validation_reads_each_sample_once(tmp_path: Path) -> None:
    validation = open_sources(config_of(tmp_path))[1][""]
    assert isinstance(validation, StreamSource) and validation.num_samples == 11
    for _ in range(2):
        labels = samples(validation, 8, 8).labels
        assert torch.equal(labels[:3], expected("plain", 8, 3)) and (labels[3:] == -100).all()


WRONG = [
    ("late", "its sample 9 differs from the one read without a break"),
    ("buffered", "cannot be resumed exactly: continued by load_state_dict"),
    ("noise", "random numbers without a fixed seed"),
    ("once", "is a generator, which can be read only once"),
    ("large", "characters as JSON, at most 32,768"),
    ("binary", "failed or is no plain JSON.*bytes is not JSON"),
    ("empty", "has no samples in epoch 0"),
]


@pytest.mark.parametrize(("kind", "said"), WRONG, ids=[kind for kind, _ in WRONG])
def test_a_stream_that_cannot_be_exact_is_refused_before_the_launch(
    tmp_path: Path, kind: str, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        draw_blueprint(config_of(tmp_path, kind))


def rows_of(tmp_path: Path, function: str, **keys: Any) -> Source:
    data = {"builder": f"{STREAMS}:rows", "options": {}, "collate": f"{STREAMS}:{function}", **keys}
    return open_sources(config_of(tmp_path, data=data))[0]


@pytest.mark.parametrize(
    "workers", [{}, {"workers": 4}, long_row(PROCESSES)], ids=["alone", "threads", "processes"]
)
def test_a_map_style_dataset_with_collate_and_workers(
    tmp_path: Path, workers: dict[str, Any]
) -> None:
    source = rows_of(tmp_path, "collate", **workers)
    assert isinstance(source, DatasetSource)
    for first in (0, 1, 2, 3, 0, 8, 9, 80, 3):
        wanted = streams.sample(source.order(first) or 0)[1]
        assert torch.equal(samples(source, first, 1).labels[0], wanted)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            "padded",
            (
                r"padded', samples 4 of .* returned \(1, 5\) int64.*each with \(4,\) int64.*pad or"
                r" crop"
            ),
        ),
        ("centred", "sample 36 of .* differs between a micro-batch and a call by itself"),
        ("sample", "failed"),
    ],
)
def test_a_collate_function_that_depends_on_the_layout(
    tmp_path: Path, function: str, said: str
) -> None:
    with pytest.raises(
        DataError, match=said, check=has_code("MW-DATA-106", "MW-DATA-107", "MW-DATA-108")
    ):
        rows_of(tmp_path, function)


def test_an_error_in_a_worker_is_the_error_of_the_read(tmp_path: Path) -> None:
    source = opened(tmp_path, "breaks", data={"workers": 2} | base("breaks"))
    assert torch.equal(samples(source, 4, 1).labels, expected("breaks", 4, 1))
    with pytest.raises(
        DataError,
        match=r"sample 17 of epoch 0 failed at .*streams\.py:\d+: ValueError: record 18",
        check=has_code("MW-DATA-115"),
    ):
        samples(source, 17, 1)


def children() -> set[int]:
    """Processes that this one has started."""
    text = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return {int(each) for each in text.split()}


@pytest.mark.long
@pytest.mark.parametrize("ending", ["exit", "kill"])
def test_a_process_that_dies_is_one_message(tmp_path: Path, ending: str) -> None:
    source = rows_of(tmp_path, "leaving" if ending == "exit" else "collate", **PROCESSES)
    before = children()
    if ending == "exit":
        with pytest.raises(
            DataError, match=r"a process of data.workers has died .exit code 3.*MW-DATA-117"
        ):
            samples(source, 6, 1)
        return
    samples(source, 6, 1)
    for each in children() - before:
        os.kill(each, signal.SIGKILL)
    with pytest.raises(
        DataError, match=r"has died .exit code -9.*memory may have run out.*MW-DATA-117"
    ):
        for first in range(7, 80, 8):
            samples(source, first, 1)


@pytest.mark.long
def test_errors_in_a_process_are_those_of_the_read(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"failed at .*streams\.py:\d+: ValueError: only in another process.*MW-DATA-106",
    ):
        samples(rows_of(tmp_path, "elsewhere", **PROCESSES), 3, 1)
    source = opened(
        tmp_path, "handles", data=PROCESSES | base("handles") | {"collate": f"{STREAMS}:first_of"}
    )
    with pytest.raises(DataError, match=r"cannot be pickled .*: yield plain values.*MW-DATA-119"):
        samples(source, 3, 1)


@pytest.mark.long
def test_processes_end_with_the_rank(tmp_path: Path) -> None:
    script = (
        f"from tests.examples.test_streams import *;samples(rows_of(Path({str(tmp_path)!r}),"
        " 'collate', **PROCESSES), 6, 1); print(*children(), flush=True);os.kill(os.getpid(),"
        " signal.SIGKILL)"
    )
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    started = [int(each) for each in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(started) == 2, done.stderr
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{each}").exists() for each in started):
        assert time.monotonic() < deadline, "processes outlive their rank"
        time.sleep(0.05)


def test_workers_read_ahead_and_no_further(tmp_path: Path) -> None:
    source = opened(tmp_path, "slow", data={"workers": 1} | base("slow"))
    before = threading.active_count()
    samples(source, 0, 1)
    # itself, and two for the thread
    assert source.ahead is not None and len(source.ahead._ahead) == 3
    for first in (first for first in range(1, 40) if first % 8 < 4):  # the first replica's
        samples(source, first, 1)
        assert len(source.ahead._ahead) <= 4 + 2
    assert threading.active_count() == before + 1


def test_a_process_that_cannot_be_started_ends_the_read() -> None:
    def start() -> Callable[[Any], Any]:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    batch = Batch(micro_batch_size=1, chunks=2, global_batch=2)
    ahead = ReadAhead(lambda indices: indices, lambda gathered: gathered, 2, Steps(batch), start)
    for first in (0, 1):
        with pytest.raises(
            DataError, match=r"cannot be started: .*temporarily unavailable.*MW-DATA-121"
        ):
            ahead.read([first])


@pytest.mark.parametrize("ramp", [None, (4, 4, 24)])
@pytest.mark.parametrize("replica", [0, 1])
def test_the_guess_of_what_a_replica_reads_next_is_right(
    ramp: tuple[int, int, int] | None, replica: int
) -> None:
    batch = Batch(micro_batch_size=2, chunks=3, global_batch=12, ramp=ramp)
    wanted = []
    for step in range(8):
        first, size = (
            samples_after(batch, step),
            samples_after(batch, step + 1) - samples_after(batch, step),
        )
        wanted += range(first + replica * size // 2, first + (replica + 1) * size // 2, 2)
    steps, found = Steps(batch), wanted[:1]
    while len(found) < len(wanted):
        found.append(steps.following(found[-1]))
    assert found == wanted
    wanted = []
    for step in range(8):  # the replicas of a model with nn.SyncBatchNorm alternate
        wanted += range(samples_after(batch, step) + 2 * replica, samples_after(batch, step + 1), 4)
    steps.alternates, found = True, wanted[:1]
    while len(found) < len(wanted):
        found.append(steps.following(found[-1]))
    assert found == wanted
    begins = [number for number in range(samples_after(batch, 8)) if steps.begins_at(number)]
    assert begins == [samples_after(batch, step) for step in range(8)]


def test_keys_without_effect(tmp_path: Path) -> None:
    config = config_of(tmp_path, data={"builder": None, "options": {}, "train": "c", "workers": 2})
    (tmp_path / "run.toml").write_text(to_toml(config))
    with pytest.raises(
        ConfigError,
        match=r"data\.workers has no effect without data\.builder",
        check=has_code("MW-CONFIG-046"),
    ):
        load(tmp_path / "run.toml")


def example_of(runs: Path, **sections: dict[str, Any]) -> RunConfig:
    config = load(
        str(ROOT / "examples/stream/config.toml"),
        ["--train.steps=6", "--optimizer.schedule=constant"],
    )
    data = {"train": str(ROOT / "docs"), "validation": str(ROOT / "docs/tasks")}
    merged = {
        "run": {"directory": str(runs)},
        "data": {"options": data},
        "tracking": {"console": False},
        **sections,
    }
    return config.replace(**merged)


@pytest.mark.long
def test_layouts_see_the_samples_of_one_process(pool: RankPool, tmp_path: Path) -> None:
    config = example_of(tmp_path, batch={"global_batch": 8, "micro_batch_size": 2})
    layouts = [parse_layout(text) for text in ("dp2,pp2,tp2", "dp4,zero3,mbs1")]
    report = verify(config, layouts, pool, global_batch=8, steps=2)
    assert report.passed, report.table()


@pytest.mark.all_layouts
@pytest.mark.parametrize("kind", ["stateful", "plain", "from"])
def test_more_layouts(pool: RankPool, tmp_path: Path, kind: str) -> None:
    layouts = [
        parse_layout(text)
        for text in ("dp2,pp2,tp2", "dp8", "dp2,zero2", "pp2,zb_v,mbs1", "dp2,zero3,pp2")
    ]
    report = verify(config_of(tmp_path, kind), layouts, pool, global_batch=8, steps=4)
    assert report.passed, report.table()


@pytest.mark.long
def test_a_run_continues_bit_equal_and_on_another_layout(pool: RankPool, tmp_path: Path) -> None:
    """Over the end of an epoch of 21 samples, with workers;
    validation reads another stream in between.
    """
    data = {"data": {"workers": 2} | base("stateful")}
    whole = config_of(tmp_path, name="whole", **data)
    said = train(pool, whole)
    assert "is a stream; a resume continues by load_state_dict" in said
    parts = config_of(tmp_path, name="parts", **data, train={"steps": 3, "device": "cpu"})
    train(pool, parts)
    train(pool, changed(parts, train={"steps": 6, "validate_every": 3, "validate_steps": 2}))
    assert exact_losses(whole) == exact_losses(parts)
    assert not differing(*(tensors(run_directory(config.run)) for config in (whole, parts)))
    with open_checkpoint(find(run_directory(parts.run))[0].path) as checkpoint:
        place = checkpoint.manifest.state["callbacks"]["StreamState"]
        assert (place["number"], place["epoch"], place["state"]) == (48, 2, {"at": 6})
    train(pool, changed(whole, train={"steps": 8}))
    train(
        pool, changed(parts, train={"steps": 8}, parallel={"dp": 1, "pp": 2}, batch={"chunks": 8})
    )
    assert last(whole) == pytest.approx(last(parts), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "workers"), [("counted", 0), ("counted", 4), ("counted plain", 1)]
)
def test_a_run_reads_each_sample_once(tmp_path: Path, kind: str, workers: int) -> None:
    """Also with threads that are ahead of the step that saves;
    and its checkpoints continue with the same samples.
    """

    def config(name: str, steps: int) -> RunConfig:
        sections: dict[str, dict[str, Any]] = {
            "data": {"workers": workers} | base(kind),
            "batch": {"micro_batch_size": 2, "chunks": 2, "global_batch": 4},
            "parallel": {"dp": 1},
            "train": {"steps": steps, "validate_every": 0},
            "checkpoint": {"every": 3},
        }
        return config_of(tmp_path, kind, name, **sections)

    streams.CountedPlain.built = streams.CountedPlain.read = 0
    run_training(config("short", 5))
    built, read = streams.CountedPlain.built, streams.CountedPlain.read
    run_training(config("whole", 20))
    assert streams.CountedPlain.built - built == built, (
        "the builder runs in each step, or each step that saves"
    )
    ahead = 2 * workers * 2  # samples: two micro-batches for each thread, of either run
    assert streams.CountedPlain.read - read <= read + 15 * 4 + 2 * ahead + 2
    run_training(config("short", 20))
    assert exact_losses(config("short", 20)) == exact_losses(config("whole", 20))


def last(config: RunConfig) -> list[float]:
    return [line["train/loss"] for line in lines(config)][6:]


def test_a_stream_is_described(tmp_path: Path) -> None:
    said = describe_source(opened(tmp_path, "plain"), 80)
    assert said.endswith(
        "build('train') is a stream; a resume continues by reading from the begin of the epoch"
    )
