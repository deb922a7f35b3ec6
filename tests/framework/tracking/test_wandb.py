"""wandb for real: its process, its files. Nothing here reaches a network beyond this machine."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from meshwright.config import RunConfig
from meshwright.tracking.jsonl import JsonlSink
from meshwright.tracking.record import metrics, to_json
from meshwright.tracking.tracker import Tracker
from meshwright.tracking.wandb import (
    PUBLIC_SERVER,
    WandbMode,
    WandbSink,
    _child_environment,
    base_url,
    choose_mode,
    has_key,
    is_reachable,
)
from tests.support.errors import raises
from tests.support.marks import long_row

pytestmark = pytest.mark.usefixtures("no_account")
KEY = "0123456789abcdef" * 2 + "01234567"


def wandb_records(path: Path) -> Iterator:
    """The protobuf records of a .wandb file: a LevelDB log (blocks of 32 KiB, records cut into
    FULL, FIRST, MIDDLE and LAST pieces with a 7-byte head: CRC, length, type) after a 7-byte head
    of the file.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, message = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(message)
            message = b""


def read_back(path: Path) -> tuple[dict, dict[int, dict], int | None]:
    """Config, step -> metrics, and the exit code of a .wandb file."""
    config: dict = {}
    history: dict[int, dict] = {}
    exit_code = None
    for found in wandb_records(path):
        if found.HasField("run"):
            config |= {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in found.run.config.update
            }
        if found.HasField("history"):
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in found.history.item
            }
            history[row["_step"]] = row
        if found.HasField("exit"):
            exit_code = found.exit.exit_code
    return config, history, exit_code


def offline_files(run_directory: Path) -> list[Path]:
    return sorted(run_directory.glob("wandb/offline-run-*/run-*.wandb"))


def processes_of(run_directory: Path) -> list[str]:
    """Command lines of living processes that were started for this run:
    they carry its cache directory.
    """
    mark = f"WANDB_CACHE_DIR={run_directory.resolve()}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def wait_until_gone(run_directory: Path) -> None:
    deadline = time.monotonic() + 30
    while processes := processes_of(run_directory):
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)


def sink(run_directory: Path, mode: WandbMode, warnings: list[str], **limits: float) -> WandbSink:
    return WandbSink(run_directory, config_of(mode), warn=warnings.append, **limits)


def config_of(mode: WandbMode) -> RunConfig:
    tracking = {"project": "p", "wandb": str(mode)}
    return RunConfig.model_validate(
        {"run": {"name": "n", "seed": 7}, "parallel": {"tp": 4}, "tracking": tracking}
    )


def test_an_offline_run_reads_back(tmp_path, record, capfd, monkeypatch) -> None:
    monkeypatch.setenv("A_SECRET", "not-for-the-record")
    monkeypatch.setenv("SLURM_JOB_ID", "not-for-the-record")
    warnings: list[str] = []
    # megatron-core, which other tests import, imports it too
    loaded_before = "wandb" in sys.modules
    records = [
        record(step, mfu=0.25, validation_loss=2.5 if step == 3 else None) for step in (1, 2, 3)
    ]
    sinks = [sink(tmp_path, WandbMode.OFFLINE, warnings)]
    with Tracker(JsonlSink(tmp_path / "metrics.jsonl"), sinks, warn=warnings.append) as tracker:
        assert ("wandb" in sys.modules) is loaded_before
        for each in records:
            tracker.write(each)
    wait_until_gone(tmp_path)

    [path] = offline_files(tmp_path)
    config, history, exit_code = read_back(path)
    sent = config_of(WandbMode.OFFLINE).model_dump(mode="json")
    assert {name: config[name] for name in sent} == sent
    assert sorted(history) == [1, 2, 3]
    for each in records:
        row = {
            name: value for name, value in history[each.step].items() if not name.startswith("_")
        }
        assert row == {"step": each.step} | metrics(each)
    assert exit_code == 0
    assert warnings == [] and capfd.readouterr() == ("", "")
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"not-for-the-record" not in file.read_bytes(), file


