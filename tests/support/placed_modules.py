"""Modules of a rank's stages as text, as ``build`` leaves them: what replaced what, and the hooks.

python -m tests.support.placed_modules          writes tests/golden/hooks/*.txt: read the diff

    block0.mlp.up: ColumnLinear was Linear          a module, and its class in the user's model
      weight (32, 16)                               a parameter, in its local shape
        after gradient: ...                         a hook on its gradient
      before forward: ...                           hooks of the module, in their order
      forward: recomputed(Linear.forward)           a function in place of its class's
    call block0: ...                                what the stage calls for a layer
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from meshwright.build import build
from meshwright.config import RunConfig
from meshwright.mesh import Grid
from meshwright.mesh.fake import fake_mesh
from meshwright.model.builder import find_builder
from meshwright.pipeline.stage import Stage
from meshwright.seeding import SeededDropout
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import open_verify_source

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "hooks"
HOOKS = {
    "_forward_pre_hooks": "before forward",
    "_forward_hooks": "after forward",
    "_backward_pre_hooks": "before backward",
    "_backward_hooks": "after backward",
}
"""Attribute of a module that holds hooks -> the words for them."""
D, VOCAB, LENGTH = 16, 24, 32


class Case(NamedTuple):
    """A layout of a small model: the words of the layout, and sections of the configuration."""

    builder: str
    layout: str
    options: Mapping[str, Any] = {}
    sections: Mapping[str, Any] = {}


def gpt2(layout: str, **sections: Any) -> Case:
    """Return a GPT-2 of one block, with dropout and a head tied to the embedding."""
    options = {"hidden_size": D, "num_layers": 1, "num_heads": 4}
    return Case("meshwright_models.gpt2:build", layout, options, sections)


def llama(layout: str, options: Mapping[str, Any] = {}, **sections: Any) -> Case:
    """Return a Llama of one block, with dropout and two query heads to each key-value head."""
    sizes = {"hidden_size": D, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 32}
    options = sizes | {"dropout": 0.1} | options
    return Case("meshwright_models.llama:build", layout, options, sections)


def own(layout: str, name: str, **sections: Any) -> Case:
    """Return a case of a model of this file."""
    return Case(f"tests.support.placed_modules:{name}", layout, {}, sections)


MIXTURE = {"num_experts": 4, "top_k": 2, "shared_ffn_size": 24, "router": "sigmoid"}
MIXTURE |= {"balance": "bias", "sequence_loss": 0.5}
LINEARS = ["block*.attention.*", "block*.mlp.*"]
ADAPTERS = {"rank": 2, "targets": LINEARS, "dropout": 0.1}
FLOAT8 = {"linear": "fp8", "fp8_keep": ["head"]}
CASES = {
    "plain": gpt2(""),
    "tp": gpt2("tp2"),
    "tp-sequence": gpt2("tp2,sequence"),
    "tp-shared-heads": llama("tp4,sequence", {"num_kv_heads": 2, "qk_norm": True}),
    "tp-whole-heads": llama("tp2,sequence", {"qk_norm": "whole", "dropout": 0.0}),
    "tp-own-rule": own("tp2,sequence", "ruled", adapter={"rank": 2, "targets": ["head"]}),
    "ep": llama("dp2,ep2", {"moe": MIXTURE}),
    "ep-tp-sequence-full": llama("tp2,ep2,sequence,full", {"moe": MIXTURE}),
    "cp": gpt2("cp2"),
    "cp-heads": llama("cp2,heads"),
    "cp-head-groups": llama("cp2,selective", {"dropout": 0.0}),
    "zero3": gpt2("dp2,zero3"),
    "fp8": llama("tp2,sequence", train=FLOAT8),
    "adapters": gpt2("dp2", adapter=ADAPTERS),
    "adapters-tp-dora": llama("tp2", adapter={**ADAPTERS, "dora": True}),
    "recompute-selective": gpt2("dp2,selective"),
    "recompute-pointwise": gpt2("dp2,pointwise"),
    "offload": gpt2("dp2,full", pipeline={"offload_activations": ["block*"]}),
    "pipeline-split-backward": gpt2("pp2,zb_h1"),
    "twice": own("tp2,sequence,selective", "twice"),
    "twice-fp8-zero3": own("dp2,tp2,zero3,full", "twice", train={"linear": "fp8", "fp8_keep": []}),
    "adapters-tp-zero3-selective": gpt2("dp2,tp2,sequence,zero3,selective", adapter=ADAPTERS),
    "all": llama(
        "cp2,tp2,ep2,sequence,zero3,selective",
        {"moe": MIXTURE},
        adapter=ADAPTERS,
        train=FLOAT8,
        pipeline={"offload_activations": ["block0"]},
        model={"parameter_groups": [{"names": ["embedding.*"], "learning_rate_factor": 0.5}]},
    ),
}
"""Name of a golden file -> what is built."""


class Gated(nn.Module):
    """MLP whose linear ``up`` is one object with that of another layer."""

    def __init__(self, up: nn.Linear) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(D), up
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))
        return y


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Double an output: a user's hook."""
    return 2.0 * output


