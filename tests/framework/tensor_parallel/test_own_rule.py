"""Layers split by a rule of the user's own give the numbers of the plain layer;
a rule that does not fit is refused.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import SplitLayer
from meshwright.seeding import SeededDropout, seed_dropouts
from meshwright.tensor_parallel.plan import apply
from meshwright_launch.pool import RankPool
from tests.framework.tensor_parallel.ranks_of_tp import (
    close,
    drawn,
    fill,
    lonely_group,
    part,
    summed,
    tp_group,
)
from tests.support.errors import raises

B, S, D, VOCAB = 2, 8, 8, 12
EXAMPLE = Path(__file__).parents[3] / "examples" / "extend"


class Gated(nn.Module):
    """A norm, a fused gate of linears, a bias after the sum: all that a rule can be wrong about."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(D),
            nn.Linear(D, 4 * D),
            nn.Linear(2 * D, D, bias=False),
        )
        self.bias = nn.Parameter(torch.zeros(D))
        self.drop, self.drop_output = nn.Dropout(0.3), nn.Dropout(0.2)
        self.share = 1.0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        gate, up = self.up(self.norm(x)).view(*x.shape[:2], -1, 2).unbind(-1)
        return self.drop_output(
            self.down(self.drop(F.silu(gate) * up)) * scale + self.bias * self.share
        )


