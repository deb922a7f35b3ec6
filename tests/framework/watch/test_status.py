"""A status.json from anywhere: bounds, one message, and one row for each rank."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.run.directory import STATUS
from meshwright.watch.hang.heartbeat import MAX_RANKS
from meshwright_launch.cli import main


def entry(rank: int, silent_s: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Return the entry of a rank, with changes to its heartbeat."""
    beat = {
        "rank": rank,
        "beat": 1,
        "step": 3,
        "phase": "training",
        "what": "0F0",
        "for_s": 1.0,
        "waits": None,
    }
    return {
        "silent_s": silent_s,
        "beat": beat | {"posted": {}, "pid": 1, "host": "h", "at_s": 1.0} | changes,
    }


def status(grid: list[int], *ranks: dict[str, Any], **changes: Any) -> str:
    """Return a status file."""
    whole = {
        "format": "meshwright status 1",
        "run": "r",
        "at_s": time.time(),
        "tick_s": 60.0,
        "grid": grid,
        "step": 1,
    }
    whole |= {
        "steps": 10,
        "phase": "training",
        "pid": 1,
        "host": "h",
        "ranks": ranks,
        "ended": None,
    }
    return json.dumps(whole | changes)


THIS = socket.gethostname()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (status([1, 1, 2], entry(7)), "ranks has rank 7, and grid has 2 ranks"),
        (status([1, 40, 1], entry(77)), "ranks has rank 77, and grid has 40 ranks"),
        (status([1, 1, 2], entry(0), entry(0)), "ranks has a rank twice"),
        (status([30000, 300000, 1], entry(0)), "grid has 9,000,000,000 ranks"),
        (status([10**30, 1, 1], entry(0)), "grid.0: "),
        (status([1, 1, 1], entry(10**30)), "ranks.0.beat.rank: "),
        (status([1, 1, 1], entry(0, step=10**400)), "ranks.0.beat.step: "),
        (status([1, 1, 1], entry(0, for_s=1e308)), "ranks.0.beat.for_s: "),
        (status([1, 1, 1], entry(0, silent_s=1e308)), "ranks.0.silent_s: "),
        (status([1, 1, 1], pid=10**30, host=THIS, at_s=1.0), "pid: "),
        (status([1, 1, 1], tick_s=1e300), "tick_s: "),
        (status([1, 1, 1], steps=10**30), "steps: "),
        ("[" * 10000, "status.json"),
    ],
)
def test_a_hostile_status_is_one_message(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / STATUS).write_text(text)
    assert main(["status", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert (
        told.out == ""
        and said in told.err
        and told.err.count("\n") == 1
        and "[MW-WATCH-004]" in told.err
    )


def test_a_status_of_too_many_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / STATUS).open("wb") as file:
        file.truncate((32 << 20) + 1)
    assert main(["status", str(tmp_path)]) == 2
    assert (
        "33,554,433 bytes, and at most 33,554,432 are read of such a file"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("num_ranks", [2, 40])
def test_text_with_newlines_adds_no_row(
    num_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = "reading\n   1  pp0 dp0 tp1     9  0.0 s  training\r\nstate  finished"
    waits = {
        "how": "collective",
        "ranks": [1],
        "operation": fake,
        "group": fake,
        "key": fake,
        "number": 1,
    }
    ranks = [
        entry(0, what=fake),
        entry(1, waits=waits),
        *(entry(rank) for rank in range(2, num_ranks)),
    ]
    plain = [entry(rank) for rank in range(num_ranks)]
    sizes = []
    for text in (
        status([1, 1, num_ranks], *ranks, phase=fake),
        status([1, 1, num_ranks], *plain),
        status([1, 1, 2], ended={"how": "failed", "message": fake}),
        status([1, 1, 2], ended={"how": "failed", "message": "out of memory"}),
        status([1, 1, 2], at_s=1.0, host=fake, phase=fake),
        status([1, 1, 2], at_s=1.0),
    ):
        (tmp_path / STATUS).write_text(text)
        assert main(["status", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        sizes.append(out.count("\n"))
        assert out.count("\nstate  ") == 1
    differs = 2 if num_ranks > 16 else 0  # many ranks share a row unless they do something else
    assert sizes[0] == sizes[1] + differs and sizes[2] == sizes[3] and sizes[4] == sizes[5]


def test_ranks_without_a_heartbeat_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of as many ranks as there may be."""
    (tmp_path / STATUS).write_text(status([MAX_RANKS, 1, 1], entry(5)))
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("no heartbeat yet: 0-4, 6-1048575\n")
