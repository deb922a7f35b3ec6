"""Llama 3: RMSNorm before each branch, rotary positions, grouped-query attention, SwiGLU, no biases.

Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv:2407.21783), Table 3; 128,256 token vocabulary
(layers, hidden, ffn, heads, kv heads -> parameters):

    8B     32   4096  14336   32  8 ->   8,030,261,248
    70B    80   8192  28672   64  8 ->  70,553,706,496
    405B  126  16384  53248  128  8 -> 405,853,388,800

Related models are options of this one: Mistral (``sliding_window``, ``head_dim``), Qwen2 (``qkv_bias``), Qwen3
(``qk_norm``, ``head_dim``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshwright.models.blocks import (
    Attention,
    Block,
    Embedding,
    LastRMSNorm,
    assemble,
    check_heads,
    check_positive,
    initialise,
)

SHARDING_PLAN = {
    "embedding.tokens": "vocab",
    "block*.attention.qkv": "column",
    "block*.attention.dropout": "heads",
    "block*.attention.out": "row",
    "block*.mlp.gate_up": "column",
    "block*.mlp.down": "row",
    "head": "vocab",
}


class RopeScaling(NamedTuple):
    """RoPE scaling of Llama 3.1, for a model pre-trained on ``original_length`` tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> list[float]:
    """Return radians per token for the head_dim / 2 pairs: theta^(-2 i / head_dim), fastest first (Su et al. 2021).

    Llama 3.1's scaling depends on a pair's turns within the original length. Pairs with at least ``high_freq_factor``
    turns stay unchanged. Pairs with at most ``low_freq_factor`` turns are slowed by ``factor``. Between the two it
    interpolates linearly in the number of turns.
    """
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return frequencies
    scaled = []
    for frequency in frequencies:
        turns = scaling.original_length * frequency / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept_share = min(max(kept, 0.0), 1.0)
        scaled.append(frequency * (kept_share + (1 - kept_share) / scaling.factor))
    return scaled