def halve(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Scale an input: a user's hook."""
    return (0.5 * args[0],)


def twice() -> nn.Sequential:
    """Build a model with a linear in two layers, its ties, a tied head, and hooks of the user's."""
    up = nn.Linear(D, 2 * D)
    up.register_forward_hook(double)
    up.register_forward_pre_hook(halve)
    layers = nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(VOCAB, D),
            one=Gated(up),
            two=Gated(up),
            head=nn.Linear(D, VOCAB, bias=False),
        )
    )
    layers.head.weight = layers.embedding.weight
    attributes: dict[str, Any] = vars(layers)
    attributes["tied_weights"] = [
        ("embedding.weight", "head.weight"),
        ("one.up.weight", "two.up.weight"),
        ("one.up.bias", "two.up.bias"),
    ]
    vocabulary = {"embedding": "vocab", "head": "vocab"}
    attributes["sharding_plan"] = vocabulary | {"*.up": "column", "*.down": "row"}
    attributes["selective_recompute"] = ["*.norm", "one.drop"]
    return layers


class Scaled(nn.Module):
    """Layer that a function of the sharding plan splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(torch.tanh(self.up(x))))
        return y


def split_scaled(layer: Any, tp_rank: int, tp: int) -> dict[str, Any]:
    """Split :class:`Scaled`: a rule of the user's."""
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    return {"dims": dims, "dropout_dims": {"drop": -1}}


def ruled() -> nn.Sequential:
    """Build a model with a layer that a function of the sharding plan splits."""
    parts = {"embedding": nn.Embedding(VOCAB, D), "scaled": Scaled(), "head": nn.Linear(D, VOCAB)}
    layers = nn.Sequential(OrderedDict(parts))
    plan = {"embedding": "vocab", "scaled": split_scaled, "head": "vocab"}
    vars(layers)["sharding_plan"] = plan
    return layers


def mistyped() -> nn.Sequential:
    """Build a model whose sharding plan has a typo."""
    layers = ruled()
    vars(layers)["sharding_plan"] = {"embedding": "vocab", "scaled.typo": "column"}
    return layers


def config_of(case: Case) -> RunConfig:
    """Return the configuration of a case, in float32 on CPU."""
    options = dict(case.options)
    if case.builder.startswith("meshwright_models"):
        options |= {"vocab_size": VOCAB, "max_sequence_length": LENGTH}
    sections = {name: dict(keys) for name, keys in case.sections.items()}
    model = {"builder": case.builder, "options": options, **sections.pop("model", {})}
    train = {"steps": 10, **sections.pop("train", {})}
    tree = {"model": model, "data": {"train": "random", "sequence_length": LENGTH}, "train": train}
    config = RunConfig.model_validate({**tree, **sections})
    layout = parse_layout(case.layout)
    return layout_config(config, layout, 4 * layout.dp, "float32")


