"""The batch arithmetic, and what follows from the number of ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config import (
    Batch,
    Data,
    Launch,
    Parallel,
    RunConfig,
    Train,
    bucket_bytes,
    default_world_size,
    load,
    resolve,
)
from meshwright.config.batch import derive, find_problem
from tests.support.errors import raises


def make(batch: dict[str, int | None], launch: int | str = "auto", **parallel: Any) -> RunConfig:
    return RunConfig(
        data=Data(train="x"),
        batch=Batch(**batch),
        parallel=Parallel(**parallel),
        launch=Launch(processes=launch),
    )


def numbers(values: tuple[int | None, ...]) -> Batch:
    micro_batch_size, chunks, global_batch = values
    return Batch(micro_batch_size=micro_batch_size, chunks=chunks, global_batch=global_batch)


TWO = {"micro_batch_size": 4, "chunks": 2}


@pytest.mark.parametrize(
    ("batch", "dp", "wanted"),
    [
        ((4, 2, None), 2, (4, 2, 16)),
        ((4, None, 16), 2, (4, 2, 16)),
        ((None, 2, 16), 2, (4, 2, 16)),
        ((4, 2, 16), 2, (4, 2, 16)),
        ((1, None, 3), 3, (1, 1, 3)),
    ],
)
def test_any_two_give_the_third(
    batch: tuple[int | None, ...], dp: int, wanted: tuple[int, int, int]
) -> None:
    assert derive(numbers(batch), dp) == numbers(wanted)


@pytest.mark.parametrize(
    ("batch", "dp", "values"),
    [
        ((4, 2, 20), 2, ("4 x chunks 2 x dp 2 = 16", "global_batch = 16")),
        ((4, None, 20), 2, ("16 or 24", "batch.micro_batch_size = 2 or 5")),
        ((None, 3, 20), 2, ("18 or 24", "batch.chunks = 2 or 5")),
        ((1, None, 3), 4, ("dp 4", "batch.global_batch = 4")),
        ((8, None, 8), 2, ("batch.global_batch = 16", "micro_batch_size = 4")),
        ((4, 2, 20), None, ("16 or 24", "batch.micro_batch_size = 2 or 5")),
        ((None, 3, 20), None, ("18 or 21", "batch.chunks = 2 or 4")),
        ((None, 2, None), 2, ("chunks = 2",)),
        ((None, None, None), None, ("none of them",)),
    ],
)
def test_batch_numbers_that_do_not_hold_together(
    batch: tuple[int | None, ...], dp: int | None, values: tuple[str, ...]
) -> None:
    problem = find_problem(numbers(batch), dp)
    assert problem is not None and all(value in problem for value in values), problem


counts = st.integers(1, 40)


@given(
    st.none() | counts,
    st.none() | counts,
    st.none() | st.integers(1, 400),
    st.none() | st.integers(1, 9),
)
@settings(deadline=None)
def test_a_batch_is_right_or_told_how_to_become_so(
    m: int | None, c: int | None, g: int | None, dp: int | None
) -> None:
    batch = Batch(micro_batch_size=m, chunks=c, global_batch=g)
    said = find_problem(batch, dp)
    if said is None and dp is not None:
        whole = derive(batch, dp)
        assert None not in (whole.micro_batch_size, whole.chunks, whole.global_batch)
        assert whole.micro_batch_size * whole.chunks * dp == whole.global_batch
        numbers = (whole.micro_batch_size, whole.chunks, whole.global_batch)
        assert all(old in (None, new) for old, new in zip((m, c, g), numbers, strict=True))
        # what is right for one dp is not refused while dp is open
        assert find_problem(batch, None) is None
    elif said is not None and (
        moves := re.findall(r"batch\.(\w+) = (\d+)(?: or (\d+))?", said.split(": ")[-1])
    ):
        for name, *numbers in moves:  # every number that the message proposes does work
            for number in filter(None, numbers):
                assert find_problem(batch.model_copy(update={name: int(number)}), dp) is None, said


def test_load_checks_the_batch_as_far_as_dp_is_known(tmp_path: Any) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[data]\ntrain = "x"\n[batch]\nmicro_batch_size = 4\nglobal_batch = 20\n')
    assert load(path).batch.global_batch == 20  # dp = 1 or 5 would do
    with raises("MW-CONFIG-037", "global_batch = 20", "micro_batch_size 4 x dp 2 = 8"):
        load(path, ["--parallel.dp=2"])
    with raises("MW-CONFIG-037", "micro_batch_size 4"):
        load(path, ["--batch.global_batch=21"])


@pytest.mark.parametrize("dp", ["auto", -1, 2])
def test_resolve_leaves_nothing_open(dp: int | str) -> None:
    config = resolve(make(TWO, dp=dp, pp=2, tp=2), 8)
    assert config.parallel.dp == 2
    assert config.batch == Batch(micro_batch_size=4, chunks=2, global_batch=16)
    assert config.launch.processes == 8
    assert resolve(config, 8) == config


def test_resolve_touches_nothing_else() -> None:
    before = make(TWO, pp=2)
    after = resolve(before, 2)
    assert before == make(TWO, pp=2)
    restored = after.model_copy(
        update={"batch": before.batch, "parallel": before.parallel, "launch": before.launch}
    )
    assert restored == before


@pytest.mark.parametrize(
    ("parallel", "world_size", "code", "values"),
    [
        (
            {"dp": 2, "pp": 2, "tp": 2},
            6,
            "MW-CONFIG-004",
            ("dp 2 x pp 2 x tp 2 = 8", 6, "launch.processes = 8"),
        ),
        (
            {"dp": 2, "pp": 1, "tp": 2},
            8,
            "MW-CONFIG-004",
            ("dp 2 x pp 1 x tp 2 = 4", 8, 'parallel.dp = 4 or "auto"'),
        ),
        (
            {"dp": "auto", "pp": 2, "tp": 2},
            6,
            "MW-CONFIG-003",
            ("pp 2 x tp 2 = 4", 6, "1.5", "4 or 8"),
        ),
        ({"dp": -1, "pp": 2, "tp": 4}, 4, "MW-CONFIG-003", ("pp 2 x tp 4 = 8", 4, "0.5", 8)),
    ],
)
def test_a_product_that_is_not_the_world(
    parallel: dict[str, Any], world_size: int, code: str, values: tuple[object, ...]
) -> None:
    with raises(code, *values) as caught:
        resolve(make(TWO, **parallel), world_size)
    assert len(caught.value.problems) == 1


def test_resolve_tells_of_world_and_batch_together() -> None:
    with raises("MW-CONFIG-004") as caught:
        resolve(make({"micro_batch_size": 4, "global_batch": 20}, dp=2, pp=2), 6)
    assert [problem.message.split(" = ")[0] for problem in caught.value.problems] == [
        "dp 2 x pp 2 x tp 1",
        "batch.global_batch",
    ]


def test_resolve_finds_a_batch_that_does_not_fit_the_inferred_dp() -> None:
    config = make({"micro_batch_size": 1, "global_batch": 2})
    assert resolve(config, 2).batch.chunks == 1
    with raises("MW-CONFIG-001", "global_batch = 2", "dp 4", "batch.global_batch = 4"):
        resolve(config, 4)


@pytest.mark.parametrize(
    ("launch", "parallel", "num_devices", "wanted"),
    [
        ("auto", {"pp": 2, "tp": 2}, 0, 4),
        ("auto", {"dp": 2, "pp": 2, "tp": 2}, 0, 8),
        ("auto", {"pp": 2, "tp": 2}, 8, 8),
        ("auto", {"dp": -1, "pp": 3, "tp": 1}, 8, 6),
        ("auto", {"dp": 1, "pp": 2, "tp": 2}, 8, 4),
        ("auto", {}, 0, 1),
        (6, {"pp": 2}, 0, 6),
        (6, {"pp": 2}, 8, 6),
    ],
)
def test_how_many_ranks_to_start(
    launch: int | str, parallel: dict[str, Any], num_devices: int, wanted: int
) -> None:
    config = make(TWO, launch, **parallel)
    assert default_world_size(config.parallel, config.launch, num_devices) == wanted
    assert resolve(config, wanted).launch.processes == wanted


@pytest.mark.parametrize(
    ("launch", "parallel", "value"),
    [
        ("auto", {"pp": 4, "tp": 2}, "pp 4 x tp 2 = 8"),
        ("auto", {"dp": 8}, "dp 8 x pp 1 x tp 1 = 8"),
        (8, {}, "launch.processes = 8"),
    ],
)
def test_more_ranks_than_devices(launch: int | str, parallel: dict[str, Any], value: str) -> None:
    config = make(TWO, launch, **parallel)
    with raises("MW-CONFIG-007", value, "4 devices"):
        default_world_size(config.parallel, config.launch, 4)


def test_ranks_may_share_devices() -> None:
    config = make(TWO, 8)
    shared = config.model_copy(
        update={"launch": config.launch.model_copy(update={"share_devices": True})}
    )
    assert default_world_size(shared.parallel, shared.launch, 1) == 8


@pytest.mark.parametrize(
    ("dp", "given_bytes", "on_cpu", "on_gpu"),
    [
        (1, None, 25, 160),
        (7, None, 28, 160),
        (41, None, 164, 164),
        (128, None, 512, 512),
        (128, 2**20, 1, 1),
    ],
)
def test_buckets_grow_with_the_replicas_unless_their_size_is_given(
    dp: int, given_bytes: int | None, on_cpu: int, on_gpu: int
) -> None:
    """The size is that of the device that is planned for, not of this machine."""
    config = resolve(
        make({"micro_batch_size": 1, "chunks": 1}, dp=dp, bucket_bytes=given_bytes), dp
    )
    found = {
        (device, dtype): (bucket_bytes(config.parallel, Train(device=device, dtype=dtype)) / 2**20)
        for device in ("auto", "cpu", "cuda")
        for dtype in ("float32", "bfloat16", "float16")
    }
    is_cuda = {
        ("auto", "bfloat16"),
        ("auto", "float16"),
        *(key for key in found if key[0] == "cuda"),
    }
    assert found == {key: on_gpu if key in is_cuda else on_cpu for key in found}
