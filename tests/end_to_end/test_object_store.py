"""Runs whose checkpoints lie in an object store: exact resumes, and a store that is away, slow or full
of leftovers. The server is real, and a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.checkpoint import find
from meshwright.config import RunConfig, to_toml
from meshwright.errors import UserError
from meshwright.run.directory import run_directory
from meshwright.run.places import store_of
from meshwright.run.resume import _checkpoint_from, prepare
from meshwright.run.saving import Saver
from meshwright.system import store
from meshwright.system.store import StoreAccess, StorePath
from meshwright_launch.pool import RankPool
from meshwright_launch.work import work
from tests.end_to_end.driving import (
    changed,
    differing,
    exact_losses,
    layout,
    lines,
    run_config,
    size,
    tensors,
    train,
    with_own_samples,
)
from tests.end_to_end.shell import LIMIT_S, Shell
from tests.support.errors import raises
from tests.support.marks import long_row
from tests.support.object_store import (
    KEY,
    SECRET,
    ObjectStore,
    Request,
    forget_file_systems,
)

STORE = "s3://bucket/prefix"
IN_STORE = StorePath(f"{STORE}/run")


def rank_in_store(
    rank: int, world_size: int, config: RunConfig, environment: dict[str, str], limit_s: float
) -> tuple[str, str, int]:
    """Run one rank in the environment of the store. Return its output, warnings and exit code.
    ``limit_s``: deadline of a request outside of a save.
    """
    os.environ.update(environment)
    forget_file_systems()
    StoreAccess.__init__.__defaults__ = (limit_s, store._never)
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            work(config)
        except UserError as error:
            err.write(str(error))
            code = error.exit_code
    return out.getvalue(), err.getvalue(), code


def train_there(
    pool: RankPool,
    s3: ObjectStore,
    config: RunConfig,
    code: int = 0,
    limit_s: float = store.LIMIT_S,
) -> str:
    """Train with checkpoints in the store; return the output and the warnings of rank 0."""
    found = pool.run(rank_in_store, size(config), config, s3.environment, limit_s)
    assert [each[2] for each in found] == [code] * len(found), found
    return str(found[0][0] + found[0][1])


def in_store(corpus: Path, runs: Path, **sections: dict[str, Any]) -> RunConfig:
    keys = {"directory": STORE, "every": 2, **sections.pop("checkpoint", {})}
    return run_config(corpus, runs, checkpoint=keys, **sections)


def steps(place: Any = IN_STORE) -> list[int]:
    return [each.step for each in find(place)]


def of_step(number: int, fault: str, more: str = "") -> Callable[[Request], str | None]:
    """Return a fault of the requests that write a step."""
    name = f"step-{number:08d}"
    return lambda request: (
        fault
        if name in request.key and more in request.key and request.method in ("PUT", "POST")
        else None
    )


@pytest.mark.parametrize(
    ("first", "then", "keys"),
    [
        ("dp2", "dp2", {}),
        long_row("dp2,pp2,zero2", "tp2,pp2", {"asynchronous": False}),
        long_row("dp2,zero3", "dp1", {}),
    ],
)
def test_a_run_resumes_to_the_bit(
    first: str,
    then: str,
    keys: dict[str, Any],
    corpus: Path,
    tmp_path: Path,
    pool: RankPool,
    s3: ObjectStore,
) -> None:
    """As the run on a disk, which stops and changes its layout at the same step."""
    for place in (tmp_path / "disk", tmp_path / "store"):
        make = in_store if place.name == "store" else run_config
        checkpoint = {"checkpoint": {"every": 2, "keep_last": 3, **keys}}
        begun = make(corpus, place, parallel=layout(first), train={"steps": 4}, **checkpoint)
        ended = make(corpus, place, parallel=layout(then), train={"steps": 6}, **checkpoint)
        for config in (begun, ended):
            if place.name == "store":
                said = train_there(pool, s3, config)
            else:
                train(pool, config)
    assert f"resuming from {IN_STORE}/step-00000004" in said and "saved " in said
    runs = [
        run_config(corpus, tmp_path / name, parallel=layout(then)) for name in ("disk", "store")
    ]
    assert exact_losses(runs[0]) == exact_losses(runs[1])
    assert steps() == [6, 4, 2]
    assert not (run_directory(runs[1].run) / "checkpoints").exists()
    assert not differing(tensors(IN_STORE), tensors(run_directory(runs[0].run)))  # type: ignore[arg-type]
    assert not any(".tmp-" in key for key in s3.all_keys()) and s3.uploads() == []


@pytest.mark.long
@pytest.mark.parametrize("fault", ["drop", "deny", long_row("skew"), long_row("throttle")])
@pytest.mark.fault(row="an object store away during a save")
def test_a_store_that_is_away_for_a_save(
    fault: str, corpus: Path, tmp_path: Path, pool: RankPool, s3: ObjectStore
) -> None:
    """The first save of the run, which on a disk would end it."""
    config = in_store(
        corpus, tmp_path, parallel=layout("dp2"), checkpoint={"upload_timeout_s": 1.5}
    )
    s3.proxy.fault = of_step(2, fault, "dp0-tp0")  # rank 0 alone
    said = train_there(pool, s3, config)
    assert "the checkpoint of step 2 could not be saved:\n  rank 0: s3://bucket/prefix/run/" in said
    assert "the run continues" in said and "MW-CHECKPOINT-034" not in said.split("rank 0")[0]
    assert steps() == [6, 4] and len(lines(config)) == 6
    assert not any("step-00000002/" in key for key in s3.all_keys()), "leftovers are removed"
    check_no_secret(tmp_path, said)


def check_no_secret(place: Path, *texts: str) -> None:
    texts += tuple(path.read_text(errors="replace") for path in place.rglob("*") if path.is_file())
    assert not any(KEY in text or SECRET in text for text in texts)


@pytest.mark.long
@pytest.mark.fault(row="an object store that keeps a connection and answers no more")
def test_training_goes_on_beside_a_stuck_upload(
    corpus: Path, tmp_path: Path, pool: RankPool, s3: ObjectStore
) -> None:
    """Rank 1's upload of step 2 hangs for three seconds; steps 3 to 7 are taken meanwhile."""
    config = in_store(
        corpus,
        tmp_path,
        parallel=layout("dp2"),
        train={"steps": 8},
        checkpoint={"upload_timeout_s": 3.0, "every": 8, "every_minutes": 0},
        run={"name": "run"},
    )
    config = changed(config, checkpoint={"every": 4})
    s3.proxy.fault = of_step(4, "stall", "dp1")
    said = train_there(pool, s3, config)
    assert "rank 1: s3://bucket/prefix/run/step-00000004/pp0-dp1-tp0-" in said
    assert "no answer in 3 s, after" in said
    assert max(line["perf/step_s"] for line in lines(config)[4:7]) < 2, "no step waits"
    assert steps() == [8]


