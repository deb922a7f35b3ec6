"""Multi-head latent attention of DeepSeek-V2 and -V3 (arXiv:2405.04434, section 2.1;
arXiv:2412.19437, section 2.1.1).

    x --> q_down --> q_norm --> q_up ----------> q of each head: | nope | rope |
    x --> kv_down --> | latent | rope |
                        |         '------------> rotary key, one for all heads
                        '--> kv_norm --> kv_up -> of each head: | k nope | v |

Queries, and keys with values, pass through vectors of low rank. Only the ``rope`` features are
rotated. Without ``q_rank`` the queries have one projection ``q``.

Under tensor parallelism the heads are split: ``q_up``, ``kv_up`` and ``out`` by a sharding rule.
The projections down are whole on every rank, on all tokens.

Shapes: B samples, S tokens, D hidden, H heads (H/tp under tp), d = nope + rope features of a query
and a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from meshwright_models.attention import AttentionCore, positions_of, rotate
from meshwright_models.option_tables import read_table
from meshwright_models.sizes import check_positive

LATENT_PLAN: dict[str, Any] = {
    "block*.attention.rotary": "positions",
    "block*.attention.core": "context",
    "block*.attention.dropout": "heads",
}
"""Sharding plan of the submodules; :func:`split_heads` is the rule of the module."""
UNUSED = {
    "head_dim": None,
    "qk_norm": False,
    "qkv_bias": False,
    "out_bias": False,
    "mup_base_size": None,
}
"""Options that a latent attention does not have, with their defaults."""


class LatentOptions(NamedTuple):
    """Sizes of a multi-head latent attention: the table ``model.options.mla``."""

    kv_rank: int
    """Features of the vector that keys and values are computed from."""
    nope_dim: int
    """Features of a head that have no position."""
    rope_dim: int
    """Rotated features of a head."""
    v_dim: int
    """Features of a value."""
    q_rank: int | None = None
    """Features of the vector that queries are computed from. None: queries have one projection."""
    norm_eps: float | None = None
    """eps of the norms of these vectors. None: the model's."""

    def score_divisor(self, scale: float) -> float | None:
        """Return the divisor of the scores q k, sqrt(d) / ``scale``; None for sqrt(d)."""
        return None if scale == 1 else math.sqrt(self.nope_dim + self.rope_dim) / scale


class LatentAttention(nn.Module):
    """Causal multi-head latent attention, (B, S, D) -> (B, S, D)."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        sizes: LatentOptions,
        *,
        norm: Callable[[int], nn.Module],
        rotary: nn.Module,
        dropout: float,
        core: AttentionCore,
    ) -> None:
        super().__init__()
        self.sizes, self.num_heads = sizes, num_heads
        width = num_heads * (sizes.nope_dim + sizes.rope_dim)
        if sizes.q_rank is None:
            self.q = nn.Linear(hidden_size, width, bias=False)
        else:
            self.q_down = nn.Linear(hidden_size, sizes.q_rank, bias=False)
            self.q_norm = norm(sizes.q_rank)
            self.q_up = nn.Linear(sizes.q_rank, width, bias=False)
        self.kv_down = nn.Linear(hidden_size, sizes.kv_rank + sizes.rope_dim, bias=False)
        self.kv_norm = norm(sizes.kv_rank)
        self.kv_up = nn.Linear(
            sizes.kv_rank, num_heads * (sizes.nope_dim + sizes.v_dim), bias=False
        )
        self.rotary = rotary
        self.core = core
        self.drops = dropout > 0
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(num_heads * sizes.v_dim, hidden_size, bias=False)
        self.fused_rows = {
            "kv_down": (sizes.kv_rank, sizes.rope_dim),
            "kv_up": (sizes.nope_dim, sizes.v_dim),
        }

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """Attend causally in each sample or document. x: (B, S, D); starts: (B, S) bool or None.
        Return (B, S, D).
        """
        sizes = self.sizes
        queries = self.q(x) if sizes.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        q = rearrange(queries, "b s (h d) -> b h s d", d=sizes.nope_dim + sizes.rope_dim)
        latent, k_rope = self.kv_down(x).split((sizes.kv_rank, sizes.rope_dim), dim=-1)
        k_and_v = rearrange(
            self.kv_up(self.kv_norm(latent)), "b s (h d) -> b h s d", d=sizes.nope_dim + sizes.v_dim
        )
        k_nope, v = k_and_v.split((sizes.nope_dim, sizes.v_dim), dim=-1)
        q_nope, q_rope = q.split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        cos, sin = self.rotary(q) if starts is None else self.rotary(q, positions_of(starts))
        k_rope = rotate(k_rope.unsqueeze(1), cos, sin)  # (B, 1, S, rope)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)  # (B, H, S, d)
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
        dropout = self.dropout if self.training and self.drops else None
        return self.out(rearrange(self.core(q, k, v, dropout, starts), "b h s d -> b s (h d)"))


def split_heads(layer: LatentAttention, tp_rank: int, tp: int) -> dict[str, Any]:
    """Return the sharding rule of a latent attention: its heads are split,
    its low-rank projections are whole.
    """
    if layer.num_heads % tp:
        raise ValueError(
            f"its {layer.num_heads} heads cannot be split over parallel.tp = {tp}: choose a divisor"
        )
    up = "q.weight" if layer.sizes.q_rank is None else "q_up.weight"
    return {"dims": {up: 0, "kv_up.weight": 0, "out.weight": 1}}


def latent_of(options: Mapping[str, Any]) -> LatentOptions | None:
    """Return the sizes that a builder's table ``mla`` gives; None without one.

    Raises:
        ValueError: a size is missing, unknown or not a positive integer, or an option that MLA does
            not have is set.
    """
    given = options["mla"]
    if given is None:
        return None
    sizes = read_table("mla", given, LatentOptions)
    check_positive(**{f"mla.{name}": value for name, value in sizes._asdict().items()})
    if sizes.rope_dim % 2:
        raise ValueError(
            f"rotary positions need an even number of features, got mla.rope_dim={sizes.rope_dim}"
        )
    if options["num_kv_heads"] != options["num_heads"]:
        raise ValueError(
            f"mla with num_kv_heads={options['num_kv_heads']}: every head has keys of its own; set"
            f" it to num_heads = {options['num_heads']}"
        )
    unused = [
        f"{name}={options[name]}" for name, default in UNUSED.items() if options[name] != default
    ]
    if unused:
        raise ValueError(
            f"mla with {', '.join(unused)}, which a latent attention does not have: leave one out"
        )
    return sizes
