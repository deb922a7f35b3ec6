"""What a rank tells of itself while it waits, as another thread sees it;
and the board on which ranks leave notes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from meshwright.mesh.activity import Activity, Waits
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import Mesh, close_mesh, open_mesh
from meshwright.mesh.store import NoteStore
from meshwright_launch.pool import RankPool

SECONDS = 30.0


def test_what_is_told_is_what_began_last() -> None:
    activity = Activity()
    activity.begin("one")
    with activity.during("validating"):
        assert activity.snapshot()[:2] == ("validating", "validating")
        activity.begin("two")
        time.sleep(0.02)
        told = activity.snapshot()
        assert told[:2] == ("validating", "two") and told.for_s >= 0.02 and told.waits is None
    assert activity.snapshot()[:2] == ("starting", "starting")
    assert [activity.posts("a"), activity.posts("b"), activity.posts("a")] == [1, 1, 2]
    assert activity.snapshot().posted == {"a": 2, "b": 1}


def operations(mesh: Mesh) -> dict[str, Callable[[], object]]:
    """What rank 0 waits in until rank 1 comes."""
    tensor, comes = torch.ones(3), mesh.rank == 0

    def exchange() -> None:
        handle = mesh.pp.transfer([tensor], 1 - mesh.rank, not comes, lambda: "0RECV_B2")
        assert handle is not None
        handle.wait()

    return {
        "all-reduce": lambda: mesh.world.all_reduce(tensor).wait(),
        "barrier": mesh.world.barrier,
        "gathering": lambda: mesh.pp.gather_objects(mesh.rank),
        "exchange": exchange,
    }


def told_while_waiting(rank: int, world_size: int) -> list[tuple[Waits | None, int]]:
    """Rank 1 comes to each only when rank 0 has been seen to wait, and has said so on the board."""
    mesh = open_mesh(Grid(pp=2), "cpu")
    board = mesh.open_store()
    assert board is not None
    found: list[tuple[Waits | None, int]] = []
    for name, operation in operations(mesh).items():
        deadline_s = time.monotonic() + SECONDS
        if rank == 0:
            thread = threading.Thread(target=_look, args=(mesh, board, name, found, deadline_s))
            thread.start()
            operation()
            thread.join()
            assert mesh.activity.snapshot().waits is None, "it goes on"
        else:
            while not board.read([name]):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            operation()
    mesh.world.barrier()
    assert board.is_first(f"only {rank}") and not board.is_first(f"only {rank}")
    assert board.has(f"only {rank}") and not board.has("nothing")
    board.put("exchange", "another")
    assert board.read(["nothing", "exchange"]) == {"exchange": "another"}
    close_mesh(mesh)
    return found


def _look(
    mesh: Mesh,
    board: NoteStore,
    name: str,
    found: list[tuple[Waits | None, int]],
    deadline_s: float,
) -> None:
    while (told := mesh.activity.snapshot()).waits is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    found.append((told.waits, 0 if told.waits is None else told.posted.get(told.waits.key, 0)))
    board.put(name, "rank 0 waits")


def test_who_waits_says_for_whom(pool: RankPool) -> None:
    (found, _) = pool.run(told_while_waiting, 2)
    (reduced, first), (met, second), (gathered, alone), (came, _) = found
    assert (
        reduced[:4] == ("collective", (1,), "all-reduce of (3,)", "world")
        and first == reduced.number
    )
    assert (
        met[:4] == ("collective", (1,), "barrier", "world")
        and second == met.number == reduced.number + 1
    )
    assert (
        gathered[:4] == ("collective", (1,), "gathering of small values", "pp")
        and alone == gathered.number == 1
    )
    assert gathered.key != met.key
    assert came == Waits("receive", (1,), "0RECV_B2")
