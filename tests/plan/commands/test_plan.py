"""``meshwright plan`` and ``calibrate`` from their words to what they print and write,
and to what they refuse.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import meshwright_plan.planner.calibrate as calibrating
from meshwright.config import RunConfig, default_world_size, load
from meshwright.run.directory import run_directory
from meshwright.tracking.jsonl import read_records
from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from meshwright_launch.work import check, work
from meshwright_plan.planner.calibrate import DeviceRates, build_hardware, to_toml
from meshwright_plan.planner.choice import choice_of
from meshwright_plan.planner.error_bars import MEASURED_ERROR_SHARE
from meshwright_plan.planner.hardware import Link, Rate, read_hardware
from meshwright_plan.planner.ranking import TIE_SHARE
from meshwright_plan.planner.search import BEST
from tests.support.marks import marked_rows

CONFIG = """
[run]
name = "small"
directory = "{runs}"
[model.options]
vocab_size = 96
hidden_size = 32
num_layers = 2
num_heads = 4
max_sequence_length = 16
[data]
{data}
[batch]
global_batch = 2
[train]
steps = 3
"""
SAMPLES = 'builder = "tests.plan.planner.small:tokens"'
NO_CORPUS = 'train = "nowhere"\nsequence_length = 16'


def as_calibrated(**other: object) -> str:
    """What ``calibrate`` writes of two cores, whose rates are round numbers here."""
    products = [
        Rate(size=size, per_s=per_s) for size, per_s in ((1e4, 2e9), (1e6, 2e10), (1e9, 5e10))
    ]
    copies = [Rate(size=size, per_s=per_s) for size, per_s in ((1e4, 1e10), (1e9, 5e9))]
    measured = {dtype: DeviceRates(products, copies, 1e-5) for dtype in ("float32", "bfloat16")}
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send")
    links = {kind: Link(bytes_per_s=1e9, latency_s=5e-5) for kind in kinds}
    found = build_hardware([measured, measured], links, 2**33, 2)
    return to_toml(found.model_copy(update=other))


class Told(NamedTuple):
    """How a command has ended."""

    code: int
    out: str
    err: str


@functools.cache
def told(*words: str) -> Told:
    """``meshwright ...``, once for the same words."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*words])
    return Told(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With configurations and clusters."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "small.toml").write_text(CONFIG.format(runs=folder / "runs", data=SAMPLES))
    (folder / "long.toml").write_text(CONFIG.format(runs=folder / "runs", data=NO_CORPUS))
    (folder / "cores.toml").write_text(as_calibrated())
    (folder / "full.toml").write_text(as_calibrated(memory_bytes=160_000))
    (folder / "tight.toml").write_text(as_calibrated(memory_bytes=5_000_000))
    (folder / "tiny.toml").write_text(as_calibrated(memory_bytes=20_000))
    (folder / "cut.toml").write_text(as_calibrated()[:200])
    (folder / "other.toml").write_text(as_calibrated().replace("processors", "procesors"))
    (folder / "folder").mkdir()
    return folder


@pytest.fixture(scope="module")
def planned(folder: Path) -> Told:
    """A plan of two ranks, with its files in ``folder / "out"``."""
    words = ("--cluster", str(folder / "cores.toml"), "--nodes", "1", "--out", str(folder / "out"))
    return told("plan", str(folder / "small.toml"), *words)


def test_the_best_are_listed_by_time_and_the_first_is_explained(planned: Told) -> None:
    assert planned.code == 0 and planned.err == ""
    rows = re.findall(r"^ *(\d+) +([\d.e-]+) ±([\d.e-]+) +[\d.]+% ", planned.out, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1)) and 4 <= len(
        rows
    ) <= BEST
    times, bars = [float(seconds) for _, seconds, _ in rows], [float(bar) for _, _, bar in rows]
    assert times[0] <= (1 + TIE_SHARE) * min(times) and times[-1] == max(times) > times[0]
    assert bars == pytest.approx([MEASURED_ERROR_SHARE * seconds for seconds in times], rel=0.1)
    gain = re.search(r"the first beats the second by ([\d.]+) (us|ms|s): \+", planned.out)
    assert gain is not None or "the first and the second take the same time" in planned.out
    if gain is not None:
        seconds = float(gain[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[gain[2]]
        assert seconds == pytest.approx(times[1] - times[0], rel=0.1)
    for said in (
        "2 x this machine",
        "fits one device: plain replicas",
        "peak memory of each rank",
        "1 node of 2",
        "rejected",
    ):
        assert said in planned.out


def test_the_page_is_written_beside_the_configuration(planned: Told, folder: Path) -> None:
    assert "plan.toml (for `meshwright train`)" in planned.out
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["plan.html", "plan.toml"]
    assert (folder / "out" / "plan.html").read_text().startswith("<!doctype html>")


def train_rank(rank: int, world_size: int, config: RunConfig) -> None:
    """One rank of ``meshwright train``."""
    work(config)


def test_what_is_written_trains(planned: Told, folder: Path, pool: RankPool) -> None:
    file = folder / "out" / "plan.toml"
    config = load(str(file), ["--tracking.console=false"])
    assert config.train.device == "cpu"  # the cluster's, which the file left open
    checked, _ = check(config, default_world_size(config.parallel, config.launch, 0))
    assert checked.launch.processes == 2
    assert f": {choice_of(checked)}.\n" in file.read_text()
    pool.run(train_rank, 2, checked)
    records = read_records(run_directory(checked.run) / "metrics.jsonl")
    assert [record.step for record in records] == [1, 2, 3]
    assert all(math.isfinite(record.loss) for record in records)


def test_a_dry_run_says_when_there_is_no_room(folder: Path) -> None:
    words = (
        "dryrun",
        str(folder / "small.toml"),
        "--batch.micro_batch_size=1",
        "--parallel.dp=2",
        "--cluster",
    )
    roomy, full = (told(*words, str(folder / f"{name}.toml")) for name in ("cores", "tiny"))
    assert (roomy.code, full.code) == (0, 1), roomy.err
    assert "MORE THAN" not in roomy.out
    assert "MORE THAN THE 19.5 KiB of this machine" in full.out


def test_the_own_layout_and_a_wanted_one_are_compared_with_the_first(folder: Path) -> None:
    own = (folder / "small.toml").read_text() + "\n[parallel]\ntp = 2\n"
    (folder / "own.toml").write_text(own.replace("[batch]", "[batch]\nmicro_batch_size = 1"))
    words = ("--cluster", str(folder / "cores.toml"), "--nodes", "1")
    found = told("plan", str(folder / "own.toml"), *words, "--why", "pp=2,dp=1,schedule=1f1b")
    assert found.code == 0, found.err
    assert (
        "your own layout, pp 1 x dp 1 x tp 2, " in found.out
        or "your own layout is number" in found.out
    )
    assert "the best with pp=2 dp=1 schedule=1f1b: pp 2 x dp 1 x tp 1, 1f1b, " in found.out
    assert "your own layout" not in told("plan", str(folder / "small.toml"), *words).out
    wrong = told("plan", str(folder / "small.toml"), *words, "--why", "colour=2")
    assert wrong.code == 2 and "MW-LAUNCH-079" in wrong.err


@pytest.mark.long
def test_a_sweep_is_a_table(folder: Path) -> None:
    words = ("--cluster", str(folder / "cores.toml"), "--nodes", "1")
    found = told(
        "plan", str(folder / "small.toml"), *words, "--sweep-nodes", "2,1", "--device-hour", "0.5"
    )
    assert found.code == 0, found.err
    assert re.findall(r"^ +(\d) +\d+ +\d+ +[\d.]+ (?:us|ms|s) ±12.5%", found.out, re.MULTILINE) == [
        "1",
        "2",
    ]
    many = told(
        "plan",
        str(folder / "small.toml"),
        *words,
        "--sweep-batch",
        ",".join(map(str, range(1, 66))),
    )
    assert many.code == 2 and "MW-LAUNCH-081" in many.err


def test_pinned_degrees_are_those_of_the_plan(folder: Path) -> None:
    words = (
        "plan",
        str(folder / "small.toml"),
        "--cluster",
        str(folder / "cores.toml"),
        "--nodes",
        "1",
    )
    for options, grid in (
        (("--tp", "2"), "tp 2"),
        (("--no-tp", "--no-dp"), "pp 2"),
        (("--dp", "2"), "dp 2"),
    ):
        found = told(*words, *options)
        assert found.code == 0 and grid in found.out, found
    shared = told(*words, "--cp", "2")
    assert shared.code == 0 and "pp 1 x dp 1 x cp 2 x tp 1" in shared.out, shared
    assert told(*words, "--tp", "2", "--no-tp").code == 2
    assert told(*words, "--no-pp", "--no-dp", "--no-tp").code == 2  # 1 of 2 devices
    assert "no layout of the search has --tp 3 on 1 x 2 " in (odd := told(*words, "--tp", "3")).err
    assert odd.err.endswith("leave out --tp 3\n")
    both = told(*words, "--pp", "2", "--dp", "2")
    assert "no layout of the search has --pp 2 and --dp 2 together on 1 x 2 " in both.err


@pytest.mark.parametrize("options", ["--pp 2", "--pipeline.schedule=gpipe", "--parallel.dp=2"])
def test_a_key_of_the_layout_is_held(options: str, folder: Path) -> None:
    """The plan that is written has it."""
    words = ["plan", str(folder / "small.toml"), "--cluster", str(folder / "cores.toml")]
    words += ["--nodes", "1", "--out", str(folder / "held")]
    found = told(*words, *options.split())
    shown = options.replace("parallel.dp=", "dp ")
    assert found.code == 0 and f" legal layouts with {shown}, " in found.out, found
    written = load(folder / "held" / "plan.toml")
    pipeline, parallel = written.pipeline, written.parallel
    assert options in (
        f"--pipeline.schedule={pipeline.schedule}",
        f"--pp {parallel.pp}",
        f"--parallel.dp={parallel.dp}",
    )


@pytest.mark.parametrize(
    ("held", "tried"),
    [
        ("", ", even with recompute and the optimizer on the host"),
        ("--pipeline.recompute=none", ", even with the optimizer on the host"),
        ("--parallel.offload=false --pipeline.recompute=none", ""),
    ],
)
def test_what_is_held_is_not_said_to_be_tried(held: str, tried: str, folder: Path) -> None:
    (folder / "none.toml").write_text(as_calibrated(memory_bytes=1000))
    words = ["plan", str(folder / "small.toml"), "--cluster", str(folder / "none.toml")]
    found = told(*words, "--nodes", "1", *held.split())
    assert found.code == 2 and f"{tried}: the closest, " in found.err, found
    assert ("even with" in found.err) == bool(tried)


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        ("--parallel={zero=3, tp=2}", "parallel.tp, parallel.zero"),
        ('--pipeline={recompute_layers=["*"]}', "pipeline.recompute_layers"),
        ("--batch={micro_batch_size=1, global_batch=2}", "batch.micro_batch_size"),
    ],
)
def test_held_keys_in_a_table_are_refused(table: str, keys: str, folder: Path) -> None:
    words = ["plan", str(folder / "small.toml"), "--cluster", str(folder / "cores.toml")]
    found = told(*words, "--nodes", "1", table)
    assert found.code == 2 and f"command line: {keys} in a table" in found.err, found
    assert "give each key by itself, such as --parallel.zero=3" in found.err


