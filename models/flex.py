"""Attention with a window or documents in one kernel that skips what no query sees: FlexAttention, on CUDA.

    tile (i, j): queries i T .. i T + T - 1, keys j T .. j T + T - 1, T = TILE
      skipped    no pair is seen
      partial    some pairs are seen: the kernel asks for each pair
      full       all pairs are seen: no mask at all

Tiles follow from the documents at the first and last token of each T, because document numbers only rise. All of it
happens on the device, in shapes that depend on S alone: the host never waits, and no tensor has S x S elements.

Shapes: B samples, S tokens, H query heads, G key-value heads, d head_dim, N = ceil(S / T) tiles along S.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import _disable_current_modes

TILE = 128
"""Queries, and keys, of a tile: FlexAttention's default, a multiple of the blocks of all its kernels."""
HEAD_DIMS = range(16, 257)
"""Sizes of heads that FlexAttention's CUDA kernels have configurations for."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (2, 11)
"""Oldest version of torch whose FlexAttention was read."""
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
Form = Literal["probabilities", "causal", "by document", "flex", "blocks"]


class Case(NamedTuple):
    """An attention's properties that decide how it is computed."""

    device: str
    dtype: torch.dtype
    head_dim: int
    length: int
    """Number of tokens S."""
    window: int | None = None
    has_documents: bool = False
    drops: bool = False
    """Some probabilities are dropped."""
    reads: bool = False
    """Reading values of tensors is free: on a CPU, not compiled."""
    compiles: bool = True
    """Kernels for CUDA can be compiled on this machine."""
    version: tuple[int, ...] = VERSION
    """Version of torch."""


def form_of(case: Case) -> Form:
    """Return how an attention is computed.

    probabilities: with all scores in memory. causal: torch's fused kernel. by document: the same, once per document.
    flex: :func:`attend`. blocks: the fused kernel with a mask, by blocks of queries.
    """
    if case.drops:
        return "probabilities"
    if not case.has_documents and (case.window is None or case.window >= case.length):
        return "causal"
    if case.reads:
        return "by document" if case.has_documents else "blocks"
    fits = case.dtype in DTYPES and case.head_dim in HEAD_DIMS and case.length >= TILE
    return "flex" if case.device == "cuda" and fits and case.compiles and case.version >= OLDEST else "blocks"


@cache
def can_compile() -> bool:
    """Return whether this machine has what torch.compile needs for CUDA kernels: Triton and a C compiler."""
    compilers = (os.environ.get("CC") or "cc", "gcc", "clang")
    return find_spec("triton") is not None and any(map(shutil.which, compilers))


def tiles_of(document: Tensor | None, window: int | None, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the partial and the full tiles, (B or 1, 1, N, N) bool each. document: (B, S), numbers that only rise."""
    number = -(-length // TILE)
    i = torch.arange(number, device=device)[:, None]
    j = torch.arange(number, device=device)[None, :]
    seen, whole = j < i, (j < i) & ((i + 1) * TILE <= length)  # below the diagonal; with all its queries
    if window is not None:
        seen = seen & ((i - j - 1) * TILE + 1 < window)  # the nearest pair, then the farthest
        whole = whole & ((i - j + 1) * TILE - 1 < window)
    seen, whole = seen[None], whole[None]
    if document is not None:
        first, last = document[:, ::TILE], document[:, TILE - 1 :: TILE]
        if length % TILE:
            last = torch.cat([last, document[:, -1:]], dim=1)
        seen = seen & (last[:, None, :] == first[:, :, None])  # the last key's document is that of the first query
        whole = whole & (first[:, None, :] == last[:, :, None])
    seen = seen | (i == j)
    return (seen & ~whole)[:, None], whole[:, None]


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of tiles how many there are, (.., N) int32, and their columns, before all others."""
    order = torch.argsort(tiles.int(), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.int()


def block_mask(document: Tensor | None, window: int | None, length: int, device: torch.device) -> BlockMask:
    """Build FlexAttention's mask, without waiting for the device. document: (B, S) int, rising along S, or None."""
    partial, whole = tiles_of(document, window, length, device)

    def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query
        if window is not None:
            seen = seen & (query - key < window)
        return seen if document is None else seen & (document[sample, query] == document[sample, key])

    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(whole), BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(length, length)
    )


def attend_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, document: Tensor | None, window: int | None, scale: float | None
) -> Tensor:
    """Build the mask and attend; to be compiled. Arguments and result: those of :func:`attend`."""
    mask = block_mask(document, window, q.shape[-2], q.device)
    mixed: Tensor = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return mixed


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(attend_in_tiles)


def attend(q: Tensor, k: Tensor, v: Tensor, document: Tensor | None, window: int | None, scale: float | None) -> Tensor:
    """Attend causally within a window and within documents. Saves q, k, v, the output and a number per query and head.

    A dry run, whose tensors have no values, builds the mask and takes flash attention, which saves as much.

    Args:
        q: (B, H, S, d), the shape of the result. k, v: (B, G, S, d).
        document: (B, S) int, document numbers, rising along S; None: one document.
        window: number of tokens that each token attends to; None: all before it.
        scale: factor of the scores; None: 1 / sqrt(d).
    """
    if torch.compiler.is_compiling():
        return attend_in_tiles(q, k, v, document, window, scale)
    if type(q) is not Tensor:
        block_mask(document, window, q.shape[-2], q.device)
        outlined: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True, scale=scale)[0]
        return outlined
    with _disable_current_modes():  # nothing is compiled under a dispatch mode: it would run without a kernel
        mixed: Tensor = _compiled()(q, k, v, document, window, scale)
    return mixed
