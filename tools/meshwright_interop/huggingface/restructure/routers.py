"""Routers of transformers that take part in recording and replay
of the routing (expert_parallel/routing.py).

A router there is a module beside the experts, with ``top_k`` and ``num_experts``. It chooses by one
call of ``topk`` on scores (N, E), and takes its weights from the values or by the indices. While a
routing is recorded or replayed, that call's indices pass ``route_ids``, and its values are those of
the indices: the weights are the router's own formula.

Shapes: N tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright_interop.huggingface.restructure.experts import is_experts

KIND = "router"
"""Kind of the sharding plan."""
TOPK = (torch.topk, Tensor.topk)


class Chosen(NamedTuple):
    """Sizes of a router's choice."""

    num_experts: int
    top_k: int


def prepare_routers(layers: nn.Module) -> dict[str, Any]:
    """Give the routers beside modules of experts the functions of a routing;
    return these routers by name.

    A router of another form is left as it is: a recording is then refused.
    """
    prepared: dict[str, Any] = {}
    for name, module in list(layers.named_modules()):
        for child, router in (
            module.named_children() if any(map(is_experts, module.children())) else ()
        ):
            sizes = getattr(router, "num_experts", None), getattr(router, "top_k", None)
            if all(type(size) is int for size in sizes) and not is_experts(router):
                found: dict[str, Any] = vars(router)
                found["routing"] = Chosen(*sizes)  # type: ignore[arg-type]  # both are int, above
                found["route_ids"] = unchanged
                found["own_tokens"] = unchanged
                found["forward"] = MethodType(_forward, router)
                prepared[f"{name}.{child}"] = router
    return prepared


def unchanged(tensor: Tensor) -> Tensor:
    """Return the tensor: default of ``route_ids`` and ``own_tokens`` while no routing is recorded
    or replayed.
    """
    return tensor


def _forward(router: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the router's own forward, within :class:`_Choice` while ids are recorded or replayed,
    and its balance in training (losses.py).
    """
    own, balance = type(router).forward, getattr(router, "balance", None)
    if router.route_ids is unchanged:
        found = own(router, *args, **kwargs)
    else:
        found = _routed(router, own, args, kwargs)
    return found if balance is None or not router.training else balance(found)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _routed(router: Any, own: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with _Choice(router):
        return own(router, *args, **kwargs)


class _Choice(TorchFunctionMode):
    """Function mode in which the router's ``topk`` returns ``route_ids(indices)``,
    and the scores at these indices.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self._router = router

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in TOPK or not args:
            return found
        scores, (num_experts, top_k) = args[0], self._router.routing
        if scores.dim() != 2 or scores.shape[-1] != num_experts or found.indices.shape[-1] != top_k:
            return found  # a topk over groups of experts
        ids = self._router.route_ids(found.indices)
        return found if ids is found.indices else type(found)((scores.gather(-1, ids), ids))
