"""Threads that do not hold up the end of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.system.process import map_in_daemon_threads

HANGS = """
import threading
from meshwright.system.process import map_in_daemon_threads
hang = lambda item: threading.Event().wait()
threading.Thread(target=map_in_daemon_threads, args=(hang, [1, 2], 2), daemon=True).start()
"""


def halve(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


@pytest.mark.parametrize("num_threads", [1, 3, 100])
def test_results_are_in_order_and_the_first_error_is_raised(num_threads: int) -> None:
    assert map_in_daemon_threads(halve, range(0, 20, 2), num_threads) == list(range(10))
    assert map_in_daemon_threads(halve, [], num_threads) == []
    with pytest.raises(ValueError, match="3 is odd"):
        map_in_daemon_threads(halve, [2, 3, 5], num_threads)


def test_a_process_ends_while_they_hang() -> None:
    assert subprocess.run([sys.executable, "-c", HANGS], timeout=60, check=False).returncode == 0
