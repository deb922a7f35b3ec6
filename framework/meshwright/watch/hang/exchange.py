"""Exchange of heartbeats over the key-value store,
and the claim by which one rank reports a hang for all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from meshwright.mesh.mesh import Mesh
from meshwright.watch.hang.heartbeat import Heartbeat, PendingWait, ReceivedHeartbeat
from meshwright.watch.hang.status import RankStatus

CLAIM, REASON, WITHDRAWN, READ = "hang/claim", "hang/reason", "hang/withdrawn", "hang/read"
"""Keys in the store: the n-th claim of the report, the reported reason, the n-th claim's
withdrawal, and the number of ranks that have the reason.
"""
READ_POLL_S = 0.1


class HeartbeatExchange:
    """Last received heartbeat of each rank. Without a store (one rank)
    there is only this rank's own.
    """

    def __init__(self, mesh: Mesh, step: Callable[[], int]) -> None:
        """Begin without heartbeats. ``step`` returns the number of steps taken;
        called by other threads.
        """
        self._mesh = mesh
        self._step = step
        self._store = mesh.open_store()
        self._num_beats = 0
        self._num_withdrawn = 0
        self._began_s = time.monotonic()
        self._received: dict[int, tuple[Heartbeat, float]] = {}
        """Last heartbeat of each rank, and the time when it arrived here (monotonic clock, s)."""
        self.host = socket.gethostname()

    def beat(self, awake_s: float) -> Heartbeat:
        """Return a new heartbeat of this rank. ``awake_s``:
        monotonic time since which the process has run.
        """
        activity = self._mesh.activity.snapshot()
        self._num_beats += 1
        return Heartbeat(
            rank=self._mesh.rank,
            beat=self._num_beats,
            step=self._step(),
            phase=activity.phase,
            what=activity.what,
            for_s=round(max(0.0, min(activity.for_s, time.monotonic() - awake_s)), 3),
            waits=None if activity.waits is None else PendingWait.pack(activity.waits._asdict()),
            posted=activity.posted,
            pid=os.getpid(),
            host=self.host,
            at_s=time.time(),
        )

    def record(self, awake_s: float) -> None:
        """Store a new heartbeat of this rank here, without sending it."""
        self._received[self._mesh.rank] = (self.beat(awake_s), time.monotonic())

    def send(self, awake_s: float) -> None:
        """Store a new heartbeat of this rank here and in the store. Blocks for the store."""
        self.record(awake_s)
        if self._store is not None:
            self._store.put(
                f"beat/{self._mesh.rank}", self._received[self._mesh.rank][0].model_dump_json()
            )

    def receive(self) -> None:
        """Read the heartbeats of the other ranks. Blocks for the store."""
        if self._store is None:
            return
        others = (rank for rank in range(self._mesh.grid.size) if rank != self._mesh.rank)
        texts = self._store.read([f"beat/{rank}" for rank in others])
        now = time.monotonic()
        for text in texts.values():
            beat = Heartbeat.model_validate_json(text)
            last = self._received.get(beat.rank)
            if last is None or last[0].beat != beat.beat:
                self._received[beat.rank] = (beat, now)

    def table(self, silent_s: float) -> dict[int, ReceivedHeartbeat]:
        """Return the last heartbeat of every rank.
        Ages above ``silent_s`` also use the sender's clock.
        """
        now = time.monotonic()
        table = dict.fromkeys(
            range(self._mesh.grid.size), ReceivedHeartbeat(None, now - self._began_s)
        )
        for rank, (beat, received_s) in self._received.items():
            quiet_s = now - received_s
            if quiet_s > silent_s:  # received only once, it may be much older than its arrival here
                quiet_s = max(quiet_s, time.time() - beat.at_s)
            table[rank] = ReceivedHeartbeat(beat, quiet_s)
        return table

    def statuses(self) -> tuple[RankStatus, ...]:
        """Return the entries of the status file, by rank. Called by several threads."""
        received, now = dict(self._received), time.monotonic()
        return tuple(
            RankStatus(silent_s=round(max(0.0, now - received[rank][1]), 3), beat=received[rank][0])
            for rank in sorted(received)
        )

    # ------------------------------------------------------------------------------------------------------
    # the report

    def claim(self) -> bool:
        """Try to claim the report of a hang for this rank;
        return False if another rank was first.
        """
        return self._store is None or self._store.is_first(f"{CLAIM}/{self._num_withdrawn}")

    def is_claimed(self) -> bool:
        """Return True if some rank has claimed the report."""
        return self._store is not None and self._store.has(f"{CLAIM}/{self._num_withdrawn}")

    def withdraw_claim(self) -> None:
        """Take back this rank's claim: the rank was only slow and makes progress again."""
        if self._store is not None:
            self._store.put(f"{WITHDRAWN}/{self._num_withdrawn}", "withdrawn")
            self._num_withdrawn += 1

    def pop_withdrawal(self) -> bool:
        """Return True, once, after the claiming rank has withdrawn its claim."""
        assert self._store is not None
        key = f"{WITHDRAWN}/{self._num_withdrawn}"
        is_withdrawn = key in self._store.read([key])
        self._num_withdrawn += is_withdrawn
        return is_withdrawn

    def publish_reason(self, reason: str) -> None:
        """Send the reason of the hang to the other ranks."""
        if self._store is not None:
            self._store.put(REASON, reason)
            self._store.count(READ)

    def reason(self) -> str | None:
        """Return the reason that another rank has published, or None."""
        return self._store.read([REASON]).get(REASON) if self._store is not None else None

    def confirm_reason(self) -> None:
        """Count this rank among those that have read the reason. Blocks for the store."""
        if self._store is not None:
            self._store.count(READ)

    def wait_until_read(self, silent_s: float, limit_s: float) -> None:
        """Wait, at most ``limit_s``, until all ranks have the reason
        that sent a heartbeat within ``silent_s``.

        For the rank whose process serves the store. Otherwise the others would lose it, and report
        that instead.
        """
        assert self._store is not None
        until_s = time.monotonic() + limit_s
        others = [
            received_s
            for rank, (_, received_s) in self._received.items()
            if rank != self._mesh.rank
        ]
        num_live = 1 + sum(time.monotonic() - received_s <= silent_s for received_s in others)
        with contextlib.suppress(RuntimeError):  # torch's error of the store
            while self._store.count(READ, 0) < num_live and time.monotonic() < until_s:
                time.sleep(READ_POLL_S)