IMPOSSIBLE = {
    "zero nodes": ("--nodes 0", "0 is not a whole number from 1 to 1,048,576", ["--nodes 1"]),
    "nodes in words": (
        "--nodes two",
        "two is not a whole number from 1 to 1,048,576",
        ["--nodes 1"],
    ),
    "unknown hardware": (
        "--cluster h10 --devices-per-node 1",
        "did you mean h100?",
        ["--cluster h100"],
    ),
    "hardware as a file": (
        "--cluster H200.toml --devices-per-node 1",
        "did you mean h200?",
        ["--cluster h200"],
    ),
    "a folder for hardware": ("--cluster {0}/folder", "this is a folder; known are a100", []),
    "batch that does not divide": (
        "--nodes 7 --global-batch 3",
        "global batch 3 is not a multiple of dp 14",
        None,
    ),
    "replicas for no sample": (
        "--nodes 64",
        "is not a multiple of dp 128 (nearest smaller divisor: 2)",
        None,
    ),
    "devices that nobody divides": (
        "--devices-per-node 7 --global-batch 3",
        "of dp 7 (nearest smaller divisor: 3)",
        None,
    ),
    "too many micro-batches": (
        "--global-batch 1000003",
        "is not a multiple of dp 2",
        ["--global-batch 131072"],
    ),
    "more nodes than there are": (
        "--nodes 1000000",
        "1,048,576 devices at most, such as --nodes 524288",
        [],
    ),
    "nothing fits": (
        "--cluster {0}/full.toml --global-batch 2",
        "what works: --nodes 2",
        None,
    ),
    "more nodes of no use": (
        (
            "--cluster {0}/tight.toml --devices-per-node 1 --global-batch 1"
            " --model.options.num_layers=1 --data.sequence_length=4096"
            " --model.options.max_sequence_length=4096"
        ),
        "what works: --data.sequence_length=",
        None,
    ),
    "only larger devices": (
        (
            "--cluster v100-16gb --devices-per-node 1 --global-batch 1"
            " --model.options.hidden_size=1024 --model.options.vocab_size=1800000"
        ),
        "needs at least 13.9 GiB of a device, and 13.3 GiB may be used",
        ["--cluster v100 --devices-per-node 1"],
    ),
    "dtype without a rate": ("--train.dtype=float64", "has no float64", ["--train.dtype=float32"]),
    "a file for a folder": (
        "--out {0}/small.toml",
        "there is a file of that name",
        ["--out {0}/small-plan"],
    ),
    "below a file": (
        "--out {0}/small.toml/x",
        "small.toml is a file, and nothing can lie below it",
        [],
    ),
    "a key that is searched": (
        "--parallel.reduce=step --launch.processes=2",
        "launch.processes, parallel.reduce: a plan gives each",
        [],
    ),
    "a degree twice": ("--pp 2 --parallel.pp=1", "are of one degree: leave one out", []),
    "a held word": ("--pipeline.schedule=1f1", '"1f1" is not allowed', []),
    "held layers": ("--parallel.keep_gathered=[]", "takes true or false for all layers", []),
    "samples twice": (
        "--batch.global_batch=2 --global-batch 8",
        "set the same number: leave one out",
        [],
    ),
    "another device": ("--train.device=cuda", "are cpu: leave it out", []),
    "no such key": ("--model.option.num_layers=1", "here this is model.options", []),
    "cut hardware": ("--cluster {0}/cut.toml", "cut.toml: not TOML", []),
    "misspelt hardware": ("--cluster {0}/other.toml", "did you mean processors?", []),
}
"""Words that are added; what is said; what is named that works:
None where it is read off what is said.
"""