def test_entity_group_tags_notes_and_the_axis_of_a_loss(tmp_path, record) -> None:
    named = {
        "entity": "a-team",
        "group": "sweep 1",
        "tags": ("long", "bf16"),
        "notes": "a run\nof two lines",
    }
    tree = config_of(WandbMode.OFFLINE).model_dump()
    config = RunConfig.model_validate({**tree, "tracking": {**tree["tracking"], **named}})
    warnings: list[str] = []
    one = WandbSink(tmp_path, config, warn=warnings.append)
    one.open()
    one.write(record(1, validation_loss=2.5, extra={"validation/accuracy": 0.5}))
    one.close()
    found = list(wandb_records(offline_files(tmp_path)[0]))
    [run] = [each.run for each in found if each.HasField("run")][:1]
    assert (run.entity, run.run_group, list(run.tags), run.notes) == (
        "a-team",
        "sweep 1",
        ["long", "bf16"],
        named["notes"],
    )
    axes = {
        each.metric.name or each.metric.glob_name: each.metric.step_metric
        for each in found
        if each.HasField("metric")
    }
    over_tokens = {"train/loss", "validation/loss", "validation/accuracy"}
    assert {name for name, axis in axes.items() if axis == "train/tokens"} == over_tokens
    assert (
        axes["train/lr"] == axes["train/tokens"] == axes["perf/step_s"] == "step"
        and not axes["step"]
    )
    assert warnings == []


VARIABLES = {
    "WANDB_PROJECT": "their-project",
    "WANDB_ENTITY": "their-team",
    "WANDB_RUN_GROUP": "their-group",
    "WANDB_NAME": "their-name",
    "WANDB_NOTES": "their notes",
    "WANDB_TAGS": "their-tag",
}
OWN_NAMES = {"project": "p", "entity": "e", "group": "g", "notes": "o", "tags": ("t",)}


@pytest.mark.parametrize(
    ("run", "named", "variables", "expected"),
    [
        long_row({}, {}, VARIABLES, tuple(VARIABLES.values())),
        long_row({}, {}, {}, ("meshwright", "", "", "run", "", "")),
        # a key that is set wins
        ({"name": "n"}, OWN_NAMES, VARIABLES, ("p", "e", "g", "n", "o", "t")),
        long_row(
            {"name": "n"},
            {"project": "meshwright"},
            VARIABLES,
            ("meshwright", "their-team", "their-group", "n"),
        ),
    ],
)
def test_names_are_those_of_the_keys_else_of_wandbs_variables(
    run: dict[str, str],
    named: dict,
    variables: dict[str, str],
    expected: tuple[str, ...],
    tmp_path,
    monkeypatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = RunConfig.model_validate({"run": run, "tracking": {"wandb": "offline", **named}})
    one = WandbSink(tmp_path, config)
    one.open()
    one.close()
    [found] = [
        each.run for each in wandb_records(offline_files(tmp_path)[0]) if each.HasField("run")
    ][:1]
    names = (
        found.project,
        found.entity,
        found.run_group,
        found.display_name,
        found.notes,
        ",".join(found.tags),
    )
    assert names[: len(expected)] == expected


@pytest.mark.long
def test_a_resumed_run_goes_on_under_its_id_and_its_rows_are_used_once(tmp_path, record) -> None:
    """wandb drops a row whose number is lower than one before: online,
    and of offline files synced to one run.
    """
    warnings: list[str] = []
    for resumed, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5)), (4, (5,)), (5, (6,))):
        parts = (
            JsonlSink(tmp_path / "metrics.jsonl", resumed),
            sink(tmp_path, WandbMode.OFFLINE, warnings, finish_limit_s=60.0),
        )
        for part in reversed(parts):  # the tracker opens wandb in a thread, perhaps first
            part.open()
        for step in steps:
            for part in parts:
                part.write(record(step, loss=step + resumed / 10))
        for part in parts:
            part.close()
        wait_until_gone(tmp_path)
        time.sleep(1)  # wandb names a directory by the second
    kept = (tmp_path / "wandb_run_id").read_text().strip()
    files = offline_files(tmp_path)
    assert [path.name for path in files] == [f"run-{kept}.wandb"] * 4
    rows = [
        (row, each["step"], each["train/loss"])
        for path in files
        for row, each in read_back(path)[1].items()
    ]
    steps, losses = [1, 2, 3, 4, 3, 4, 5, 5, 6], [1.0, 2.0, 3.0, 4.0, 3.2, 4.2, 5.2, 5.4, 6.5]
    assert rows == list(zip(range(1, 10), steps, losses, strict=True))
    assert warnings == []


def test_a_row_of_the_client_is_never_lower_than_one_before(tmp_path, record) -> None:
    """The client continues a run online as one process does:
    it drops what has the number of an earlier row.
    """
    one = sink(tmp_path, WandbMode.OFFLINE, [], finish_limit_s=60.0)
    one.open()
    for loss, step in enumerate((1, 2, 3, 4, 3, 4, 5)):
        one.write(record(step, loss=float(loss)))
    one.close()
    history = read_back(offline_files(tmp_path)[0])[1]
    assert [(each["step"], each["train/loss"]) for each in history.values()] == [
        (1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0), (3, 4.0), (4, 5.0), (5, 6.0)
    ]  # fmt: skip


