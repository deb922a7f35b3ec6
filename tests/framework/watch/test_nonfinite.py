"""NaN put in at known places of known ranks: the step is taken by none, and the place is named.
Or it is skipped.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright.train
import meshwright_launch.work
from meshwright.config import RunConfig, parse
from meshwright.errors import NonFiniteError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.run.resume import resume
from meshwright.step import take_step
from meshwright.tracking.record import from_json, to_json
from meshwright.watch.nonfinite.evidence import Evidence, EvidenceKind, broken, cause
from meshwright.watch.ranks import numbers, ranks_at, samples_named
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import LATER, save
from tests.framework.watch.builders import Doubling, double
from tests.framework.watch.spoiling import (
    LIMIT_S,
    Spoil,
    checkpoints_in,
    config_for,
    held,
    messages,
    opened,
    parts_for,
    quiet,
    same_bits,
    size_of,
    spoil,
    taken,
)
from tests.support.marks import long_row, marked_rows

pytestmark = pytest.mark.fault(row="NaN at 3 places x 3 axes: stopped before the step, named")

ONCE = "It did not recur when the step was replayed: check the hardware of "
TIED = "embedding.tokens.weight"
BUILDERS = "tests.framework.watch.builders"


def test_many_ranks_and_samples_in_few_words() -> None:
    grid = Grid(pp=2, dp=2, tp=2)
    assert ranks_at(grid, [5]) == "rank 5 (pp1 dp0 tp1)"
    assert ranks_at(grid, [7, 6, 3, 2]) == "ranks 2-3, 6-7 (pp0-1 dp1 tp0-1)"
    assert numbers(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 ..."
    assert samples_named([4]) == "sample 4" and samples_named([4, 5, 9]) == "samples 4-5, 9"


def test_what_is_broken() -> None:
    assert (
        broken(torch.ones(3)) is None
        and broken(torch.tensor([1, 2])) is None
        and broken(torch.ones(0)) is None
    )
    assert broken(torch.tensor([1.0, float("nan"), float("-inf")])) == "1 of 3 NaN and 1 of 3 inf"
    large = torch.full((2,), 1e19)
    assert broken(large) is None and "whose square" in str(broken(large, is_gradient=True))


def seen(
    kind: EvidenceKind,
    rank: int,
    stage: int,
    position: int,
    microbatch: int | None = 0,
    **more: Any,
) -> Evidence:
    given = {
        "ranks": (rank,),
        "name": "it",
        "description": "1 of 2 NaN",
        "dp_rank": 0,
        "samples": (3,),
    } | more
    return Evidence(kind=kind, stage=stage, position=position, microbatch=microbatch, **given)


@pytest.mark.parametrize(
    ("found", "ranks"),
    [
        # the lower stage
        ([seen(EvidenceKind.OUTPUT, 2, 1, 1), seen(EvidenceKind.OUTPUT, 1, 0, 9)], (1,)),
        (
            [seen(EvidenceKind.OUTPUT, 2, 1, 1, 4), seen(EvidenceKind.OUTPUT, 3, 1, 5, 2)],
            (3,),
        ),  # the earlier micro-batch
        (
            [seen(EvidenceKind.OUTPUT, 2, 1, 6), seen(EvidenceKind.OUTPUT, 3, 1, 5)],
            (3,),
        ),  # the earlier call; the other met it in a sum
        # not to be told
        ([seen(EvidenceKind.OUTPUT, 2, 1, 5), seen(EvidenceKind.OUTPUT, 3, 1, 5)], (2, 3)),
        (
            [seen(EvidenceKind.GRADIENT, 0, 0, 9), seen(EvidenceKind.GRADIENT, 2, 1, 1)],
            (2,),
        ),  # backward begins at the end
        ([seen(EvidenceKind.GRADIENT, 0, 0, 9), seen(EvidenceKind.GRADIENT, 1, 0, 8)], (0,)),
        (
            [
                seen(EvidenceKind.GRADIENT, 2, 1, 9),
                seen(EvidenceKind.LOSS, 3, 1, 0),
                seen(EvidenceKind.OUTPUT, 0, 1, 3),
            ],
            (0,),
        ),
        ([seen(EvidenceKind.GRADIENT, 2, 1, 9), seen(EvidenceKind.LOSS, 3, 1, 0)], (3,)),
        ([seen(EvidenceKind.OUTPUT, 0, 0, 0), seen(EvidenceKind.WEIGHT, 3, 1, 0, None)], (3,)),
        # a sum into which another rank's own gradient went says nothing of who summed it; one
        # without such does
        (
            [
                seen(EvidenceKind.SUM, 0, 0, 9, piece=(0, 0)),
                seen(EvidenceKind.GRADIENT, 1, 0, 9, piece=(0, 0)),
            ],
            (1,),
        ),
        (
            [
                seen(EvidenceKind.SUM, 0, 0, 9, piece=(0, 0)),
                seen(EvidenceKind.GRADIENT, 0, 0, 8, piece=(0, 1)),
            ],
            (0,),
        ),
    ],
)
def test_the_first_of_many_is_the_cause(found: list[Evidence], ranks: tuple[int, ...]) -> None:
    for order in (found, found[::-1]):
        told = cause(order, Grid(pp=2, tp=2))
        assert told is not None and told.ranks == ranks


def test_nothing_found_is_no_cause() -> None:
    assert cause([], Grid()) is None


CASES: list[tuple[str, str, str, list[tuple[Spoil, str, str]]]] = [
    (
        "dp2,pp2,mbs2",
        "float32",
        "",
        [
            (Spoil("output", 3, "block1.mlp.up", 7), "rank 3 (pp1 dp1 tp0)", "sample 15"),
            (Spoil("output", 0, "block0.attention", 1), "rank 0 (pp0 dp0 tp0)", "sample 9"),
            (
                Spoil("gradient", 1, "block0.mlp.up.weight", 6),
                "rank 1 (pp0 dp1 tp0)",
                "micro-batch 1, samples 14-15",
            ),
            (Spoil("weight", 2, "block1.mlp.up.bias"), "rank 2 (pp1 dp0 tp0)", ""),
            (
                Spoil("output", 3, "block1.mlp.up", 7, times=1),
                "ranks 1, 3 (pp0-1 dp1 tp0)",
                "samples 14-15",
            ),
            (
                Spoil("gradient", 1, "block0.mlp.up.weight", 6, times=1),
                "rank 1 (pp0 dp1 tp0)",
                "samples 12-15",
            ),
            (
                Spoil("gradient", 2, "block1.mlp.down.weight", 0, times=1),
                "rank 2 (pp1 dp0 tp0)",
                "samples 8-11",
            ),
        ],
    ),
    (
        "pp2,tp2,mbs2,zb_h1",
        "float32",
        "",
        [
            (Spoil("output", 3, "block1.mlp.up", 5), "rank 3 (pp1 dp0 tp1)", "sample 13"),
            (Spoil("output", 1, "embedding.dropout", 5), "rank 1 (pp0 dp0 tp1)", ""),
            (
                Spoil("gradient", 2, "block1.attention.qkv.weight", 5),
                "rank 2 (pp1 dp0 tp0)",
                "micro-batch 2, samples 12-13",
            ),
            (
                Spoil("gradient", 1, "block0.attention_norm.weight", 2),
                "rank 1 (pp0 dp0 tp1)",
                "micro-batch 1, samples 10-11",
            ),
            (Spoil("weight", 1, TIED), "rank 1 (pp0 dp0 tp1)", ""),
            (Spoil("gradient", 3, TIED, 3), "rank 3 (pp1 dp0 tp1)", "micro-batch 1, samples 10-11"),
        ],
    ),
    (
        "dp4,zero2,shard2",
        "float32",
        "",
        [
            (Spoil("gradient", 3, "norm.weight", 2), "rank 3 (pp0 dp3 tp0)", ""),
            (Spoil("weight", 1, "block1.mlp.down.weight"), "rank 1 (pp0 dp1 tp0)", ""),
            (Spoil("gradient", 2, "norm.weight", 4, times=1), "ranks 0-3 (pp0 dp0-3 tp0)", ""),
        ],
    ),
    (
        "dp4,zero3,shard2",
        "float32",
        "",
        [
            (Spoil("gradient", 3, "norm.weight", 2), "rank 3 (pp0 dp3 tp0)", ""),
            (Spoil("output", 2, "block0.attention.qkv", 4), "rank 2 (pp0 dp2 tp0)", ""),
            (Spoil("weight", 1, "block1.mlp.down.weight"), "rank 1 (pp0 dp1 tp0)", ""),
            (Spoil("gradient", 2, "norm.weight", 4, times=1), "ranks 0-3 (pp0 dp0-3 tp0)", ""),
        ],
    ),
    (
        "dp2,cp2,mbs2",
        "float32",
        "",
        [
            (
                Spoil("output", 3, "block0.mlp.up", 4),
                "rank 3 (pp0 dp1 cp1 tp0)",
                "replica dp1, sample 12",
            ),
            (
                Spoil("gradient", 1, "block0.mlp.up.weight", 0),
                "rank 1 (pp0 dp0 cp1 tp0)",
                "samples 8-9",
            ),
            (
                Spoil("output", 2, "block0.attention.qkv", 4, times=1),
                "ranks 2-3 (pp0 dp1 cp0-1 tp0)",
                "",
            ),
        ],
    ),
    (
        "dp2,tp2,sequence,zero0,selective",
        "bfloat16",
        "",
        [
            (Spoil("output", 3, "block0.attention.qkv", 4), "rank 3 (pp0 dp1 tp1)", ""),
            (Spoil("gradient", 2, "norm.weight", 4), "rank 2 (pp0 dp1 tp0)", "sample 12"),
            (Spoil("weight", 1, "block1.mlp.down.weight"), "rank 1 (pp0 dp0 tp1)", ""),
            (Spoil("gradient", 2, "norm.weight", 4, times=1), "ranks 0-3 (pp0 dp0-1 tp0-1)", ""),
        ],
    ),
    (
        "pp2,interleaved_1f1b,full",
        "float32",
        f"{BUILDERS}:partly_frozen",
        [
            (Spoil("output", 1, "block1.mlp", 3), "rank 1 (pp1 dp0 tp0)", "sample 11"),
            (Spoil("gradient", 0, "block2.mlp.up.bias", 3), "rank 0 (pp0 dp0 tp0)", ""),
        ],
    ),
    (
        "dp1",
        "float64",
        "",
        [
            (
                Spoil("output", 0, "head", 3, value=float("inf")),
                "rank 0 (pp0 dp0 tp0)",
                "inf, sample 11",
            ),
            (Spoil("gradient", 0, "norm.bias", 3), "rank 0 (pp0 dp0 tp0)", "sample 11"),
            (Spoil("weight", 0, "norm.bias"), "rank 0 (pp0 dp0 tp0)", ""),
        ],
    ),
]


@marked_rows(
    "long",
    "dp2,pp2,mbs2",
    "pp2,tp2,mbs2,zb_h1",
    "dp4,zero2,shard2",
    "dp4,zero3,shard2",
    "dp2,cp2,mbs2",
    "pp2,interleaved_1f1b,full",
)
@pytest.mark.parametrize(
    ("layout", "dtype", "builder", "cases"),
    [LATER(*case) if "selective" in case[0] else case for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_rank_layer_and_samples_are_named(
    pool: RankPool, layout: str, dtype: str, builder: str, cases: list[tuple[Spoil, str, str]]
) -> None:
    config = config_for(layout, builder=builder, dtype=dtype)
    found = messages(pool, config, [spec for spec, _, _ in cases])
    for (spec, place, details), message in zip(cases, found, strict=True):
        is_transient = spec.times == 1
        cause = f"{'the weight' if spec.what == 'weight' else f'the {spec.what} of'} {spec.name} "
        assert (f"{ONCE}{place}" if is_transient else f"{place}: {cause}") in message, message
        assert all(detail in message for detail in details.split(", ")), message
        assert message.startswith("step 2: the loss is ") and "not taken on any rank" in message
        assert (ONCE in message) == is_transient, message


def test_a_replay_runs_layers_alone_without_torch_compile() -> None:
    """A compiled function within a layer stays compiled:
    attention by its plain code makes all scores, S x S.
    """
    config = config_for("dp1", builder=f"{BUILDERS}:with_a_compiled_function").replace(
        train={"compile": True}
    )
    parts = parts_for(config, open_mesh(Grid(), "cpu"))
    ran: list[str] = []

    def backend(name: str) -> Any:
        def compile_(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            def run(*values: Any) -> Any:
                ran.append(name)
                return graph(*values)

            return run

        return compile_

    (stage,) = parts.executor.stages.values()
    for layer in stage.layers:
        layer.compile(
            backend=backend("layer" if isinstance(layer, Doubling) else "a layer of torch")
        )
    compiled = [layer._compiled_call_impl for layer in stage.layers]
    for layer in stage.layers:
        if isinstance(layer, Doubling):
            layer.double = torch.compile(double, backend=backend("function"))
    assert taken(parts) is None
    in_step = ran.count("layer")
    assert in_step and "function" not in ran
    undo, _ = spoil(parts, Spoil("gradient", 0, "1.weight", 3, times=1)), ran.clear()
    message = str(taken(parts))
    undo()
    torch._dynamo.reset()
    own = [name for name in ran if name != "a layer of torch"]  # compiled from torch 2.15 on
    assert own == ["layer"] * in_step + ["function"] * in_step
    assert [layer._compiled_call_impl for layer in stage.layers] == compiled
    assert (
        "It did not recur when the step was replayed, its layers without torch.compile: check the"
        " hardware of rank 0 (pp0 dp0 tp0); if it happens again, set train.compile = false"
        in message
    )


def without_an_update(
    rank: int, world_size: int, config_json: str, saved: str
) -> tuple[bool, bool, bool, str]:
    """(a skipped step is one without an update, a resumed run goes on so,
    it is told in the statistics, stderr).
    """
    config, mesh = opened(config_json)
    plain = parts_for(config, mesh)
    update = plain.optimizer.step
    for step in range(1, 6):
        plain.optimizer.step = (lambda rate, factor: None) if step in (2, 3) else update  # type: ignore[method-assign]
        take_step(plain)
    skipping = parts_for(config, mesh)
    said = io.StringIO()
    told = []
    with redirect_stderr(said):
        for step in range(1, 6):
            undo = spoil(
                skipping,
                Spoil("output", 0, "1" if "builders" in config.model.builder else "block0", 3),
            )
            if step not in (2, 3):
                undo()
            before = held(skipping)
            stats = take_step(skipping)
            told.append(stats.skipped == (step in (2, 3)) == same_bits(before, held(skipping)))
            undo()
            if step == 3:
                save(skipping, saved)
    resumed = parts_for(config, mesh)
    resume(resumed, Path(saved), quiet)
    told.append(
        resumed.state.step == 3
        and resumed.state.optimizer_steps == 1
        and resumed.state.skipped_in_a_row == 2
    )
    take_step(resumed)
    take_step(resumed)
    state = skipping.state
    told.append(
        (state.step, state.optimizer_steps, state.samples_seen, state.skipped_in_a_row)
        == (5, 3, 40, 0)
    )
    told.append(resumed.state == state)
    has_running = bool(plain.running())  # of those a step without update is none
    same = same_bits(held(skipping), held(plain)) or has_running
    again = same_bits(held(skipping), held(resumed))
    close_mesh(mesh)
    return same, again, all(told), said.getvalue()


@pytest.mark.parametrize(
    ("layout", "builder", "dtype"),
    [
        long_row("dp2,pp2,mbs2", "", "bfloat16"),
        ("dp1", f"{BUILDERS}:with_running_buffers", "float32"),
    ],
)
def test_a_skipped_step_leaves_no_trace_but_in_the_count(
    pool: RankPool, tmp_path: Path, layout: str, builder: str, dtype: str
) -> None:
    config = config_for(layout, builder=builder, dtype=dtype, on_nonfinite="skip")
    found = pool.run(
        without_an_update,
        size_of(config),
        config.model_dump_json(),
        str(tmp_path),
        timeout_s=LIMIT_S,
    )
    for rank, (same, again, told, said) in enumerate(found):
        assert same and again and told, (rank, same, again, told)
        if rank:
            assert not said
        else:
            assert said.count("\n") == 2 and "2 in a row, at most 3" in said
            assert "step 2: the loss is nan" in said and "the loss is nan in micro-batch" in said, (
                said
            )


def beyond_the_limit(
    rank: int, world_size: int, config_json: str
) -> tuple[list[str | None], int, int]:
    config, mesh = opened(config_json)
    parts = parts_for(config, mesh)
    undo = spoil(parts, Spoil("gradient", 1, "block1.mlp.up.weight", 0))
    with redirect_stderr(io.StringIO()):
        said = [taken(parts) for _ in range(2)]
        undo()
        said.append(taken(parts))
        spoil(parts, Spoil("gradient", 1, "block1.mlp.up.weight", 0))
        said += [taken(parts) for _ in range(3)]
    close_mesh(mesh)
    return said, parts.state.step, parts.state.optimizer_steps


def test_so_many_in_a_row_and_no_more(pool: RankPool) -> None:
    config = config_for("pp2", on_nonfinite="skip", most_skipped=2)
    for said, steps, optimizer_steps in pool.run(
        beyond_the_limit, 2, config.model_dump_json(), timeout_s=LIMIT_S
    ):
        assert said[:5] == [None] * 5 and (steps, optimizer_steps) == (5, 1)
        assert (
            "2 in a row were skipped" in said[5]
            and "rank 1 (pp1 dp0 tp0)" in said[5]
            and "sample 40" in said[5]
        )


def trained(rank: int, world_size: int, config_json: str, spec: Spoil, in_step: int) -> str | None:
    """Train a whole run, in one step of which something is spoilt."""

    def spoiling(parts: Any) -> Any:
        undo = spoil(parts, spec) if parts.state.step + 1 == in_step else lambda: None
        try:
            return take_step(parts)
        finally:
            undo()

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()):
        patch.setattr(meshwright.train, "take_step", spoiling)
        patch.setattr(meshwright_launch.work, "print_lines", quiet)
        try:
            meshwright_launch.work.work(parse(config_json))
        except NonFiniteError as error:
            assert error.exit_code == 17
            return str(error)
    return None


def run_of(tmp_path: Path, layout: str, **watch: Any) -> RunConfig:
    tree = config_for(layout, steps=4, **watch).model_dump()
    tree["data"].update(train="", builder=f"{BUILDERS}:tokens")
    tree["run"].update(name="run", directory=str(tmp_path))
    tree["checkpoint"].update(every=1, keep_last=9)
    tree["tracking"]["console"] = False
    return RunConfig.model_validate(tree)


def test_a_run_that_stops_saves_nothing_of_it_and_one_that_skips_says_so(
    pool: RankPool, tmp_path: Path
) -> None:
    spec = Spoil("output", 1, "block1", 2)
    stopping = run_of(tmp_path / "stopping", "pp2")
    said = pool.run(trained, 2, stopping.model_dump_json(), spec, 3, timeout_s=LIMIT_S)
    assert "rank 1" in said[0] and said[0] == said[1]
    assert len(checkpoints_in(tmp_path / "stopping" / "run" / "checkpoints")) == 2
    skipping = run_of(tmp_path / "skipping", "pp2", on_nonfinite="skip")
    assert pool.run(trained, 2, skipping.model_dump_json(), spec, 3, timeout_s=LIMIT_S) == [
        None,
        None,
    ]
    lines = (tmp_path / "skipping" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("train/skipped") for line in lines] == [None, None, 1, None]
    assert json.loads(lines[2])["train/loss"] == "NaN"
    record = from_json(lines[2])
    assert record.skipped and to_json(record) == lines[2] and record.samples_seen == 24
    assert len(checkpoints_in(tmp_path / "skipping" / "run" / "checkpoints")) == 4