def with_option(words: list[str], option: str, value: str) -> list[str]:
    """With another value of an option, where it was or at the end."""
    if option not in words:
        return [*words, option, value]
    at = words.index(option) + 1
    return [*words[:at], value, *words[at + 1 :]]


@marked_rows(
    "long",
    "zero nodes",
    "batch that does not divide",
    "replicas for no sample",
    "devices that nobody divides",
    "too many micro-batches",
    "nothing fits",
    "more nodes of no use",
    "dtype without a rate",
    "a file for a folder",
)
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_be_is_one_message_with_what_can(case: str, folder: Path) -> None:
    words, said, works = IMPOSSIBLE[case]
    file = folder / (
        "long.toml" if "sequence" in words or "memory" in said or "full" in words else "small.toml"
    )
    asked = [
        "plan",
        str(file),
        "--cluster",
        str(folder / "cores.toml"),
        "--nodes",
        "1",
        "--best",
        "1",
    ]
    for option, value in re.findall(r"(--[\w.-]+)[ =](\S+)", words.format(folder)):
        asked = with_option(asked, option, value)
    found = told(*asked)
    assert found.code == 2 and found.out == ""
    assert said in found.err and "Traceback" not in found.err
    assert found.err.startswith(("meshwright: error: ", "usage: meshwright plan"))
    if works is None:
        named = re.search(r"what works: (.*)", found.err)
        assert named is not None
        works = named[1].split(", or ")
    for each in works:
        again = asked
        for option, value in re.findall(r"(--[\w.-]+)[ =](\S+)", each.format(folder)):
            assert value.split("/")[-1] in found.err or option == "--cluster"
            again = with_option(again, option, value)
        done = told(*again)
        assert done.code == 0, done.err
        assert "peak memory of each rank in the first layout" in done.out


