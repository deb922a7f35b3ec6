"""Building blocks of the models: embedding, attention over fused projections, residual block, initial weights.

Samples of several documents: the first element takes {"tokens": (B, S), "starts": (B, S) bool, True where a document
begins}. The elements then pass (x, starts). Attention stays within a document, and positions count from its beginning.
The last norm returns x alone.

Shapes: B samples, S tokens, D hidden, H query heads, G key-value groups, R = H / G query heads of a group, d head_dim.
Under tensor parallelism a module may hold a contiguous part of its rows. H and G are then local counts (H/tp, G/tp) and
follow from tensor shapes alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

RESIDUAL_WEIGHTS = ("*.attention.out.weight", "*.mlp.down.weight")
"""Projections that end a residual branch, 2 per block."""


def initialise(name: str, tensor: Tensor, *, num_layers: int, std: float = 0.02) -> None:
    """Initialise one full parameter in place from torch's default generator, as a function of its name and shape only.

    Matrices: N(0, std). Projections that end a residual branch: N(0, std / sqrt(2 L)), so that the sum over 2 L
    branches keeps the variance of one (GPT-2 paper, section 2.3). Biases 0; norm weights, the only other vectors, 1.
    """
    if name.endswith(".bias"):
        nn.init.zeros_(tensor)
    elif tensor.dim() == 1:
        nn.init.ones_(tensor)
    elif any(fnmatchcase(name, pattern) for pattern in RESIDUAL_WEIGHTS):
        nn.init.normal_(tensor, std=std / math.sqrt(2 * num_layers))
    else:
        nn.init.normal_(tensor, std=std)


def assemble(
    layers: dict[str, nn.Module],
    *,
    initialise: Callable[[str, Tensor], None],
    sharding_plan: dict[str, str],
    divisible: dict[str, int],
    tied_weights: list[tuple[str, ...]],
    selective_recompute: Sequence[str] = (),
) -> nn.Sequential:
    """Build the Sequential with the attributes of ``models/__init__.py``, tie its weights and initialise them."""
    model = nn.Sequential(OrderedDict(layers))
    for canonical, *others in tied_weights:
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(canonical))
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            initialise(name, parameter)
    carried: dict[str, object] = {"sharding_plan": sharding_plan, "divisible": divisible, "tied_weights": tied_weights}
    carried |= {"initialise": initialise, "selective_recompute": list(selective_recompute)}
    for attribute, value in carried.items():
        setattr(model, attribute, value)
    return model


def check_positive(**options: float) -> None:
    """Raise ValueError for sizes that are not positive, all in one message."""
    wrong = [f"{name}={value}" for name, value in options.items() if value <= 0]
    if wrong:
        raise ValueError(f"model options must be positive: {', '.join(wrong)}")


def check_heads(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None = None) -> None:
    """Raise ValueError with the nearest valid counts when hidden size, heads and key-value heads are not divisible."""
    if head_dim is None and hidden_size % num_heads:
        near = _nearest_divisors(hidden_size, num_heads)
        raise ValueError(f"hidden_size={hidden_size} over num_heads={num_heads} heads: use num_heads = {near}")
    if num_heads % num_kv_heads:
        near = _nearest_divisors(num_heads, num_kv_heads)
        raise ValueError(f"num_heads={num_heads} over num_kv_heads={num_kv_heads} groups: use num_kv_heads = {near}")


def _nearest_divisors(number: int, near: int) -> str:
    """Return the divisors just below and just above ``near`` as text: "8 or 12"."""
    below = max((i for i in range(1, near) if number % i == 0), default=1)
    above = min((i for i in range(near + 1, number + 1) if number % i == 0), default=number)
    return " or ".join(str(i) for i in sorted({below, above}))


Value = Tensor | tuple[Tensor, Tensor]
"""Activations x (B, S, D), or (x, starts) with the document starts (B, S) bool."""


def documents_of(starts: Tensor) -> Tensor:
    """Return each token's document number in its sample, (B, S) int64. starts: (B, S) bool, True at document starts."""
    return starts.cumsum(-1)


def positions_of(starts: Tensor) -> Tensor:
    """Return the position of each token in its document from 0, (B, S) int64. starts: (B, S) bool."""
    places = torch.arange(starts.shape[-1], device=starts.device).expand(starts.shape)
    return places - places.masked_fill(~starts, 0).cummax(-1).values