class Rotary(nn.Module):
    """Rotary position embedding: cos and sin of the angles, each (S, head_dim / 2), for activations (..., S, head_dim).

    With positions (B, S) each is (B, 1, S, head_dim / 2).

    The frequencies stay float64 when the model is cast. In bfloat16 some pairs would be off by whole turns within 8,192
    tokens. A table of all positions would take 134 MB per layer at 131,072 tokens. Computing the angles is cheap
    compared with the attention.
    """

    frequencies: Tensor

    def __init__(self, frequencies: list[float]) -> None:
        super().__init__()
        self.values = tuple(frequencies)
        self.register_buffer("frequencies", self._on(torch.device("cpu")), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin in the dtype of x, float32 at least. x: (..., S, head_dim); positions: (B, S) or None."""
        frequencies = self.frequencies.to(x.device)
        if positions is None:
            angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64, device=x.device), frequencies)
        else:
            angles = positions[:, None, :, None] * frequencies
        dtype = torch.promote_types(x.dtype, torch.float32)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _on(self, device: torch.device) -> Tensor:
        return torch.tensor(self.values, dtype=torch.float64, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Move with the module between devices, the meta device included, but ignore dtype casts."""
        super()._apply(fn, recurse)
        self.frequencies = self._on(self.frequencies.device)
        return self


class SwiGlu(nn.Module):
    """SwiGLU feed-forward down(silu(gate(x)) * up(x)), (B, S, D) -> (B, S, D) (Shazeer 2020).

    Gate and up are one projection. Its rows are ordered in blocks, so that a contiguous run of blocks contains each
    gate row with its up row::

        | gate 0 .. f-1 | up 0 .. f-1 | gate f .. 2f-1 | up f .. 2f-1 | ...        f = block_size

    Blocks instead of single pairs keep elements contiguous in memory for vector units.
    """

    def __init__(self, hidden_size: int, ffn_size: int, num_blocks: int, *, bias: bool = False) -> None:
        super().__init__()
        self.block_size = ffn_size // num_blocks
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_size, bias=bias)
        self.down = nn.Linear(ffn_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = rearrange(self.gate_up(x), "b s (n two f) -> two b s n f", two=2, f=self.block_size)
        return self.down(rearrange(F.silu(gate) * up, "b s n f -> b s (n f)"))


def build(
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_size: int,
    max_sequence_length: int = 8192,
    rope_theta: float = 500_000.0,
    norm_eps: float = 1e-5,
    rope_scaling_factor: float = 1.0,
    rope_low_freq_factor: float = 1.0,
    rope_high_freq_factor: float = 4.0,
    rope_original_length: int = 8192,
    tied: bool = False,
    dropout: float = 0.0,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: int | None = None,
) -> nn.Sequential:
    """Build ``embedding``, ``block0`` .., ``norm``, ``head``: token ids (B, S) int64 -> logits (B, S, V).

    Also takes {"tokens": ids, "starts": (B, S) bool}: attention within each document, see ``models/blocks.py``. tp must
    divide ``num_kv_heads``.

    Args:
        rope_scaling_factor: 1 is Llama 3 as pre-trained on 8,192 tokens. 8, with the defaults of the other three
            ``rope_`` options, is the long context of Llama 3.1.
        tied: Use the token embedding's weight in the head.
        dropout: One probability for embedding, attention probabilities and end of a branch.
        head_dim: None means hidden_size / num_heads.
        qkv_bias: Add a bias to the query, key and value projection.
        out_bias: Add a bias to the attention's output projection.
        mlp_bias: Add biases to the feed-forward projections.
        qk_norm: Apply an RMSNorm to the queries and keys of each head.
        sliding_window: Number of tokens that each token attends to, itself included; None: all before it.

    Raises:
        ValueError: The sizes do not fit each other.
    """
    check_positive(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_size=ffn_size,
        max_sequence_length=max_sequence_length,
        rope_theta=rope_theta,
        rope_scaling_factor=rope_scaling_factor,
        **({} if head_dim is None else {"head_dim": head_dim}),
        **({} if sliding_window is None else {"sliding_window": sliding_window}),
    )
    check_heads(hidden_size, num_heads, num_kv_heads, head_dim)
    said = f"head_dim={head_dim}"
    if head_dim is None:
        head_dim = hidden_size // num_heads
        said = f"{hidden_size} / {num_heads} = {head_dim}"
    if head_dim % 2:
        raise ValueError(f"rotary positions need an even head_dim, got {said}")
    if rope_low_freq_factor >= rope_high_freq_factor:
        raise ValueError(
            f"rope_low_freq_factor={rope_low_freq_factor} must be below rope_high_freq_factor={rope_high_freq_factor}"
        )
    scaling = RopeScaling(rope_scaling_factor, rope_low_freq_factor, rope_high_freq_factor, rope_original_length)
    frequencies = rope_frequencies(head_dim, rope_theta, scaling if rope_scaling_factor != 1 else None)
    num_blocks = math.gcd(ffn_size, num_kv_heads)  # tp divides num_kv_heads: more blocks would have no use
    layers: dict[str, nn.Module] = {
        "embedding": Embedding(vocab_size, hidden_size, max_sequence_length, learned_positions=False, dropout=dropout)
    }
    for i in range(num_layers):
        layers[f"block{i}"] = Block(
            nn.RMSNorm(hidden_size, eps=norm_eps),
            Attention(
                hidden_size,
                num_heads,
                num_kv_heads,
                bias=qkv_bias,
                dropout=dropout,
                rotary=Rotary(frequencies),
                head_dim=head_dim,
                out_bias=out_bias,
                qk_norm_eps=norm_eps if qk_norm else None,
                window=sliding_window,
            ),
            nn.RMSNorm(hidden_size, eps=norm_eps),
            SwiGlu(hidden_size, ffn_size, num_blocks, bias=mlp_bias),
            dropout=dropout,
        )
    layers["norm"] = LastRMSNorm(hidden_size, eps=norm_eps)
    layers["head"] = nn.Linear(hidden_size, vocab_size, bias=False)
    return assemble(
        layers,
        initialise=partial(initialise, num_layers=num_layers),
        sharding_plan=SHARDING_PLAN | ({"block*.attention.[qk]_norm": "heads"} if qk_norm else {}),
        divisible={
            "block*.attention.qkv": num_kv_heads,
            "block*.attention.out": num_kv_heads,
            "block*.mlp.gate_up": num_blocks,
            "block*.mlp.down": num_blocks,
        },
        tied_weights=[("embedding.tokens.weight", "head.weight")] if tied else [],
        selective_recompute=["block*.attention.core"],
    )
