"""Expert parallelism of a plain model: each module of kind ``experts``
in its sharding plan keeps E/ep experts.

    x, ids, weights --> dispatch --> the module's original forward on its experts --> combine --> sum of weight * y

The original forward gets rows with one expert each, without weights or with weights of 1. The rank
that sent a token multiplies by the router's weights: so the router gets its gradient there, and
only rows go over the wire. It works for any module called with (x, ids, weights) whose parameters
have the experts in dim 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.expert_parallel.dispatch import find_route
from meshwright.expert_parallel.exchange import combine, dispatch
from meshwright.expert_parallel.parts import join_parts, take_part
from meshwright.mesh.comm import Group
from meshwright.parameters import ParameterInfo, Slice
from meshwright.placement.patterns import entries_for
from meshwright.placement.rewrite import ModuleSite, Placed, PlacementRule, copy_of, rewrite
from meshwright.placement.ties import Held, check_ties

EXPERTS = "experts"


def apply(
    builder: str,
    model: nn.Sequential,
    plan: Mapping[str, Any],
    infos: Mapping[str, ParameterInfo],
    group: Group,
    tied: Sequence[tuple[str, ...]] = (),
    alike: Group | None = None,
) -> dict[str, ParameterInfo]:
    """Slice the experts of each layer over the ep group, in place; return the parameters' metadata.
    No communication.

    Call it after tensor parallelism is applied, which does not cut experts.

    Args:
        alike: ranks of the ep group with the same tokens (tp without sequence parallelism); None:
            each has tokens of its own.

    Raises:
        ModelError: the plan names no experts, their parameters cannot be sliced along dim 0 or are
            tied to others, or their buffers have a row for each expert.
    """
    if group.size == 1:
        return dict(infos)
    share = partial(_share, builder, group, alike if alike and alike.size > 1 else None)
    patterns = [pattern for pattern, kind in plan.items() if kind == EXPERTS]
    rules = [PlacementRule(EXPERTS, each, EXPERTS, share, is_deep=True) for each in patterns]
    slices = rewrite(model, rules).slices
    if not slices:
        raise ModelError(
            "MW-EP-001",
            f"{builder}: parallel.ep = {group.size} shares experts, and the model's sharding_plan"
            f' names none (kind "{EXPERTS}"): use parallel.ep = 1, or name the module that is'
            " called with (x, ids, weights)",
        )
    sliced = dict(infos)
    for name, part in slices.items():
        # its gradient is summed over the ranks with the same experts, not over tp
        sliced[name] = sliced[name]._replace(slice=part, is_partial=False)
    held = {
        name: Held(info.slice, info.is_partial, EXPERTS if name in slices else "no expert")
        for name, info in sliced.items()
    }
    check_ties(held, tied, "parallel.ep")
    return sliced


def expert_names(model: nn.Module, plan: Mapping[str, Any]) -> list[str]:
    """Return the names of the modules of experts that the sharding plan names."""
    return [
        name
        for name, _ in model.named_modules(remove_duplicate=False)
        if name and EXPERTS in entries_for(name, plan)
    ]


def _slice(builder: str, name: str, whole: Tensor, group: Group) -> Slice:
    num_experts = whole.shape[0]
    part = whole.shape[0] // group.size
    if num_experts % group.size:
        divisors = ", ".join(str(ep) for ep in range(1, num_experts + 1) if num_experts % ep == 0)
        raise ModelError(
            "MW-EP-002",
            f"{builder}: {name} has {num_experts} experts, and parallel.ep = {group.size} does not"
            f" divide them: choose one of {divisors}",
        )
    return Slice(0, group.rank * part, (group.rank + 1) * part, part, over="ep")


def _check_experts(builder: str, name: str, experts: nn.Module, ep: int) -> None:
    counts = {path: whole.shape[0] for path, whole in experts.named_parameters()}
    if len(set(counts.values())) > 1:
        raise ModelError(
            "MW-EP-004",
            f"{builder}: parallel.ep cuts dim 0 of each parameter of {name}, and these have"
            f" {', '.join(f'{path} {count}' for path, count in counts.items())}: the expert is not"
            " dim 0 of all; use parallel.ep = 1, or take the others out of the module",
        )
    for path, buffer in experts.named_buffers():
        if buffer.dim() and buffer.shape[0] in counts.values():
            raise ModelError(
                "MW-EP-011",
                f"{builder}: the buffer {name}.{path} has dim 0 = {buffer.shape[0]}, the number of"
                f" experts, and parallel.ep = {ep} cuts parameters alone: ids on a rank count its"
                " own experts from 0, so it would read the rows of others. Make it an nn.Parameter"
                " with requires_grad=False that reset_parameters() fills, hold it in the router,"
                " or use parallel.ep = 1",
            )


def _share(builder: str, group: Group, alike: Group | None, site: ModuleSite) -> Placed:
    """Return a copy of a module of experts whose forward exchanges rows, and the slices of its
    parameters.
    """
    name, plain = site.name, site.module
    _check_experts(builder, name, plain, group.size)
    slices = {
        path: _slice(builder, f"{name}.{path}", whole, group)
        for path, whole in plain.named_parameters(remove_duplicate=False)
    }
    module = copy_of(plain)
    num_experts = next(plain.parameters()).shape[0]
    attributes: dict[str, Any] = vars(module)
    attributes["expert_exchange"] = ExpertExchange(group, num_experts, type(plain), alike)
    attributes["forward"] = MethodType(_forward, module)
    return Placed(module, slices)


class ExpertExchange:
    """Attributes of a module of experts for its exchange: ep group,
    and number of experts over all ranks.

    ``alike``: ranks with the same tokens, of which each sends a part; None: there are none.
    """

    def __init__(
        self, group: Group, num_experts: int, kind: type[nn.Module], alike: Group | None = None
    ) -> None:
        self.group = group
        self.alike = alike
        self.num_experts = num_experts
        third = list(signature(kind.forward).parameters.values())[3:4]
        self.takes_none = any(parameter.default is None for parameter in third)
        """True if the original forward accepts None as its weights; otherwise it gets ones."""


@torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
def _forward(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the weighted sum over each token's experts on all ranks: x (.., D),
    ids and weights (.., k) -> (.., D).

    Replaces the forward of a module of experts. Collective over the ep group, and over ranks with
    the same tokens; blocks.
    """
    alike = vars(module)["expert_exchange"].alike
    if alike is None:
        return _exchanged(module, x, ids, weights)
    none = vars(module)["expert_exchange"].num_experts
    chosen = ids.reshape(-1, ids.shape[-1])
    rows = take_part(x.reshape(-1, x.shape[-1]), alike)
    factors = None if weights is None else take_part(weights.reshape(chosen.shape), alike)
    part = _exchanged(module, rows, take_part(chosen, alike, none), factors)
    whole: Tensor = join_parts(part, alike, len(chosen))
    return whole.view(*ids.shape[:-1], whole.shape[-1])


def _exchanged(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
    """Send this rank's tokens to the experts, and return their sums. Collective over ep; blocks."""
    exchange: Any = vars(module)["expert_exchange"]
    experts = type(module).forward
    route = find_route(ids, exchange.num_experts, exchange.group)
    rows = dispatch(x.reshape(-1, x.shape[-1]), route)
    ones = None
    if not exchange.takes_none:
        ones = torch.ones_like(route.local_ids, dtype=x.dtype).unsqueeze(-1)
    y = combine(experts(module, rows, route.local_ids.unsqueeze(-1), ones), route)
    y = y.view(*ids.shape, y.shape[-1])
    if weights is not None:
        y = y * weights.unsqueeze(-1)
    total: Tensor = y.sum(-2) if ids.shape[-1] > 1 else y.squeeze(-2)
    return total.to(x.dtype)