@pytest.mark.long
@pytest.mark.fault(row="an object store that keeps a connection and answers no more")
def test_a_server_that_is_stopped(
    corpus: Path, tmp_path: Path, pool: RankPool, s3: ObjectStore
) -> None:
    """SIGSTOP when step 4 begins to be written, SIGCONT seconds later: the next save succeeds."""
    config = in_store(
        corpus, tmp_path, parallel=layout("dp2"), checkpoint={"upload_timeout_s": 2.0}
    )
    frozen_s: list[float] = []

    def freeze(request: Request) -> str | None:
        if "step-00000004" in request.key and not frozen_s:
            frozen_s.append(time.monotonic())
            s3.freeze()
        if frozen_s and time.monotonic() - frozen_s[0] > 3:
            s3.thaw()
        return None

    s3.proxy.fault = freeze
    said = train_there(pool, s3, config)
    assert "the checkpoint of step 4 could not be saved" in said and "no answer in 2 s" in said
    assert steps() == [6, 2] and len(exact_losses(config)) == 6


@pytest.mark.long
def test_saves_that_fail_in_a_row_end_the_run(
    corpus: Path, tmp_path: Path, pool: RankPool, s3: ObjectStore
) -> None:
    keys = {"every": 1, "upload_timeout_s": 0.5, "most_failed": 2}
    config = in_store(corpus, tmp_path, parallel=layout("dp2"), checkpoint=keys)
    s3.proxy.fault = lambda request: "deny" if request.method == "PUT" else None
    said = train_there(pool, s3, config, code=2)
    assert "MW-RUN-067" in said and "3 saves in a row have failed" in said
    assert said.count("the run continues") == 2
    # a success in between begins the count anew
    shutil.rmtree(tmp_path / "run")
    failing = {f"step-{number:08d}" for number in (1, 2, 4, 5)}
    s3.proxy.fault = lambda request: (
        "deny" if request.method == "PUT" and any(name in request.key for name in failing) else None
    )
    said = train_there(pool, s3, config)
    assert said.count("the run continues") == 4 and steps() == [6, 3]


