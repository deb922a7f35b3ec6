"""Low-rank adapters (Hu et al. 2021, "LoRA") on a model's linears and embeddings,
before it is sharded.

    y = base(x) + (alpha / rank) B(A(dropout(x)))          A (rank, I), B (O, rank); base frozen

A and B are plain child modules of the target, ``NAME.lora_a`` and ``NAME.lora_b``; a forward hook
adds their output. Names of base parameters do not change. Each has its own entry in the sharding
plan, derived from the target's kind:

    kind of the target       lora_a                   lora_b          on the wire beside the base, forward and backward
    column                   replicate                column          all-gather of (B, S, rank) under sequence
                                                                      parallelism; backward
                                                                      all-reduce or reduce-scatter
    column_whole             replicate                column_whole    the same, and an all-gather of (B, S, O)
    vocab, of a linear       replicate                vocab           as column
    row, row_whole           row, row_whole           replicate       all-reduce or reduce-scatter of (B, S, rank)
    vocab, of an embedding   vocab                    replicate       all-reduce or reduce-scatter of (B, S, rank)
    any other                inherited                inherited       -

With ``adapter.dora`` the target itself gets a parameter (O,), split as its bias would be: see
:mod:`magnitude`.

NOTE [gradients of adapters]: the tensor between A and B, (B, S, rank), is communicated. So a
replicated factor sees whole activations, and its gradient is complete. Under sequence parallelism
it sees this rank's tokens, and the plan's rule for replicated parameters sums its gradient over tp.
Adapters have no rule of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.adapters.magnitude import MAGNITUDE, decompose
from meshwright.config import ParameterGroup
from meshwright.config.sections import Adapter
from meshwright.current import CurrentMicrobatch
from meshwright.errors import ModelError
from meshwright.placement.patterns import (
    enclosing,
    entries_for,
    fits,
    fits_around,
    matching,
)
from meshwright.placement.rewrite import ModuleSite, PlacementRule, rewrite
from meshwright.seeding import SeededDropout

A, B, DROPOUT = "lora_a", "lora_b", "lora_dropout"
"""Names of an adapter's modules below its target."""
ADAPTERS, TARGETS = "adapters", (nn.Linear, nn.Embedding)
"""Feature of the rule of this room, and the classes of its modules."""
Fill = Callable[[str, Tensor], None]


class Adaptable(Protocol):
    """Model that gets adapters: the fields of ``PlainModel`` that attaching reads or changes."""

    layers: nn.Sequential
    plan: dict[str, Any]
    shared_units: dict[str, Any]
    tied: list[tuple[str, ...]]
    groups: dict[str, ParameterGroup]
    initialise: Fill | None
    current: CurrentMicrobatch
    seed: int

    def canonical(self, name: str) -> str:
        """Return the canonical name of a parameter: of a tied weight, that of its first copy."""


class FirstFactor(nn.Module):
    """Owner of the initial value of one parameter of an adapter: its shape on meta,
    and the rule that fills it.
    """

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


def attach(model: Adaptable, adapter: Adapter) -> dict[str, nn.Module]:
    """Attach the adapters of the configuration to the model, in place; freeze nothing yet.
    With rank 0: nothing.

    Returns:
        parameter name -> module that draws its initial value, for all parameters of adapters.

    Raises:
        ModelError: a pattern matches no module, or a target cannot have an adapter.
    """
    if not adapter.rank:
        return {}
    factors: dict[str, nn.Module] = {}
    known = [name for name, _ in model.layers.named_modules(remove_duplicate=False)]
    entries: dict[str, str] = {}
    replace = partial(_adapt, model, adapter, factors, entries)
    rules = [
        PlacementRule(ADAPTERS, each, "adapter", replace, of=TARGETS, key="adapter.targets")
        for each in adapter.targets
    ]
    _refuse_experts(model, adapter.targets)
    targets = rewrite(model.layers, rules).kinds
    model.plan = _narrowed(model, known, targets) | entries
    if model.initialise is not None:
        model.initialise = partial(_initialise, model.initialise, factors)
    return factors


def _adapt(
    model: Adaptable,
    adapter: Adapter,
    factors: dict[str, nn.Module],
    entries: dict[str, str],
    site: ModuleSite,
) -> None:
    """Give a linear or an embedding its adapter, in place.

    ``factors``, ``entries``: get the first values of its parameters, and its kinds in the plan.
    """
    name, module = site.name, site.module
    why = _why_not(model, site, dora=adapter.dora)
    if why is not None:
        raise ModelError(
            "MW-MODEL-041",
            f"adapter.targets: {name} cannot have an adapter: {why}. Leave it out",
        )
    down, up = _factors(module, adapter.rank)
    is_embedding = isinstance(module, nn.Embedding)
    inits = ("zero", "normal") if is_embedding else (adapter.init, "zero")
    for child, factor, init in ((A, down, inits[0]), (B, up, inits[1])):
        factors[f"{name}.{child}.weight"] = FirstFactor(factor.weight, init, adapter.rank)
        module.add_module(child, factor)
    if adapter.dropout and not is_embedding:
        dropout = SeededDropout(adapter.dropout, model.seed, f"{name}.{DROPOUT}", model.current)
        module.add_module(DROPOUT, dropout.train(module.training))
    if adapter.dora:
        outline = up.weight.new_empty(len(up.weight))
        factors[f"{name}.{MAGNITUDE}"] = FirstFactor(outline, "zero", adapter.rank)
        module.register_parameter(MAGNITUDE, nn.Parameter(outline))
    module.register_forward_hook(partial(_add, factor_of(adapter)), with_kwargs=True)
    entries |= dict(_entries(name, module, model.plan))
    for pattern, (rows, copied, *_) in list(model.shared_units.items()):
        if fits(name, pattern):
            model.shared_units[f"{pattern}.{B}"] = rows, copied


