"""Local ranks: they meet, their failures are told with the cause first,
and none outlives the launcher.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.config import Data, Launch, Run, RunConfig
from meshwright.errors import (
    ConfigError,
    DataError,
    MeshError,
    NonFiniteError,
    Preempted,
    UserError,
)
from meshwright.system.process import LISTENING, GiveUp, StopRequest
from meshwright_launch.failure import RankFailed
from meshwright_launch.forking import warm_up
from meshwright_launch.local import launch
from tests.support.errors import has_code
from tests.support.marks import marked_rows
from tests.support.run import alive

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """A run of three local ranks."""
    return config(tmp_path, 3)


def config(directory: Path, num_ranks: int) -> RunConfig:
    return RunConfig(
        run=Run(directory=str(directory)),
        # with a corpus, the server of the ranks would import megatron-core
        data=Data(builder="nobody:asks"),
        launch=Launch(processes=num_ranks, threads=2),
    )


def notes(run: RunConfig) -> Path:
    return Path(run.run.directory) / run.run.name


def join() -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return dist.get_rank()


def meet(run: RunConfig, give_up: GiveUp) -> None:
    rank = join()
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    found = [*(os.environ[name] for name in names), str(torch.get_num_threads()), str(value.item())]
    (notes(run) / f"{rank}.txt").write_text(" ".join(found))
    print(f"rank {rank} was here", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def alone(run: RunConfig, give_up: GiveUp) -> None:
    (notes(run) / "alone.txt").write_text(str(os.getpid()))


def raise_in_last(run: RunConfig, give_up: GiveUp) -> None:
    """The last rank leaves its peers while it cleans up:
    they see a lost connection before it has told anything.
    """
    rank = join()
    try:
        if rank == 2:
            raise LookupError("the cause")
        dist.barrier()
    finally:
        if rank == 2:
            dist.destroy_process_group()
            time.sleep(0.5)


def refuse_in_one(run: RunConfig, give_up: GiveUp) -> None:
    if join() == 1:
        raise DataError("MW-TEST-001", "corpus.idx: damaged")
    dist.barrier()


def refuse_in_all(run: RunConfig, give_up: GiveUp) -> None:
    raise DataError("MW-TEST-001", "corpus.idx: damaged")


def vanish_in_one(run: RunConfig, give_up: GiveUp) -> None:
    if join() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang(run: RunConfig, give_up: GiveUp) -> None:
    (notes(run) / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    join()
    dist.barrier()
    signal.pause()


def fail_without_records(run: RunConfig, give_up: GiveUp) -> None:
    """Fail where no record can be written, as with a full temporary directory."""
    code = run.train.steps
    if join() == 1:
        shutil.rmtree(Path(os.environ[LISTENING]).parent)
    dist.barrier()
    raise (
        Preempted("MW-TEST-001", "stopped")
        if code == Preempted.exit_code
        else NonFiniteError("MW-TEST-001", "NaN")
    )


@pytest.mark.parametrize("kind", [Preempted, NonFiniteError])
def test_without_records_the_exit_code_remains(
    run: RunConfig, capfd: pytest.CaptureFixture[str], kind: type[UserError]
) -> None:
    """Otherwise a stopped run would be restarted."""
    with pytest.raises(RankFailed, match=f"exited with code {kind.exit_code}") as caught:
        launch(fail_without_records, run.replace(train={"steps": kind.exit_code}))
    assert caught.value.exit_code == kind.exit_code
    assert "[MW-TEST-001]" in capfd.readouterr().err + (notes(run) / "logs/rank-1.log").read_text()


def stop_after_a_cleanup(run: RunConfig, give_up: GiveUp) -> None:
    """The first rank deletes the marks of the signal handlers,
    and has the launcher stop the run.
    """
    with StopRequest() as request:
        rank = join()
        dist.barrier()
        if rank == 0:
            time.sleep(3.0)  # the launcher looks for the marks every second
            shutil.rmtree(Path(os.environ[LISTENING]))
            launcher = multiprocessing.parent_process()
            assert launcher is not None and launcher.pid is not None
            os.kill(launcher.pid, signal.SIGTERM)
        for _ in range(600):
            if request.is_requested():
                raise Preempted("MW-TEST-001", "stopped and saved")
            time.sleep(0.1)


def test_a_cleaned_temporary_directory_does_not_kill_a_run_that_is_stopped(run: RunConfig) -> None:
    with pytest.raises(RankFailed, match="stopped and saved") as caught:
        launch(stop_after_a_cleanup, run)
    assert caught.value.exit_code == 85


@pytest.mark.long
def test_ranks_meet_and_print_where_they_should(
    run: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(meet, run)
    for rank in range(3):
        assert (notes(run) / f"{rank}.txt").read_text() == f"{rank} 3 {rank} 2 2 3.0"
    assert not (notes(run) / "logs/rank-0.log").exists()
    assert "rank 2 was here" in (notes(run) / "logs/rank-2.log").read_text()
    assert "rank 2 was here" not in capfd.readouterr().out


def test_one_rank_runs_in_this_process(tmp_path: Path) -> None:
    run = config(tmp_path, 1)
    notes(run).mkdir()
    threads = torch.get_num_threads()
    try:
        launch(alone, run)
    finally:
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = "1"
    assert (notes(run) / "alone.txt").read_text() == str(os.getpid())


def test_the_cause_is_told_before_its_echoes(run: RunConfig) -> None:
    with pytest.raises(RankFailed) as caught:
        launch(raise_in_last, run)
    assert (caught.value.rank, caught.value.exit_code) == (2, 1)
    message = str(caught.value)
    assert (
        message.startswith("rank 2: LookupError: the cause\nTraceback")
        and "in raise_in_last" in message
    )
    # one, or both, before the agent ends them
    assert message.splitlines()[-1].startswith("then lost a peer: rank")


def test_what_the_user_can_mend_comes_without_a_traceback(run: RunConfig) -> None:
    for refuse in (refuse_in_one, refuse_in_all):
        with pytest.raises(RankFailed, match=r"\Acorpus.idx: damaged \[MW-TEST-001\]\Z") as caught:
            launch(refuse, run)
        assert caught.value.exit_code == 2


def test_a_killed_rank_is_named_with_its_last_words(run: RunConfig) -> None:
    with pytest.raises(
        RankFailed, match=r"\Arank 1 was ended by SIGKILL[\s\S]*rank-1.log:\n  last words"
    ):
        launch(vanish_in_one, run)


def test_what_is_known_before_the_start(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        monkeypatch.setenv("MASTER_PORT", str(holder.getsockname()[1]))
        with pytest.raises(MeshError, match="MASTER_PORT", check=has_code("MW-LAUNCH-029")):
            launch(meet, run)
    monkeypatch.delenv("MASTER_PORT")
    notes(run).rename(notes(run).with_name("moved"))
    notes(run).write_text("a file where the run directory should be")
    with pytest.raises(ConfigError, match=r"run\.directory", check=has_code("MW-LAUNCH-034")):
        launch(meet, run)


@marked_rows("long", "9--9-True")
@pytest.mark.parametrize(
    ("signum", "exit_code", "stopped"),
    [
        pytest.param(signal.SIGINT, 130, False, marks=pytest.mark.torture),
        pytest.param(signal.SIGTERM, 143, False, marks=pytest.mark.torture),
        # test_from_the_shell too
        pytest.param(signal.SIGKILL, -signal.SIGKILL, False, marks=pytest.mark.torture),
        pytest.param(
            signal.SIGKILL, -signal.SIGKILL, True, marks=pytest.mark.slow
        ),  # and a rank that does nothing more
    ],
)
def test_no_rank_outlives_the_launcher(
    tmp_path: Path, signum: int, exit_code: int, stopped: bool
) -> None:
    script = f"""
