"""A rank on paper holds and says what it does for real, to the byte; and leaves nothing behind."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from framework.build import build
from framework.config import RunConfig, parse, resolve
from framework.data.example import example
from framework.dryrun.job import plan_job
from framework.dryrun.rehearsal import grid_of, rehearse
from framework.errors import MeshError
from framework.mesh.grid import Grid
from framework.mesh.mesh import open_mesh
from framework.mesh.paper import paper_mesh
from framework.step import take_step
from launch.pool import RankPool

ALMOST = 256
"""Bytes: scalars of a step, such as a loss that its caller still holds."""
OF_GLOO = 4096
"""Its reduce-scatter, which megatron-core asks for under sequence parallelism, keeps a copy of the message."""


def configured(
    schedule: str = "1f1b", chunks: int = 2, model: str = "gpt2", num_layers: int = 1, **parallel: Any
) -> RunConfig:
    """A small run."""
    options: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "num_layers": num_layers, "num_heads": 2}
    if model == "llama":
        options |= {"num_kv_heads": 2, "ffn_size": 64}
    config = RunConfig.model_validate(
        {
            "model": {"builder": f"models.{model}:build", "options": options},
            "data": {"train": "in memory", "sequence_length": 16},
            "batch": {"micro_batch_size": 2, "chunks": chunks},
            "parallel": {"bucket_bytes": 2**15, **parallel},
            "pipeline": {"schedule": schedule},
            "train": {"device": "cpu"},
        }
    )
    return resolve(config, parallel.get("dp", 1) * parallel.get("pp", 1) * parallel.get("tp", 1))


class Live(TorchDispatchMode):  # type: ignore[misc]
    """Counts after every operation what lives: by its own hand, and not by the recorder's."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.peak_bytes = 0

    def live_bytes(self) -> int:
        """Of all storages that were seen."""
        alive = [storage for storage in (reference() for reference in self.storages.values()) if storage is not None]
        return sum(storage.nbytes() for storage in alive)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        results = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return results


class Feed:
    """Token ids of the right shape."""

    def __init__(self, config: RunConfig) -> None:
        self.outlines = example(config, 2)

    def microbatch(self, *_: int) -> tuple[Any, Tensor, Tensor]:
        drawn = tree_map(lambda outline: torch.randint(1, 99, outline.shape), self.outlines)
        return drawn[0], drawn[1], torch.arange(2)


def measure(rank: int, world_size: int, config_json: str) -> tuple[int, float]:
    """(the most live bytes of this rank in a step, bytes on the wire)."""
    config = parse(config_json)
    with Live() as live:
        parts = build(config, open_mesh(grid_of(config), "cpu"), (Feed(config), None))
        for _ in range(2):
            take_step(parts)
            for replica in parts.replicas.values():
                replica.ready_all()
        gc.collect()
        gc.disable()
        live.peak_bytes = 0
        parts.mesh.traffic.reset()
        take_step(parts)
        gc.enable()
    return live.peak_bytes, sum(counted.wire_bytes for counted in parts.mesh.traffic.counts.values())


@pytest.mark.parametrize(
    "config",
    [
        configured(pp=2),
        configured("zb_h1", pp=2, dp=2, zero=2),
        configured(model="llama", dp=2, tp=2, sequence=True, zero=3),
    ],
    ids=["pp2", "zb_h1-zero2", "llama-sequence-zero3"],
)
def test_a_rank_on_paper_is_the_rank(pool: RankPool, config: RunConfig) -> None:
    grid = grid_of(config)
    measured = pool.run(measure, grid.size, config.model_dump_json())
    for pp_rank in range(grid.pp):
        ranks = range(pp_rank * grid.dp * grid.tp, (pp_rank + 1) * grid.dp * grid.tp)
        found = rehearse(config, ranks[0])
        for rank in ranks:
            off = measured[rank][0] - found.peak_bytes
            assert -ALMOST <= off <= ALMOST + config.parallel.sequence * OF_GLOO, (rank, off)
        assert sum(spoken.heard.wire_bytes for spoken in found.said) == pytest.approx(measured[ranks[0]][1])
        assert sum(found.held.values()) == found.peak_bytes == max(peak.num_bytes for peak in found.peaks)


@pytest.mark.parametrize(
    ("config", "pp_rank"),
    [(configured(chunks=5, pp=3, num_layers=2), 1), (configured("zb_v", 5, pp=2, model="llama"), 0)],
    ids=["1f1b", "zb_v"],
)
def test_a_short_rehearsal_played_back_is_the_whole_one(config: RunConfig, pp_rank: int) -> None:
    told: list[str] = []
    job = plan_job(config, told.append)
    assert not told  # nothing had to be run as a whole
    played = job.rehearsals[pp_rank]
    whole = rehearse(config, played.rank)
    assert [str(peak) for peak in played.peaks[1:]] == [str(peak) for peak in whole.peaks]
    assert (played.peak_bytes, played.held) == (whole.peak_bytes, whole.held)
    assert [spoken.heard for spoken in played.said] == [spoken.heard for spoken in whole.said]


def test_what_cannot_be_played_back_is_run_as_a_whole() -> None:
    config = configured(chunks=5, dp=2, zero=2)
    told: list[str] = []
    job = plan_job(config, told.append)
    assert "is run" in told[0] or "are run" in told[0]
    assert job.rehearsals[0].peak_bytes == rehearse(config, 0).peak_bytes


def test_offloaded_bytes_are_not_the_devices() -> None:
    here, away = rehearse(configured(dp=2), 0), rehearse(configured(dp=2, offload=True), 0)
    assert away.peak_bytes < here.peak_bytes
    assert away.host_bytes > 0
    assert away.both_bytes == pytest.approx(away.peak_bytes + away.host_bytes, rel=0.2)


def test_nothing_is_left_of_a_paper_mesh() -> None:
    hook, resize = sys.excepthook, torch.UntypedStorage.resize_
    rehearse(configured(dp=2, tp=2, zero=3), 3)
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert torch.UntypedStorage.resize_ is resize
    assert type(torch.zeros(1)) is Tensor
    with pytest.raises(ZeroDivisionError), paper_mesh(Grid(2, 4, 2), 9):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def join_and_rehearse(rank: int, world_size: int) -> str:
    """The refusal."""
    try:
        rehearse(configured(), 0)
    except MeshError as error:
        return str(error)
    return "rehearsed"


def test_a_rank_of_a_job_rehearses_nothing(pool: RankPool) -> None:
    assert "has joined a job already" in pool.run(join_and_rehearse, 2)[0]


def test_a_paper_mesh_of_any_size_makes_its_own_groups_alone() -> None:
    with paper_mesh(Grid(16, 128, 8), 5000) as mesh:
        assert (mesh.pp.size, mesh.dp.size, mesh.tp.size, mesh.world.size) == (16, 128, 8, 16384)
        assert mesh.dp.ranks == Grid(16, 128, 8).group(mesh.dp.name, 5000)  # type: ignore[arg-type]
        shard, copies = mesh.split_dp(8)
        assert (shard.size, copies.size) == (8, 16)
        assert set(shard.ranks) & set(copies.ranks) == {5000}
        assert mesh.stage_group([0, 3]).rank == -1
