"""Dropout of the plain run: the user's own ``nn.Dropout`` modules and functional dropouts,
with ``F.dropout`` and its kin replaced by keyed masks.

Written from the published definition (docs/verify.md) and not from :mod:`meshwright.seeding`, so
that a mistake in one of them does not hide in the other. All arithmetic is modulo 2**64, with mix =
splitmix64's finaliser::

    key      = BLAKE2b-64(seed, "dropout", name[, call])[63 bits]        call is left out for the first call
    drawn    = mix(position * GOLDEN + mix(sample * GOLDEN ^ key))
    is_kept  = bits 32..62 of drawn >= floor(p * 2**31)

``name`` is the module's full name; ``LAYER.functional_dropout`` for all functions that a layer
calls outside of ``nn.Dropout``. ``call`` counts its calls in one forward of a micro-batch.
``sample`` is the global sample index. ``position`` is the element's row-major index in the
activation of one sample.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import ModelError

GOLDEN = 0x9E3779B97F4A7C15
FUNCTIONAL = ".functional_dropout"
REPLACED = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
)
"""Functions of torch.nn.functional that the plain run replaces."""


def mix(z: np.ndarray) -> np.ndarray:
    """Return splitmix64's finaliser of each element (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def key_of(seed: int, name: str, call: int) -> int:
    """Return the 63-bit key of one call of a dropout module."""
    words = [str(seed), "dropout", name, *([str(call)] if call else [])]
    digest = hashlib.blake2b("\x1f".join(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") // 2


def keep_mask(p: float, key: int, sample_indices: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the bool mask of kept elements, with the shape (B, ...) of the activation.

    ``sample_indices``: (B,) int64, global.
    """
    samples = sample_indices.numpy().astype(np.uint64)
    positions = np.arange(int(np.prod(shape[1:])), dtype=np.uint64)
    with np.errstate(over="ignore"):
        of_sample = mix(samples * np.uint64(GOLDEN) ^ np.uint64(key))
        drawn = mix(positions[None, :] * np.uint64(GOLDEN) + of_sample[:, None])
    kept = (drawn >> np.uint64(32)) & np.uint64(0x7FFFFFFF) >= np.uint64(int(p * 2**31))
    return torch.from_numpy(kept).view(shape)


class KeyedDropout:
    """Keyed masks for the dropouts of a model, active inside :meth:`installed`.

    Forward pre-hooks record the running module, and ``F.dropout`` is replaced. A call number must
    survive a recomputation (``torch.utils.checkpoint`` inside the user's model), which restores
    torch's generator. The generator's state therefore identifies the call: each call advances it
    once, and a state that was seen before is the same call again.
    """

    def __init__(self, layers: nn.Sequential, seed: int) -> None:
        self._layers, self._seed = layers, seed
        self._samples: Tensor | None = None
        self._layer: nn.Module | None = None
        self._running: nn.Module | None = None
        self._heads_of: int | None = None
        """Samples of the nn.MultiheadAttention that runs."""
        self._entered: dict[int, int] = {}
        self._num_calls: dict[str, int] = {}
        self._calls: dict[bytes, tuple[str, int]] = {}
        self._places: dict[int, list[str]] = {}
        self._paths: dict[tuple[int, int], str] = {}
        for place, layer in layers._modules.items():
            assert layer is not None
            places = self._places.setdefault(id(layer), [])
            places.append(place)
            if len(places) == 1:
                self._name_dropouts(layer)

    def _name_dropouts(self, layer: nn.Module) -> None:
        """Record the paths of the dropouts inside a layer.
        A dropout used at several places gets a copy for each.
        """
        if type(layer) is nn.Dropout:
            self._paths[id(layer), id(layer)] = ""
        seen: set[int] = set()
        for path, module in list(layer.named_modules()):
            for attribute, child in list(module._modules.items()):
                if type(child) is not nn.Dropout:
                    continue
                if id(child) in seen:
                    child = copy.deepcopy(child)
                    module._modules[attribute] = child
                seen.add(id(child))
                self._paths[id(layer), id(child)] = (
                    f".{path}.{attribute}" if path else f".{attribute}"
                )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install keyed masks for training forwards inside the context.
        Torch's generator is restored afterwards.
        """
        plain = {name: getattr(F, name) for name in REPLACED}
        hooks = [layer.register_forward_pre_hook(self._enter) for layer in set(self._layers)]
        dropouts = {module for module in self._layers.modules() if type(module) is nn.Dropout}
        hooks += [module.register_forward_pre_hook(self._mark_running) for module in dropouts]
        keyed = {
            name: partial(getattr(self, f"_{name}"), function) for name, function in plain.items()
        }
        vars(F).update(keyed)
        by_function = {function: keyed[name] for name, function in plain.items()}
        by_function[torch.dropout] = keyed["dropout"]
        try:
            with torch.random.fork_rng(devices=[]), Redirection(by_function):
                yield
        finally:
            vars(F).update(plain)
            for hook in hooks:
                hook.remove()

    def begin(self, sample_indices: Tensor) -> None:
        """Begin the forward of one micro-batch. ``sample_indices``: (B,) int64, global."""
        self._samples = sample_indices
        self._entered.clear()
        self._num_calls.clear()
        self._calls.clear()
        torch.default_generator.manual_seed(0)

    def has_foreign_draws(self) -> bool:
        """Return True if anything else has drawn from torch's generator since :meth:`begin`."""
        found = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            for _ in self._calls:
                torch.rand(())
            return not torch.equal(found, torch.get_rng_state())

    def _enter(self, layer: nn.Module, args: Any) -> None:
        self._layer = layer
        self._entered[id(layer)] = self._entered.get(id(layer), 0) + 1
        if type(layer) is nn.Dropout:
            self._running = layer

    def _mark_running(self, module: nn.Module, args: Any) -> None:
        self._running = module

    def _call(self, module: nn.Module | None) -> tuple[str, int]:
        """Return (full name, call number), equal for a recomputed call;
        advances torch's generator by one draw.
        """
        state = torch.get_rng_state().numpy().tobytes()
        if state not in self._calls:
            assert self._layer is not None
            places = self._places[id(self._layer)]
            place = places[(self._entered[id(self._layer)] - 1) % len(places)]
            path = FUNCTIONAL
            if module is not None:
                path = self._paths[id(self._layer), id(module)]
            name = place + path
            self._calls[state] = name, self._num_calls.get(name, 0)
            self._num_calls[name] = self._num_calls.get(name, 0) + 1
        torch.rand(())
        return self._calls[state]

    def _kept(self, module: nn.Module | None, shape: tuple[int, ...], p: float) -> Tensor:
        """Return the mask of the next call, bool (B, ...)."""
        assert self._samples is not None
        name, call = self._call(module)
        if shape[0] != self._samples.shape[0]:
            raise ModelError(
                "MW-VERIFY-001",
                f"dropout {name} gets a tensor of shape {shape} for"
                f" {self._samples.shape[0]} samples: masks are drawn by sample, so the first"
                " dim must be the micro-batch. Move the dropout to where it is, or transpose"
                " around it",
            )
        return keep_mask(p, key_of(self._seed, name, call), self._samples, shape)

    def _dropout(
        self,
        plain: Callable[..., Tensor],
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        module, self._running = self._running, None
        if not training or p == 0.0:
            return plain(input, p, training, inplace)
        shape = tuple(input.shape)
        if self._heads_of is not None:  # inside nn.MultiheadAttention: (B H, L, S)
            shape = (self._heads_of, shape[0] // self._heads_of, *shape[1:])
        kept = self._kept(module, shape, p).view(input.shape)
        if p >= 1.0:
            return input.mul_(0.0) if inplace else torch.zeros_like(input)
        scaled = input * kept * (1.0 / (1.0 - p))
        return input.mul_(kept).mul_(1.0 / (1.0 - p)) if inplace else scaled

    def _channels(
        self,
        plain: Callable[..., Tensor],
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0.0:
            return plain(input, p, training, inplace)
        kept = self._kept(None, tuple(input.shape[:2]), p)
        factor = kept.to(input.dtype) / (1.0 - p) if p < 1.0 else torch.zeros(kept.shape)
        factor = factor.to(input.dtype).reshape(*kept.shape, *[1] * (input.dim() - 2))
        return input.mul_(factor) if inplace else input * factor

    _dropout1d = _dropout2d = _dropout3d = _channels

    def _alpha_dropout(
        self,
        plain: Callable[..., Tensor],
        input: Tensor,
        p: float = 0.5,
        training: bool = False,
        inplace: bool = False,
        of_channels: bool = False,
    ) -> Tensor:
        """Return a (kept x - (1 - kept) c) + b, which has the mean and variance of a normal x
        (Klambauer et al. 2017, section 2): c = SELU's limit.
        """
        if not training or p == 0.0:
            return plain(input, p, training, inplace)
        dims = 2 if of_channels else input.dim()
        kept = self._kept(None, tuple(input.shape[:dims]), p)
        if p >= 1.0:
            return input.mul_(0.0) if inplace else torch.zeros_like(input)
        kept = kept.reshape(*kept.shape, *[1] * (input.dim() - dims))
        limit = -1.0507009873554805 * 1.6732632423543772
        a = ((1.0 - p) * (1.0 + p * limit * limit)) ** -0.5
        dropped = torch.where(kept, input, torch.full_like(input, limit)) * a - a * p * limit
        return input.copy_(dropped) if inplace else dropped

    def _feature_alpha_dropout(
        self,
        plain: Callable[..., Tensor],
        input: Tensor,
        p: float = 0.5,
        training: bool = False,
        inplace: bool = False,
    ) -> Tensor:
        return self._alpha_dropout(plain, input, p, training, inplace, True)

    def _scaled_dot_product_attention(
        self,
        plain: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Attend; with dropout to one-hot values first, which gives the probabilities."""
        if dropout_p == 0.0:
            return plain(query, key, value, attn_mask, 0.0, is_causal, **options)
        ones = torch.eye(key.shape[-2], dtype=value.dtype).expand(*key.shape[:-1], key.shape[-2])
        probabilities = plain(query, key, ones, attn_mask, 0.0, is_causal, **options)
        kept = self._kept(None, tuple(probabilities.shape), dropout_p)
        groups = probabilities.shape[-3] // value.shape[-3] if options.get("enable_gqa") else 1
        values = value.repeat_interleave(groups, -3) if groups > 1 else value
        scale = 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
        return (probabilities * kept * scale) @ values

    def _multi_head_attention_forward(
        self, plain: Callable[..., Any], query: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Run torch's function, query (L, B, D), which finds the functions of this class."""
        before, self._heads_of = self._heads_of, query.shape[1] if query.dim() == 3 else 1
        try:
            return plain(query, *args, **kwargs)
        finally:
            self._heads_of = before


class Redirection(TorchFunctionMode):
    """Function mode for references to torch's functions that were taken before they were replaced,
    as by ``from torch.nn.functional import dropout``.
    """

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._functions.get(func, func)(*args, **(kwargs or {}))
