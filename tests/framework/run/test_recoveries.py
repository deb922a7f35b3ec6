"""Recoveries in place: from the launcher's log into the record of a step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from meshwright.parts import StepEvent
from meshwright.run.observers import RecoveryRecords
from meshwright.run.recoveries import MAX_RECOVERIES, LoggedRecovery, read_recoveries


def line(stepped_s: float) -> str:
    """Return a line of the log."""
    return json.dumps({"at": "now", "what": "rank 1", "step": 7, "stepped_s": stepped_s}) + "\n"


def seen(observer: RecoveryRecords, rank: int = 0) -> tuple[int | None, float | None]:
    """Return what the observer adds to the next step."""
    event = StepEvent(cast(Any, None), 0.0, False, False, False, False)
    observer.after_step(cast(Any, SimpleNamespace(mesh=SimpleNamespace(rank=rank))), event)
    return event.recoveries, event.recovery_s


def test_each_is_in_one_record(tmp_path: Path) -> None:
    """Those of earlier starts count too; the seconds are those of the last one."""
    log = tmp_path / "recoveries.jsonl"
    log.write_text(line(1.0))
    observer, other = RecoveryRecords(tmp_path), RecoveryRecords(tmp_path)
    assert seen(observer) == (None, None)
    log.write_text(line(1.0) + line(2.5))
    assert [seen(observer), seen(observer)] == [(2, 2.5), (None, None)]
    assert seen(other, rank=1) == (None, None)
    log.write_text(line(1.0) + line(2.5) + "torn")
    assert seen(observer) == (2, 2.5)


def test_a_change_of_the_layout(tmp_path: Path) -> None:
    """Lines of earlier versions have none."""
    grown = {"what": "node b can take ranks", "change": "dp 2 -> 3, chunks 3 -> 2", "planned": True}
    (tmp_path / "recoveries.jsonl").write_text(line(1.0) + json.dumps(grown) + "\n")
    found = [each for each in read_recoveries(tmp_path) if isinstance(each, LoggedRecovery)]
    assert [each.change for each in found] == ["", "dp 2 -> 3, chunks 3 -> 2"]
    assert [each.is_planned for each in found] == [False, True]


def test_seconds_beyond_a_float_are_damage(tmp_path: Path) -> None:
    text = '{"stepped_s": 1' + 400 * "0" + "}\n"
    (tmp_path / "recoveries.jsonl").write_text(text + line(2.5))
    damaged, sound = read_recoveries(tmp_path)
    assert isinstance(damaged, str) and "recoveries.jsonl:1 is damaged" in damaged
    assert isinstance(sound, LoggedRecovery) and sound.seconds == {"stepped": 2.5}


def test_hostile_lines(tmp_path: Path) -> None:
    """None raises, and none is read as a recovery that it is not."""
    texts = ["[]", "7", '{"step": true}', '{"nodes": 3, "step": -1}', '{"stepped_s": "x"}', "{", ""]
    (tmp_path / "recoveries.jsonl").write_text("\n".join(texts) + "\n")
    found = [each for each in read_recoveries(tmp_path) if isinstance(each, LoggedRecovery)]
    assert [(each.step, each.nodes, each.seconds) for each in found] == [(None, (), {})] * 3
    (tmp_path / "recoveries.jsonl").write_text("{}\n" * (MAX_RECOVERIES + 9))
    *most, last = read_recoveries(tmp_path)
    assert len(most) == MAX_RECOVERIES and isinstance(last, str)
