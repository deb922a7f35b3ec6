"""A signal that was ignored when the run was started, as SIGHUP is under nohup,
stays ignored by all its processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.run.directory import run_directory
from meshwright.system.process import SIGNALS, StopRequest, ignored_signals
from tests.end_to_end.driving import layout, run_config
from tests.end_to_end.shell import LIMIT_S, Shell, written


def test_what_is_ignored_stays_ignored() -> None:
    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        others = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        with StopRequest() as asked:
            assert (
                signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
                and signal.SIGHUP in ignored_signals()
            )
            signal.raise_signal(signal.SIGHUP)
            assert not asked.is_requested()
            signal.raise_signal(others[0])
            assert asked.signal is others[0]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize("each", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_what_a_wrapper_ignores_for_itself_is_handled(each: signal.Signals) -> None:
    """bash -c 'trap "" USR1 USR2; exec torchrun ...': its ranks inherit that,
    and must save before a time limit.
    """
    before = signal.signal(each, signal.SIG_IGN)
    try:
        with StopRequest() as asked:
            assert each not in ignored_signals()
            signal.raise_signal(each)
            assert asked.signal is each
    finally:
        signal.signal(each, before)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.parametrize("text", ["dp2", ""])
def test_a_terminal_that_is_closed_ends_nothing(
    text: str, corpus: Path, tmp_path: Path, shell: Shell
) -> None:
    """SIGHUP to every process of the run; then SIGTERM, which ends it as ever."""
    keys: dict[str, Any] = {"parallel": layout(text), "train": {"steps": 100000}}
    config = run_config(corpus, tmp_path, **keys)
    process = shell.start(
        ["-m", "meshwright_launch", "train", written(config, tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    metrics = run_directory(config.run) / "metrics.jsonl"

    def steps() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def wait_until(reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not reached():
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.02)

    def hang_up() -> None:
        for pid in shell.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)

    # while it starts; with ranks of their own: the server too
    wait_until(lambda: len(shell.alive()) > len(text) // 2)
    hang_up()
    wait_until(lambda: steps() >= 2)
    hang_up()
    before = steps()
    wait_until(lambda: steps() >= before + 3)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 85 and said.startswith(
        "meshwright: stopped by SIGTERM after step "
    ), said