def placed(case: Case) -> str:
    """Build the first rank of each pipeline rank, on a fake mesh; describe its modules."""
    config = config_of(case)
    plain = find_builder(config.model.builder)(**config.model.options)
    classes = {
        name: type(module).__name__ for name, module in plain.named_modules(remove_duplicate=False)
    }
    grid = Grid.of(config.parallel.degrees)
    lines: list[str] = []
    for rank in range(0, grid.size, grid.size // grid.pp):
        with fake_mesh(grid, rank) as mesh:
            parts = build(config, mesh, (open_verify_source(config, True), {}))
            for stage in parts.executor.stages.values():
                lines += _of_stage(stage, classes)
    return "".join(f"{line}\n" for line in lines)


def _of_stage(stage: Stage, classes: Mapping[str, str]) -> Iterator[str]:
    yield f"stage {stage.index}"
    modules: dict[int, str] = {}
    parameters: dict[int, str] = {}
    for name, module in stage.layers.named_modules(remove_duplicate=False):
        first = modules.setdefault(id(module), name)
        now, before = type(module).__name__, classes.get(name, "nothing")
        was = "" if now == before else f" was {before}"
        yield f"{name or '(layers)'}: {now}{was}" + (f" = {first}" if first != name else "")
        if first == name:
            yield from _of_module(name, module, parameters)
    for name, call in stage.calls._calls:
        yield f"call {name}: {named(call)}"
    if stage.calls._offloaded:
        yield f"offloaded: {', '.join(stage.calls._offloaded)}"


def _of_module(name: str, module: nn.Module, parameters: dict[int, str]) -> Iterator[str]:
    for attribute, parameter in module._parameters.items():
        if parameter is None:
            continue
        first = parameters.setdefault(id(parameter), f"{name}.{attribute}")
        same = f" = {first}" if first != f"{name}.{attribute}" else ""
        frozen = "" if parameter.requires_grad else " frozen"
        yield f"  {attribute} {tuple(parameter.shape)}{frozen}{same}"
        hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        yield from (f"    after gradient: {named(hook)}" for hook in hooks.values() if not same)
    if getattr(module, "is_fp8", False):
        yield "  float8"
    for attribute, words in HOOKS.items():
        yield from (f"  {words}: {named(hook)}" for hook in getattr(module, attribute).values())
    for attribute, value in vars(module).items():
        if attribute == "forward" or isinstance(value, partial | MethodType):
            yield f"  {attribute}: {named(value)}"
    if isinstance(module, SeededDropout):
        cut = None if module.cut is None else (module.cut[0], type(module.cut[1]).__name__)
        yield f"  dropout {module.name}, shard {module.shard}, cut {cut}"


def named(function: Callable[..., Any]) -> str:
    """Return a function's name, with its room; of a partial one also the functions in it."""
    if isinstance(function, partial):
        given = (*function.args, *function.keywords.values())
        inner = ", ".join(named(each) for each in given if _is_function(each))
        return named(function.func) + (f"({inner})" if inner else "")
    if isinstance(function, MethodType):
        owner = type(function.__self__)
        return f"{_room(owner.__module__)}.{owner.__name__}.{function.__name__}"
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{_room(kind.__module__)}.{kind.__qualname__}"


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | ReferenceType)


def _room(module: str) -> str:
    """Return the room of a module, in which a function may move: adapters, of adapters.attach."""
    parts = module.split(".")
    return parts[1] if parts[0] == "meshwright" else parts[0]


def path_of(name: str) -> Path:
    """Return the golden file of a case."""
    return GOLDEN / f"{name}.txt"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CASES:
        path_of(name).write_text(placed(CASES[name]), encoding="utf-8")
