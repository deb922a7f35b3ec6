"""A dry run of a rank: memory and communication are those of the real rank, to the byte;
nothing is left behind.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.errors import MeshError
from meshwright.mesh.fake import fake_mesh
from meshwright.mesh.grid import Grid
from meshwright.run.summary import rank_shares
from meshwright_launch.pool import RankPool
from meshwright_plan.dryrun.fake_step import grid_of, profile_rank
from meshwright_plan.dryrun.job import Job, dry_run_job
from meshwright_plan.dryrun.rank_profile import Category
from tests.plan.dryrun.jobs import Planned, configured
from tests.support.marks import long_row
from tests.support.processes import RUNS, measured

ALMOST = 256
"""Bytes: scalars of a step, such as a loss that its caller still holds."""
OF_GLOO = 4096
"""Its reduce-scatter, which megatron-core asks for under sequence parallelism,
keeps a copy of the message.
"""

SYNCHRONISED = configured(dp=2, pp=2, chunks=4, zero=2).replace(
    model={
        "builder": "tests.framework.verify.synchronised:build",
        "options": {"vocab_size": 100, "momentum": None},
    },
    pipeline={"recompute": "full"},
)


@pytest.mark.parametrize(
    "config",
    [
        long_row(RUNS["pp2"]),
        pytest.param(RUNS["llama-zb_h1-zero2"], marks=pytest.mark.torture),
        long_row(configured(model="llama", dp=2, tp=2, sequence=True, zero=3)),
        long_row(RUNS["llama-mtp-pp2-tp2"]),
        long_row(RUNS["muon-bfloat16-step"]),
        long_row(RUNS["adafactor-tp2-zero2"]),
        long_row(SYNCHRONISED),
    ],
    ids=[
        "pp2",
        "llama-zb_h1-zero2",
        "llama-sequence-zero3",
        "llama-mtp-pp2-tp2",
        "muon-bfloat16-step",
        "adafactor-tp2-zero2",
        "synchronised-pp2-full",
    ],
)
def test_a_dry_run_of_a_rank_equals_the_rank(pool: RankPool, config: RunConfig) -> None:
    check_rank_equals_dry_run(pool, config)


def check_rank_equals_dry_run(pool: RankPool, config: RunConfig) -> None:
    grid, held = grid_of(config.parallel), measured(pool, config)
    for pp_rank in range(grid.pp):
        ranks = range(pp_rank * grid.dp * grid.tp, (pp_rank + 1) * grid.dp * grid.tp)
        found = profile_rank(config, ranks[0])
        for rank in ranks:
            off = held[rank].peak_bytes - found.peak_bytes
            assert -ALMOST <= off <= ALMOST + config.parallel.sequence * OF_GLOO, (rank, off)
        assert sum(record.call.wire_bytes for record in found.communication) == pytest.approx(
            held[ranks[0]].wire_bytes
        )
        assert (
            sum(found.held.values())
            == found.peak_bytes
            == max(peak.num_bytes for peak in found.peaks)
        )


@pytest.mark.parametrize(
    ("own", "bytes_per_element"),
    [
        long_row({"name": "lion"}, 4),
        long_row({"name": "schedule_free_adamw", "schedule": "constant"}, 8),
        ({"state_dtype": "bfloat16"}, 4),
    ],
)
def test_states_of_other_optimizers(
    own: dict[str, Any], bytes_per_element: int, pool: RankPool
) -> None:
    """The dry run is the rank's, and its states those of the summary, but for padding."""
    config = configured(dp=2, zero=1).replace(optimizer=own)
    check_rank_equals_dry_run(pool, config)
    held, blueprint = profile_rank(config, 0).held[Category.OPTIMIZER], draw_blueprint(config)
    (share,) = rank_shares(blueprint)
    assert share.optimizer_bytes == blueprint.num_parameters // 2 * bytes_per_element
    assert held == pytest.approx(share.optimizer_bytes, rel=0.01)


@pytest.mark.long
def test_a_plain_model_and_an_optimizer_of_ones_own(pool: RankPool) -> None:
    """Layers that initialise themselves, with their resets,
    and an optimizer that is tried on values first.
    """
    config = RunConfig.model_validate(
        {
            "model": {
                "builder": "tests.support.builders:plain",
                "options": {"vocab_size": 500, "width": 64, "depth": 4},
            },
            "data": {"train": "in memory", "sequence_length": 48},
            "batch": {"micro_batch_size": 2, "chunks": 4},
            "parallel": {"pp": 2, "dp": 2, "bucket_bytes": 2**17},
            "optimizer": {
                "builder": "torch.optim:RAdam",
                "options": {"decoupled_weight_decay": True},
            },
            "train": {"device": "cpu"},
        }
    )
    check_rank_equals_dry_run(pool, resolve(config, 4))


