"""The highest point of a rank: on numbers made by hand, by the ZeRO paper's table,
and against real processes.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config import RunConfig, resolve
from meshwright.optimizer.at_rest import Elements, StateWidths, held_at_rest
from meshwright.schedule.action import Action, Kind
from meshwright.schedule.build import build as build_schedule
from meshwright.schedule.lower import lower
from meshwright_launch.pool import RankPool
from meshwright_plan.dryrun.fake_step import grid_of, profile_rank
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.layer_profile import LayerProfile, OutputTensor
from meshwright_plan.planner.memory.footprint import (
    BackwardPoint,
    Footprint,
    SharedWeight,
    footprint,
)
from meshwright_plan.planner.memory.reduction import GLOO, NCCL, Backend, ReductionBuffers
from meshwright_plan.planner.memory.row import ActionMemory, row_peak
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.rates import FrameworkTraits
from tests.plan.planner.small import LENGTH, LLAMA, OPTIONS, config
from tests.support.marks import long_row, mark_all_rows_but
from tests.support.processes import RUNS, measured

KEPT = 1000


def layer(name: str, kept: int, out: int, **other: object) -> LayerProfile:
    """One that keeps what comes in, and hands on one tensor."""
    values: dict[str, object] = {
        "num_parameters": 10,
        "inputs_kept": (True,),
        "outputs": (OutputTensor(out, None, kept=False, needs_gradient=True),),
        "forward_peak": kept + out,
        "backward_peak": 2 * out,
        "backward_peak_from_outside": out,
    }
    return LayerProfile(name, (), (), (), (), (), kept_bytes=kept, **(values | other))  # type: ignore[arg-type]


def alone(pp: int, kept: int = KEPT, deferred: int = 0, sent: int = 0) -> list[Footprint]:
    """Stages that hold nothing but what they keep."""
    way = (BackwardPoint(0, 0, 0), BackwardPoint(deferred - kept, 0, 0))
    one = Footprint(
        0,
        kept,
        kept,
        way,
        deferred,
        (BackwardPoint(0, 0, 0), BackwardPoint(-deferred, 0, 0)),
        sent,
        0,
        0,
    )
    return [one] * pp


def highest(
    name: str, pp: int, chunks: int, rank: int, footprints: list[Footprint], by: Backend = NCCL
) -> ActionMemory:
    """Of a rank without replicas."""
    schedule = lower(build_schedule(name, pp, chunks, 1))
    return row_peak(schedule, rank, footprints, ReductionBuffers(config(), by))


@pytest.mark.parametrize("rank", range(4))
def test_1f1b_holds_fewer_micro_batches_on_later_ranks(rank: int) -> None:
    assert highest("1f1b", 4, 8, rank, alone(4)).total == (4 - rank) * KEPT
    assert highest("gpipe", 4, 8, rank, alone(4)).total == 8 * KEPT
    assert highest("1f1b", 4, 2, rank, alone(4)).total == min(2, 4 - rank) * KEPT


def test_a_split_backward_keeps_notes_between_its_halves() -> None:
    plain, noting = (highest("zb_h1", 4, 8, 3, alone(4, deferred=n)) for n in (0, 600))
    assert noting.total > plain.total
    assert noting.total <= plain.total + 4 * 600
    assert highest("1f1b", 4, 8, 3, alone(4, deferred=600)).total == KEPT


def test_what_is_sent_is_held_until_twice_as_many_as_ranks_are_on_their_way() -> None:
    schedule = lower(build_schedule("1f1b", 2, 6, 1))
    last = [alone(2)[0], alone(2)[1]._replace(input_gradients=70, inputs=0, outputs=0)]
    for backend in (GLOO, NCCL):
        found = row_peak(schedule, 1, last, ReductionBuffers(config(), backend))
        assert found.messages == found.total - KEPT == 70 * 4
    assert any(
        action.kind is Kind.SEND_B
        for row in schedule.rows
        for item in row
        for action in _actions(item)
    )


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_receive_is_held_from_one_computation_before_its_use(name: str) -> None:
    """While 2B0 runs, the input of 2F1 is there; in rows that are not lowered likewise."""
    built = build_schedule(name, 3, 6, 1)
    footprints = [each._replace(inputs=70) for each in alone(3)]
    buffers = ReductionBuffers(config(), NCCL)
    found = row_peak(lower(built), 2, footprints, buffers)
    assert (found.messages, found.activations) == (70, KEPT + 70)
    assert found == row_peak(built, 2, footprints, buffers)


def _actions(item: object) -> tuple[object, ...]:
    from meshwright.schedule.action import actions_of

    return tuple(actions_of(item))  # type: ignore[arg-type]


def test_layers_of_a_stage_hand_on_what_the_next_one_keeps() -> None:
    stage = footprint([layer("a", 100, 7), layer("b", 200, 9)], [(5, True)], last=False)
    assert stage.inputs == stage.input_gradients == 5
    assert stage.kept == 100 + 200 + 7 + 9  # a's output is kept by b, b's is kept to be sent
    assert stage.outputs == stage.output_gradients == 9
    assert stage.forward_peak == 100 + 7 + (200 + 9)
    # back: b's gradient is what was received; b and what it kept of a go before a's; what was sent
    # stays to the end
    assert stage.backward[0]._replace(after=0) == BackwardPoint(9, 10, 0)
    assert stage.backward[1]._replace(after=0) == BackwardPoint(2 * 7 - 200 - 7, 10, 10)
    assert stage.backward[-1] == BackwardPoint(-stage.kept, 0, 20)
    ending = footprint([layer("a", 100, 7), layer("b", 200, 9)], [(5, True)], last=True)
    assert (ending.outputs, ending.output_gradients, ending.kept) == (0, 0, 307)


def test_what_a_layer_hands_through_is_counted_once() -> None:
    through = layer(
        "through",
        0,
        7,
        inputs_kept=(False,),
        outputs=(OutputTensor(7, 0, kept=False, needs_gradient=True),),
    )
    stage = footprint([layer("a", 100, 7), through, through, layer("b", 200, 9)], [], last=True)
    assert stage.kept == 100 + 200 + 7


def test_what_a_layer_keeps_of_its_own_output_is_not_counted_again() -> None:
    keeps = layer("keeps", 100, 7, outputs=(OutputTensor(7, None, kept=True, needs_gradient=True),))
    assert footprint([keeps, layer("b", 200, 9)], [], last=True).kept == 300


def bytes_at_rest(zero: int, dp: int, dtype: str = "bfloat16") -> tuple[int, ...]:
    """Weights, gradients, optimizer of 1,000 elements."""
    base = config(dtype=dtype)
    parallel = base.parallel.model_copy(update={"zero": zero, "dp": dp})
    return held_at_rest(parallel, base.optimizer, dtype, Elements(0, 1000, 0))[:3]


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"),
    [(0, 2000, 4000, 12_000), (1, 2000, 4000, 3000), (2, 2000, 1000, 3000), (3, 1000, 1000, 2000)],
)
def test_zero_at_rest(zero: int, weights: int, gradients: int, optimizer: int) -> None:
    assert bytes_at_rest(zero, 4) == (weights, gradients, optimizer)
    assert sum(bytes_at_rest(zero, 1)) == 18_000 or zero == 3


def test_widths_of_other_frameworks_at_rest() -> None:
    base, whole = config(), Elements(0, 1000, 10)

    def held(run: RunConfig, elements: Elements = whole, **widths: Any) -> tuple[int, ...]:
        return held_at_rest(
            run.parallel, run.optimizer, run.train.dtype, elements, StateWidths(**widths)
        )

    assert held(base, gradient=2) == (2020, 2000, 12_000, 0)
    assert held(base, has_copy=False) == (4020, 4000, 8000, 0)
    sharded = base.replace(parallel={"dp": 4, "zero": 2})
    assert held(sharded, gradient=2)[1] == 500
    offloaded = base.replace(parallel={"dp": 4, "zero": 3, "offload": True})
    of_shard = {2: 500, 4: 1000}
    # float32 weights and states of the shard, its summed gradient
    for gradient, shard in of_shard.items():
        assert held(offloaded, Elements(0, 1000, 0), gradient=gradient)[3] == 3000 + shard
    doubles = config(dtype="float64")
    assert held(doubles, gradient=2)[1] == 8000  # no less than a weight


def test_a_framework_of_narrow_gradients_needs_less_at_the_peak_too() -> None:
    bench = ModelCache(config().replace(parallel={"dp": 4, "zero": 2}), ExecutionOptions())
    layout = bench.layout(bench.config)
    wide, narrow = (
        layout.memory(0, GLOO, FrameworkTraits(wide_gradient_bytes=width)) for width in (4, 2)
    )
    assert narrow.gradients == wide.gradients / 2
    assert narrow.weights == wide.weights
    assert narrow.temporaries < wide.temporaries  # buckets


def test_outputs_that_are_freed_once_sent_are_held_by_no_micro_batch() -> None:
    stage = footprint([layer("a", 100, 7), layer("b", 200, 9)], [(5, True)], last=False)
    assert stage.sent_only == 9
    ending = footprint([layer("a", 100, 7), layer("b", 200, 9)], [(5, True)], last=True)
    assert ending.sent_only == 0
    kept = footprint(
        [layer("keeps", 100, 7, outputs=(OutputTensor(7, None, kept=True, needs_gradient=True),))],
        [],
        last=False,
    )
    assert kept.sent_only == 0  # its own backward needs it
    schedule = lower(build_schedule("1f1b", 4, 8, 1))
    stages, buffers = [stage._replace(inputs=0)] * 3 + [ending], ReductionBuffers(config(), NCCL)
    held, freed = (
        row_peak(schedule, 0, stages, buffers, frees_sent=flag) for flag in (False, True)
    )
    assert held.activations - freed.activations == 4 * 9


def test_zero_2_and_3_need_room_for_what_is_summed_and_gathered() -> None:
    base = config()
    points = [BackwardPoint(0, 500, 0), BackwardPoint(0, 100, 500), BackwardPoint(0, 0, 600)]

    def at(zero: int, by: Backend, reduces: bool = True) -> int:
        parallel = base.parallel.model_copy(update={"zero": zero, "dp": 4, "bucket_bytes": 1000})
        sums = ReductionBuffers(base.model_copy(update={"parallel": parallel}), by)
        return sums.at(points, 1, reduces=reduces)

    assert at(0, NCCL) == at(1, NCCL) == 0
    assert at(2, NCCL) > 0
    assert at(2, GLOO) > at(2, NCCL)
    assert at(3, NCCL, reduces=False) == 2 * 100
    assert at(3, NCCL) == 2 * 100 + 4 * 500  # and the reduce-scatter of the layer after it
    assert at(2, NCCL, reduces=False) == 0


@pytest.mark.parametrize(("device", "bucket"), [("cpu", 25 * 2**20), ("cuda", 160 * 2**20)])
def test_buckets_that_fill_are_those_of_the_device(device: str, bucket: int) -> None:
    of = config().replace(parallel={"zero": 2, "dp": 4}, train={"device": device})
    points = [BackwardPoint(0, 100, 500), BackwardPoint(0, 0, 2**27)]
    assert ReductionBuffers(of, NCCL).at(points, 0, reduces=True) == 2 * bucket


def test_zero_3_gathers_one_layer_ahead_and_keeps_one_reduce_scatter() -> None:
    """bfloat16 weights (2 bytes), float32 gradients (4): layers of 10, 20 and 30 elements,
    the last of 30 first.
    """
    sums = ReductionBuffers(config().replace(parallel={"zero": 3, "dp": 4}), NCCL)
    path = (
        BackwardPoint(0, 30, 0),
        BackwardPoint(0, 20, 30),
        BackwardPoint(0, 10, 50),
        BackwardPoint(0, 0, 60),
    )
    of = alone(1)[0]._replace(backward=path, weight_half=path)
    assert sums.held(of, Action(Kind.B, 0, 0)) == 4 * 10
    assert sums.held(of, Action(Kind.W, 0, 0)) == 4 * 30
    first, *others, end = (sums.at(path, index, reduces=True, held=40) for index in range(4))
    assert first == 2 * (30 + 20) + 40
    assert others == [2 * (20 + 10) + 4 * 30, 2 * 10 + 4 * 20]
    assert end == 4 * 10
    assert sums.at(path, 1, reduces=False, held=40) == 2 * (20 + 10) + 40  # I reduces nothing
    assert sums.at(path, 1, reduces=True, in_halves=True, held=40) == 2 * (30 + 20) + 40


def test_the_first_stage_of_zero_2_has_its_embedding_in_flight_until_a_forward() -> None:
    of = alone(1)[0]._replace(
        backward=(BackwardPoint(0, 30, 0), BackwardPoint(0, 10, 30), BackwardPoint(0, 0, 40))
    )
    by_nccl, by_gloo = (
        ReductionBuffers(config().replace(parallel={"zero": 2, "dp": 4}, batch={"chunks": 2}), by)
        for by in (NCCL, GLOO)
    )
    assert by_nccl.held(of, Action(Kind.B, 0, 0)) == 4 * 10
    assert by_gloo.held(of, Action(Kind.B, 0, 0)) == 2 * 4 * 10
    assert by_nccl.held(of, Action(Kind.B, 1, 0)) == 0


def test_a_tied_weights_gradient_waits_for_the_first_layer_that_uses_it() -> None:
    layers = [layer("embedding", 0, 0), layer("block", 0, 0), layer("head", 0, 0)]
    plain = footprint(layers, [], last=True).backward
    tied = footprint(layers, [], last=True, shared=[SharedWeight(0, 2, 64)]).backward
    assert [after.bytes - before.bytes for before, after in zip(plain, tied, strict=True)] == [
        0,
        64,
        64,
        0,
    ]


def test_a_layer_in_two_halves_leaves_its_deferred_bytes_to_the_layers_before_it() -> None:
    layers = [layer("a", 100, 7, deferred_bytes=60), layer("b", 200, 9, deferred_bytes=90)]
    plain = footprint([layer("a", 100, 7), layer("b", 200, 9)], [], last=True).backward
    halves = footprint(layers, [], last=True).backward
    assert [after.bytes - before.bytes for before, after in zip(plain, halves, strict=True)] == [
        0,
        90,
        150,
    ]


@mark_all_rows_but("long", "pp2")
@pytest.mark.parametrize("name", RUNS)
def test_real_processes_hold_what_was_predicted(pool: RankPool, name: str) -> None:
    grid = grid_of(RUNS[name].parallel)
    layout = ModelCache(RUNS[name], ExecutionOptions(fuses_any_attention=False)).layout(RUNS[name])
    for rank, held in enumerate(measured(pool, RUNS[name])):
        predicted = layout.memory(rank // (grid.dp * grid.tp), GLOO).total
        assert predicted == pytest.approx(held.peak_bytes, rel=0.02), rank


@pytest.mark.parametrize(
    ("parallel", "dtype"),
    [
        ({"dp": 2, "zero": 1}, "bfloat16"),
        long_row({"dp": 2, "zero": 2}, "bfloat16"),
        ({"dp": 2, "zero": 3}, "bfloat16"),
        long_row({"dp": 2, "zero": 3}, "float32"),
        ({"dp": 2, "zero": 3, "unit_layers": 2}, "bfloat16"),
        ({"dp": 2, "zero": 3, "keep_gathered": True}, "bfloat16"),
        long_row({"dp": 2, "zero": 3, "unit_layers": 2, "keep_gathered": ["block*"]}, "float32"),
        long_row({"pp": 2, "dp": 2, "zero": 3, "keep_gathered": True}, "bfloat16"),
        long_row({"pp": 2, "dp": 2, "zero": 3}, "bfloat16"),
    ],
)
def test_a_large_vocabulary_is_reduced_in_the_memory_that_a_dry_run_counts(
    parallel: dict[str, int], dtype: str
) -> None:
    """The embedding's gradient, alive beside the input,
    the copy and the output of its reduce-scatter.
    """
    options = OPTIONS | LLAMA | {"vocab_size": 8192, "hidden_size": 64}
    of = RunConfig.model_validate(
        {
            "model": {"builder": "meshwright_models.llama:build", "options": options},
            "data": {"train": "in memory", "sequence_length": LENGTH},
            "batch": {"micro_batch_size": 1, "chunks": 4},
            "parallel": parallel,
            "train": {"dtype": dtype, "device": "cpu"},
        }
    )
    pp = parallel.get("pp", 1)
    of = resolve(of, 2 * pp)
    layout = ModelCache(of, ExecutionOptions(fuses_any_attention=False)).layout(of)
    for pp_rank in range(pp):
        expected = profile_rank(of, 2 * pp_rank).both_bytes
        assert layout.memory(pp_rank, GLOO).total == pytest.approx(expected, rel=0.03)
