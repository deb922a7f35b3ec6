"""Commands as processes of their own, none of which may be left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig, to_toml

ROOT = Path(__file__).parents[2]
MARK = "MESHWRIGHT_TEST"
LIMIT_S = 240
"""Much longer than anything here takes on a busy machine,
much shorter than a collective waits for a lost peer.
"""


class Shell:
    """Starts commands that carry a mark in their environment, by which their children are found."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = uuid.uuid4().hex
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")
            },
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
        }

    def start(self, words: Sequence[str], **how: Any) -> subprocess.Popen[str]:
        """Begin ``python ...``."""
        return subprocess.Popen(
            [sys.executable, *words], cwd=self.directory, env=self.environment, text=True, **how
        )

    def run(self, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
        """``python ...`` to its end; its children may outlive it by no more than a moment."""
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
        with self.start(words, **how) as process:
            try:
                out, err = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                self.end_all()
                raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def alive(self) -> list[int]:
        """Processes with the mark that run; one that only waits to be reaped does not."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() not in (directory / "environ").read_bytes().split(
                    b"\0"
                ):
                    continue
                if (directory / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(directory.name))
            except OSError:
                continue
        return found

    def end_all(self) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)

    def wait_until_none_is_left(self) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while left := self.alive():
            assert time.monotonic() < deadline_s, f"processes {left} live on"
            time.sleep(0.05)


def written(config: RunConfig, directory: Path) -> str:
    """Return the configuration as a file."""
    file = directory / f"{config.run.name}.toml"
    file.write_text(to_toml(config))
    return str(file)
