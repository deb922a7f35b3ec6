"""Seeding by name: the same random numbers in every layout, independent of rank and of call order.

* Initial weights: torch's generator is seeded by (seed, parameter name) and the *whole* tensor is
  drawn, then sliced.
* Dropout: a counter-based hash. The mask is a pure function of (seed, layer name, call number,
  global sample index, position of the element in the sample's full activation). A rank with a shard
  of the heads or of the sequence computes its shard of the same mask, on any device, in any order.
  A recomputed forward draws the same mask again.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.current import CurrentMicrobatch
from meshwright.errors import ModelError
from meshwright.kernels import dropout

PRIVATE_TORCH = {
    "torch._C._current_graph_task_id": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""

# splitmix64 (Steele, Lea, Flood 2014), in two's complement: int64 multiplication wraps in torch as
# it does in C
GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for a purpose, stable across processes,
    Python versions and machines (BLAKE2b).
    """
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def set_generators(value: int) -> None:
    """Seed the generators of torch (CPU), numpy and Python with ``value``."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)


@contextmanager
def kept_generators(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore the generators of torch (CPU), numpy and Python after the block. ``devices``: GPUs,
    theirs as well.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def generators_at(value: int) -> Iterator[None]:
    """Seed the generators of torch (CPU), numpy and Python with ``value`` in the block,
    then restore them.
    """
    with kept_generators():
        set_generators(value)
        yield


@contextmanager
def seeded(seed: int, *names: str | int) -> Iterator[None]:
    """Seed the generators of torch (CPU), numpy and Python for a purpose in the block,
    then restore them.
    """
    with generators_at(derive(seed, *names)):
        yield


def _mix(z: Tensor) -> Tensor:
    """Apply splitmix64's finaliser in place, int64 -> int64:
    each input bit changes each output bit.
    """
    z ^= (z >> 30) & 0x3FFFFFFFF  # >> keeps the sign: mask to the logical shift
    z *= MIX_1
    z ^= (z >> 27) & 0x1FFFFFFFFF
    z *= MIX_2
    z ^= (z >> 31) & 0x1FFFFFFFF
    return z


def drawn_bits(key: int, positions: Tensor) -> Tensor:
    """Return 64 random bits for each position, int64:
    a function of the key and the position alone.
    """
    return _mix(positions * GOLDEN + key)


class TokenPositions(Protocol):
    """Tokens of a sample, or heads, that a rank has: see :mod:`meshwright.context_parallel.cut`."""

    unit: str

    @property
    def length(self) -> int:
        """Tokens of the sample."""

    def positions(self, device: torch.device, parts: int = 1) -> Tensor:
        """Return their positions in the sample, (1 or B, n) int64; of heads,
        those of all ``parts`` tp ranks.
        """


NUM_KEYS = 16
"""Keys that a dropout prepares at the start, one per call in a forward.
More are made when needed.
"""


def key_of(seed: int, name: str, call: int = 0) -> int:
    """Return the key of one call of a dropout module. The first call's key has no call number."""
    return derive(seed, "dropout", name, *([call] if call else []))