def freeze_base(model: Adaptable, adapters: Mapping[str, object]) -> None:
    """Put every parameter outside ``adapters`` into a frozen group; do nothing without adapters."""
    if adapters:
        named = model.layers.named_parameters(remove_duplicate=False)
        names = dict.fromkeys(model.canonical(name) for name, _ in named if name not in adapters)
        model.groups |= {name: ParameterGroup(names=[name], frozen=True) for name in names}


def _why_not(model: Adaptable, site: ModuleSite, *, dora: bool) -> str | None:
    """Return why a module cannot have an adapter; None: it can."""
    name, module = site.name, site.module
    if len(site.names) > 1 or any(f"{name}.weight" in names for names in model.tied):
        return "its weight is shared with another module, whose output would not change with it"
    if fits_around(name, *(pattern for pattern, kind in model.plan.items() if callable(kind))):
        return "it lies in a layer that a function of the sharding_plan splits"
    if isinstance(module, nn.Embedding) and _patterns(name, "column", model.plan):
        return "it is an embedding whose features are split (column)"
    if isinstance(module, nn.Embedding) and dora:
        return (
            "it is an embedding, and adapter.dora is for linears only: rows of their weights are"
            " outputs"
        )
    return None


def _refuse_experts(model: Adaptable, patterns: Iterable[str]) -> None:
    """Raise ModelError for a pattern that names experts and no linear or embedding."""
    modules = dict(model.layers.named_modules(remove_duplicate=False))
    for pattern in patterns:
        found = matching([pattern], modules)
        experts = [name for name in found if "experts" in entries_for(name, model.plan)]
        if experts and not any(isinstance(modules[name], TARGETS) for name in found):
            raise ModelError(
                "MW-MODEL-046",
                f"adapter.targets: {pattern!r} names the experts {experts[0]}, whose weights are no"
                " nn.Linear: adapters are of linears and embeddings. Leave it out; linears beside"
                " them, such as a shared expert's, can have some",
            )


def factor_of(adapter: Adapter) -> float:
    """Return the factor on an adapter's output, ``alpha / rank``."""
    return 1.0 if adapter.alpha is None else adapter.alpha / adapter.rank


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of a factor of an adapter, or of its magnitudes."""
    return name.endswith((f".{A}.weight", f".{B}.weight", f".{MAGNITUDE}"))


def _factors(module: nn.Module, rank: int) -> tuple[nn.Linear | nn.Embedding, nn.Linear]:
    """Return A and B of a target on meta, in its dtype: (rank, I) and (O, rank);
    of an embedding (V, rank).
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    more: dict[str, Any] = {"device": "meta", "dtype": weight.dtype}
    if isinstance(module, nn.Embedding):
        down: nn.Linear | nn.Embedding = nn.Embedding(module.num_embeddings, rank, **more)
        return down, nn.Linear(rank, module.embedding_dim, bias=False, **more)
    out_features, in_features = weight.shape
    return nn.Linear(in_features, rank, bias=False, **more), nn.Linear(
        rank, out_features, bias=False, **more
    )


def _add(
    factor: float, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """Add an adapter's output to that of its target, in the target's local shape."""
    (x,) = args or kwargs.values()
    dropout = module._modules.get(DROPOUT)
    down, up = module.get_submodule(A), module.get_submodule(B)
    y: Tensor = output + factor * up(down(x if dropout is None else dropout(x)))
    if MAGNITUDE not in module._parameters:
        return y
    return decompose(module, down.get_parameter("weight"), up.get_parameter("weight"), factor, y)


def _entries(name: str, module: nn.Module, plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (pattern, kind) of an adapter's modules for the sharding plan:
    see the table of this module.

    Patterns are the target's, extended by the adapter's names, so that they also match in a stage
    of the model.
    """
    has_dropout = DROPOUT in module._modules
    takes_part = any(_patterns(name, kind, plan) for kind in ("row", "row_whole"))
    for outer in enclosing(name) if has_dropout and not takes_part else ():
        for pattern in _patterns(outer, "gather", plan):
            # its input is the whole sequence
            yield f"{pattern}{name.removeprefix(outer)}.{DROPOUT}", "uncut"
    for kind in ("column", "column_whole", "vocab", "row", "row_whole"):
        for pattern in _patterns(name, kind, plan):
            yield (
                (
                    f"{pattern}.{A if kind.startswith('row') or isinstance(module, nn.Embedding) else B}"
                ),
                kind,
            )
            if kind.startswith("row") and has_dropout:
                yield f"{pattern}.{DROPOUT}", "features" if kind == "row" else "uncut"


def _narrowed(model: Adaptable, known: Sequence[str], targets: Iterable[str]) -> dict[str, Any]:
    """Return the plan; patterns that would also match an adapter's modules become the ``known``
    names they match.
    """
    added = [
        f"{name}.{child}" for name in targets for child in model.layers.get_submodule(name)._modules
    ]
    found: dict[str, Any] = {}
    for pattern, kind in model.plan.items():
        is_wide = matching([pattern], added)
        found |= dict.fromkeys(matching([pattern], known) if is_wide else [pattern], kind)
    return found


def _patterns(name: str, kind: str, plan: Mapping[str, Any]) -> list[str]:
    """Return the patterns that give a module this kind."""
    return [pattern for pattern, each in plan.items() if each == kind and fits(name, pattern)]


def _initialise(given: Fill, first: Mapping[str, nn.Module], name: str, tensor: Tensor) -> None:
    """Fill a parameter of an adapter by its own rule, any other by the model's."""
    module = first.get(name)
    if isinstance(module, FirstFactor):
        module.fill(tensor)
    else:
        given(name, tensor)