def test_a_configuration_without_samples_is_told_how_many(folder: Path) -> None:
    file = folder / "open.toml"
    file.write_text((folder / "small.toml").read_text().replace("global_batch = 2", ""))
    words = (
        "plan",
        str(file),
        "--cluster",
        str(folder / "cores.toml"),
        "--nodes",
        "1",
        "--best",
        "1",
    )
    found = told(*words)
    assert found.code == 2 and "batch.global_batch is not set" in found.err
    near = re.search(r"--global-batch, such as (\d+)", found.err)
    assert near is not None
    assert told(*words, "--global-batch", near[1]).code == 0


@pytest.mark.long
def test_this_machine_is_measured_and_can_be_planned_with(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrating, "SIDES", (16, 64))
    monkeypatch.setattr(calibrating, "COPIED", (4**5, 4**8))
    monkeypatch.setattr(calibrating, "REPEATS", 1)
    file = tmp_path / "below" / "machine.toml"
    found = told("calibrate", "--out", str(file), "--ranks", "2")
    assert found.code == 0 and found.out.endswith(f"written: {file}\n")
    hardware = read_hardware(str(file))
    assert (
        hardware.kind,
        hardware.devices_per_node,
        len(hardware.products),
        len(hardware.copies),
    ) == ("cpu", 2, 2, 2)
    assert hardware.node_link.latency_s > 0 and hardware.operation_s > 0
    assert (
        told(
            "plan",
            str(folder / "small.toml"),
            "--cluster",
            str(file),
            "--nodes",
            "1",
            "--best",
            "1",
        ).code
        == 0
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    found = told("calibrate", "--device", "cuda", "--out", str(tmp_path / "gpu.toml"))
    assert found.code == 2 and "MW-PLANNER-007" in found.err, found.err


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    folder: Path,
) -> None:
    found = told("calibrate", "--out", str(folder / "folder"))
    assert found.code == 2 and f"such as {folder / 'folder' / 'this-machine.toml'}" in found.err
    assert (
        "nothing can lie below it"
        in told("calibrate", "--out", str(folder / "small.toml" / "x.toml")).err
    )
