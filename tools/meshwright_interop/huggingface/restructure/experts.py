"""Experts of transformers computed without shapes that depend on values,
and their entries in the sharding plan.

Modules of experts there (``use_experts_implementation``) hold weights of three dims, (E, 2F, D) and
(E, D, F), and are called with tokens, ids and weights of the chosen experts. Their own loop skips
experts without tokens: this branch reads values, and leaves the expert without a gradient. The
function here is registered as another implementation. Rows are sorted by expert, in token order,
and every expert computes.

Shapes: N tokens, D hidden, E experts, k experts of a token, R = N k rows, F ffn size of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_interop.huggingface.restructure.library import register_experts

IMPLEMENTATION = "meshwright"
STYLES = ("moe_tp_experts", "ep_dispatch_experts")
"""Words of transformers' plans for a module of experts."""


def implementation(config: Any) -> dict[str, str]:
    """Return the argument of ``from_config`` that chooses :func:`experts_forward`,
    for a configuration with experts.

    Registers the function in transformers.
    """
    if not has_experts(config):
        return {}
    register_experts(IMPLEMENTATION, experts_forward)
    return {"experts_implementation": IMPLEMENTATION}


def has_experts(config: Any) -> bool:
    """Return whether a configuration, or a table in it, has keys about experts."""
    return any("expert" in str(key) for table in tables_of(config.to_dict()) for key in table)


def tables_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a table and all tables nested in it."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from tables_of(inner)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is one of experts whose implementation can be chosen."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None = None
) -> Tensor:
    """Return the weighted sum over each token's experts, (N, D).

    hidden_states: (N, D); top_k_index: (N, k) int64; top_k_weights: (N, k), None for a sum without
        weights. E is
    read from the parameters, so that a slice of the experts computes too.
    """
    num_tokens, top_k = top_k_index.shape
    first = self.gate_up_proj if self.has_gate else self.up_proj
    chosen = top_k_index.reshape(-1)
    order = chosen.argsort(stable=True)  # (R,)
    rows = hidden_states.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1).index_select(0, order)
    biases = _biases(self, len(first))
    found = []
    parts = torch.split(rows, _rows_of(chosen, len(first)))
    for part, up, down, (up_bias, down_bias) in zip(
        parts, first.unbind(), self.down_proj.unbind(), biases, strict=True
    ):
        inner = _linear(part, up, up_bias, self.is_transposed)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        found.append(_linear(inner, down, down_bias, self.is_transposed))
    y = torch.cat(found)
    if self.has_post_expert_norm:
        y = self.post_expert_norm(y)
    y = y.index_select(0, order.argsort()).view(num_tokens, top_k, y.shape[-1])
    if top_k_weights is not None:
        y = y * top_k_weights.unsqueeze(-1)
    return y.sum(1).to(hidden_states.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    """Return the product of x (.., I) with a weight (O, I), or (I, O) if it is transposed."""
    return F.linear(x, weight.t() if is_transposed else weight, bias)


def _biases(experts: Any, num_experts: int) -> list[tuple[Tensor | None, Tensor | None]]:
    """Return the biases of each expert's two products."""
    if not experts.has_bias:
        return [(None, None)] * num_experts
    first = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
    return list(zip(first.unbind(), experts.down_proj_bias.unbind(), strict=True))


def _rows_of(chosen: Tensor, num_experts: int) -> list[int]:
    """Return the number of rows of each expert. chosen: (R,) int64. On meta, without values,
    rows are split evenly.
    """
    if type(chosen) is not Tensor or chosen.is_meta:
        each, rest = divmod(chosen.shape[0], num_experts)
        return [each + (expert < rest) for expert in range(num_experts)]
    counts: list[int] = chosen.bincount(minlength=num_experts).tolist()
    return counts


def without_parameters(
    theirs: Mapping[str, str], names: Mapping[str, str], layers: nn.Module
) -> dict[str, str]:
    """Return a plan of transformers without its entries for parameters inside modules of experts.

    Tensor parallelism of transformers cuts each expert by them. Here every expert is whole.

    Args:
        theirs: pattern of names in transformers -> kind.
        names: name in transformers -> name in ``layers``, of modules and parameters.
    """
    experts = {name for name, module in layers.named_modules() if is_experts(module)}
    inside = [name for name, ours in names.items() if ours.rpartition(".")[0] in experts]
    return {
        pattern: style
        for pattern, style in theirs.items()
        if not any(_fits(name, pattern) for name in inside)
    }


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")


def plan_of_experts(layers: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return a sharding plan that names the modules of experts,
    also where the plan of transformers names none.
    """
    if "experts" in plan.values():
        return dict(plan)
    return {
        **plan,
        **{name: "experts" for name, module in layers.named_modules() if is_experts(module)},
    }


def matrices_of_experts(layers: nn.Module) -> dict[str, Any]:
    """Return the entries of ``matrices`` for experts:
    gate and up in one weight are two matrices of each expert.

    Those of transposed weights (E, I, O) are columns.
    """
    found: dict[str, Any] = {}
    for name, module in layers.named_modules():
        if not is_experts(module):
            continue
        experts: Any = module
        outputs = ("columns",) if experts.is_transposed else ()
        for path, each in module.named_parameters():
            size = each.shape[-1]
            if path == "gate_up_proj" and experts.has_gate:
                half = (size if experts.is_transposed else each.shape[1]) // 2
                found[f"{name}.{path}"] = (
                    (*outputs, half, half) if experts.is_concatenated else (*outputs, 1, 1)
                )
            elif experts.is_transposed and each.dim() == 3:
                found[f"{name}.{path}"] = (*outputs, size)
    return found


def around_experts(layers: nn.Module) -> set[str]:
    """Return the names of the modules that contain a module of experts (MoE blocks):
    they compute token by token.
    """
    return {
        name.rpartition(".")[0] for name, module in layers.named_modules() if is_experts(module)
    }