def test_non_finite_values_do_not_break_it(tmp_path, record) -> None:
    broken = sink(tmp_path, WandbMode.OFFLINE, [])
    broken.open()
    broken.write(record(1, loss=math.nan, grad_norm=math.inf))
    broken.write(record(2))
    broken.close()
    history = read_back(offline_files(tmp_path)[0])[1]
    assert math.isnan(float(history[1]["train/loss"]))
    assert float(history[1]["train/grad_norm"]) == math.inf
    assert history[2]["train/loss"] == record(2).loss


@pytest.mark.long
@pytest.mark.fault(row="a logger without network, refused, silent, failing, killed or stuck")
def test_a_silent_server_ends_offline_and_loses_nothing(tmp_path, record, monkeypatch) -> None:
    """A server that takes the connection and never answers."""
    warnings: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        silent = sink(tmp_path, WandbMode.AUTO, warnings, init_limit_s=2.0)
        silent.open()
        assert silent.mode is WandbMode.OFFLINE
        silent.write(record(1))
        silent.close()
    assert len(warnings) == 1 and "offline" in warnings[0]
    assert read_back(offline_files(tmp_path)[-1])[1][1]["train/loss"] == record(1).loss
    wait_until_gone(tmp_path)
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


@pytest.mark.long
@pytest.mark.fault(row="a logger without network, refused, silent, failing, killed or stuck")
def test_a_server_that_refuses_the_key_ends_offline(tmp_path, record, monkeypatch) -> None:
    warning = ends_offline(
        tmp_path, record, monkeypatch, Refusing, WandbMode.ONLINE, init_limit_s=60.0
    )
    assert "no answer" not in warning  # it said why


@pytest.mark.long
@pytest.mark.fault(row="a logger without network, refused, silent, failing, killed or stuck")
def test_a_server_that_fails_ends_offline(tmp_path, record, monkeypatch) -> None:
    """It answers 500 to all; wandb itself would go on asking for a minute and a half."""
    ends_offline(tmp_path, record, monkeypatch, Failing, WandbMode.AUTO, init_limit_s=2.0)


def ends_offline(tmp_path, record, monkeypatch, answers, mode, *, init_limit_s) -> str:
    """With a server that answers so; nothing of the run is lost. Returns the one warning."""
    warnings: list[str] = []
    with HTTPServer(("127.0.0.1", 0), answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        left_alone = sink(tmp_path, mode, warnings, init_limit_s=init_limit_s)
        left_alone.open()
        server.shutdown()
    assert left_alone.mode is WandbMode.OFFLINE
    left_alone.write(record(1))
    left_alone.close()
    assert len(warnings) == 1 and "offline" in warnings[0] and KEY not in warnings[0]
    assert read_back(offline_files(tmp_path)[-1])[1][1]["train/loss"] == record(1).loss
    return warnings[0]


class Refusing(BaseHTTPRequestHandler):
    """Every key is wrong."""

    def do_POST(self) -> None:
        self.send_error(401)

    do_GET = do_POST

    def log_message(self, *arguments: object) -> None:
        pass


class Failing(Refusing):
    """An error of the server's own."""

    def do_POST(self) -> None:
        self.send_error(500)

    do_GET = do_POST


@pytest.mark.fault(row="a logger without network, refused, silent, failing, killed or stuck")
def test_a_killed_run_leaves_its_steps_and_no_process(tmp_path, record) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), to_json(record(1))],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    assert killed.returncode == -signal.SIGKILL
    wait_until_gone(tmp_path)
    _, history, exit_code = read_back(offline_files(tmp_path)[0])
    assert sorted(history) == [1, 2]
    assert exit_code == 1


