"""One bit flipped in one rank's copy of what others hold too: found at the next check, named,
and nothing is saved.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import meshwright.train
import meshwright_launch.work
from meshwright.config import RunConfig, parse
from meshwright.errors import DriftError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh
from meshwright.optimizer import read_states
from meshwright.parts import Parts
from meshwright.step import take_step
from meshwright.verify import layout_config, parse_layout
from meshwright.watch.drift import WORDS, bits, check_drift, differing_pieces
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import Size, model_config
from tests.framework.watch.spoiling import (
    LIMIT_S,
    checkpoints_in,
    config_for,
    opened,
    parts_for,
    quiet,
    size_of,
)
from tests.support.marks import long_row, mark_all_rows_but


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("size", [1, 7, 24])
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype, size: int) -> None:
    tensor = torch.arange(size).to(dtype)
    before = bits(tensor)
    raw = tensor.view(torch.uint8)
    for byte in range(len(raw)):
        for bit in range(1 if dtype == torch.bool else 8):
            raw[byte] ^= 1 << bit
            assert bits(tensor) != before
            raw[byte] ^= 1 << bit
    assert bits(tensor) == before


def test_which_ranks_are_to_blame() -> None:
    grid = Grid(pp=2, dp=2, tp=2)
    assert (
        differing_pieces(grid, [[5], [4, 7, 6]])
        == "rank 5 (pp1 dp0 tp1) is unlike the other 3 copies (ranks 4, 6-7)"
    )
    assert differing_pieces(grid, [[4, 6], [5], [7]]).startswith(
        "ranks 4, 6 (pp1 dp0-1 tp0) and rank 5 (pp1 dp0 tp1) and rank 7"
    )
    assert (
        differing_pieces(grid, [[7], [5]])
        == "rank 5 (pp1 dp0 tp1) and rank 7 (pp1 dp1 tp1) hold different bits, and of 2 copies it"
        " is unknown which one is wrong"
    )


class Flip(NamedTuple):
    """One bit of one rank's copy."""

    rank: int
    what: str
    """``weight``, ``exp_avg``, ``master`` or ``frozen``."""
    name: str


def find(parts: Parts, flip: Flip) -> Tensor:
    """Some of the numbers."""
    index = 0
    for replica in parts.replicas.values():
        for member in replica.frozen:
            if flip.what == "frozen" and member.info.name == flip.name:
                return member.parameter.detach().view(-1)
        for bucket in replica.buckets:
            for place in bucket.slots:
                if place.member.info.name == flip.name:
                    flat = {"weight": bucket.flat, "master": bucket.master}.get(flip.what)
                    flat = (
                        read_states(parts.optimizer, index)[0][flip.what] if flat is None else flat
                    )
                    return flat[place.start : place.stop]
            index += 1
    raise AssertionError(f"rank {parts.mesh.rank} does not hold {flip.name}")


def toggle(parts: Parts, flip: Flip) -> None:
    """Flip the lowest bit of the third number; once more, and it is as it was."""
    if parts.mesh.rank == flip.rank:
        numbers = find(parts, flip)
        numbers.view(WORDS[numbers.element_size()])[2] ^= 1


def flipped(rank: int, world_size: int, config_json: str, flips: list[Flip]) -> list[str | None]:
    """After two steps: what a check says when all is sound, with each of the flips,
    and at the end again.
    """
    config, mesh = opened(config_json)
    parts = parts_for(config, mesh)

    def said() -> str | None:
        try:
            check_drift(parts)
        except DriftError as error:
            assert error.exit_code == 18
            return str(error)
        return None

    found = [said()]  # as they begin
    for _ in range(2):
        take_step(parts)
    found.append(said())
    for flip in flips:
        for replica in parts.replicas.values():
            replica.wait_for_weights()
        toggle(parts, flip)
        found.append(said())
        toggle(parts, flip)
    take_step(parts)
    found.append(said())
    close_mesh(mesh)
    return found


TIED = "embedding.tokens.weight"
UP, NORM = "block0.mlp.up.weight", "norm.weight"
BUILDERS = "tests.framework.watch.builders"
OF_TWO = " hold different bits, and of 2 copies it is unknown which one is wrong"
OF_FOUR = " is unlike the other 3 copies"

