"""Hooks that a model registers on activations run once per backward, however often a forward runs:
against plain torch.

Each model halves or shortens gradients, so that a hook that runs twice, or never, changes the
gradients of the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from meshwright.model.build import meta_copy
from meshwright.pipeline.plan import describe_boundaries
from meshwright.pipeline.plan.boundaries import run_on_meta
from meshwright.pipeline.plan.standalone import LayerWatch
from meshwright.pipeline.recompute import POINTWISE
from meshwright.pipeline.stage import Stage
from meshwright.pipeline.values import StageSpec
from tests.framework.pipeline.test_stage import (
    TOKENS,
    B,
    S,
    V,
    backward,
    batch,
    forward,
    token_loss,
)
from tests.support.errors import raises

D = 6


def shortened(g: Tensor) -> Tensor:
    """Not the same when done twice, as halving is not; of each token alone."""
    return g / (1 + g.norm(dim=-1, keepdim=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def mixed(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, x: Any) -> Any:
        return self.mixed(x)


class OnInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(shortened)
        return self.mixed(x)


class OnOutput(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mixed(x)
        y.register_hook(shortened)
        return y


class OnInner(Block):
    """On the output of a linear, on that of a pointwise operation and on a view."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.register_hook(shortened)
        a = F.gelu(h)
        a.register_hook(lambda g: g * 0.5)
        first = a[..., :D]
        first.register_hook(lambda g: g * 3.0)
        return x + self.down(a) + first


class OnNode(Block):
    """A hook on the place in the graph that a tensor has."""

    def forward(self, x: Tensor) -> Tensor:
        get_gradient_edge(x).node.register_prehook(
            lambda gs: tuple(None if g is None else g * 0.5 for g in gs)
        )
        return self.mixed(x)


class InDict(Block):
    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        value["x"].register_hook(shortened)
        value["x"] = self.mixed(value["x"]) + value["skip"]
        return value


class InTuple(Block):
    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, skip = value
        x.register_hook(shortened)
        return self.mixed(x) + skip, skip


class OnSkip(Block):
    """Hooks on a tensor that earlier blocks use as well, and on one tensor under two names."""

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        value["x"].register_hook(shortened)
        value["skip"].register_hook(lambda g: g * 0.5)
        return {"x": self.mixed(value["x"]) + value["skip"], "skip": value["skip"]}


