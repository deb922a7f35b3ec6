"""The pool of ranks: right answers, clean worlds, the first failure first,
and nobody left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import MeshError
from meshwright_launch.pool import RankError, RankPool, RankTimeout
from tests.support.run import alive

ROOT = Path(__file__).parents[2]


def total(rank: int, world_size: int, offset: torch.Tensor) -> torch.Tensor:
    value = torch.full((3,), float(rank))
    dist.all_reduce(value)
    return value + offset


def environment(rank: int, world_size: int) -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def spoil(rank: int, world_size: int) -> None:
    os.environ["SPOILT"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.rand(rank + 1)


def draw(rank: int, world_size: int) -> tuple[torch.Tensor, str | None]:
    return torch.rand(2), os.environ.get("SPOILT")


def train(rank: int, world_size: int) -> float:
    """Needs what a fork of a careless parent cannot do: backward and an optimizer step."""
    layer = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(64, 256)).sum().backward()
    optimizer.step()
    return float(layer.weight.detach().sum())


def gather_at_once(rank: int, world_size: int) -> None:
    """Post messages so large that gloo's threads copy them with torch's thread pool,
    all in their first copy.
    """
    shards = [torch.ones(50_000) for _ in range(4)]
    wholes = [torch.empty(100_000) for _ in shards]
    works = [
        dist.all_gather_into_tensor(whole, shard, async_op=True)
        for whole, shard in zip(wholes, shards, strict=True)
    ]
    for work in works:
        assert work is not None
        work.wait()


def fail_one_after_another(rank: int, world_size: int) -> None:
    """Rank 2 fails; rank 0 fails later, of its own; the others wait for both."""
    if rank == 2:
        raise MeshError("MW-TEST-001", "the cause")
    if rank == 0:
        time.sleep(0.05)
        raise ValueError("an echo")
    dist.barrier()


def vanish(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang(rank: int, world_size: int) -> int:
    if rank == 1:
        print("hanging", flush=True)
        signal.pause()
    return rank


def unpicklable(rank: int, world_size: int) -> object:
    return lambda: rank


def large(rank: int, world_size: int, data: torch.Tensor) -> torch.Tensor:
    return data * rank


def test_results_come_by_rank_in_worlds_of_any_size(pool: RankPool) -> None:
    for world_size in (4, 8, 1, 2, 4):
        results = pool.run(total, world_size, torch.ones(3))
        expected = world_size * (world_size - 1) / 2 + 1
        assert [r.tolist() for r in results] == [[expected] * 3] * world_size
    assert pool.run(environment, 2) == [("0", "2", "0"), ("1", "2", "1")]


def test_workers_are_reused_and_start_each_world_afresh(pool: RankPool) -> None:
    first = pool.run(draw, 3)
    pids = pool.pids()
    pool.run(spoil, 3)
    second = pool.run(draw, 3)
    assert pool.pids() == pids
    for (numbers, _), (again, spoilt) in zip(first, second, strict=True):
        assert torch.equal(numbers, again) and again.dtype == torch.float32 and spoilt is None


def test_forked_ranks_can_train_after_the_parent_did(pool: RankPool) -> None:
    train(0, 1)
    pool.kill()
    assert len(set(pool.run(train, 4))) == 1


@pytest.mark.long
def test_first_messages_of_a_fork_do_not_race_for_its_thread_pool() -> None:
    """Without a renewed thread pool about one world in fifty fails."""
    # as in a process that has computed: its forks do not renew the pool by themselves
    torch.get_num_threads()
    with RankPool(2) as pool:
        for _ in range(80):
            pool.run(gather_at_once, 2)
            pool.kill()


def test_messages_larger_than_a_pipe(pool: RankPool) -> None:
    data = torch.arange(1_000_000)
    results = pool.run(large, 3, data)
    assert all(torch.equal(result, data * rank) for rank, result in enumerate(results))


def test_first_failure_is_told_first(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fail_one_after_another, 4)
    assert caught.value.rank == 2 and isinstance(caught.value.__cause__, MeshError)
    message = str(caught.value)
    assert message.startswith(
        "rank 2: meshwright.errors.MeshError: the cause [MW-TEST-001]\nTraceback"
    )
    assert "in fail_one_after_another" in message and message.endswith(
        "then rank 0: ValueError: an echo"
    )
    assert pool.run(total, 4, torch.zeros(3))[0].tolist() == [6.0] * 3


def test_a_killed_rank_is_named_before_those_who_missed_it(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"\Arank 1: died of SIGKILL"):
        pool.run(vanish, 3)
    assert len(pool.run(environment, 8)) == 8


def test_the_number_of_a_process_that_has_ended_is_not_signalled(pool: RankPool) -> None:
    """It may be another process's by then."""
    pids = pool.run(os_pid, 3)
    with mock.patch.object(os, "kill", wraps=os.kill) as kill, pytest.raises(RankError):
        pool.run(vanish, 3)
    assert {call.args[0] for call in kill.call_args_list} & set(pids) == {pids[0], pids[2]}


def test_hanging_ranks_are_named_with_their_stacks(pool: RankPool) -> None:
    before = pool.run(os_pid, 3)
    with pytest.raises(
        RankTimeout, match=r"no result from ranks \[1\] of 3[\s\S]*in hang"
    ) as caught:
        pool.run(hang, 3, timeout_s=0.5)
    assert caught.value.ranks == [1]
    after = pool.run(os_pid, 3)
    assert not set(before) & set(after) and not any(alive(pid) for pid in before)


def os_pid(rank: int, world_size: int) -> int:
    return os.getpid()


def test_what_cannot_be_sent_is_told(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0"):
        pool.run(unpicklable, 1)
    pids = pool.run(os_pid, 2)
    with pytest.raises(Exception, match=r"pickle|local"):
        pool.run(total, 2, lambda: None)
    with pytest.raises(AssertionError, match="8 ranks"):
        pool.run(total, 9)
    assert len(pids) == 2 and len(pool.run(os_pid, 2)) == 2


@pytest.mark.torture
def test_workers_die_with_a_killed_parent() -> None:
    script = """
import os, signal
from meshwright_launch.pool import RankPool
from tests.launch.test_pool import hang, os_pid
pool = RankPool(3)
print(*pool.run(os_pid, 3), flush=True)
pool.run(hang, 3)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3 and all(alive(pid) for pid in pids)
        assert parent.stdout.readline() == "hanging\n"  # an idle rank would notice by itself
        parent.kill()
    deadline_s = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, f"of {pids} some live on"
        time.sleep(0.05)