KILLED = """
import dataclasses, os, signal, sys
from pathlib import Path
from meshwright.config import RunConfig
from meshwright.tracking.record import from_json
from meshwright.tracking.wandb import WandbSink
sink = WandbSink(Path(sys.argv[1]), RunConfig.model_validate({"tracking": {"wandb": "offline"}}))
sink.open()
for step in (1, 2):
    sink.write(dataclasses.replace(from_json(sys.argv[2]), step=step))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_child_that_does_not_finish_is_killed(tmp_path, record) -> None:
    warnings: list[str] = []
    stuck = sink(tmp_path, WandbMode.OFFLINE, warnings, finish_limit_s=0.5)
    stuck.open()
    stuck.write(record(1))
    assert stuck._child is not None and processes_of(tmp_path)
    os.kill(stuck._child.pid, signal.SIGSTOP)
    stuck.close()
    assert len(warnings) == 1 and "wandb sync" in warnings[0]
    wait_until_gone(tmp_path)


@pytest.mark.fault(row="a logger without network, refused, silent, failing, killed or stuck")
def test_a_child_that_dies_is_told(tmp_path, record) -> None:
    warnings: list[str] = []
    dead = sink(tmp_path, WandbMode.OFFLINE, warnings)
    dead.open()
    assert dead._child is not None
    dead._child.kill()
    dead._child.wait()
    with raises("MW-TRACKING-007", "step 1"):
        dead.write(record(1))
    dead.close()
    wait_until_gone(tmp_path)


def test_off_starts_nothing(tmp_path, record) -> None:
    off = sink(tmp_path, WandbMode.OFF, [])
    off.open()
    off.write(record(1))
    off.close()
    assert list(tmp_path.iterdir()) == []


def test_auto_needs_a_key_and_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"http://127.0.0.1:{server.getsockname()[1]}"
        online = {"WANDB_BASE_URL": there, "WANDB_API_KEY": KEY}
        assert choose_mode(WandbMode.AUTO, online) == (WandbMode.ONLINE, None)
        assert (
            choose_mode(WandbMode.AUTO, online | {"WANDB_MODE": "offline"})[0] is WandbMode.OFFLINE
        )
        assert choose_mode(WandbMode.AUTO, online | {"WANDB_MODE": "disabled"})[0] is WandbMode.OFF
        assert choose_mode(WandbMode.OFFLINE, online) == (WandbMode.OFFLINE, None)
        mode, why = choose_mode(
            WandbMode.AUTO, {"WANDB_BASE_URL": there, "NETRC": os.environ["NETRC"]}
        )
        assert mode is WandbMode.OFFLINE and why is not None and "wandb login" in why
    mode, why = choose_mode(WandbMode.AUTO, online)
    assert mode is WandbMode.OFFLINE and why is not None and "did not answer" in why
    assert choose_mode(WandbMode.ONLINE, online) == (WandbMode.ONLINE, None)


def test_a_key_is_found_in_netrc(tmp_path) -> None:
    place = tmp_path / "netrc"
    place.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    assert has_key(PUBLIC_SERVER, {"NETRC": str(place)})
    assert not has_key("https://wandb.example.org", {"NETRC": str(place)})
    assert not has_key(PUBLIC_SERVER, {"NETRC": str(tmp_path / "none")})


def test_the_server_is_the_one_logged_into(tmp_path) -> None:
    (tmp_path / "settings").write_text("[default]\nbase_url = https://wandb.example.org/\n")
    saved = {"WANDB_CONFIG_DIR": str(tmp_path)}
    assert base_url(saved) == "https://wandb.example.org"
    assert base_url(saved | {"WANDB_BASE_URL": "https://other.org"}) == "https://other.org"
    assert base_url({"WANDB_CONFIG_DIR": str(tmp_path / "none")}) == PUBLIC_SERVER


def test_a_password_in_the_server_stays_out_of_all(tmp_path, record, monkeypatch) -> None:
    """wandb's settings, logs, the environment of its process and warnings;
    from either place of the URL.
    """
    monkeypatch.setenv("WANDB_BASE_URL", "http://me:canary-1@127.0.0.1:9/")
    (tmp_path / "settings").write_text(
        "[default]\nbase_url = https://canary-2@wandb.example.org/\n"
    )
    assert base_url({"WANDB_CONFIG_DIR": str(tmp_path)}) == "https://wandb.example.org"
    assert _child_environment(tmp_path)["WANDB_BASE_URL"] == "http://127.0.0.1:9"
    warnings: list[str] = []
    for mode, key in ((WandbMode.ONLINE, KEY), (WandbMode.AUTO, ""), (WandbMode.OFFLINE, KEY)):
        run = tmp_path / f"{mode}"
        run.mkdir()
        monkeypatch.setenv("WANDB_API_KEY", key)
        one = sink(run, mode, warnings, init_limit_s=3.0)
        one.open()
        one.write(record(1))
        one.close()
        files = [path for path in run.rglob("*") if path.is_file()]
        assert any(path.name == "debug.log" for path in files)
        assert not [path for path in files if b"canary" in path.read_bytes()]
    assert len(warnings) >= 2 and not any("canary" in warning for warning in warnings)


def test_a_proxy_is_asked_instead_of_the_server(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert is_reachable("https://nowhere.invalid", limit_s=5)
    assert not is_reachable("https://nowhere.invalid", limit_s=5)