@pytest.mark.long
def test_homes_of_matrices_of_unlike_size_are_ranks_of_unlike_peaks(pool: RankPool) -> None:
    """Each rank's dry run is that rank's: what waits at home, and the bytes that go back."""
    config = RUNS["muon-tp2-zero2-step"]
    held = measured(pool, config)
    assert len({each.peak_bytes for each in held}) > 1
    for rank in (0, 3):
        found = profile_rank(config, rank)
        assert abs(held[rank].peak_bytes - found.peak_bytes) <= ALMOST
        assert sum(record.call.wire_bytes for record in found.communication) == pytest.approx(
            held[rank].wire_bytes
        )


def same_as_whole(job: Job, pp_rank: int) -> None:
    """Check that the replay of a pipeline rank equals its dry run with all micro-batches."""
    played = job.profiles[pp_rank]
    whole = profile_rank(job.config, played.rank)
    assert [str(peak) for peak in played.peaks[1:]] == [str(peak) for peak in whole.peaks]
    assert (played.peak_bytes, played.held) == (whole.peak_bytes, whole.held)
    assert [record.call for record in played.communication] == [
        record.call for record in whole.communication
    ]


@pytest.mark.long
def test_a_replayed_step_equals_the_whole_dry_run(planned: Planned) -> None:
    assert not planned.reported  # nothing had to be run as a whole
    # the templates replayed in rank 2's row are those of another rank
    assert planned.job.representatives[2] == 1
    same_as_whole(planned.job, 2)


def test_a_replayed_step_of_ranks_that_share_samples_has_their_labels_alone() -> None:
    job = dry_run_job(configured(chunks=6, pp=2, cp=2, num_layers=2))
    same_as_whole(job, 1)


@pytest.mark.torture
def test_two_stages_of_a_rank_are_replayed_too() -> None:
    reported: list[str] = []
    job = dry_run_job(configured("zb_v", 5, pp=2, model="llama"), reported.append)
    assert not reported
    same_as_whole(job, 0)


@pytest.mark.long
def test_a_few_micro_batches_that_cannot_be_replayed_are_run_whole() -> None:
    config = configured(chunks=5, dp=2, zero=2)
    job = dry_run_job(config)
    assert job.profiles[0].peak_bytes == profile_rank(config, 0).peak_bytes


def test_offloaded_bytes_are_not_the_devices() -> None:
    here, away = profile_rank(configured(dp=2), 0), profile_rank(configured(dp=2, offload=True), 0)
    assert away.peak_bytes < here.peak_bytes
    assert away.host_bytes > 0
    assert away.both_bytes == pytest.approx(away.peak_bytes + away.host_bytes, rel=0.2)


def test_with_zero_3_and_offload_no_gradient_is_on_the_device_after_its_backward() -> None:
    """The peak is that without offload, less the shards of weights,
    gradients and optimizer state.
    """
    here, away = (
        profile_rank(configured(dp=2, zero=3, offload=offload), 0) for offload in (False, True)
    )
    assert away.both_bytes == here.peak_bytes
    assert away.peak_bytes + away.host_bytes == here.peak_bytes


def test_nothing_is_left_of_a_fake_mesh() -> None:
    hook, resize, device = sys.excepthook, torch.UntypedStorage.resize_, torch.cuda.current_device
    profile_rank(configured(dp=2, tp=2, zero=3), 3)
    assert torch.cuda.current_device is device
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert torch.UntypedStorage.resize_ is resize
    assert type(torch.zeros(1)) is Tensor
    with pytest.raises(ZeroDivisionError), fake_mesh(Grid(pp=2, dp=4, tp=2), 9):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def join_and_dry_run(rank: int, world_size: int) -> str:
    """The refusal."""
    try:
        profile_rank(configured(), 0)
    except MeshError as error:
        return str(error)
    return "ran"


def test_a_rank_of_a_job_cannot_dry_run(pool: RankPool) -> None:
    assert "has joined a job already" in pool.run(join_and_dry_run, 2)[0]


def test_a_fake_mesh_of_any_size_makes_its_own_groups_alone() -> None:
    with fake_mesh(Grid(pp=16, dp=128, tp=8), 5000) as mesh:
        assert (mesh.pp.size, mesh.replicas.size, mesh.tp.size, mesh.world.size) == (
            16,
            128,
            8,
            16384,
        )
        assert mesh.replicas.ranks == Grid(pp=16, dp=128, tp=8).group(mesh.replicas.name, 5000)  # type: ignore[arg-type]
        shard, copies = mesh.split(mesh.replicas, 8)
        assert (shard.size, copies.size) == (8, 16)
        assert set(shard.ranks) & set(copies.ranks) == {5000}
        assert mesh.stage_group([0, 3]).rank == -1


def test_trimmed_rows_are_dry_run_whole() -> None:
    """Lengths follow from labels, which a dry run has not; whole rows need the most memory."""
    whole = configured(pp=2, chunks=2, model="llama")
    trimmed = whole.replace(batch={"padding": "trim"}, data={"packing": "documents"})
    peaks = [
        [each.peak_bytes for each in dry_run_job(config).profiles] for config in (whole, trimmed)
    ]
    assert peaks[0] == peaks[1]
