"""Model with the operations of GPT-NeoX when Pythia was trained, copies included,
for the planner to profile.

Black et al. 2022 (arXiv:2204.06745), Biderman et al. 2023; operations in the order of
EleutherAI/gpt-neox at 8dc25da (January 2023), ``megatron/model/transformer.py``: activations (S, B,
D), rotary on a quarter of each head, queries, keys and values packed for FlashAttention 1, both
branches on the same input, the loss in place over float32 logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_models.blocks import assemble, initialise

SHARDING_PLAN = {
    "embedding.tokens": "vocab",
    "block*.attention.qkv": "column",
    "block*.attention.out": "row",
    "block*.mlp.up": "column",
    "block*.mlp.down": "row",
    "head": "vocab",
}
ROTARY_SHARE = 0.25


class Embedding(nn.Module):
    """Embedding of token ids, (B, S) -> (S, B, D)."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids).transpose(0, 1).contiguous()


class Norm(nn.LayerNorm):
    """Norm after the blocks, (S, B, D) -> (B, S, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1).contiguous())


class Attention(nn.Module):
    """Self-attention with rotary positions, (S, B, D) -> (S, B, D)."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        length, batch, _ = x.shape
        heads = self.qkv(x).view(length, batch, -1, 3 * self.head_dim)
        q, k, v = heads.split(self.head_dim, dim=-1)  # (S, B, H, d)
        q, k = self.turned(q), self.turned(k)
        q, k, v = (
            each.transpose(0, 1).reshape(batch * length, 1, -1, self.head_dim) for each in (q, k, v)
        )
        # packed for the kernel; its gradient comes packed too, and is split without a copy
        with torch.no_grad():
            torch.cat((q, k, v), dim=1)
        q, k, v = (
            each.view(batch, length, -1, self.head_dim).transpose(1, 2) for each in (q, k, v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, S, d)
        return self.out(mixed.permute(2, 0, 1, 3).contiguous().flatten(2))

    def turned(self, x: Tensor) -> Tensor:
        """Rotate the first dims of each head by their positions' angles; x: (S, B, H, d)."""
        turns = int(self.head_dim * ROTARY_SHARE)
        rates = 10_000 ** (-torch.arange(0, turns, 2, device=x.device, dtype=torch.float32) / turns)
        angles = torch.arange(len(x), device=x.device)[:, None, None, None] * torch.cat(
            (rates, rates)
        )
        turning, passing = x[..., :turns], x[..., turns:]
        first, second = turning.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
        turning = turning * angles.cos().to(x.dtype) + crossed * angles.sin().to(x.dtype)
        return torch.cat((turning, passing), dim=-1)


class Mlp(nn.Module):
    """Feed-forward layer, (S, B, D) -> (S, B, D); bias and GELU run in one kernel."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, ffn_size)
        self.down = nn.Linear(ffn_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Parallel block x + attention(norm(x)) + mlp(norm(x)) with two norms, (S, B, D) -> (S, B,
    D).
    """

    def __init__(self, hidden_size: int, num_heads: int, ffn_size: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp = Mlp(hidden_size, ffn_size)

    def forward(self, x: Tensor) -> Tensor:
        # a kernel of its own, with the bias
        attended = F.dropout(self.attention(self.attention_norm(x)), 0.0)
        return x + (self.mlp(self.mlp_norm(x)) + attended)


class _LossInPlace(torch.autograd.Function):
    """Loss of float32 logits (N, V) -> (N,), in place: logits become probabilities,
    and then their own gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        logits.sub_(logits.max(dim=-1).values[:, None])
        right = logits.gather(-1, labels[:, None])[:, 0]
        torch.exp(logits, out=logits)
        sums = logits.sum(dim=-1)
        logits.div_(sums[:, None])
        ctx.save_for_backward(logits, labels)
        return sums.log() - right

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        probabilities, labels = ctx.saved_tensors
        minus_one = torch.full_like(gradient, -1.0)[:, None]
        probabilities.scatter_add_(-1, labels[:, None], minus_one)
        return probabilities.mul_(gradient[:, None]), None


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token, (B, S, V), (B, S) -> (B, S)."""
    wide = logits.to(torch.float32, copy=True).flatten(0, -2)
    found: Tensor = _LossInPlace.apply(wide, labels.flatten())  # type: ignore[no-untyped-call]
    return found.view_as(labels)


def build(
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    ffn_size: int,
    own_loss: bool = True,
) -> nn.Sequential:
    """Build ``embedding``, ``block0`` .., ``norm``, ``head``: token ids (B, S) int64 -> logits (B,
    S, V).

    ``own_loss``: use GPT-NeoX's loss; otherwise this framework's, which tp ranks share.
    """
    layers: dict[str, nn.Module] = {"embedding": Embedding(vocab_size, hidden_size)}
    for index in range(num_layers):
        layers[f"block{index}"] = Block(hidden_size, num_heads, ffn_size)
    layers["norm"] = Norm(hidden_size)
    layers["head"] = nn.Linear(hidden_size, vocab_size, bias=False)
    model = assemble(
        layers,
        initialise=partial(initialise, num_layers=num_layers),
        sharding_plan=dict(SHARDING_PLAN),
        divisible={"block*.attention.qkv": num_heads, "block*.attention.out": num_heads},
        tied_weights=[],
        selective_recompute=[],
        attributes={},
    )
    if own_loss:
        model.loss = loss  # type: ignore[assignment]
    return model
