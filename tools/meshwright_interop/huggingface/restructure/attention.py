"""Attention of a transformers model under context parallelism,
through transformers' registries of attention and masks.

A rank has some queries of each sample and all keys. The model's code calls the attention that its
configuration names in the registry, and creates masks by the registry of masks. While a layer runs
on a rank's tokens, its configurations name two functions of this file:

    masks       make_rule: keeps the model's own mask function (causal, window, chunk, documents), and computes no mask
    attention   attend: calls the module's ``attention_core``, the module that context parallelism hooks

The core attends block by block of queries. For each it evaluates the mask function at the queries'
places, and calls the attention that the model would have called: softcaps, sinks and grouped heads
are those of transformers' code.

Shapes: B samples, Q queries, S tokens, H query heads, G key-value heads, d head_dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from meshwright.errors import ModelError
from meshwright_interop.huggingface.restructure.float64 import keep_float64
from meshwright_interop.huggingface.restructure.library import mask_function_of, register_attention

PRIVATE_TORCH = {
    "torch.overrides._get_current_function_mode_stack": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""

NAME = "meshwright"
"""Name of both functions in transformers' registries."""
CORE = "attention_core"
"""Name of the core in a module of attention."""
REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""Name of the registry in the files of models."""
QUERY_BLOCK = 1024
"""Most queries of a block."""
MASK_ELEMENTS = {"cpu": 2**21}
"""Elements of a block's mask by type of device; 2^27 of others."""
_CHOSEN: ContextVar[str] = ContextVar("chosen_attention", default="sdpa")


