"""Wrapper of torchrun on one node that exits with the code of the rank that failed first.

    python3 -P -m meshwright_launch.pod [options of torchrun] -m meshwright_launch train CONFIG

    rank, on failure    failure record: exit code, time, lost_peer (echo)  -> directory in FAILURES
    this process        after torchrun: exit code of the earliest record that is not an echo of another rank

torchrun reports any failure of a rank as 1, and a scheduler that must not repeat an error of the
configuration needs the rank's own code. A rank that was ended as a consequence writes no record.
Without records (a rank was killed) the exit code is torchrun's.

A node whose ranks have only lost their peers exits ECHO_S later, so that the scheduler sees the
cause's node first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from meshwright_launch.failure import FAILURES, read_failures

ECHO_S = 20.0
"""Seconds by which a node exits later if none of its own ranks is the cause."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals for torchrun, which passes them on to its ranks."""


def main(arguments: list[str], echo_s: float = ECHO_S) -> int:
    """Run torchrun with these arguments; return 0,
    or the exit code of the rank that failed first on this node.
    """
    torchrun: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if torchrun is not None:
            torchrun.send_signal(number)

    for each in SIGNALS:
        signal.signal(each, pass_on)
    with tempfile.TemporaryDirectory(prefix="failures-") as records:
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        torchrun = subprocess.Popen(command, env=os.environ | {FAILURES: records})
        for number in received:  # before there was a torchrun
            torchrun.send_signal(number)
        code = torchrun.wait()
        failures = read_failures(Path(records))
    if code == 0:
        return 0
    if not received and (not failures or failures[0].lost_peer):
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        # the scheduler ends this node with a signal, once it has seen the other
        signal.sigtimedwait(SIGNALS, echo_s)
    return failures[0].exit_code if failures else code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