class Embedding(nn.Module):
    """Token embedding, learned positions if the model has them, dropout: token ids (B, S) int64 -> (B, S, D).

    {"tokens": ids, "starts": (B, S) bool} -> (x, starts).
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, max_sequence_length: int, *, learned_positions: bool, dropout: float
    ) -> None:
        super().__init__()
        self.max_sequence_length = max_sequence_length
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(max_sequence_length, hidden_size) if learned_positions else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor | dict[str, Tensor]) -> Value:
        """Embed ids (B, S) int64, or {"tokens", "starts"}. Return x (B, S, D), or (x, starts).

        Raises:
            ValueError: There are more than ``max_sequence_length`` tokens.
        """
        starts = None
        if isinstance(ids, dict):
            ids, starts = ids["tokens"], ids["starts"]
        length = ids.shape[1]
        if length > self.max_sequence_length:
            raise ValueError(
                f"a sequence of {length} tokens, but the model has {self.max_sequence_length} positions: "
                f"shorten the sequence (data.sequence_length) or raise model.options.max_sequence_length"
            )
        x = self.tokens(ids)  # (B, S, D)
        if self.positions is not None:
            places = torch.arange(length, device=ids.device)[None] if starts is None else positions_of(starts)
            x = x + self.positions(places)  # (1, S, D), or (B, S, D)
        x = self.dropout(x)
        return x if starts is None else (x, starts)


class Attention(nn.Module):
    """Causal self-attention, (B, S, D) -> (B, S, D), with R query heads to each key-value head.

    The rows of ``qkv`` are ordered by group, so that any contiguous run of groups is a smaller attention of its own::

        group 0                group 1
        | q0 .. qR-1 | k | v | q0 .. qR-1 | k | v | ...        each of q, k, v: head_dim rows

    With R = 1 this is GPT-2's ``[q k v]`` per head. ``dropout`` acts on the probabilities (B, H, S, S), heads in dim 1.
    ``head_dim=None`` means hidden_size / num_heads, ``out_bias=None`` the value of ``bias``. With ``qk_norm_eps``
    queries and keys first pass an RMSNorm over head_dim, one weight for all heads. ``window``: see
    :class:`AttentionCore`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool,
        dropout: float,
        rotary: nn.Module | None = None,
        head_dim: int | None = None,
        out_bias: bool | None = None,
        qk_norm_eps: float | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.heads_per_group = num_heads // num_kv_heads
        self.drops = dropout > 0
        self.core = AttentionCore(window)
        self.qkv = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=bias)
        self.q_norm = None if qk_norm_eps is None else nn.RMSNorm(self.head_dim, eps=qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else nn.RMSNorm(self.head_dim, eps=qk_norm_eps)
        self.rotary = rotary
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias if out_bias is None else out_bias)

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """Attend causally in each sample or document. x: (B, S, D); starts: (B, S) bool or None. Return (B, S, D)."""
        groups = rearrange(self.qkv(x), "b s (g r d) -> b g r s d", r=self.heads_per_group + 2, d=self.head_dim)
        q, k, v = groups[:, :, :-2], groups[:, :, -2], groups[:, :, -1]  # (B, G, R, S, d), (B, G, S, d) twice
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            cos, sin = self.rotary(q) if starts is None else self.rotary(q, positions_of(starts))
            of_q = (cos, sin) if starts is None else (cos[:, None], sin[:, None])  # q has one more dim than k
            q, k = rotate(q, *of_q), rotate(k, cos, sin)
        dropout = self.dropout if self.training and self.drops else None
        mixed = self.core(rearrange(q, "b g r s d -> b (g r) s d"), k, v, dropout, starts)  # (B, H, S, d)
        return self.out(rearrange(mixed, "b h s d -> b s (h d)"))


class AttentionCore(nn.Module):
    """Attention scores, probabilities and weighted sum: cheap to recompute and expensive to store.

    A separate module, so that ``selective_recompute`` can name it. It has no parameters. The parent passes in the
    dropout of the probabilities, whose masks are seeded by its module name in the parent. ``window``: number of tokens
    that each token attends to, itself and those just before it. None: all before it.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: nn.Module | None, starts: Tensor | None = None
    ) -> Tensor:
        """Attend: q (B, H, S, d), k and v (B, G, S, d), starts (B, S) bool or None -> (B, H, S, d). H, G: local heads.

        Runs the fused kernel, except with dropout: the kernel draws its own masks, which cannot be seeded by name.
        """
        heads_per_group, length = q.shape[1] // k.shape[1], q.shape[-2]
        sees_all = starts is None and (self.window is None or self.window >= length)
        if dropout is None and sees_all:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads_per_group > 1)
        k, v = (repeat(t, "b g s d -> b (g r) s d", r=heads_per_group) for t in (k, v))
        if dropout is None:  # keys repeated per head: no GPU kernel with a mask supports GQA
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen(length, q.device, starts))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, S, S)
        scores = scores.masked_fill(~self.seen(length, scores.device, starts), -math.inf)
        probabilities = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
        return dropout(probabilities) @ v  # type: ignore[no-any-return]

    def seen(self, length: int, device: torch.device, starts: Tensor | None = None) -> Tensor:
        """Return the attention mask, True where query i sees key j: (S, S) bool, or (B, 1, S, S) with starts (B, S)."""
        before = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        if self.window is not None:
            before = before.triu(1 - self.window)
        if starts is None:
            return before
        document = documents_of(starts)
        return (before & (document[:, :, None] == document[:, None, :]))[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of x (..., S, d) by angles given as cos and sin (..., S, d/2). Keeps x's dtype.

    The two elements of a pair are half a head apart, as in Hugging Face's checkpoints. Meta's checkpoints pair
    neighbours. That is the same model with the rows of q and k permuted.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x)). (B, S, D) -> (B, S, D).

    (x, starts) -> (x, starts).
    """

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        *,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.after_attention = nn.Dropout(dropout)
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.after_mlp = nn.Dropout(dropout)

    def forward(self, value: Value) -> Value:
        """Apply both branches. value: x (B, S, D), or (x, starts) with starts (B, S) bool. Return the same type."""
        x, starts = value if isinstance(value, tuple) else (value, None)
        x = x + self.after_attention(self.attention(self.attention_norm(x), starts))
        x = x + self.after_mlp(self.mlp(self.mlp_norm(x)))
        return x if starts is None else (x, starts)


class LastLayerNorm(nn.LayerNorm):
    """LayerNorm after the last block: x (B, S, D) or (x, starts) -> x. Later layers treat each token separately."""

    def forward(self, value: Value) -> Tensor:
        """Normalise x (B, S, D) and drop ``starts``."""
        return super().forward(value[0] if isinstance(value, tuple) else value)


class LastRMSNorm(nn.RMSNorm):
    """RMSNorm after the last block: x (B, S, D) or (x, starts) -> x."""

    def forward(self, value: Value) -> Tensor:
        """Normalise x (B, S, D) and drop ``starts``."""
        return super().forward(value[0] if isinstance(value, tuple) else value)
