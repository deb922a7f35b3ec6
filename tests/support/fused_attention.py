"""A small model in two forms with equal initial weights: q, k, v in one fused linear,
or in one linear each.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

HEAD_DIM, HEADS, WIDTH = 4, 4, 16


class Mixer(nn.Module):
    """Causal attention with a residual, (B, S, D) -> (B, S, D),
    over projections in one linear or in three.
    """

    def __init__(self, fused: bool) -> None:
        super().__init__()
        names = ["qkv"] if fused else ["q", "k", "v"]
        for name in names:
            self.add_module(name, nn.Linear(WIDTH, len(name) * HEADS * HEAD_DIM, bias=False))
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        if self.names == ["qkv"]:
            q, k, v = rearrange(
                self.qkv(x), "b s (h three d) -> three b h s d", three=3, d=HEAD_DIM
            )
        else:
            parts = [self.get_submodule(name)(x) for name in self.names]
            q, k, v = (rearrange(part, "b s (h d) -> b h s d", d=HEAD_DIM) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(rearrange(mixed, "b h s d -> b s (h d)"))


def fused_from(parts: list[Tensor]) -> Tensor:
    """Concatenate q, k, v (H d, D) each to a fused weight (3 H d, D): rows of q, k, v of head 0,
    then of head 1, ...
    """
    return rearrange(torch.stack(parts), "three (h d) i -> (h three d) i", d=HEAD_DIM)


@torch.no_grad()
def initialise(name: str, tensor: Tensor) -> None:
    """Draw a weight. q, k and v have seeds of their own,
    so that fused and separate linears are equal.
    """

    def drawn(seed: int) -> Tensor:
        return 0.3 * torch.randn(
            HEADS * HEAD_DIM, WIDTH, generator=torch.Generator().manual_seed(seed)
        )

    last = name.split(".")[-2]
    if last == "qkv":
        tensor.copy_(fused_from([drawn(ord(each)) for each in "qkv"]))
    elif last in ("q", "k", "v"):
        tensor.copy_(drawn(ord(last)))
    else:
        nn.init.normal_(tensor, std=0.3)


def build(fused: bool, vocab_size: int = 16) -> nn.Sequential:
    """Build ``embedding``, two mixers, ``head``."""
    layers: dict[str, nn.Module] = {"embedding": nn.Embedding(vocab_size, WIDTH)}
    layers |= {f"block{i}": Mixer(fused) for i in range(2)}
    model: Any = nn.Sequential(OrderedDict(layers, head=nn.Linear(WIDTH, vocab_size, bias=False)))
    model.initialise = initialise
    model.sharding_plan = {
        "embedding": "vocab",
        "block*.[qkv]": "column",
        "block*.out": "row",
        "head": "vocab",
    }
    if fused:
        model.sharding_plan = {
            "embedding": "vocab",
            "block*.qkv": "column",
            "block*.out": "row",
            "head": "vocab",
        }
        model.matrices = {"block*.qkv": (HEAD_DIM, HEAD_DIM, HEAD_DIM)}
    return model  # type: ignore[no-any-return]