def keep_mask(
    p: float,
    key: Tensor,
    golden: Tensor,
    sample_indices: Tensor,
    shape: torch.Size,
    shard: tuple[int, int, int] | None = None,
    cut: tuple[int, TokenPositions] | None = None,
) -> Tensor:
    """Return the bool mask of kept elements.

    Args:
        p: fraction of elements dropped.
        key: () int64 of :func:`key_of`. ``golden``: () int64, GOLDEN.
        sample_indices: (B,) int64, global.
        shape: (B, ...), local. ``shard``: (dim, index, count), the slice of the whole activation
            that is local.
        cut: (dim of the tokens, their positions), where a rank has some of the tokens; ``shard`` is
            a slice of these.
    """
    device = sample_indices.device
    whole = list(shape)
    start = [0] * len(shape)
    if shard is not None:
        dim, index, count = shard  # dim may be -1, the last
        start[dim] = index * shape[dim]
        whole[dim] = shape[dim] * count
    position = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in range(len(shape) - 1, 0, -1):
        # of all samples, or of each
        along = torch.arange(start[dim], start[dim] + shape[dim], device=device)[None]
        if cut is not None and cut[0] == dim:
            positions = cut[1].positions(device, _parts(shard, dim))
            along, whole[dim] = positions[:, start[dim] : start[dim] + shape[dim]], cut[1].length
        position = position + (along * stride).view(
            [-1] + [1] * (dim - 1) + [shape[dim]] + [1] * (len(shape) - 1 - dim)
        )
        stride *= whole[dim]
    keys = _mix((sample_indices * golden) ^ key).view([-1] + [1] * (len(shape) - 1))
    drawn = _mix(position * golden + keys)
    return ((drawn >> 32) & 0x7FFFFFFF) >= int(p * 2**31)


def _parts(shard: tuple[int, int, int] | None, dim: int) -> int:
    """Return the number of slices along ``dim``."""
    return shard[2] if shard is not None and shard[0] == dim else 1


HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
"""Attributes of a module that hold its hooks; a module that replaces another takes them over."""


@dataclass
class LayoutParts:
    """Parts of an activation that a rank may have: what tp, cp and the exchange of heads give it."""

    tp: tuple[int, int] = (0, 1)
    """(rank, size) of the tensor-parallel group."""
    tokens: TokenPositions | None = None
    """Positions of this rank's tokens, with cp > 1."""
    heads: TokenPositions | None = None
    """This rank's heads inside attention cores, where cp exchanges tokens for heads."""

    @property
    def is_whole(self) -> bool:
        """True if the rank has whole samples."""
        return self.tp[1] == 1 and self.tokens is None


