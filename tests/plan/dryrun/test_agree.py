"""Ranks that do not understand each other are found, and named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.mesh import Grid, nodes_of
from meshwright.mesh.fake import InterceptedOperation
from meshwright.schedule.load import draw_schedule, format_schedule
from meshwright_plan.dryrun.agreement import disagreements
from meshwright_plan.dryrun.fake_step import profile_rank
from meshwright_plan.dryrun.groups import GroupViews, axis_of
from meshwright_plan.dryrun.job import Job, dry_run_job, set_rank_schedule
from meshwright_plan.dryrun.rank_profile import CommunicationRecord
from meshwright_plan.dryrun.report import describe, wire_bytes
from tests.plan.dryrun.jobs import Planned, configured


@pytest.fixture
def job(planned: Planned) -> Job:
    return replace(planned.job, own_profiles={}, own_schedules={})


@pytest.mark.long
def test_a_job_that_runs_agrees(job: Job) -> None:
    assert disagreements(job) == []
    assert job.representatives == [0, 1, 1, 3]  # equal stages are run once


@pytest.mark.long
def test_neighbours_that_share_shards_agree() -> None:
    assert disagreements(dry_run_job(configured(dp=4, zero=2, shard_factor=2))) == []


@pytest.mark.long
def test_stages_whose_ranks_share_samples_agree() -> None:
    """The ranks of a pipeline rank are dp x cp x tp neighbours."""
    for chunks in (2, 20):  # 20: the middle ones are repeated
        job = dry_run_job(configured(chunks=chunks, pp=2, dp=2, cp=2, num_layers=2))
        assert disagreements(job) == []
        assert {call.call.operation for call in job.profile_of(4).communication} >= {"receive"}


@pytest.mark.long
def test_a_tied_weight_and_all_ranks_are_told_apart() -> None:
    """Both groups go along the pipeline, and only the ends of it speak in the first."""
    assert disagreements(dry_run_job(configured(pp=3))) == []


@pytest.mark.long
def test_a_rank_with_another_schedule_is_named(job: Job) -> None:
    set_rank_schedule(job, 5, "gpipe")
    found = disagreements(job)
    assert {"schedule", "hang"} <= {each.kind for each in found}
    assert "rank 5 runs gpipe and the others 1f1b" in "\n".join(map(str, found))
    assert 5 in next(each for each in found if each.kind == "hang").ranks


def test_a_group_without_one_of_its_members_hangs(job: Job) -> None:
    """Rank 5 takes its tp group for itself alone; rank 4 waits for it, and all ranks for rank 4."""
    profile = job.profile_of(5)
    alone = [
        record._replace(call=record.call._replace(group=(5,)))
        if record.call.name == "tp"
        else record
        for record in profile.communication
    ]
    job.own_profiles[5] = replace(profile, rank=5, communication=alone)
    (found,) = disagreements(job)
    assert found.kind == "hang" and {4, 5} <= set(found.ranks)


def altered(job: Job, rank: int, which: str, **changes: object) -> None:
    """The rank says its first such message otherwise."""
    profile = job.profile_of(rank)
    at = next(n for n, record in enumerate(profile.communication) if record.call.operation == which)
    record = profile.communication[at]
    call = InterceptedOperation(
        *(changes.get(name, value) for name, value in record.call._asdict().items())
    )  # type: ignore[arg-type]
    changed = [
        *profile.communication[:at],
        CommunicationRecord(record.activity, call),
        *profile.communication[at + 1 :],
    ]
    job.own_profiles[rank] = replace(profile, communication=changed)


def test_a_message_of_another_size_is_named(job: Job) -> None:
    altered(job, 4, "receive", num_bytes=12)
    (found,) = disagreements(job)
    assert found.kind == "messages"
    assert found.ranks == (0, 4)
    assert "expected: receive of 12 bytes" in found.text


def test_a_collective_of_another_kind_is_named(job: Job) -> None:
    altered(job, 4, "all_gather", operation="reduce_scatter")
    found = disagreements(job)
    assert found[0].kind == "collectives"
    assert "tp group [4 5]" in found[0].text
    assert "rank 4" in found[0].text


def test_bytes_stay_inside_a_node_or_do_not(job: Job) -> None:
    wide, narrow = nodes_of(1, 16), nodes_of(8, 2)
    assert all(
        each.between == 0
        for each in wire_bytes(job, GroupViews(job), job.profiles[1], wide).values()
    )
    found = wire_bytes(job, GroupViews(job), job.profiles[1], narrow)
    assert found["tp"].between == 0 and found["tp"].inside > 0
    assert found["pp"].inside == 0 and found["pp"].between > 0
    assert found["dp"].inside == 0 and found["dp"].between > 0


def test_axes_are_told_apart() -> None:
    grid = Grid(pp=2, dp=2, tp=2)
    assert [axis_of(grid, grid.group(axis, 0)) for axis in ("dp", "tp")] == ["dp", "tp"]  # type: ignore[arg-type]
    assert axis_of(grid, range(8)) == "world"
    assert axis_of(grid, (0, 4)) == "tied"


@pytest.mark.long
def test_experts_are_told_apart_from_an_axis_of_the_same_ranks() -> None:
    """Two replicas that share experts: the bytes of rows, as the formula has them,
    are not those of gradients.
    """
    config = configured(model="llama", dp=2, ep=2)
    moe = {"num_experts": 4, "top_k": 2}
    found = dry_run_job(config.replace(model={"options": config.model.options | {"moe": moe}}))
    sent = wire_bytes(found, GroupViews(found), found.profiles[0], nodes_of(1, 2))
    rows, counts = 4 * 2 * (2 * 16) * 32 * 4, 4 * 8
    assert sent["ep"].inside == 2 * (rows + counts) / 2
    assert sent["dp"].inside > 0
    assert "ep inside" in describe(found, nodes_of(1, 2), disagreements(found))


@pytest.mark.long
def test_ranks_that_share_experts_take_turns_alike() -> None:
    """Exchanges of an ep group are in one order on its ranks;
    with F and B in another order on one they would hang.
    """
    config = configured("dualpipe_v", 5, "llama", 3, pp=2, dp=2, ep=2)
    job = dry_run_job(
        config.replace(
            model={"options": config.model.options | {"moe": {"num_experts": 4, "top_k": 2}}}
        )
    )
    assert disagreements(job) == []
    rows = [each for each in job.profile_of(2).communication if each.call.name == "ep"]
    # of each of two layers and five micro-batches: three in F, two in B
    assert len(rows) == 5 * 2 * 5
    set_rank_schedule(job, 3, "zb_v")
    assert {"schedule", "collectives"} <= {each.kind for each in disagreements(job)}


def test_the_report_names_what_matters(job: Job) -> None:
    text = describe(job, nodes_of(2, 8), disagreements(job))
    assert "16 ranks on 2 nodes" in text
    assert "all ranks    agree" in text
    set_rank_schedule(job, 5, "gpipe")
    assert "DO NOT AGREE" in describe(job, nodes_of(2, 8), disagreements(job))


def test_experts_whose_replicas_share_shards_are_told_apart() -> None:
    """The shard groups of an expert are (0, 2), (4, 6):
    rank 4 was taken for a member of the first.
    """
    config = configured(model="llama", dp=8, ep=2, zero=2, shard_factor=2)
    job = dry_run_job(
        config.replace(
            model={"options": config.model.options | {"moe": {"num_experts": 4, "top_k": 2}}}
        )
    )
    assert disagreements(job) == []
    views, profile = GroupViews(job), job.profile_of(4)
    own = {views.group(group, profile, 4) for group in views.groups_of[id(profile)]}
    assert all(4 in group for group in own)
    of_rank = {record.call.group for record in profile_rank(job.config, 4).communication}
    assert own == of_rank and (4, 6) in own


def test_bytes_between_nodes_are_the_mean_of_a_stage_s_ranks() -> None:
    """pp 2 x dp 6 on nodes of 8: ranks 0 and 1 have their stage's neighbour in the node,
    ranks 2 to 5 have not.
    """
    job = dry_run_job(configured(pp=2, dp=6, num_layers=2))
    sent = wire_bytes(job, GroupViews(job), job.profiles[0], nodes_of(2, 8))["pp"]
    assert sent.between == pytest.approx(2 * sent.inside)
    assert "pp between" in describe(job, nodes_of(2, 8), [])


def test_a_schedule_that_has_one_number_of_micro_batches_runs_whole(tmp_path: Path) -> None:
    """Dry runs of more than 4 micro-batches drew a short schedule, which a file has not."""
    config = configured(chunks=20, pp=2, num_layers=2)
    built = dry_run_job(config)
    (tmp_path / "own.txt").write_text(
        format_schedule(draw_schedule(config.pipeline, config.parallel.pp, config.batch.chunks))
    )
    reported: list[str] = []
    job = dry_run_job(
        config.replace(pipeline={"schedule_file": str(tmp_path / "own.txt")}), reported.append
    )
    # progress too, if it takes long
    said = [line.partition(":")[0] for line in reported if "micro-batches" in line]
    assert said == [f"pipeline rank {r} runs all micro-batches" for r in (0, 1)]
    for read, drawn in zip(job.profiles, built.profiles, strict=True):
        assert read.peak_bytes == drawn.peak_bytes
        assert [each.call for each in read.communication] == [
            each.call for each in drawn.communication
        ]
