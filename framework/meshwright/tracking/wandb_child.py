"""Child process that runs wandb. ``wandb.py`` starts it as a file and documents the protocol.
It imports only wandb.

It ends by itself when its parent is gone, for any reason, and outlives it by at most the time limit
to finish.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

PARENT_CHECK_S = 1.0
STEP, TOKENS = "step", "train/tokens"
"""Metrics that are x axes of charts."""
QUIET: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "x_disable_stats": True,
    "x_disable_meta": True,  # would send the host, the command line and the SLURM_* variables
    "x_disable_machine_info": True,
}


def main() -> None:
    """Start wandb, send "ready", and log until the finish message."""
    parent = os.getppid()
    commands = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    _redirect_standard_streams()
    lines = read_lines(commands, parent)
    hello = next(lines, None)
    if hello is None:
        return
    threading.Thread(
        target=_exit_with_parent, args=(parent, hello["finish_limit_s"]), daemon=True
    ).start()
    try:
        run = start(hello)
    except BaseException as error:
        answers.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n".encode())
        os._exit(1)
    answers.write(b"ready\n")
    finish: dict[str, Any] = {"failed": True}  # without a finish message: the parent died
    log = HistoryLog(run)
    for message in lines:
        if "finish" in message:
            finish = message["finish"]
            break
        log.write(message["row"], message["metrics"])
    _exit_within(hello["finish_limit_s"])
    run.finish(exit_code=int(finish["failed"]))


class HistoryLog:
    """History of a wandb run: one row per record, in the order of writing.

    wandb drops a row whose number, its ``step``, is lower than one before. So steps that a resume
    repeats get rows of their own. The step is the metric ``step``, and the x axis of charts.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        # online, after a resume: beyond the rows that the server has
        self._next_row = run.starting_step
        self._defined: set[str] = set()

    def write(self, row: int, metrics: dict[str, Any]) -> None:
        """Log the metrics of one record as ``row``,
        or as the next free row if that one is taken.
        """
        # one by one: which of two globs applies is undefined
        for name in sorted(metrics.keys() - self._defined):
            self._run.define_metric(name, step_metric=_axis_of(name))
        self._defined |= metrics.keys()
        row = max(row, self._next_row)
        self._run.log(metrics, step=row)
        self._next_row = row + 1


def _axis_of(name: str) -> str | None:
    """Return the metric that is the x axis of a chart; None for the step itself."""
    if name == STEP:
        return None
    is_loss = name == "train/loss" or name.startswith("validation/")
    return TOKENS if is_loss else STEP  # losses are comparable over batch sizes


def start(hello: dict[str, Any]) -> Any:
    """Call ``wandb.init`` silently and without information on the machine."""
    import wandb

    known = {name: value for name, value in QUIET.items() if name in wandb.Settings.model_fields}
    return wandb.init(
        id=hello["id"],
        resume="allow",
        project=hello["project"],
        entity=hello["entity"] or None,
        group=hello["group"] or None,
        tags=hello["tags"] or None,
        notes=hello["notes"] or None,
        name=hello["name"],
        mode=hello["mode"],
        dir=hello["directory"],
        config=hello["config"],
        settings=wandb.Settings(init_timeout=hello["init_limit_s"], **known),
    )


def read_lines(commands: BinaryIO, parent: int) -> Iterator[dict[str, Any]]:
    """Yield the messages until the pipe ends or the parent is gone.

    The pipe stays open while another child of the parent still has it, so the parent is checked as
    well.
    """
    buffer = b""
    while True:
        if not select.select([commands], [], [], PARENT_CHECK_S)[0]:
            if os.getppid() != parent:
                return
            continue
        part = os.read(commands.fileno(), 65536)
        if not part:
            return
        *whole, buffer = (buffer + part).split(b"\n")
        for line in whole:
            yield json.loads(line)


def _redirect_standard_streams() -> None:
    """Redirect stdin and stdout to /dev/null for wandb and its service;
    the pipes are used by this module alone.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _exit_with_parent(parent: int, limit_s: float) -> None:
    """Exit when the parent is gone, even if wandb blocks the main thread. Runs on a thread."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    _exit_within(limit_s)


def _exit_within(limit_s: float) -> None:
    """Exit within ``limit_s``, exit hooks included. The log on disk is complete without them."""
    timer = threading.Timer(limit_s, os._exit, args=(1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