CASES: list[tuple[str, str, str, list[tuple[Flip, str]]]] = [
    (
        *("dp2,pp2,tp2,mbs2", "float32", ""),
        [
            # column-parallel: its replicas alone hold the same
            (
                Flip(6, "weight", "block1.mlp.up.weight"),
                f"rank 4 (pp1 dp0 tp0) and rank 6 (pp1 dp1 tp0){OF_TWO}",
            ),
            (Flip(5, "weight", NORM), f"rank 5 (pp1 dp0 tp1){OF_FOUR} (ranks 4, 6-7)"),
            # of a row-parallel linear
            (Flip(7, "weight", "block1.mlp.down.bias"), f"rank 7 (pp1 dp1 tp1){OF_FOUR}"),
            # tp1's half, on both stages and replicas
            (Flip(3, "weight", TIED), f"rank 3 (pp0 dp1 tp1){OF_FOUR} (ranks 1, 5, 7)"),
        ],
    ),
    (
        *("dp2,pp2,mbs2,zero0,zb_h1", "bfloat16", ""),
        [
            (
                Flip(1, "exp_avg", "block0.attention.out.weight"),
                f"rank 0 (pp0 dp0 tp0) and rank 1 (pp0 dp1 tp0){OF_TWO}",
            ),
            (Flip(2, "master", "norm.bias"), "rank 2 (pp1 dp0 tp0) and rank 3"),
            (Flip(0, "exp_avg", TIED), f"rank 0 (pp0 dp0 tp0){OF_FOUR}"),
        ],
    ),
    (
        *("dp4,zero2,shard2", "bfloat16", ""),
        [
            (Flip(1, "weight", UP), f"rank 1 (pp0 dp1 tp0){OF_FOUR}"),
            # half of it each: only rank 2 holds what rank 0 does
            (Flip(0, "exp_avg", UP), f"rank 0 (pp0 dp0 tp0) and rank 2 (pp0 dp2 tp0){OF_TWO}"),
            (Flip(3, "master", UP), "rank 1 (pp0 dp1 tp0) and rank 3"),
        ],
    ),
    (
        *("dp4,zero3,shard2", "bfloat16", ""),
        [
            # between steps the master weights are the weights
            (Flip(3, "master", UP), "rank 1 (pp0 dp1 tp0) and rank 3"),
            (Flip(0, "exp_avg", UP), f"rank 0 (pp0 dp0 tp0) and rank 2 (pp0 dp2 tp0){OF_TWO}"),
        ],
    ),
    (
        *("dp4,zero0", "float64", f"{BUILDERS}:partly_frozen"),
        [(Flip(2, "frozen", UP), f"rank 2 (pp0 dp2 tp0){OF_FOUR}")],
    ),
    (
        *("tp2,pp2,mbs2,interleaved_1f1b,sequence", "float32", ""),
        [(Flip(3, "exp_avg", NORM), f"rank 2 (pp1 dp0 tp0) and rank 3 (pp1 dp0 tp1){OF_TWO}")],
    ),
    (
        # the first stage and the last are one rank's, and so are both copies of the tied weight
        *("dp2,pp2,mbs2,zb_v", "float32", ""),
        [(Flip(0, "weight", "embedding.positions.weight"), "rank 0 ")],
    ),
    (
        *("dp2,cp2", "float32", ""),
        [(Flip(3, "weight", NORM), f"rank 3 (pp0 dp1 cp1 tp0){OF_FOUR} (ranks 0-2)")],
    ),
    (
        *("cp2,pp2,mbs2,zero0", "bfloat16", ""),
        [
            (
                Flip(1, "exp_avg", UP),
                f"rank 0 (pp0 dp0 cp0 tp0) and rank 1 (pp0 dp0 cp1 tp0){OF_TWO}",
            )
        ],
    ),
    ("pp3", "float32", "tests.support.builders:tied_to_the_head", []),
    ("dp2,tp2,mbs2,sequence,full", "bfloat16", "", []),
    ("pp2", "float32", f"{BUILDERS}:with_running_buffers", []),
    ("dp1", "float32", "", []),
]


@mark_all_rows_but("long", "pp3", "pp2", "dp1")
@pytest.mark.fault(row="a bit flip in each class of replicated tensor: found by the next check")
@pytest.mark.parametrize(
    ("layout", "dtype", "builder", "cases"), CASES, ids=[case[0] for case in CASES]
)
def test_a_flipped_bit_is_found_and_sound_copies_pass(
    pool: RankPool, layout: str, dtype: str, builder: str, cases: list[tuple[Flip, str]]
) -> None:
    config = config_for(layout, builder=builder, dtype=dtype)
    ranks = pool.run(
        flipped,
        size_of(config),
        config.model_dump_json(),
        [flip for flip, _ in cases],
        timeout_s=LIMIT_S,
    )
    assert all(found == ranks[0] for found in ranks)
    first, second, *found, last = ranks[0]
    assert (first, second, last) == (None, None, None)
    for (flip, ranks_named), message in zip(cases, found, strict=True):
        assert message is not None and message.startswith("replicas of "), (flip, message)
        assert f"{flip.name} differ after step 2: {ranks_named}" in message, (flip, message)
        assert (flip.what == "exp_avg") == ("the moment exp_avg of " in message)
        assert "So do those of" not in message


