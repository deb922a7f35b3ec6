"""Models that are one nn.Module, as published ones are:
their forward runs over an nn.ModuleList.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D, LENGTH, HEADS, DEPTH = 24, 16, 8, 2, 3


class Attention(nn.Module):
    """Causal or full self-attention with one projection of queries, keys and values."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.c_attn = nn.Linear(D, 3 * D)
        self.c_proj = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in self.c_attn(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(D), Attention(is_causal=is_causal)
        self.ln_2 = nn.LayerNorm(D)
        self.c_fc, self.c_proj = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """Shape of nanoGPT: a ModuleDict with the blocks, a head tied to the tokens,
    weights set by ``apply``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(V, D),
                "wpe": nn.Embedding(LENGTH, D),
                "h": nn.ModuleList(Block(is_causal=True) for _ in range(DEPTH)),
                "ln_f": nn.LayerNorm(D),
            }
        )
        self.lm_head = nn.Linear(D, V, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * DEPTH))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.transformer.wte(ids) + self.transformer.wpe(places)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class ViT(nn.Module):
    """Vision transformer with a class token and positions that are parameters
    of the whole module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, D, 2, stride=2)
        self.cls = nn.Parameter(torch.zeros(1, 1, D))
        self.positions = nn.Parameter(torch.zeros(1, 5, D))
        self.blocks = nn.ModuleList(Block(is_causal=False) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 10)
        nn.init.trunc_normal_(self.cls, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def build(how: str) -> nn.Module:
    """Build a module as published code does: no nn.Sequential."""
    return GPT() if how == "gpt" else ViT()
