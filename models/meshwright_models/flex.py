"""Attention with a window, documents or a subset of queries by FlexAttention on CUDA,
which skips masked tiles.

    tile (i, j): queries i T .. i T + T - 1, keys j T .. j T + T - 1, T = TILE
      skipped    no query sees a key
      partial    some pairs are seen: the kernel evaluates the mask for each pair
      full       all pairs are seen: no mask

A query sees one run of keys: from the start of its document, or of its window, up to itself. Both
ends rise with the query. So the kind of a tile follows from the runs of its first and last query.
This is computed on the device, in shapes that depend on Q and S alone: no host synchronisation, and
no tensor of Q x S elements.

Shapes: B samples, Q queries, S tokens, H query heads, G key-value heads, d head_dim, M = ceil(Q /
T) tiles along Q, N = ceil(S / T) along S.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import _disable_current_modes

TILE = 128
"""Queries, and keys, of a tile: FlexAttention's default,
a multiple of the blocks of all its kernels.
"""
HEAD_DIMS = range(16, 257)
"""Sizes of heads that FlexAttention's CUDA kernels have configurations for."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (2, 11)
"""Oldest version of torch whose FlexAttention is used: older ones were not checked."""
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
    """Dropout acts on the probabilities."""
    reads: bool = False
    """Reading values of tensors costs no synchronisation: on a CPU, not compiled."""
    compiles: bool = True
    """Kernels for CUDA can be compiled on this machine."""
    version: tuple[int, ...] = VERSION
    """Version of torch."""


def form_of(case: Case) -> Form:
    """Return how an attention is computed.

    probabilities: with all scores in memory. causal: torch's fused kernel. by document: the same,
        once per document.
    flex: :func:`attend`. blocks: the fused kernel with a mask, by blocks of queries.
    """
    if case.drops:
        return "probabilities"
    if not case.has_documents and (case.window is None or case.window >= case.length):
        return "causal"
    if case.reads:
        return "by document" if case.has_documents else "blocks"
    fits = case.dtype in DTYPES and case.head_dim in HEAD_DIMS and case.length >= TILE
    return (
        "flex"
        if case.device == "cuda" and fits and case.compiles and case.version >= OLDEST
        else "blocks"
    )


@cache
def can_compile() -> bool:
    """Return whether this machine has what torch.compile needs for CUDA kernels:
    Triton and a C compiler.
    """
    compilers = (os.environ.get("CC") or "cc", "gcc", "clang")
    return find_spec("triton") is not None and any(map(shutil.which, compilers))


def tiles_of(places: Tensor, first: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the partial and the full tiles, (B or 1, 1, M, N) bool each. Arguments:
    see :func:`attend`; S: length.

    Some partial tiles have no pair where positions of neighbouring queries are apart.
    """
    key = torch.arange(-(-length // TILE), device=places.device) * TILE  # first of each tile
    (nearest, farthest), (lowest, highest) = _ends(places), _ends(first)
    seen = (lowest <= key + TILE - 1) & (farthest >= key)
    has_all = (
        torch.arange(TILE, places.shape[1] + TILE, TILE, device=places.device)[:, None]
        <= places.shape[1]
    )
    whole = (highest <= key) & (nearest >= key + TILE - 1) & has_all
    return (seen & ~whole)[:, None], whole[:, None]


def _ends(rising: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of the first and of the last query of each tile, (B or 1, Q) -> (B or 1, M,
    1).
    """
    last = rising[:, TILE - 1 :: TILE]
    if rising.shape[1] % TILE:
        last = torch.cat([last, rising[:, -1:]], dim=1)
    return rising[:, ::TILE, None], last[:, :, None]


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of set tiles in each row, (.., M) int32, and all columns (.., M, N),
    the set ones first.
    """
    order = torch.argsort(tiles.int(), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.int()


def block_mask(places: Tensor, first: Tensor, length: int) -> BlockMask:
    """Build FlexAttention's mask, without a host synchronisation. Arguments: see :func:`attend`,
    of all B samples.
    """
    partial, whole = tiles_of(places, first, length)

    def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= places[sample, query]) & (key >= first[sample, query])

    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(whole),
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(places.shape[1], length),
    )


def attend_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, first: Tensor, scale: float | None
) -> Tensor:
    """Build the mask and attend; to be compiled. See :func:`attend`; places and first are (B, Q)
    int32.
    """
    mask = block_mask(places, first, k.shape[-2])
    mixed: Tensor = flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(attend_in_tiles)


def attend(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, first: Tensor, scale: float | None
) -> Tensor:
    """Attend to one run of keys per query. Saves q, k, v,
    the output and a number per query and head.

    With fake tensors it builds the mask and runs flash attention, which saves as much. On meta it
    runs torch's attention to all keys.

    Args:
        q: (B, H, Q, d), the shape of the result. k, v: (B, G, S, d).
        places: (1 or B, Q) int, ascending: positions of the queries, and of the last key that each
            sees.
        first: (1 or B, Q) int, rising: the first key that each sees.
        scale: factor of the scores; None: 1 / sqrt(d).
    """
    # computed outside of the compiled function: torch's CPU kernel takes only inputs of the graph
    places, first = (each.int().expand(q.shape[0], -1).contiguous() for each in (places, first))
    if torch.compiler.is_compiling():
        return attend_in_tiles(q, k, v, places, first, scale)
    if q.is_meta:
        whole: Tensor = F.scaled_dot_product_attention(
            q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return whole
    if type(q) is not Tensor:
        block_mask(places, first, k.shape[-2])
        outlined: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, is_causal=True, scale=scale
        )[0]
        return outlined
    # nothing is compiled under a dispatch mode: it would run without a kernel
    with _disable_current_modes():
        mixed: Tensor = _compiled()(q, k, v, places, first, scale)
    return mixed
