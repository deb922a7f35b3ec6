"""Attention function of a user in the place of the kernels of a model's attention cores:
``model.attention = "package.module:function"``.

    function(q, k, v, *, scale, dropout, starts, window) -> (B, H, S, d)

    q, k, v    (B, H, S, d), (B, G, S, d), (B, G, S, d_v); G divides H. Under tensor parallelism H and G are a rank's
    scale      factor of the scores; None: 1 / sqrt(d)
    dropout    module to call with the probabilities (B, H, S, S); None: nothing is dropped
    starts     (B, S) bool, True where a document begins, and attention with it; None: one document
    window     tokens that each token attends to, itself included; None: all before it

Attention is causal. A function with the attribute ``takes_places = True`` also takes the keyword
``places``, (1 or B, Q) int64: the positions of the queries q (B, H, Q, d) among the keys, None for
all. Without it context parallelism is ruled out.

A core is a module with the attribute ``attention_function``, which it calls if it is not None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshwright.config.functions import find_function
from meshwright.errors import ModelError

DOOR = "attention_function"
"""Attribute of a module that attends by a function, if it is given one."""
KEY = "model.attention"


class OwnAttention:
    """Attention function with its name, by which equal layers are found."""

    def __init__(self, path: str, function: Callable[..., Any]) -> None:
        self.path = path
        self.function = function
        self.takes_places = bool(getattr(function, "takes_places", False))

    def __repr__(self) -> str:
        return f"OwnAttention({self.path!r})"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, places: Tensor | None = None, **given: Any
    ) -> Tensor:
        """Attend: q (B, H, Q, d), k and v (B, G, S, d) -> (B, H, Q, d)."""
        if self.takes_places:
            given["places"] = places
        mixed = self.function(q, k, v, **given)
        shape = (*q.shape[:-1], v.shape[-1])
        if not isinstance(mixed, Tensor) or mixed.shape != shape or mixed.dtype != v.dtype:
            found = type(mixed).__name__
            if isinstance(mixed, Tensor):
                found = f"{tuple(mixed.shape)} {mixed.dtype}"
            raise ModelError(
                "MW-MODEL-062",
                f"{KEY} = {self.path} returns {found} for queries {tuple(q.shape)}: return a tensor"
                f" {shape} of {v.dtype}, (samples, heads, queries, head_dim)",
            )
        return mixed


def use_own_attention(layers: nn.Module, path: str | None) -> dict[str, str]:
    """Give the attention cores of a model the user's function, in place; return the axes that it
    rules out, with the reason.

    Raises:
        ModelError: there is no such function, or the model has no attention core that takes one.
    """
    if path is None:
        return {}
    function = OwnAttention(path, find_function(path, KEY, "an attention function", ModelError))
    cores = [module for module in layers.modules() if DOOR in vars(module)]
    if not cores:
        raise ModelError(
            "MW-MODEL-063",
            f"{KEY} = {path}: the model has no attention core that takes a function. gpt2, llama"
            f" and decoder have; a module of your own may, with the attribute {DOOR} = None",
        )
    for core in cores:
        setattr(core, DOOR, function)
    if function.takes_places:
        return {}
    return {"cp": f"{KEY} = {path} takes no places of queries (takes_places = True)"}