class SeededDropout(nn.Module):
    """nn.Dropout whose mask is a function of (seed, layer name, call, sample, element).
    Identity in eval mode.

    ``num_calls`` counts the calls in the forward of one micro-batch; :func:`restart_calls` begins
    the next one.

    ``shard = (dim, index, count)``: the input is slice ``index`` of ``count`` along ``dim`` of the
    whole activation. ``cut = (dim, positions)``: of the rank's tokens of it, at these positions
    along ``dim``.
    """

    keys: Tensor
    golden: Tensor

    def __init__(self, p: float, seed: int, name: str, current: CurrentMicrobatch) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.num_calls = 0
        self.name = name
        self.current = current
        self.shard: tuple[int, int, int] | None = None
        self.cut: tuple[int, TokenPositions] | None = None
        self.parts = LayoutParts()
        # In memory and not in the code: compiled layers then share one graph, whatever their names,
        # and the compiler does not try to work out indices times GOLDEN exactly, which no 64-bit
        # integer holds.
        keys = [key_of(seed, name, call) for call in range(NUM_KEYS)]
        self.register_buffer("keys", torch.tensor(keys, device="cpu"), persistent=False)
        self.register_buffer("golden", torch.tensor(GOLDEN, device="cpu"), persistent=False)

    @property
    def key(self) -> Tensor:
        """Key of the first call, () int64."""
        return self.keys[0]

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}, shard={self.shard}"

    def mask(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Return the mask of the next call, bool (B, ...) in the input's local shape; True:
        kept.
        """
        samples, key = self._next(shape, device)
        if self.cut is not None:
            self._check_tokens(shape, *self.cut)
        return keep_mask(self.p, key, self.golden, samples, shape, self.shard, self.cut)

    def _next(self, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the sample indices, (B,) int64, and the key of the next call, () int64."""
        sample_indices = self.current.sample_indices
        assert sample_indices is not None, self.name
        if not shape or sample_indices.shape[0] != shape[0]:
            raise ModelError(
                "MW-MODEL-056",
                f"dropout {self.name} acts on {tuple(shape)}, and the micro-batch has"
                f" {sample_indices.shape[0]} samples: masks are drawn by sample, so that dim 0 of"
                " its input must be the samples. Apply it before samples are merged with another"
                " dim, or split them again: dropout(x.view(B, -1, D)).view(x.shape)",
            )
        if self.num_calls >= self.keys.shape[0]:
            self._add_keys()
        return sample_indices.to(device), self.keys[self.num_calls]

    def _check_tokens(self, shape: torch.Size, dim: int, tokens: TokenPositions) -> None:
        """Raise :class:`ModelError` for an input whose dim of tokens is not
        where the plan has it.
        """
        parts = _parts(self.shard, dim)
        share = tokens.positions(torch.device("cpu"), parts).shape[1]
        if len(shape) <= dim or shape[dim] * parts != share:
            raise ModelError(
                "MW-CP-005",
                f"dropout {self.name} acts on {tuple(shape)}, and with context parallelism dim"
                f" {dim} of it has the rank's {share} {tokens.unit} of {tokens.length}: give the"
                " module its kind in the sharding_plan (heads for the probabilities of an"
                " attention), or use parallel.cp = 1",
            )

    def around_recompute(self) -> AbstractContextManager[object]:
        """Return the context of a second forward that does not begin with the layer's own."""
        return nullcontext()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _add_keys(self) -> None:
        """Double the number of calls that keys are prepared for."""
        have = self.keys.shape[0]
        more = [key_of(self.seed, self.name, call) for call in range(have, 2 * have)]
        self.keys = torch.cat([self.keys, torch.tensor(more, device=self.keys.device)])

    def forward(self, x: Tensor) -> Tensor:
        # only shapes matter; there are no samples
        outline = x.is_meta and self.current.sample_indices is None
        if not self.training or self.p == 0.0 or outline:
            return x
        if self.p >= 1.0:
            return torch.zeros_like(x)
        self.check_backward()
        if self.cut is None and dropout.takes(x):
            dropped = dropout.drop_elements(x, *self._next(x.shape, x.device), self.p, self.shard)
        else:
            dropped = x * self.mask(x.shape, x.device) * (1.0 / (1.0 - self.p))
        self.num_calls += 1
        return dropped

    def check_backward(self) -> None:
        """Raise :class:`ModelError` in a second forward that no recompute of the run has begun."""
        if (
            not torch.compiler.is_compiling()
            and torch._C._current_graph_task_id() != -1
            and not self.current.is_recompute
        ):
            raise ModelError(
                "MW-RUN-031",
                f"dropout {self.name} runs inside backward: a layer that computes itself again"
                " (torch.utils.checkpoint) would drop other elements than in its first forward."
                " Use pipeline.recompute for the layer instead (docs/recompute.md), or p = 0",
            )


def dropouts_of(module: nn.Module) -> list[SeededDropout]:
    """Return the dropouts of a module, itself included."""
    return [each for each in module.modules() if isinstance(each, SeededDropout)]


def restart_calls(dropouts: Sequence[SeededDropout]) -> None:
    """Begin the forward of a micro-batch: the next call of each dropout is its first."""
    for each in dropouts:
        each.num_calls = 0


def seed_dropouts(model: nn.Module, seed: int) -> CurrentMicrobatch:
    """Replace each nn.Dropout of the model (in place) by a :class:`SeededDropout` under its name;
    return their current micro-batch.
    """
    current = CurrentMicrobatch()
    for name, module in list(model.named_modules(remove_duplicate=False)):
        for child_name, child in list(module._modules.items()):
            if type(child) is nn.Dropout:
                full_name = f"{name}.{child_name}" if name else child_name
                seeded_dropout = SeededDropout(child.p, seed, full_name, current).train(
                    child.training
                )
                vars(seeded_dropout).update({kind: vars(child)[kind] for kind in HOOKS})
                setattr(module, child_name, seeded_dropout)
    return current