@dataclass(frozen=True)
class MaskRule:
    """Deferred mask: the arguments of transformers' mask function,
    passed through the model in place of the mask.
    """

    implementation: str
    """Attention of the model's configuration: "sdpa" or "eager"."""
    arguments: Mapping[str, Any]
    """Arguments of transformers' function for masks of that implementation, for all tokens."""

    @property
    def is_plain(self) -> bool:
        """True if transformers' function would return None:
        plain causal attention over all queries and keys.
        """
        window = self.arguments.get("local_size")
        is_full = window is None or self.arguments["kv_length"] < window
        is_skipped = (
            self.implementation == "sdpa"
            and self.arguments.get("allow_is_causal_skip", True)
            and is_full
        )
        return bool(is_skipped and self.arguments.get("attention_mask") is None)

    def rows(self, places: Tensor) -> Tensor:
        """Return the mask of the queries at ``places`` (B, Q) for all keys: (B, 1, Q, S),
        bool or added to scores.
        """
        see = self.arguments["mask_function"]

        def see_from_places(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            found: Tensor = see(sample, head, places[sample, query], key)
            return found

        changed = {
            "mask_function": see_from_places,
            "q_length": places.shape[1],
            "allow_is_causal_skip": False,
        }
        changed["allow_is_bidirectional_skip"] = False
        mask: Tensor = mask_function_of(self.implementation)(**{**self.arguments, **changed})
        return mask


def make_rule(**arguments: Any) -> MaskRule:
    """Return the rule of a mask; an entry of transformers' registry of masks."""
    return MaskRule(_CHOSEN.get(), arguments)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Call the module's attention core; this is the entry in transformers' registry of attention.

    query: (B, H, S/cp, d); key, value: (B, G, S/cp, d). Return (B, S/cp, H, d), and no
        probabilities.
    """
    mixed = getattr(module, CORE)(query, key, value, attention_mask, module, options)
    return mixed.transpose(1, 2).contiguous(), None


class RegisteredAttention(nn.Module):
    """Attention core of a module that calls its attention through the registry.
    It has no parameters.
    """

    def __init__(self, window: int | None) -> None:
        """Create the core. ``window``: limit of keys per query, for cost estimates alone;
        the mask function decides.
        """
        super().__init__()
        self.window = window

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        owner: nn.Module,
        options: Mapping[str, Any],
        places: Tensor | None = None,
    ) -> Tensor:
        """Attend with q (B, H, Q, d) to k and v (B, G, S, d). Return (B, H, Q, d).

        Args:
            mask: :class:`MaskRule`. owner: module of attention, which transformers' functions read.
            options: their keyword arguments.
            places: (1 or B, Q) int64, positions of the queries; None: all S.
        """
        _check_call(owner, mask, options, is_whole=places is None)
        function = partial(_function_of(owner, mask.implementation), owner, **options)
        if places is None and mask.is_plain:
            whole: Tensor = function(q, k, v, None)[0].transpose(1, 2)
            return whole
        if places is None:
            places = torch.arange(q.shape[-2], device=q.device)[None]
        places = places.expand(len(q), -1)
        blocks = _blocks_of(q, k.shape[-2])
        if len(blocks) == 1:  # the caller recomputes by itself, or the sample is short
            return _attend(q, k, v, places, mask, function).transpose(1, 2)
        context: dict[str, Any] = (
            {} if torch.compiler.is_compiling() else {"context_fn": _same_modes}
        )
        mixed = []
        for block in blocks:
            arguments = q[:, :, block], k, v, places[:, block], mask, function
            mixed.append(
                checkpoint(
                    _attend, *arguments, use_reentrant=False, preserve_rng_state=False, **context
                )
            )
        return torch.cat(mixed, dim=1).transpose(1, 2)

    def query_blocks(
        self, q: Tensor, *others: Any, places: Tensor, length: int
    ) -> list[slice] | None:
        """Return the blocks of queries for which :meth:`forward` can be called separately,
        also with some heads only.

        None if an option has values per head, such as sinks. ``others``: further arguments of
        forward, options last.
        """
        options: Mapping[str, Any] = others[-1]
        if any(
            isinstance(option, Tensor) and key != "position_ids" for key, option in options.items()
        ):
            return None
        return _blocks_of(q, length)


def _blocks_of(q: Tensor, length: int) -> list[slice]:
    """Return blocks of queries (B, H, Q, d) whose masks for ``length`` keys are small."""
    size, queries = (
        max(1, min(QUERY_BLOCK, MASK_ELEMENTS.get(q.device.type, 2**27) // length)),
        q.shape[-2],
    )
    return [slice(at, min(at + size, queries)) for at in range(0, queries, size)]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, mask: MaskRule, function: Callable[..., Any]
) -> Tensor:
    """Attend with a block of queries: (B, H, n, d) -> (B, n, H, d).
    Runs again in backward (activation checkpointing).

    On CPU the keys before the first and after the last one that any query sees are left out.
    """
    with keep_float64(q.dtype):
        rows = mask.rows(places)
        if q.device.type == "cpu" and type(rows) is Tensor and not torch.compiler.is_compiling():
            seen = (rows if rows.dtype == torch.bool else rows == 0).flatten(0, -2).any(0).nonzero()
            keys = slice(int(seen[0]), int(seen[-1]) + 1)
            k, v, rows = k[:, :, keys], v[:, :, keys], rows[..., keys]
        mixed: Tensor = function(q, k, v, rows)[0]
    return mixed


def _same_modes() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of a block's forward and of its recompute,
    which re-enters the function modes of forward.
    """
    return nullcontext(), _entered(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


@contextmanager
def _entered(modes: list[TorchFunctionMode]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            if mode not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
                stack.enter_context(mode)
        yield


def _check_call(owner: nn.Module, mask: Any, options: Mapping[str, Any], *, is_whole: bool) -> None:
    """Raise :class:`ModelError` for a mask or an option that cannot be sliced
    by queries or heads.
    """
    name, problem = type(owner).__name__, ""
    if not isinstance(mask, MaskRule):
        problem = (
            f"its mask is a {type(mask).__name__} that transformers' registry of masks did not"
            " create"
        )
    for key, option in options.items():
        if isinstance(option, Tensor) and key != "position_ids" and (is_whole or option.dim() > 1):
            of = (
                'heads (use parallel.cp_exchange = "keys")'
                if option.dim() == 1
                else "queries and keys"
            )
            problem = f"its attention takes {key} {tuple(option.shape)}, values for all {of}"
    if problem:
        raise ModelError(
            "MW-INTEROP-137",
            f"{name} has no context parallelism: {problem}; or use parallel.cp = 1",
        )


def _function_of(owner: nn.Module, implementation: str) -> Callable[..., Any]:
    """Return the attention that a module would call with this implementation."""
    names = _forward_of(owner).__globals__
    function: Callable[..., Any] = names[REGISTRY].get_interface(
        implementation, names.get("eager_attention_forward")
    )
    return function


def _forward_of(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def window_of(module: nn.Module) -> int | None:
    """Return the limit of keys per query of an attention module, from its configuration; None:
    all keys before it.

    For chunked attention, whose queries see the keys of their chunk, it is the length of a chunk.
    """
    config = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds and isinstance(layer, int) and layer < len(kinds) else None
    own = {
        "full_attention": None,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    found = (
        own[kind]
        if kind in own
        else getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    )
    return found if isinstance(found, int) else None


def install_cores(model: nn.Module) -> list[str]:
    """Give each module that calls its attention through the registry a core;
    return the names of the cores.
    """
    register_attention(NAME, attend, make_rule)
    found = []
    for name, module in list(model.named_modules()):
        code = getattr(_forward_of(module), "__code__", None)
        if code is not None and REGISTRY in code.co_names:
            module.add_module(CORE, RegisteredAttention(window_of(module)))
            found.append(f"{name}.{CORE}")
    return found


@contextmanager
def registered(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Name the functions of this file in the configurations of these modules within the block."""
    configs: dict[int, Any] = {
        id(module.config): module.config for module in modules if hasattr(module, "config")
    }
    before = [(config, config._attn_implementation) for config in configs.values()]
    chosen = next((name for _, name in before if name != NAME), None)
    token = None if chosen is None else _CHOSEN.set(chosen)
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
        if token is not None:
            _CHOSEN.reset(token)