@pytest.mark.long
def test_or_the_first_one_where_that_is_wanted(
    corpus: Path, tmp_path: Path, pool: RankPool, s3: ObjectStore
) -> None:
    keys = {"on_failure": "fail", "upload_timeout_s": 0.5}
    config = in_store(corpus, tmp_path, parallel=layout("dp2"), checkpoint=keys)
    s3.proxy.fault = of_step(2, "deny")
    assert "MW-RUN-025" in train_there(pool, s3, config, code=2)


@pytest.mark.long
def test_the_last_save_is_tried_again(
    corpus: Path, tmp_path: Path, pool: RankPool, s3: ObjectStore
) -> None:
    """Nothing comes after it that could save."""
    config = in_store(
        corpus, tmp_path, parallel=layout("dp2"), checkpoint={"upload_timeout_s": 2.0}
    )
    begun_s = time.monotonic()
    tried: list[str] = []

    def away(request: Request) -> str | None:
        is_mark = request.key.endswith("attempt.json") and "step-00000006" in request.key
        if is_mark and request.method == "PUT" and request.key not in tried:
            tried.append(request.key)
        return "drop" if len(tried) == 1 and "step-00000006" in request.key else None

    s3.proxy.fault = away
    said = train_there(pool, s3, config)
    assert "the checkpoint of step 6 could not be saved" in said
    assert steps() == [6, 4] and time.monotonic() - begun_s < LIMIT_S


@pytest.mark.long
def test_a_run_moves_to_a_store_and_not_back_without_its_steps(
    corpus: Path, tmp_path: Path, pool: RankPool, s3: ObjectStore
) -> None:
    keys = {"parallel": layout("dp1"), "train": {"steps": 4}}
    config = run_config(corpus, tmp_path, checkpoint={"every": 2}, **keys)
    train(pool, config)
    directory = run_directory(config.run)
    moved = changed(config, checkpoint={"directory": STORE}, train={"steps": 6})
    said = train_there(pool, s3, moved)
    assert f"resuming from {directory / 'checkpoints' / 'step-00000004'}" in said
    assert steps() == [6] and steps(directory) == [4, 2], "the old steps stay"
    back = changed(config, train={"steps": 8})
    said = train_there(pool, s3, back, code=2)
    assert "MW-RUN-071" in said and f"{IN_STORE}/step-00000006 is newer" in said
    elsewhere = changed(moved, checkpoint={"directory": "s3://bucket/other"}, train={"steps": 8})
    assert "MW-RUN-071" in train_there(pool, s3, elsewhere, code=2)
    here = directory / "checkpoints" / "step-00000006"
    here.mkdir()
    for key in s3.all_keys():
        (here / key.rpartition("/")[2]).write_bytes(s3.get(key))
    said = train_there(pool, s3, back)
    assert f"resuming from {here}" in said and steps(directory)[0] == 8