import sys
from pathlib import Path
from meshwright_launch.local import launch
from meshwright_launch.node_ranks import Interrupted
from tests.launch.test_local import config, hang
if __name__ == "__main__":
    try:
        launch(hang, config(Path({str(tmp_path)!r}), 3))
    except Interrupted as error:
        sys.exit(error.exit_code)
"""
    file = tmp_path / "start.py"
    file.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(file)], env=environment, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            pids = wait_for_pids(notes(config(tmp_path, 3)), 3)
            if stopped:
                os.kill(pids[1], signal.SIGSTOP)
            launcher.send_signal(signum)
            assert launcher.wait(60) == exit_code
        finally:
            launcher.kill()  # or leaving this block would wait for it
        deadline_s = time.monotonic() + 60
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline_s, f"of {pids} some live on"
            time.sleep(0.05)
        assert launcher.stderr is not None
        assert not re.search("Traceback", launcher.stderr.read())


def wait_for_pids(directory: Path, count: int) -> list[int]:
    deadline_s = time.monotonic() + 120
    while True:
        found = [file.read_text() for file in directory.glob("pid-*")]
        if len(found) == count and all(found):
            return [int(text) for text in found]
        assert time.monotonic() < deadline_s, "the ranks did not start"
        time.sleep(0.1)


def test_a_signal_while_the_server_starts_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the ranks' server is being started, which is not to get it; this process is."""
    came: list[int] = []
    monkeypatch.setattr(
        "multiprocessing.forkserver.ensure_running", lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    before = signal.signal(signal.SIGTERM, lambda signum, frame: came.append(signum))
    try:
        warm_up(config(tmp_path, 1), "meshwright_launch.work")
        time.sleep(0)  # a handler runs between two instructions
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
