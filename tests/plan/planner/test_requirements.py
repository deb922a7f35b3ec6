"""Requirements of models on their layout: a search offers what a launch takes,
and names what it refuses.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.blueprint import draw_blueprint
from meshwright.config import resolve
from meshwright_launch.cli import main
from meshwright_models import llama
from meshwright_plan.planner.choice import Choice, Rejection, with_choice
from meshwright_plan.planner.choices import choices
from meshwright_plan.planner.comparison import own_layout
from meshwright_plan.planner.search import search
from tests.plan.planner.small import cache, hardware

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
}
SIZES |= {"ffn_size": 64, "max_sequence_length": 16}


def whole_sequence() -> nn.Sequential:
    """A model whose layers need all tokens of a sample."""
    layers = llama.build(**SIZES)
    layers.impossible = {"sequence": "it mixes tokens", "cp": "it mixes tokens"}  # type: ignore[assignment]
    return layers


def no_tensor_parallelism() -> nn.Sequential:
    """A model whose heads cannot be distributed."""
    layers = llama.build(**SIZES)
    layers.impossible = {"tp": "its heads share a weight"}  # type: ignore[assignment]
    return layers


class Counting(nn.Module):
    """A layer that counts its calls in a buffer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.inner(x)


def counting() -> nn.Sequential:
    """A model with such a layer in the middle."""
    layers = llama.build(**SIZES)
    name = list(layers._modules)[1]
    layers._modules[name] = Counting(layers.get_submodule(name))
    return layers


class Normed(nn.Module):
    """A layer with BatchNorm over the samples and tokens of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SIZES["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def normed() -> nn.Sequential:
    """A model with BatchNorm between its blocks."""
    of_llama, layers = llama.build(**SIZES), nn.Sequential()
    for name, layer in of_llama.named_children():
        layers.add_module(name, layer)
        if name == "block0":
            layers.add_module("normed", Normed())
    layers.sharding_plan = of_llama.sharding_plan
    return layers


def offered(builder: str, **options: Any) -> tuple[list[Choice], list[Rejection]]:
    bench = cache(f"tests.plan.planner.test_requirements:{builder}", **options)
    found = list(choices(bench, hardware(), 1))
    taken = [each for each in found if isinstance(each, Choice)]
    for each in {(c.degrees, c.sequence, c.recompute): c for c in taken}.values():
        draw_blueprint(resolve(with_choice(bench.config, each), 4))  # as a launch does
    return taken, [each for each in found if isinstance(each, Rejection)]


@pytest.mark.long
def test_sequence_parallelism_that_a_model_rules_out_is_not_offered() -> None:
    taken, _ = offered("whole_sequence")
    assert {(each.tp, each.sequence) for each in taken} == {(1, False), (2, False), (4, False)}


@pytest.mark.long
def test_tensor_parallelism_that_a_model_rules_out_is_rejected() -> None:
    taken, rejected = offered("no_tensor_parallelism")
    assert {each.tp for each in taken} == {1}
    assert any(
        "its heads share a weight; this rules out parallel.tp = 2" in each.rule for each in rejected
    )


def test_a_buffer_that_counts_rules_out_replicas_tensor_parallelism_and_recompute() -> None:
    taken, rejected = offered("counting")
    assert {each.degrees for each in taken} == {(4, 1, 1, 1, 1)}
    assert {each.recompute for each in taken} == {"none", "pointwise", "selective"}
    reasons = (
        "with parallel.dp = 4 each replica would keep",
        "is split over parallel.tp = 2",
        "each micro-batch would count",
    )
    for reason in reasons:
        assert any(reason in each.rule for each in rejected), reason


@pytest.mark.long
def test_running_statistics_rule_out_bfloat16() -> None:
    taken, rejected = offered("normed")
    assert not taken
    assert any("its statistics stay float32" in each.rule for each in rejected)


def test_batch_norm_goes_with_tensor_parallelism_but_not_with_sequence_parallelism() -> None:
    bench = cache("tests.plan.planner.test_requirements:normed", dtype="float32")
    found = [each for each in choices(bench, hardware(), 1) if isinstance(each, Choice)]
    assert {(each.tp, each.sequence) for each in found} == {(1, False), (2, False), (4, False)}
    draw_blueprint(
        resolve(with_choice(bench.config, next(each for each in found if each.tp == 2)), 4)
    )


def test_batch_norm_keeps_its_micro_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "examples/vision/convnet.toml",
        "--cluster",
        "h100",
        "--nodes",
        "1",
        "--devices-per-node",
        "2",
    ]
    assert main(arguments) == 0
    sizes = re.findall(r"(\d+) x \d+  [01]  ", capsys.readouterr().out)
    assert sizes and set(sizes) == {"8"}
    assert main([*arguments, "--train.dtype=bfloat16"]) == 2
    said = capsys.readouterr().err
    assert "its statistics stay float32" in said and "smaller model" not in said


@pytest.mark.long
def test_sync_batch_norm_keeps_dp_times_its_micro_batch_size(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = Path("examples/vision/convnet.toml").read_text()
    path = tmp_path / "run.toml"
    path.write_text(text.replace("dp = 1\n", "dp = 2\n").replace("pp = 4\n", "pp = 1\n"))
    cluster = ["--cluster", "h100", "--nodes", "1", "--devices-per-node", "4"]
    synchronised = "--model.options.synchronised=true"
    assert main(["plan", str(path), *cluster, synchronised]) == 0
    layouts = re.findall(r"  (\d) +(\d) +1  \S+ .*?  (\d+) x \d+  ", capsys.readouterr().out)
    assert layouts and {int(dp) * int(size) for _, dp, size in layouts} == {2 * 8}
    assert {int(dp) for _, dp, _ in layouts} >= {2, 4}
    path.write_text(text.replace("dp = 1\n", ""))
    assert main(["plan", str(path), *cluster, synchronised]) == 0
    assert "set parallel.dp and batch.micro_batch_size in the file" in capsys.readouterr().err


def test_an_own_layout_that_a_launch_refuses_is_not_compared() -> None:
    bench = cache("tests.plan.planner.test_requirements:counting", samples=4)
    plan = search(bench, hardware(), 1)
    own = bench.config.replace(parallel={"dp": 4}, batch={"chunks": 1})
    said = own_layout(bench, plan, resolve(own, 4))
    assert (
        len(said) == 1
        and "cannot run: layer" in said[0]
        and "each replica would keep its own" in said[0]
    )