def copies_after_a_step(rank: int, world_size: int, config_json: str) -> str | None:
    """What the check says of copies that nobody has spoiled."""
    config, mesh = opened(config_json)
    try:
        parts = parts_for(config, mesh)
        take_step(parts)
        check_drift(parts)
    except DriftError as error:
        return str(error)
    finally:
        close_mesh(mesh)
    return None


@pytest.mark.parametrize("layout", ["dp3,pp2,zb_v,zero1", long_row("dp2,tp2,pp2,zero1")])
def test_copies_of_a_tied_weight_stay_equal_under_adafactor(pool: RankPool, layout: str) -> None:
    """Its sums lie at other places in the messages of the two stages,
    where three ranks add in another order.
    """
    laid_out, size = parse_layout(layout), Size(4, 16, 2, 12)
    # the last bit of an update counts
    optimizer = {"name": "adafactor", "learning_rate": 1.0, "warmup_steps": 0}
    config = model_config("gpt2", size, vocab_size=64).replace(optimizer=optimizer)
    text = layout_config(config, laid_out, size.global_batch, "float64").model_dump_json()
    assert (
        pool.run(copies_after_a_step, laid_out.size, text, timeout_s=LIMIT_S)
        == [None] * laid_out.size
    )


def drifting(rank: int, world_size: int, config_json: str, flip: Flip, in_step: int) -> str | None:
    """Train a whole run, after one step of which a bit is flipped; the weights stay so,
    for there is one owner of each.
    """

    def stepping(parts: Any) -> Any:
        stats = take_step(parts)
        if parts.state.step == in_step:
            for replica in parts.replicas.values():
                replica.wait_for_weights()
            toggle(parts, flip)
        return stats

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()):
        patch.setattr(meshwright.train, "take_step", stepping)
        patch.setattr(meshwright_launch.work, "print_lines", quiet)
        try:
            meshwright_launch.work.work(parse(config_json))
        except DriftError as error:
            return str(error)
    return None


def run_of(tmp_path: Path, every: int, **watch: Any) -> RunConfig:
    tree = config_for("dp2,zero0", steps=6, **watch).model_dump()
    tree["data"].update(train="", builder="tests.framework.watch.builders:tokens")
    tree["run"].update(name="run", directory=str(tmp_path))
    tree["checkpoint"].update(every=every, keep_last=9)
    tree["tracking"]["console"] = False
    return RunConfig.model_validate(tree)


@pytest.mark.fault(row="a bit flip in each class of replicated tensor: found by the next check")
@pytest.mark.parametrize(
    ("drift_every", "every", "in_step", "after"),
    [long_row(100, 2, 3, 4), long_row(3, 6, 2, 3), (0, 6, 2, None)],
    ids=["before a checkpoint", "every so many steps", "never"],
)
def test_nothing_is_saved_of_copies_that_differ(
    pool: RankPool, tmp_path: Path, drift_every: int, every: int, in_step: int, after: int | None
) -> None:
    config = run_of(tmp_path, every, drift_every=drift_every)
    flip = Flip(1, "weight", "block0.mlp.up.weight")
    said = pool.run(drifting, 2, config.model_dump_json(), flip, in_step, timeout_s=LIMIT_S)
    saved = checkpoints_in(tmp_path / "run" / "checkpoints")
    if after is None:
        assert said == [None, None] and len(saved) == 1
        return
    assert (
        said[0] == said[1]
        and f"differ after step {after}: rank 0 (pp0 dp0 tp0) and rank 1" in said[0]
    )
    assert saved == [f"step-{step:08d}" for step in range(every, after, every)]
    steps = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    assert steps == after
    again = pool.run(drifting, 2, config.model_dump_json(), flip, 0, timeout_s=LIMIT_S)
    assert (
        again == [None, None]
        and checkpoints_in(tmp_path / "run" / "checkpoints")[-1] == "step-00000006"
    )
