"""A decoder of a user's own code that drops elements by torch's functions, in every place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout as imported_dropout

P = 0.3


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)

    def forward(self, ids: Tensor) -> Tensor:
        return imported_dropout(self.tokens(ids), P, self.training)


class Core(nn.Module):
    """Attention of q (B, H, Q, d) to k and v (B, H, S, d); the mask is by the queries' places."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor | None = None) -> Tensor:
        keys = torch.arange(k.shape[-2], device=q.device)
        if places is None:
            places = keys[None]
        sees = places[:, None, :, None] >= keys
        p = P if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, sees, dropout_p=p)


class Block(nn.Module):
    """Whole, hidden and attention's dropout; ``hidden``: one with an alpha, in place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.core = Core()
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part.view(*part.shape[:2], -1, self.head_dim).transpose(1, 2)
            for part in (self.q(y), self.k(y), self.v(y))
        )
        mixed = self.core(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), P, self.training)
        hidden = F.dropout(
            F.gelu(self.up(self.norm2(x))), p=P, training=self.training, inplace=True
        )
        return x + self.drop(F.alpha_dropout(self.down(hidden), P, self.training))


def build(vocab_size: int = 61, width: int = 16, heads: int = 4, depth: int = 2) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("embedding", Embedding(vocab_size, width))
    for i in range(depth):
        model.add_module(f"block{i}", Block(width, heads))
    model.add_module("norm", nn.LayerNorm(width))
    model.add_module("head", nn.Linear(width, vocab_size, bias=False))
    model.sharding_plan = {
        "embedding.tokens": "vocab",
        "block*.[qkv]": "column",
        "block*.core": "context",
        "block*.out": "row",
        "block*.up": "column",
        "block*.down": "row",
        "head": "vocab",
    }
    model.divisible = {"block*.[qkv]": heads}
    model.selective_recompute = ["block*.core"]
    return model


class Channels(nn.Module):
    """Channels of (B, C, L), by functions and by torch's modules of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.of_torch = nn.Sequential(nn.Dropout1d(P), nn.FeatureAlphaDropout(P))

    def forward(self, x: Tensor) -> Tensor:
        y = self.of_torch(self.mix(x))
        y = F.dropout1d(y, P, self.training) + F.feature_alpha_dropout(y, P, self.training)
        square = F.dropout2d(y.unflatten(2, (2, -1)), P, self.training)
        cube = F.dropout3d(square.unflatten(3, (2, -1)), P, self.training)
        return x + torch.dropout(cube.flatten(2), P, self.training)


def build_of_torch(vocab_size: int = 61, width: int = 16) -> nn.Sequential:
    """Return layers of torch with attention's own dropout, and dropouts of channels."""
    return nn.Sequential(
        nn.Embedding(vocab_size, width),
        nn.TransformerEncoderLayer(width, 4, 32, dropout=P, batch_first=True),
        Attended(width),
        Channels(width),
        nn.Sequential(nn.Linear(width, width), nn.AlphaDropout(P)),
        nn.Linear(width, vocab_size),
    )


class Attended(nn.Module):
    """nn.MultiheadAttention that returns its weights too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=P, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x)[0]


class Merged(nn.Module):
    """Drops (B, S H, d): tokens and heads in one dim, of which tp has every H-th part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        merged = hidden.reshape(x.shape[0], -1, 4)
        return x + self.down(F.dropout(merged, P, self.training).view(hidden.shape))


def build_merged(vocab_size: int = 61, width: int = 16) -> nn.Sequential:
    model = nn.Sequential(
        nn.Embedding(vocab_size, width), Merged(width), nn.Linear(width, vocab_size)
    )
    model.sharding_plan = {"1.up": "column", "1.down": "row"}
    return model


class Checkpointed(nn.Module):
    """Computes itself again in backward."""

    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.mix, self.reentrant = nn.Linear(width, width), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self._drop, x, use_reentrant=self.reentrant)

    def _drop(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mix(x).tanh(), P, self.training)


def build_checkpointed(
    vocab_size: int = 61, width: int = 16, reentrant: bool = False
) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(vocab_size, width),
        Checkpointed(width, reentrant),
        nn.Linear(width, vocab_size),
    )
