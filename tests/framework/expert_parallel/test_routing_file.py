"""Files of recorded routing: form, a file of one's own, and refusals with a code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.current import CurrentMicrobatch
from meshwright.errors import ConfigError
from meshwright.expert_parallel.routing import RankTokens, RoutingHooks, RoutingPlan
from meshwright.expert_parallel.routing_file import (
    RoutingFile,
    TableShape,
    compact_dtype,
    compare_files,
    fingerprint_of,
    write_file,
)
from meshwright_models.experts import MoE
from meshwright_models.moe_options import FeedForwards, MoeOptions
from tests.support.errors import has_code, raises

E, K, S, D = 6, 2, 5, 8
NAME = "mlp.router"


def layers(capacity_factor: float = 0.5) -> torch.nn.Module:
    torch.manual_seed(0)
    chosen = MoeOptions(E, K, capacity_factor=capacity_factor)
    mixture = FeedForwards(D, 4, 1, moe=chosen).build(0)
    assert isinstance(mixture, MoE)
    return torch.nn.ModuleDict({"mlp": mixture.double()})


def samples(count: int = 4) -> Tensor:
    return torch.randn(count, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def run(
    plan: RoutingPlan, model: torch.nn.Module, order: tuple[int, ...] = (0, 1, 2, 3), start: int = 8
) -> Tensor:
    """Outputs of the samples, in micro-batches of one, in any order."""
    current, x, out = CurrentMicrobatch(), samples(), torch.zeros(4, S, D, dtype=torch.float64)
    hooks = RoutingHooks(plan, [model], model, RankTokens(S, current))
    with hooks.during("step-00000001", range(start, start + 4)):
        for at in order:
            current.sample_indices = torch.tensor([start + at])
            out[at] = model["mlp"](x[at : at + 1]).detach()[0]  # type: ignore[index]
    return out


def test_a_record_holds_choices_and_drops_and_its_replay_gives_the_same_output(
    tmp_path: Path,
) -> None:
    model, facts = layers(), fingerprint_of("models:build", {"a": 1}, {}, 7, S)
    expected = run(RoutingPlan(tmp_path, fingerprint=facts), model)
    (file,) = tmp_path.iterdir()
    ids = load_file(file)[NAME]
    assert ids.dtype == torch.uint8 and ids.shape == (4, S, K)
    assert (ids >= E).any() and bool(((ids % E).sort(-1).values.diff(dim=-1) > 0).all()), (
        "two experts, some dropped"
    )
    other = layers()
    with torch.no_grad():  # other numbers: a router that would choose otherwise
        other["mlp"].router.weight.neg_()  # type: ignore[index]
    assert not torch.equal(run(RoutingPlan(), other), expected)
    run(RoutingPlan(tmp_path / "again", tmp_path, facts), other, (3, 1, 0, 2))
    assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), (
        "recorded while replayed"
    )
    assert torch.equal(
        run(RoutingPlan(replay=tmp_path, fingerprint=facts), layers(), (3, 1, 0, 2)), expected
    )


def test_a_file_of_ones_own_may_leave_tokens_to_the_router(tmp_path: Path) -> None:
    free = run(RoutingPlan(tmp_path / "free"), layers())
    own = load_file(tmp_path / "free" / "step-00000001.safetensors")[NAME].to(torch.int64)
    own[:, 0] = torch.tensor([4, 1])
    own[0] = -1
    save_file({NAME: own.contiguous()}, tmp_path / "step-00000001.safetensors")
    run(RoutingPlan(tmp_path / "taken", tmp_path, {"run.seed": 7}), layers())
    taken = load_file(tmp_path / "taken" / "step-00000001.safetensors")[NAME].to(torch.int64)
    assert torch.equal(taken[1:], own[1:]) and free.shape == (4, S, D)
    assert torch.equal(
        taken[0],
        load_file(tmp_path / "free" / "step-00000001.safetensors")[NAME][0].to(torch.int64),
    )


def refused(directory: Path, code: str, facts: dict[str, str | int] | None = None) -> str:
    with pytest.raises(ConfigError, check=has_code("MW-EP-005", "MW-EP-006", "MW-EP-007")) as error:
        run(RoutingPlan(replay=directory, fingerprint=facts or {}), layers())
    assert error.value.code == code
    return error.value.message


def test_a_file_of_another_run_is_refused_in_one_message(tmp_path: Path) -> None:
    facts = fingerprint_of("models:build", {"a": 1}, {"corpus": "ab"}, 7, S)
    run(RoutingPlan(tmp_path, fingerprint=facts), layers())
    said = refused(
        tmp_path, "MW-EP-006", fingerprint_of("models:build", {"a": 2}, {"corpus": "cd"}, 8, S)
    )
    assert all(
        word in said for word in ("model.options is", "data is", "run.seed is 8, the file's 7")
    )
    assert "model.builder" not in said
    with raises("MW-EP-006", "9 to 12", "8 to 11"):
        run(RoutingPlan(replay=tmp_path, fingerprint=facts), layers(), start=9)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "step-00000001.safetensors"
    assert "No such file" in refused(tmp_path, "MW-EP-005")
    os.mkfifo(file)
    assert "a FIFO" in refused(tmp_path, "MW-EP-005")
    file.unlink()
    file.write_bytes(b"\xff" * 64)
    refused(tmp_path, "MW-EP-005")
    good = torch.zeros(4, S, K, dtype=torch.int32)
    for tensors, said in (
        ({"other": good}, "has no tensor 'mlp.router'"),
        ({NAME: good[:2]}, "has [2, 5, 2] ids"),
        ({NAME: good[:, :3].contiguous()}, "has [4, 3, 2] ids"),
        ({NAME: good.float()}, "holds float32"),
        ({NAME: good + 2 * E}, "has ids from 12 to 12 for mlp.router, not below 12"),
        ({NAME: good - 2}, "has ids from -2"),
    ):
        save_file(tensors, file)
        assert said in refused(tmp_path, "MW-EP-007")
    save_file({NAME: good}, file, {"fingerprint": json.dumps([1])})
    assert run(RoutingPlan(replay=tmp_path, fingerprint={"run.seed": 1}), layers()).shape == (
        4,
        S,
        D,
    )


def test_ids_of_dropped_tokens_are_refused_by_a_router_without_a_capacity(tmp_path: Path) -> None:
    """It has no choice to drop: the expert would take the token."""
    ids = torch.tensor([0, E + 1]).expand(4, S, K).contiguous()
    save_file({NAME: ids}, tmp_path / "step-00000001.safetensors")
    assert run(RoutingPlan(replay=tmp_path), layers()).shape == (4, S, D)
    with raises("MW-EP-007", f"0 to {E + 1}", "mlp.router"):
        run(RoutingPlan(replay=tmp_path), layers(capacity_factor=0.0))


def test_a_router_that_sees_a_token_twice_is_refused(tmp_path: Path) -> None:
    with raises("MW-EP-010", "25 tokens", "4 samples", "5 tokens") as error:
        run(RoutingPlan(tmp_path), layers(), (0, 1, 2, 3, 3))
    assert error.value.code == "MW-EP-010"


def test_dtypes_and_comparison(tmp_path: Path) -> None:
    assert [compact_dtype(n) for n in (256, 257, 2**15, 2**15 + 1)] == [
        torch.uint8,
        torch.int16,
        torch.int16,
        torch.int32,
    ]
    a, b = torch.tensor([[[1, 2], [300, 4]]]), torch.tensor([[[2, 1], [300, 5]]])
    for name, ids in (("a", a), ("b", b)):
        table = ids.to(torch.int16)
        write_file(
            tmp_path / name, {"r": TableShape(torch.int16, (1, 2, 2))}, iter([table]), {"x": 1}
        )
        assert torch.equal(RoutingFile(tmp_path / name).table("r"), table)
    (found,) = compare_files(tmp_path / "a", tmp_path / "b")
    assert found == ("r", 1, 2, (0, 1))
