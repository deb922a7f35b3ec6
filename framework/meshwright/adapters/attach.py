"""Low-rank adapters (Hu et al. 2021, "LoRA") on a model's linears and embeddings, before it is sharded.

    y = base(x) + (alpha / rank) B(A(dropout(x)))          A (rank, I), B (O, rank); base frozen

A and B are plain child modules of the target, ``NAME.lora_a`` and ``NAME.lora_b``; a forward hook adds their output.
Names of base parameters do not change. Each has its own entry in the sharding plan, derived from the target's kind:

    kind of the target       lora_a                   lora_b          on the wire beside the base, forward and backward
    column                   replicate                column          all-gather of (B, S, rank) under sequence
                                                                      parallelism; backward all-reduce or reduce-scatter
    column_whole             replicate                column_whole    the same, and an all-gather of (B, S, O)
    vocab, of a linear       replicate                vocab           as column
    row, row_whole           row, row_whole           replicate       all-reduce or reduce-scatter of (B, S, rank)
    vocab, of an embedding   vocab                    replicate       all-reduce or reduce-scatter of (B, S, rank)
    any other                inherited                inherited       -

With ``adapter.dora`` the target itself gets a parameter (O,), split as its bias would be: see :mod:`magnitude`.

NOTE [gradients of adapters]: the tensor between A and B, (B, S, rank), is communicated. So a replicated factor sees
whole activations, and its gradient is complete. Under sequence parallelism it sees this rank's tokens, and the plan's
rule for replicated parameters sums its gradient over tp. Adapters have no rule of their own.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.adapters.magnitude import MAGNITUDE, decompose
from meshwright.config import ParameterGroup, RunConfig
from meshwright.errors import ModelError
from meshwright.seeding import Draw, SeededDropout

A, B, DROPOUT = "lora_a", "lora_b", "lora_dropout"
"""Names of an adapter's modules below its target."""
Fill = Callable[[str, Tensor], None]


class Adaptable(Protocol):
    """Model that gets adapters: the fields of ``PlainModel`` that attaching reads or changes."""

    layers: nn.Sequential
    plan: dict[str, Any]
    shared_units: dict[str, Any]
    tied: list[tuple[str, ...]]
    groups: dict[str, ParameterGroup]
    initialise: Fill | None
    draw: Draw
    seed: int

    def canonical(self, name: str) -> str:
        """Return the canonical name of a parameter: of a tied weight, that of its first copy."""


