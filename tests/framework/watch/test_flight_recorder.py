"""The first unfinished collective of each group,
from dumps of torch's flight recorder and from a live one.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.watch.hang.disk_writer import DiskWriter
from meshwright.watch.hang.flight_recorder import first_unfinished, unfinished
from meshwright_launch.pool import RankPool

RECORDED: dict[str, Any] = {  # by torch 2.13.0 with gloo, without the fields of threads and times
    "entries": [
        {
            "collective_seq_id": number,
            "input_dtypes": ["Float"],
            "input_sizes": [[4, 3]],
            "is_p2p": False,
            "op_id": number,
            "output_dtypes": ["Float"],
            "output_sizes": [sizes],
            "p2p_seq_id": 0,
            "pg_id": group,
            "process_group": [str(group), "dp" if group else "default_pg"],
            "profiling_name": f"gloo:{name}",
            "record_id": record,
            "retired": is_retired,
            "state": "scheduled",
            "time_discovered_completed_ns": 0,
            "time_discovered_started_ns": 0,
            "timeout_ms": 1800000,
        }
        for record, (number, group, name, sizes, is_retired) in enumerate(
            [
                (1, 0, "all_reduce", [4, 3], True),
                (1, 1, "all_reduce", [4, 3], True),
                (2, 1, "all_gather", [2, 4, 3], False),
                (2, 0, "all_reduce", [4, 3], False),
                (3, 1, "all_reduce", [4, 3], False),
            ]
        )
    ],
    "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
    "pg_status": {"1": {"last_completed_collective": "1", "last_enqueued_collective": "3"}},
    "version": "2.10",
}
EXPECTED = [
    "gloo:all_gather, collective 2 of group 1 dp (4x3 Float): scheduled, not completed",
    "gloo:all_reduce, collective 2 of group 0 default_pg (4x3 Float): scheduled, not completed",
]


def test_the_first_of_each_group_is_named() -> None:
    assert first_unfinished(json.dumps(RECORDED).encode()) == EXPECTED


def test_states_of_nccl() -> None:
    """NCCL's entries have states; a message has a number of its own,
    and an entry may be retired before it is seen.
    """
    entry = RECORDED["entries"][2] | {"profiling_name": "nccl:all_gather"}
    sent = {
        "is_p2p": True,
        "p2p_seq_id": 9,
        "profiling_name": "nccl:send 0->1",
        "process_group": ["3", ""],
    }
    entries = [
        entry | {"state": "completed"},
        entry | {"state": "started", "collective_seq_id": 3},
        entry | {"collective_seq_id": 4},
        entry | sent | {"input_sizes": [[]], "input_dtypes": ["BFloat16"]},
    ]
    assert first_unfinished(json.dumps({"entries": entries})) == [
        "nccl:all_gather, collective 3 of group 1 dp (4x3 Float): started, not completed",
        "nccl:send 0->1, message 9 of group 3 (1 BFloat16): scheduled, not completed",
    ]


def test_dumps_of_another_format_are_empty() -> None:
    for dump in (
        b"",
        b"{}",
        b"[]",
        b"no json",
        b'{"entries": [{"state": 3}]}',
        b'{"entries": 3}',
        b"\xff",
    ):
        assert first_unfinished(dump) == []


def waits_for_the_other(rank: int, world_size: int, place: str) -> tuple[list[str], list[str], str]:
    """Rank 0 enters two collectives of a new group, of which rank 1 enters the second late."""
    group = dist.new_group([0, 1], group_desc="flight")
    tensor, mark = torch.ones(5, 2), Path(place) / "seen"
    dist.all_reduce(tensor, group=group)
    during: list[str] = []
    if rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        writer = DiskWriter(Path(place), rank, "host", lambda error: None, lambda text: None)
        writer.write_stacks()
        assert writer.flush()
        during = writer.unfinished
        mark.touch()
        work.wait()
    else:
        while not mark.exists():
            time.sleep(0.01)
        dist.all_reduce(tensor, group=group)
    deadline = time.monotonic() + 5.0
    while (
        after := [line for line in unfinished() if "flight" in line]
    ) and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's thread retires an entry after the result is there
    text = (Path(place) / "hang" / "rank-0.txt").read_text()
    return [line for line in during if "flight" in line], after, text


def test_a_rank_that_waits_writes_its_collective(pool: RankPool, tmp_path: Path) -> None:
    (during, after, text), _ = pool.run(waits_for_the_other, 2, str(tmp_path))
    assert (
        len(during) == 1
        and "all_reduce, collective 2 of group" in during[0]
        and "(5x2 Float)" in during[0]
    )
    assert during[0] in text.splitlines() and after == []
