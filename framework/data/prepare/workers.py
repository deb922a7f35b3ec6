"""A function over many things in several processes, the results in the things' order: bounded, and without orphans.

A process that is killed is named; when the one that asked is gone, however it went, the others' pipes end and they go.
multiprocessing's own pools hang in the first case and stay behind in the second.
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

AHEAD = 4
"""Results that may wait for their turn, for each worker."""

Item = TypeVar("Item")
Found = TypeVar("Found")


def ordered_map(
    function: Callable[[Item], Found], items: Iterable[Item], num_workers: int
) -> Iterator[tuple[Item, Found]]:
    """Yield (item, function(item)) for each item, in order. One worker runs in this process; more are forked at the
    first.

    Raises:
        UserError: what the function raised for the first item, in order, for which it did.
        DataError: a worker was killed.
    """
    if num_workers == 1:
        yield from ((item, function(item)) for item in items)
        return
    remaining = iter(items)
    crew = _Crew(function, num_workers)
    try:
        underway: dict[int, Item] = {}
        done: dict[int, Found | BaseException] = {}
        issued = given = 0
        while True:
            while crew.idle and issued - given < AHEAD * num_workers and remaining is not None:
                try:
                    underway[issued] = next(remaining)
                except StopIteration:
                    remaining = None  # type: ignore[assignment]
                    break
                crew.give(issued, underway[issued])
                issued += 1
            if given in done:
                found = done.pop(given)
                if isinstance(found, BaseException):
                    raise found
                yield underway.pop(given), found
                given += 1
            elif given < issued:
                done.update(crew.collect())
            else:
                return
    finally:
        crew.dismiss()


class _Crew:
    """Forked workers, a pipe to each; one item at a time, so that nobody waits for who waits for him."""

    def __init__(self, function: Callable[[Any], Any], size: int) -> None:
        context = multiprocessing.get_context("fork")
        self.processes: dict[Connection, Any] = {}
        self.idle: list[Connection] = []
        for _ in range(size):
            mine, theirs = context.Pipe()
            others = [*self.processes, mine]
            process = context.Process(target=_work, args=(function, theirs, others), daemon=True)
            process.start()
            theirs.close()
            self.processes[mine] = process
            self.idle.append(mine)

    def give(self, number: int, item: Any) -> None:
        """Give an item to an idle worker."""
        pipe = self.idle.pop()
        try:
            pipe.send((number, item))
        except OSError as error:
            raise self._gone(pipe) from error

    def collect(self) -> dict[int, Any]:
        """Return the finished results; block until there is one."""
        found = {}
        busy = [pipe for pipe in self.processes if pipe not in self.idle]
        for pipe in wait(busy):
            assert isinstance(pipe, Connection)
            try:
                number, result = pipe.recv()
            except (EOFError, OSError) as error:
                raise self._gone(pipe) from error
            found[number] = result
            self.idle.append(pipe)
        return found

    def _gone(self, pipe: Connection) -> DataError:
        process = self.processes[pipe]
        process.join(5)
        code = process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"gone (exit code {code})"
        return DataError(
            "MW-DATA-086",
            f"a worker was {how}: was there memory for {len(self.processes)} of them? The same command goes on where "
            f"it was, also with fewer --workers",
        )

    def dismiss(self) -> None:
        """End the workers: closing their pipes does, and a busy one is terminated."""
        for pipe in self.processes:
            pipe.close()
        for process in self.processes.values():
            process.terminate()
            process.join()


def _work(function: Callable[[Any], Any], pipe: Connection, others: list[Connection]) -> None:
    """Run a worker. ``others``: ends of pipes that the fork has copied, and that are not its own."""
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the parent stops the workers
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