class FirstFactor(nn.Module):
    """Owner of the initial value of one parameter of an adapter: its shape on meta, and the rule that fills it."""

    def __init__(self, weight: Tensor, init: str, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(weight, device="meta"))
        self.init, self.rank = init, rank

    def reset_parameters(self) -> None:
        """Draw the factor with torch's default generator, or set it to zero."""
        self.fill(self.weight)

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Fill ``weight``: "kaiming", "gaussian", "normal", or zero for any other ``init``."""
        if self.init == "kaiming":
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        elif self.init == "gaussian":
            nn.init.normal_(weight, std=1.0 / self.rank)
        elif self.init == "normal":
            nn.init.normal_(weight)
        else:
            nn.init.zeros_(weight)


def attach(model: Adaptable, config: RunConfig) -> dict[str, nn.Module]:
    """Attach the adapters of the configuration to the model, in place; freeze nothing yet. With rank 0: nothing.

    Returns:
        parameter name -> module that draws its initial value, for all parameters of adapters.

    Raises:
        ModelError: a pattern matches no module, or a target cannot have an adapter.
    """
    adapter = config.adapter
    if not adapter.rank:
        return {}
    first: dict[str, nn.Module] = {}
    targets = find_targets(model, adapter.targets, dora=adapter.dora)
    known = [name for name, _ in model.layers.named_modules(remove_duplicate=False)]
    entries: dict[str, str] = {}
    for name, module in targets.items():
        down, up = _factors(module, adapter.rank)
        is_embedding = isinstance(module, nn.Embedding)
        first[f"{name}.{A}.weight"] = FirstFactor(down.weight, "zero" if is_embedding else adapter.init, adapter.rank)
        first[f"{name}.{B}.weight"] = FirstFactor(up.weight, "normal" if is_embedding else "zero", adapter.rank)
        module.add_module(A, down)
        module.add_module(B, up)
        if adapter.dropout and not is_embedding:
            dropout = SeededDropout(adapter.dropout, model.seed, f"{name}.{DROPOUT}", model.draw)
            module.add_module(DROPOUT, dropout.train(module.training))
        if adapter.dora:
            outline = up.weight.new_empty(len(up.weight))
            first[f"{name}.{MAGNITUDE}"] = FirstFactor(outline, "zero", adapter.rank)
            module.register_parameter(MAGNITUDE, nn.Parameter(outline))
        module.register_forward_hook(partial(_add, factor_of(config)), with_kwargs=True)
        entries |= dict(_entries(name, module, model.plan))
        for pattern, (rows, copied, *_) in list(model.shared_units.items()):
            if fnmatchcase(name, pattern):
                model.shared_units[f"{pattern}.{B}"] = rows, copied
    model.plan = _narrowed(model.plan, known, targets) | entries
    if model.initialise is not None:
        model.initialise = partial(_initialise, model.initialise, first)
    return first


def freeze_base(model: Adaptable, adapters: Mapping[str, object]) -> None:
    """Put every parameter outside ``adapters`` into a frozen group; do nothing without adapters."""
    if adapters:
        named = model.layers.named_parameters(remove_duplicate=False)
        names = dict.fromkeys(model.canonical(name) for name, _ in named if name not in adapters)
        model.groups |= {name: ParameterGroup(names=[name], frozen=True) for name in names}


def find_targets(model: Adaptable, patterns: Sequence[str], *, dora: bool = False) -> dict[str, nn.Module]:
    """Return the linears and embeddings that the patterns name, in the model's order.

    Raises:
        ModelError: a pattern matches no linear or embedding; a target has a tied weight, is used at two places, lies in
            a layer with a sharding rule of the user, or is an embedding that is split by features or gets ``dora``.
    """
    modules = list(model.layers.named_modules(remove_duplicate=False))
    possible = {name: module for name, module in modules if isinstance(module, nn.Linear | nn.Embedding)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in possible):
            _refuse_experts(model, pattern, [name for name, _ in modules])
            close = difflib.get_close_matches(pattern, possible, 1, cutoff=0.4)
            hint = f"the closest is {close[0]}" if close else f"they are {', '.join(list(possible)[:5])}, ..."
            raise ModelError(
                "MW-MODEL-040",
                f"adapter.targets: {pattern!r} matches no nn.Linear and no nn.Embedding of the model; {hint}",
            )
    found: dict[str, nn.Module] = {
        name: module for name, module in possible.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    times = Counter(id(module) for module in possible.values())
    tied = {name for names in model.tied for name in names}
    rules = [pattern for pattern, kind in model.plan.items() if callable(kind)]
    for name, module in found.items():
        why = None
        if times[id(module)] > 1 or f"{name}.weight" in tied:
            why = "its weight is shared with another module, whose output would not change with it"
        elif any(_lies_in(name, pattern) for pattern in rules):
            why = "it lies in a layer that a function of the sharding_plan splits"
        elif isinstance(module, nn.Embedding) and _patterns(name, "column", model.plan):
            why = "it is an embedding whose features are split (column)"
        elif isinstance(module, nn.Embedding) and dora:
            why = "it is an embedding, and adapter.dora is for linears only: rows of their weights are outputs"
        if why is not None:
            raise ModelError("MW-MODEL-041", f"adapter.targets: {name} cannot have an adapter: {why}. Leave it out")
    return found


def _refuse_experts(model: Adaptable, pattern: str, names: Iterable[str]) -> None:
    """Raise ModelError if a pattern names experts and nothing else."""
    planned = [each for each, kind in model.plan.items() if kind == "experts"]
    found = [name for name in names if fnmatchcase(name, pattern) and any(fnmatchcase(name, each) for each in planned)]
    if found:
        raise ModelError(
            "MW-MODEL-046",
            f"adapter.targets: {pattern!r} names the experts {found[0]}, whose weights are no nn.Linear: adapters are "
            f"of linears and embeddings. Leave it out; linears beside them, such as a shared expert's, can have some",
        )


def factor_of(config: RunConfig) -> float:
    """Return the factor on an adapter's output, ``alpha / rank``."""
    alpha, rank = config.adapter.alpha, config.adapter.rank
    return 1.0 if alpha is None else alpha / rank


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of a factor of an adapter, or of its magnitudes."""
    return name.endswith((f".{A}.weight", f".{B}.weight", f".{MAGNITUDE}"))


def _factors(module: nn.Module, rank: int) -> tuple[nn.Linear | nn.Embedding, nn.Linear]:
    """Return A and B of a target on meta, in its dtype: (rank, I) and (O, rank); of an embedding (V, rank)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    more: dict[str, Any] = {"device": "meta", "dtype": weight.dtype}
    if isinstance(module, nn.Embedding):
        down: nn.Linear | nn.Embedding = nn.Embedding(module.num_embeddings, rank, **more)
        return down, nn.Linear(rank, module.embedding_dim, bias=False, **more)
    out_features, in_features = weight.shape
    return nn.Linear(in_features, rank, bias=False, **more), nn.Linear(rank, out_features, bias=False, **more)


