"""Ordered map over forked worker processes,
with a bounded number of results in flight and no orphans.

A killed worker raises an error that names its signal. When the parent dies for any reason, the
workers' pipes end and they exit. multiprocessing's own pools hang in the first case and leave
orphans in the second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from meshwright.errors import DataError, UserError

ITEMS_IN_FLIGHT = 4
"""Items in flight, for each worker."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, function(item)) for each item, in order.

    With one worker the function runs in this process; more workers are forked at the first
    ``next``.

    Raises:
        UserError: the error of the first item, in order, for which the function raised.
        DataError: a worker was killed.
    """
    if num_workers == 1:
        yield from ((item, function(item)) for item in items)
        return
    remaining = enumerate(items)
    workers = _Workers(function, num_workers)
    try:
        in_flight: dict[int, Item] = {}
        done: dict[int, Result | BaseException] = {}
        num_yielded = 0
        while True:
            while (
                workers.idle
                and len(in_flight) < ITEMS_IN_FLIGHT * num_workers
                and (entry := next(remaining, None))
            ):
                number, item = entry
                in_flight[number] = item
                workers.send(number, item)
            if num_yielded in done:
                result = done.pop(num_yielded)
                if isinstance(result, BaseException):
                    raise result
                yield in_flight.pop(num_yielded), result
                num_yielded += 1
            elif in_flight:
                done.update(workers.receive())
            else:
                return
    finally:
        workers.terminate()


class _Workers:
    """Forked workers with a pipe each. A worker has one item at a time,
    so that no two ends block in a send.
    """

    def __init__(self, function: Callable[[Any], Any], size: int) -> None:
        context = multiprocessing.get_context("fork")
        self.processes: dict[Connection, Any] = {}
        self.idle: list[Connection] = []
        for _ in range(size):
            parent_end, worker_end = context.Pipe()
            inherited = [*self.processes, parent_end]
            process = context.Process(
                target=_work, args=(function, worker_end, inherited), daemon=True
            )
            process.start()
            worker_end.close()
            self.processes[parent_end] = process
            self.idle.append(parent_end)

    def send(self, number: int, item: Any) -> None:
        """Send an item to an idle worker."""
        pipe = self.idle.pop()
        try:
            pipe.send((number, item))
        except OSError as error:
            raise self._death(pipe) from error

    def receive(self) -> dict[int, Any]:
        """Return the finished results by item number; blocks until there is one."""
        results = {}
        busy = [pipe for pipe in self.processes if pipe not in self.idle]
        for pipe in wait(busy):
            assert isinstance(pipe, Connection)
            try:
                number, result = pipe.recv()
            except (EOFError, OSError) as error:
                raise self._death(pipe) from error
            results[number] = result
            self.idle.append(pipe)
        return results

    def _death(self, pipe: Connection) -> DataError:
        """Return the error for a worker that ended."""
        process = self.processes[pipe]
        process.join(5)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"gone (exit code {code})"
        return DataError(
            "MW-DATA-086",
            f"a worker was {how}: was there memory for {len(self.processes)} of them? The same"
            " command resumes, also with fewer --workers",
        )

    def terminate(self) -> None:
        """End the workers: closed pipes end the idle ones, SIGTERM the busy ones."""
        for pipe in self.processes:
            pipe.close()
        for process in self.processes.values():
            process.terminate()
            process.join()


def _work(function: Callable[[Any], Any], pipe: Connection, inherited: list[Connection]) -> None:
    """Run a worker. ``inherited``: pipe ends of the parent and of other workers,
    copied by the fork; closed here.
    """
    for other in inherited:
        other.close()
    # Ctrl-C reaches every process: the parent stops the workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        try:
            number, item = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            result = function(item)
        except UserError as error:
            result = error
        except BaseException:
            result = RuntimeError(f"a worker failed:\n{traceback.format_exc()}")
        try:
            pipe.send((number, result))
        except OSError:
            os._exit(0)
