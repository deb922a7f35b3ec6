"""Dropout of the plain run: the user's own ``nn.Dropout`` modules,
with ``F.dropout`` replaced by keyed masks.

Written from the published definition (docs/verify.md) and not from :mod:`meshwright.seeding`, so
that a mistake in one of them does not hide in the other. All arithmetic is modulo 2**64, with mix =
splitmix64's finaliser::

    key      = BLAKE2b-64(seed, "dropout", name[, call])[63 bits]        call is left out for the first call
    drawn    = mix(position * GOLDEN + mix(sample * GOLDEN ^ key))
    is_kept  = bits 32..62 of drawn >= floor(p * 2**31)

``name`` is the module's full name. ``call`` counts its calls in one forward of a micro-batch.
``sample`` is the global sample index. ``position`` is the element's row-major index in the
activation of one sample.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ModelError

GOLDEN = 0x9E3779B97F4A7C15


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
    """Keyed masks for the ``nn.Dropout`` modules of a model, active inside :meth:`installed`.

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
        plain = F.dropout
        hooks = [layer.register_forward_pre_hook(self._enter) for layer in set(self._layers)]
        dropouts = {module for module in self._layers.modules() if type(module) is nn.Dropout}
        hooks += [module.register_forward_pre_hook(self._mark_running) for module in dropouts]
        F.dropout = self._replacement(plain)
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        finally:
            F.dropout = plain
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

    def _call(self, module: nn.Module) -> tuple[str, int]:
        """Return (full name, call number), equal for a recomputed call;
        advances torch's generator by one draw.
        """
        state = torch.get_rng_state().numpy().tobytes()
        if state not in self._calls:
            assert self._layer is not None
            places = self._places[id(self._layer)]
            place = places[(self._entered[id(self._layer)] - 1) % len(places)]
            name = place + self._paths[id(self._layer), id(module)]
            self._calls[state] = name, self._num_calls.get(name, 0)
            self._num_calls[name] = self._num_calls.get(name, 0) + 1
        torch.rand(())
        return self._calls[state]

    def _replacement(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def dropout(
            input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> Tensor:
            module, self._running = self._running, None
            if module is None or not training or p == 0.0:
                return plain(input, p, training, inplace)
            assert self._samples is not None
            name, call = self._call(module)
            if input.shape[0] != self._samples.shape[0]:
                raise ModelError(
                    "MW-VERIFY-001",
                    f"dropout {name} gets a tensor of shape {tuple(input.shape)} for"
                    f" {self._samples.shape[0]} samples: masks are drawn by sample, so the first"
                    " dim must be the micro-batch. Move the dropout to where it is, or transpose"
                    " around it",
                )
            if p >= 1.0:
                return input.mul_(0.0) if inplace else torch.zeros_like(input)
            kept = keep_mask(p, key_of(self._seed, name, call), self._samples, tuple(input.shape))
            scaled = input * kept * (1.0 / (1.0 - p))
            return input.mul_(kept).mul_(1.0 / (1.0 - p)) if inplace else scaled

        return dropout