class Lookup(nn.Module):
    """An embedding whose ids select from the rows that a rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(VOCAB, D))
        self.first = 0

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.arange(len(self.table)) + self.first
        return (ids[..., None] == rows).to(self.table.dtype) @ self.table


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(2 * D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def split_gated(layer: Any, tp_rank: int, tp: int) -> SplitLayer:
    layer.share /= tp
    return SplitLayer({"up.weight": 0, "up.bias": 0, "down.weight": 1}, dropout_dims={"drop": -1})


def split_scale(layer: nn.Module, tp_rank: int, tp: int) -> SplitLayer:
    return SplitLayer({"gain": 0}, input="split", output="split")


def split_rows(layer: Any, tp_rank: int, tp: int) -> SplitLayer:
    layer.first = tp_rank * VOCAB // tp
    return SplitLayer({"table": 0})


def build() -> nn.Sequential:
    layers = nn.Sequential(
        Lookup(), Gated(), nn.Linear(D, 2 * D), Scale(), nn.Linear(2 * D, D), Gated()
    )
    return layers.append(nn.Linear(D, VOCAB))


PLAN: dict[str, Any] = {
    "0": split_rows,
    "1": split_gated,
    "2": "column",
    "3": split_scale,
    "4": "row",
    "5": split_gated,
    "6": "vocab",
}


def rank_of_rules(rank: int, tp: int, sequence: bool) -> None:
    group = tp_group(rank, tp)
    plain = fill(build().double())
    current = seed_dropouts(plain, 5)
    split = copy.deepcopy(plain)
    for module in split.modules():
        if isinstance(module, SeededDropout):
            module.current = current
    current.sample_indices = torch.arange(B) + 40
    infos = apply(split, PLAN, [], group, sequence, {})
    ids, target = (
        torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(6)),
        drawn(B, S, VOCAB),
    )
    want, logits = plain(ids), split(ids)
    (want * target).sum().backward()
    (logits * part(target, -1, rank, tp)).sum().backward()
    close(logits.detach(), part(want.detach(), -1, rank, tp), what="logits")
    for name, whole in plain.named_parameters():
        info, local = infos[name], split.get_parameter(name)
        assert torch.equal(local.detach(), info.take(whole.detach())), name
        assert local.grad is not None and whole.grad is not None
        close(
            summed(local.grad) if info.is_partial else local.grad,
            info.take(whole.grad),
            1e-11,
            name,
        )
    assert infos["1.up.weight"].slice is not None and infos["1.norm.weight"].is_partial


@pytest.mark.parametrize(("tp", "sequence"), [(2, False), (4, False), (2, True), (4, True)])
def test_layers_split_by_rules_give_the_numbers_of_plain_ones(
    pool: RankPool, tp: int, sequence: bool
) -> None:
    pool.run(rank_of_rules, tp, sequence)


def wrong(
    change: Callable[[Any], None] | None = None, **fields: Any
) -> Callable[[Any, int, int], SplitLayer]:
    def rule(layer: Any, tp_rank: int, tp: int) -> SplitLayer:
        if change is not None:
            change(layer)
        return SplitLayer(**{"dims": {"up.weight": 0, "up.bias": 0, "down.weight": 1}, **fields})

    return rule


def cut_it(layer: Any) -> None:
    layer.up.weight = nn.Parameter(layer.up.weight[:2])


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (lambda layer, tp_rank, tp: {"up.weight": 0}, ("dict", "meshwright.SplitLayer")),
        (lambda layer, tp_rank, tp: layer.width // tp, ("1 (Gated)", "'width'")),
        (wrong(dims={}), ("dims", "2 ranks")),
        (wrong(dims={"upp.weight": 0}), ("'upp.weight'", "bias")),
        (wrong(dims={"bias": 1}), ("dims['bias'] = 1", "0 to 0")),
        (wrong(dims={"bias": True}), ("dims['bias'] = True", "0 to 0")),
        (wrong(input="hole"), ("input = 'hole'", "'whole', 'split'")),
        (wrong(output="whole"), ("output = 'whole'", "'sum', 'split'")),
        (wrong(dropout_dims={"norm": 1}), ("dropout_dims['norm'] = 1", "drop, drop_output")),
        (wrong(cut_it), ("parameters",)),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(rule: Any, values: tuple[object, ...]) -> None:
    model = build()
    seed_dropouts(model, 0)
    with raises(("MW-TP-003", "MW-TP-004"), *values):
        apply(model, {**PLAN, "1": rule}, [], lonely_group(0, 2), False, {})


def test_a_size_that_tp_does_not_divide_is_refused() -> None:
    with raises("MW-TP-004", "up.weight", "(32, 8)", "parallel.tp = 3", "dim 0"):
        apply(build(), {"1": split_gated}, [], lonely_group(0, 3), False, {})


def test_a_rule_has_its_layer_for_itself() -> None:
    with raises("MW-TP-002", "1.up", "lies in 1"):
        apply(build(), {**PLAN, "1.up": "column"}, [], lonely_group(0, 2), False, {})
    with raises("MW-TP-002", "module 1"):
        apply(build(), {"1": split_gated, "[1]": "row"}, [], lonely_group(0, 2), False, {})


def test_tied_weights_are_split_alike() -> None:
    model = nn.Sequential(Lookup(), nn.Linear(D, VOCAB, bias=False))
    model[1].weight = model[0].table
    tied = [("0.table", "1.weight")]
    infos = apply(
        copy.deepcopy(model), {"0": split_rows, "1": "vocab"}, tied, lonely_group(0, 2), False, {}
    )
    assert infos["0.table"].slice == infos["1.weight"].slice
    with raises(
        "MW-PLACEMENT-002", "0.table is a rule (0:6 of dim 0)", "1.weight is replicate (whole"
    ):
        apply(model, {"0": split_rows}, tied, lonely_group(0, 2), False, {})


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D, D))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x @ self.weight, y


def test_inputs_and_outputs_that_a_rule_does_not_know_are_refused() -> None:
    model = nn.Sequential(Pair(), nn.Linear(D, D))
    apply(
        model,
        {"0": lambda layer, tp_rank, tp: SplitLayer({"weight": 1})},
        [],
        lonely_group(0, 2),
        False,
        {},
    )
    x = torch.zeros(B, S, D, device="meta", requires_grad=True)
    with raises("MW-TP-006"):
        model[0](x, x)
    with raises("MW-TP-007", "tuple"):
        model[0](x, torch.zeros(B, S, D))


CONFIG = """
[model]
builder = "own_layer:model"
options = {width = 16}
[data]
builder = "own_run:data"
options = {length = 16}
[batch]
micro_batch_size = 2
global_batch = 8
"""


@pytest.mark.long
@pytest.mark.slow
def test_layouts_of_the_example_agree(tmp_path: Path) -> None:
    for name in ("own_run.py", "own_layer.py"):
        (tmp_path / name).write_text((EXAMPLE / name).read_text())
    (tmp_path / "a.toml").write_text(CONFIG)
    layouts = ["tp4,sequence", "pp2,tp2,sequence,zb_h1,full", "dp2,tp2,zero3"]
    command = [
        sys.executable,
        "-m",
        "meshwright_launch",
        "verify",
        "a.toml",
        "--steps",
        "3",
        "--layouts",
        *layouts,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and "all 3 layouts agree" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_rule_that_counts_a_bias_twice_is_found(tmp_path: Path) -> None:
    """The rule of the example without the bias' share: verify is what finds it."""
    for name in ("own_run.py", "own_layer.py"):
        text = (EXAMPLE / name).read_text()
        text = (
            text.replace("self.down)\n", "self.down) + 0.1\n") if name == "own_layer.py" else text
        )
        (tmp_path / name).write_text(text)
    (tmp_path / "a.toml").write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "meshwright_launch",
        "verify",
        "a.toml",
        "--steps",
        "3",
        "--layouts",
        "tp2",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1 and "differ" in done.stdout, done.stdout + done.stderr