def _add(factor: float, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    """Add an adapter's output to that of its target, in the target's local shape."""
    (x,) = args or kwargs.values()
    dropout = module._modules.get(DROPOUT)
    down, up = module.get_submodule(A), module.get_submodule(B)
    y: Tensor = output + factor * up(down(x if dropout is None else dropout(x)))
    if MAGNITUDE not in module._parameters:
        return y
    return decompose(module, down.get_parameter("weight"), up.get_parameter("weight"), factor, y)


def _entries(name: str, module: nn.Module, plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (pattern, kind) of an adapter's modules for the sharding plan: see the table of this module.

    Patterns are the target's, extended by the adapter's names, so that they also match in a stage of the model.
    """
    has_dropout = DROPOUT in module._modules
    takes_part = any(_patterns(name, kind, plan) for kind in ("row", "row_whole"))
    for outer in _enclosing(name) if has_dropout and not takes_part else ():
        for pattern in _patterns(outer, "gather", plan):
            yield f"{pattern}{name.removeprefix(outer)}.{DROPOUT}", "uncut"  # its input is the whole sequence
    for kind in ("column", "column_whole", "vocab", "row", "row_whole"):
        for pattern in _patterns(name, kind, plan):
            yield f"{pattern}.{A if kind.startswith('row') or isinstance(module, nn.Embedding) else B}", kind
            if kind.startswith("row") and has_dropout:
                yield f"{pattern}.{DROPOUT}", "features" if kind == "row" else "uncut"


def _narrowed(plan: Mapping[str, Any], known: Sequence[str], targets: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the plan; patterns that would also match an adapter's modules become the ``known`` names they match."""
    added = [f"{name}.{child}" for name, module in targets.items() for child in module._modules]
    found: dict[str, Any] = {}
    for pattern, kind in plan.items():
        is_wide = any(fnmatchcase(name, pattern) for name in added)
        found |= dict.fromkeys([name for name in known if fnmatchcase(name, pattern)] if is_wide else [pattern], kind)
    return found


def _patterns(name: str, kind: str, plan: Mapping[str, Any]) -> list[str]:
    """Return the patterns that give a module this kind."""
    return [pattern for pattern, each in plan.items() if each == kind and fnmatchcase(name, pattern)]


def _enclosing(name: str) -> list[str]:
    """Return the names of the modules around a module, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _lies_in(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a module or one around it."""
    return any(fnmatchcase(each, pattern) for each in (*_enclosing(name), name))


def _initialise(given: Fill, first: Mapping[str, nn.Module], name: str, tensor: Tensor) -> None:
    """Fill a parameter of an adapter by its own rule, any other by the model's."""
    module = first.get(name)
    if isinstance(module, FirstFactor):
        module.fill(tensor)
    else:
        given(name, tensor)