class Both(nn.Module):
    """The embedding's output, as both members of a value: one tensor under two names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.kind = nn.Embedding(V, D), kind

    def forward(self, tokens: Tensor) -> Any:
        x = self.table(tokens)
        return (x, x * 0.5) if self.kind == "tuple" else {"x": x, "skip": x}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, V)

    def forward(self, value: Any) -> Tensor:
        y: Tensor = self.head(value["x"] if isinstance(value, dict) else value[0])
        return y


class Core(nn.Module):
    """A part that selective recompute names; it hooks its argument, also one given by keyword."""

    def forward(self, x: Tensor, *, gate: Tensor) -> Tensor:
        x.register_hook(shortened)
        gate.register_hook(lambda g: g * 0.5)
        return torch.tanh(x) * torch.sigmoid(gate)


class WithCore(Block):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return x + self.down(self.core(h, gate=h))


@dataclass(frozen=True)
class State:
    x: Tensor
    others: list[Tensor]


class CoreOfState(nn.Module):
    def forward(self, state: State) -> Tensor:
        state.x.register_hook(shortened)
        state.others[0].register_hook(lambda g: g * 0.5)
        return torch.tanh(state.x) * torch.sigmoid(state.others[0])


class WithState(Block):
    def __init__(self) -> None:
        super().__init__()
        self.core = CoreOfState()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return x + self.down(self.core(State(h, [h * 2.0])))


class Force(nn.Module):
    """Differentiates by its first argument, which is the second one as well."""

    def forward(self, x: Tensor, same: Tensor) -> Tensor:
        x.register_hook(shortened)
        energy = (torch.tanh(x) * torch.sin(same)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


class WithForce(Block):
    def __init__(self) -> None:
        super().__init__()
        self.core = Force()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return x + self.down(self.core(h, h))


def halve_given(module: nn.Module, given: Any, out: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in given)


def outside(register: Callable[[nn.Module], object], name: str = "") -> Callable[[], nn.Module]:
    """Return a block whose hook is registered from outside, by whoever builds the model."""

    def build() -> nn.Module:
        block = Block()
        register(block.get_submodule(name))
        return block

    return build


def hook_output(module: nn.Module, args: Any, y: Tensor) -> None:
    if y.requires_grad:
        y.register_hook(shortened)


def hook_input(module: nn.Module, args: Any) -> None:
    if args[0].requires_grad:
        args[0].register_hook(shortened)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "input": OnInput,
    "output": OnOutput,
    "inner": OnInner,
    "node": OnNode,
    "dict": InDict,
    "tuple": InTuple,
    "skip": OnSkip,
    "core": WithCore,
    "state": WithState,
    "force": WithForce,
    "module's backward": outside(lambda m: m.register_full_backward_hook(halve_given)),
    "module's backward, before": outside(
        lambda m: m.register_full_backward_pre_hook(lambda m, g: (shortened(g[0]),))
    ),
    "linear's backward": outside(lambda m: m.register_full_backward_hook(halve_given), "up"),
    "after forward": outside(lambda m: m.register_forward_hook(hook_output)),
    "before forward": outside(lambda m: m.register_forward_pre_hook(hook_input)),
    "before a linear's forward": outside(lambda m: m.register_forward_pre_hook(hook_input), "down"),
}


IN_ONE_STAGE = ("node", "skip")
"""Hooks on inputs that a boundary between stages would change,
where the input is a leaf of the graph.
"""


def model_of(name: str) -> nn.Sequential:
    model = nn.Sequential()
    is_value = name in ("dict", "tuple", "skip")
    model.add_module("embedding", Both(name) if is_value else nn.Embedding(V, D))
    for index in range(3):
        model.add_module(f"block{index}", BLOCKS[name]())
    model.add_module("head", Last() if is_value else nn.Linear(D, V))
    return model.double()


RECOMPUTED: dict[str, Callable[[str], bool]] = {
    "none": lambda name: False,
    "pointwise": lambda name: name.endswith(POINTWISE),
    "selective": lambda name: any(fnmatchcase(name, each) for each in ("block*.core", "block*.up")),
    "full": lambda name: "." not in name,
}


def stages_of(
    model: nn.Sequential, sizes: list[int], recompute: str, *, splits: bool
) -> list[Stage]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    ranges = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    specs, _ = describe_boundaries(model, ranges, TOKENS)
    parts = [name for name, _ in model.named_modules()] + [
        f"{name}.{POINTWISE}" for name in model._modules
    ]
    recomputed = [name for name in parts if name and RECOMPUTED[recompute](name)]
    named, stages = list(model.named_children()), []
    for index, layers in enumerate(ranges):
        piece = nn.Sequential()
        for layer in layers:
            piece.add_module(*named[layer])
        taken, sent = (
            specs[index - 1] if index else None,
            specs[index] if index < len(sizes) - 1 else None,
        )
        spec = StageSpec(index, taken, sent, splits_backward=splits, recomputed=recomputed)
        stages.append(Stage(spec, piece, token_loss))
    return stages


CUTS = [([5], False), ([5], True), ([2, 3], False), ([2, 2, 1], True)]
CASES = [
    (name, *cut) for name in BLOCKS for cut in CUTS if name not in IN_ONE_STAGE or cut[0] == [5]
]


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize(("name", "sizes", "halves"), CASES)
def test_hooks_run_once(name: str, recompute: str, sizes: list[int], halves: bool) -> None:
    """Two micro-batches in flight, backward whole or in halves;
    gradients of plain torch in float64.
    """
    torch.manual_seed(0)
    model = model_of(name)
    plain = copy.deepcopy(model)
    stages = stages_of(model, sizes, recompute, splits=halves)
    batches = [batch(seed) for seed in range(2)]
    for m in range(2):
        forward(stages, m, *batches[m])
    for m in range(2):
        backward(stages, m, halves)
        for stage in stages if halves else ():
            stage.backward_weight(m)
    for tokens, labels in batches:
        F.cross_entropy(plain(tokens).view(B * S, V), labels.flatten(), reduction="sum").backward()
    for (key, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad,
            expected.grad,
            rtol=1e-12,
            atol=1e-14,
            msg=lambda text: f"{key}: {text}",  # noqa: B023
        )


class OnWeight(Block):
    """Registers one more hook in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.register_hook(lambda g: g * 0.5)
        return self.mixed(x)


def test_a_hook_on_a_parameter_in_forward_is_refused() -> None:
    """How often it would run depends on the number of micro-batches."""
    model = nn.Sequential(nn.Embedding(V, D), OnWeight(), nn.Linear(D, V)).to("meta")
    copied = meta_copy(model)
    with raises("MW-PIPELINE-045"):
        run_on_meta(copied, [range(3)], TOKENS, LayerWatch(copied, model))