def test_the_store_is_checked_before_any_rank(
    corpus: Path, tmp_path: Path, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.blueprint import draw_blueprint
    from meshwright.config import resolve

    config = resolve(in_store(corpus, tmp_path), 1)
    prepare(draw_blueprint(config), {})
    assert s3.proxy.counts() == {"PUT": 1, "GET": 1, "LIST": 1, "DELETE": 1, "uploads": 1}
    assert s3.all_keys() == []
    gone = resolve(in_store(corpus, tmp_path, checkpoint={"directory": "s3://nobody/x"}), 1)
    with raises("MW-RUN-069", "there is no such bucket"):
        prepare(draw_blueprint(gone), {})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    forget_file_systems()
    with raises("MW-RUN-069", "no credentials"):
        prepare(draw_blueprint(config), {})


def test_a_store_that_is_away_at_a_start_ends_only_that_start(
    corpus: Path, tmp_path: Path, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1: a scheduler or the launcher starts it again, which it does not after 2."""
    from meshwright.blueprint import draw_blueprint
    from meshwright.config import resolve

    monkeypatch.setattr("meshwright.run.places.CHECK_S", 1.0)
    s3.proxy.fault = lambda request: "drop"
    with raises("MW-RUN-074", "when the store answers") as error:
        prepare(draw_blueprint(resolve(in_store(corpus, tmp_path), 1)), {})
    assert error.value.exit_code == 1


@pytest.mark.long
@pytest.mark.parametrize(("what", "code"), [("HEAD", "MW-RUN-075"), ("GET", "MW-RUN-076")])
@pytest.mark.fault(row="an object store away during a save")
def test_a_store_that_is_away_at_a_resume_ends_only_that_start(
    what: str, code: str, corpus: Path, tmp_path: Path, pool: RankPool, s3: ObjectStore
) -> None:
    config = in_store(corpus, tmp_path, parallel=layout("dp2"), train={"steps": 2})
    train_there(pool, s3, config)
    s3.proxy.fault = lambda request: (
        "drop" if request.what == what and "step-00000002" in request.key else None
    )
    more = changed(config, train={"steps": 4})
    assert code in train_there(pool, s3, more, code=1, limit_s=2.0)
    s3.proxy.fault = lambda request: None
    train_there(pool, s3, more)
    assert steps()[0] == 4


def test_beside_a_mirror_an_unreadable_store_is_left_out(
    tmp_path: Path, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror is whole: the run goes on from it. On a disk such a step ends the start."""
    monkeypatch.setattr(StoreAccess.__init__, "__defaults__", (1.0, store._never))
    world = SimpleNamespace(gather_objects=lambda own, *kinds: [own])
    alone: Any = SimpleNamespace(rank=0, grid=SimpleNamespace(size=1), world=world)
    s3.proxy.fault = lambda request: "drop"
    said: list[str] = []
    step = IN_STORE / "step-00000002"
    assert _checkpoint_from([step], tmp_path, alone, said.append) is None
    assert len(said) == 1 and "left out" in said[0] and str(step) in said[0]


def test_a_fresh_run_has_no_checkpoint_in_a_store() -> None:
    """Not of a step above -1 either, for the message at its end."""
    fresh: Any = SimpleNamespace(saved_step=None, _store=IN_STORE, _first_step=0)
    assert not Saver.has_checkpoint(fresh, above=-1)
    fresh._first_step = 2
    assert Saver.has_checkpoint(fresh, above=-1)


def test_the_place_follows_the_name_of_the_run(corpus: Path, tmp_path: Path) -> None:
    config = in_store(corpus, tmp_path, checkpoint={"directory": "s3://bucket/a/b/"})
    assert str(store_of(config)) == "s3://bucket/a/b/run"
    assert store_of(run_config(corpus, tmp_path)) is None


@pytest.fixture
def there(shell: Shell, s3: ObjectStore) -> Shell:
    """A shell in the environment of the store."""
    shell.environment |= s3.environment
    return shell


def config_file(config: RunConfig, place: Path) -> str:
    path = place / "config.toml"
    path.write_text(to_toml(config))
    return str(path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.fault(row="all ranks killed while they upload")
def test_killed_in_the_middle_of_an_upload(
    corpus: Path, tmp_path: Path, there: Shell, s3: ObjectStore
) -> None:
    config = with_own_samples(
        in_store(corpus, tmp_path / "runs", parallel={"dp": 2}, train={"steps": 6})
    )
    s3.proxy.fault = of_step(4, "stall", "manifest.json")
    words = ["-m", "meshwright_launch", "train", config_file(config, tmp_path)]
    process = there.start(words)
    end_s = time.monotonic() + LIMIT_S
    while not any(
        "step-00000004/manifest.json" in each.key and each.method == "PUT"
        for each in s3.proxy.requests
    ):
        assert time.monotonic() < end_s and process.poll() is None
        time.sleep(0.05)
    there.end_all()
    process.wait()
    assert steps() == [2] and any("step-00000004/pp0" in key for key in s3.all_keys())
    s3.proxy.fault = lambda request: None
    again = there.run(*words)
    assert again.returncode == 0 and "resuming from" in again.stdout, again
    assert steps() == [6, 4] and len(exact_losses(config)) == 6
    assert len([key for key in s3.all_keys() if "step-00000004/" in key]) == 4
    check_no_secret(tmp_path, again.stdout, again.stderr)


@pytest.mark.slow
@pytest.mark.long
def test_a_signal_saves_to_the_store(
    corpus: Path, tmp_path: Path, there: Shell, s3: ObjectStore
) -> None:
    config = with_own_samples(
        in_store(
            corpus,
            tmp_path / "runs",
            parallel={"dp": 2},
            train={"steps": 100_000},
            checkpoint={"every": 0},
        )
    )
    words = ["-m", "meshwright_launch", "train", config_file(config, tmp_path)]
    process = there.start(words)
    end_s, metrics = time.monotonic() + LIMIT_S, run_directory(config.run) / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < end_s and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(LIMIT_S) == 85
    (step,) = steps()
    again = there.run(*words, f"--train.steps={step + 1}")
    assert again.returncode == 0 and f"step {step}, " in again.stdout
    assert steps() == [step + 1, step]


@pytest.mark.slow
@pytest.mark.long
def test_commands_take_paths_in_a_store(
    corpus: Path, tmp_path: Path, there: Shell, s3: ObjectStore
) -> None:
    config = in_store(corpus, tmp_path / "runs", train={"validate_every": 6})
    file = config_file(config, tmp_path)

    def run(*words: str, code: int = 0) -> str:
        done = there.run("-m", "meshwright_launch", *words)
        assert done.returncode == code, done
        check_no_secret(tmp_path, done.stdout, done.stderr)
        return str(done.stdout + done.stderr)

    run("train", file)
    local, place = str(run_directory(config.run)), str(IN_STORE)
    for where in (local, place):
        listed = run("checkpoint", "list", where)
        assert " 4 " in listed and " 6 " in listed
        run("eval", where, "--out", str(tmp_path / "eval.json"))
        assert json.loads((tmp_path / "eval.json").read_text())["step"] == 6
    assert "the" in run("sample", place, "--prompt", "the", "--tokens", "3")
    assert run("checkpoint", "verify", place).count(": sound") == 2
    assert "step          4" in run("checkpoint", "show", place, "--step", "4")
    run("checkpoint", "export", f"{place}/step-00000006", "--out", str(tmp_path / "dcp"))
    run("convert", place, "--to", "hf", str(tmp_path / "hf"))
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    for start in (f"{place}@4", local):
        said = run("train", file, "--run.name=other", f"--run.start={start}", "--train.steps=3")
        assert f"{place}/step-0000000" in said
        shutil.rmtree(tmp_path / "runs" / "other")
        s3.reset() if start == local else [
            s3.delete(key) for key in s3.all_keys() if "/other/" in key
        ]
    for words in (
        ("convert", place, "--to", "hf", "s3://bucket/x"),
        ("convert", place, "--from", "hf", str(tmp_path / "hf")),
        ("checkpoint", "export", local, "--out", "s3://bucket/x"),
        ("report", place),
        ("checkpoint", "list", f"s3://{KEY}:{SECRET}@bucket/x"),
    ):
        assert "error: " in run(*words, code=2)


@pytest.mark.slow
@pytest.mark.long
def test_restarts_count_the_steps_in_the_store(
    corpus: Path, tmp_path: Path, there: Shell, s3: ObjectStore
) -> None:
    """A rank dies in every start, each time a few steps later: without the store's steps the
    launcher would give the run up.
    """
    from tests.end_to_end.test_from_the_shell import trapped

    config = trapped(corpus, tmp_path / "runs", 1, killed=True, parallel={"dp": 2})
    config = changed(
        config,
        checkpoint={"directory": STORE, "every": 1, "asynchronous": False},
        launch={"max_restarts": 4},
        train={"steps": 1000},
    )
    done = there.run("-m", "meshwright_launch", "train", config_file(config, tmp_path))
    assert done.returncode != 0 and "launch.max_restarts = 4 is used up" in done.stderr, done
    assert steps()[0] >= 4
