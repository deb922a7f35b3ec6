"""One rank's writer with a thread of an abandoned save that is still busy."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import AsyncWriter, HostSlab, SaveAttempt, begin, newest_valid
from meshwright.checkpoint import async_writer as module


def test_an_abandoned_thread_does_not_disturb_the_next_save(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`begin` deletes the directory that the old thread still writes to,
    whose error is not one of the new save.
    """
    goes_on, write_shard = threading.Event(), module.write_shard

    def stuck_once(temporary: Path, *args: Any, **options: Any) -> Any:
        if temporary.name.endswith("aa"):
            goes_on.wait()
        return write_shard(temporary, *args, **options)

    monkeypatch.setattr(module, "write_shard", stuck_once)
    writer = AsyncWriter()

    def start(step: int, name: str) -> SaveAttempt:
        attempt = SaveAttempt(tmp_path, fake.head(step), name, frozenset({"tp0"}))
        begin(tmp_path, step, name)
        writer.start(
            attempt, "tp0", HostSlab().copy(fake.pieces(fake.state(step), 1, 0)), is_first=True
        )
        return attempt

    before = set(threading.enumerate())
    first = start(4, "aa")
    (old,) = set(threading.enumerate()) - before
    writer.abandon()
    assert writer.leave() and not writer.failed()
    second = start(5, "bb")
    assert not first.temporary.exists()
    goes_on.set()
    old.join(20)
    assert not old.is_alive()
    while not writer.is_share_done():
        time.sleep(0.01)
    assert writer.problem is None and writer.written_bytes > 0
    writer.end()
    found = newest_valid(tmp_path)
    assert found is not None and found.manifest.step == 5 and second.final.is_dir()
