"""Dropout by functions: ``F.dropout`` and its kin, and the dropout of attention functions.

A layer that calls them gets one module, ``LAYER.functional_dropout``, which draws the masks of all
its calls as an ``nn.Dropout`` of that name would. A function mode around the layer's forward
replaces the functions of torch.

    F.dropout(x, p)                              one bit for each element of x (B, ...)
    F.dropout1d, 2d, 3d, feature_alpha_dropout   one for each channel, (B, C)
    F.scaled_dot_product_attention(dropout_p)    one for each probability, (B, H, L, S)
    F.multi_head_attention_forward               the same; nn.MultiheadAttention

NOTE [place by shape]: where tp or cp gives a rank a part of an activation, the mask needs to be
that part of the whole one. No module names the dim that is cut. But the whole shape of each call is
known from one forward of the plain model on meta, and the dim that is shorter on a rank is the one
that is cut. A shape that fits no cut, or two, is refused before any rank starts.

Shapes: B samples, C channels, H heads, L queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.current import CurrentMicrobatch
from meshwright.errors import ModelError
from meshwright.seeding import LayoutParts, SeededDropout, TokenPositions, keep_mask

NAME = "functional_dropout"
"""Name, in its layer, of the module that draws."""
SELU_LIMIT = 1.7580993408473766
"""Minus the limit of SELU for small inputs, which alpha dropout puts in the place of an element."""
Shard = tuple[int, int, int] | None
Cut = tuple[int, TokenPositions] | None


class Drawer(Protocol):
    """Source of the masks of functional dropouts."""

    def kept(self, like: Tensor, shape: torch.Size, p: float) -> Tensor | None:
        """Return the bool mask of the next call; None where only shapes matter.

        ``like``: a tensor of the device. ``shape``: (B, ...), local.
        """


class FunctionalDropout(SeededDropout):
    """Masks of the functional dropouts of a layer."""

    def __init__(
        self,
        name: str,
        seed: int,
        current: CurrentMicrobatch,
        calls: list[tuple[tuple[int, ...], float]],
        lengths: frozenset[int],
    ) -> None:
        """Create the module.

        Args:
            calls: shape of the mask, without the samples, and p of each call of the plain layer.
            lengths: numbers of tokens of a sample in the model's inputs.
        """
        super().__init__(max(p for _, p in calls), seed, name, current)
        self.whole = [shape for shape, _ in calls]
        self.lengths = sorted(lengths)

    def forward(self, x: Any) -> Any:
        return x  # an nn.Sequential calls its children one after the other

    def around_recompute(self) -> AbstractContextManager[object]:
        return FunctionalDropoutMode(self)

    def kept(self, like: Tensor, shape: torch.Size, p: float) -> Tensor | None:
        if self.current.sample_indices is None:  # a forward for shapes alone, or inference
            self._check_outline(shape)
            return None if like.is_meta else torch.rand(shape, device=like.device) >= p
        self.check_backward()
        shard, cut = self._place(shape)
        samples, key = self._next(shape, like.device)
        mask = keep_mask(p, key, self.golden, samples, shape, shard, cut)
        self.num_calls += 1
        return mask

    def _check_outline(self, shape: torch.Size) -> None:
        """Raise :class:`ModelError` for a call without a place. Searches for modules that mix tokens
        run layers on samples of other lengths, where no place is known.
        """
        tokens = self.parts.tokens
        if tokens is None or tokens.length in self.lengths:
            self._place(shape)
        self.num_calls += 1

    def _place(self, shape: torch.Size) -> tuple[Shard, Cut]:
        """Return the part of the whole mask that this rank needs; see NOTE [place by shape]."""
        if self.parts.is_whole:
            return None, None
        whole = self.whole[self.num_calls] if self.num_calls < len(self.whole) else None
        shard: Shard = None
        cut: Cut = None
        problem = whole is None or len(whole) != len(shape) - 1
        for dim in range(1, 0 if problem else len(shape)):
            assert whole is not None
            if shape[dim] == whole[dim - 1]:
                continue
            ways = list(_ways(self.parts, dim, shape, whole[dim - 1], self.lengths))
            if len(ways) != 1:
                problem = True
                break
            is_split, tokens = ways[0]
            problem = problem or (is_split and shard is not None) or bool(tokens and cut)
            shard = (dim, *self.parts.tp) if is_split else shard
            cut = cut if tokens is None else (dim, tokens)
        if problem:
            raise self._misplaced(shape, whole)
        return shard, cut

    def _misplaced(self, shape: torch.Size, whole: tuple[int, ...] | None) -> ModelError:
        plain = "has no such call" if whole is None else f"drops elements of (B, {_text(whole)})"
        return ModelError(
            "MW-MODEL-060",
            f"layer {self.name.removesuffix(f'.{NAME}')}: call {self.num_calls + 1} of its"
            f" functional dropouts drops elements of (B, {_text(shape[1:])}) on a rank, and the"
            f" whole layer {plain}: which part of the whole mask the rank needs cannot be told from"
            ' that. Use an nn.Dropout with its kind in the sharding_plan ("features", "heads",'
            " docs/models.md), or parallel.tp = 1 and parallel.cp = 1",
        )


def _text(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _ways(
    parts: LayoutParts, dim: int, shape: torch.Size, whole: int, lengths: list[int]
) -> Iterator[tuple[bool, TokenPositions | None]]:
    """Yield each way in which ``whole`` elements along ``dim`` can have become ``shape[dim]`` on a
    rank: (split over tp, tokens or heads that cp gives it).
    """
    tp, mine = parts.tp[1], shape[dim]
    tokens, heads = parts.tokens, parts.heads
    # in (B, tokens, D) and (B, H, tokens, S): cp has cut these, whatever tp divides
    is_of_tokens = tokens is not None and whole == tokens.length and dim == len(shape) - 2
    # along any other dim, tokens and heads may be interleaved: a slice of tp is then no interval
    is_plain = dim == len(shape) - 1 or len(shape) > 3 or whole in lengths
    if tp > 1 and is_plain and not is_of_tokens and mine * tp == whole:
        yield True, None
    cpu = torch.device("cpu")
    if tokens is not None and whole == tokens.length:
        share = tokens.positions(cpu).shape[1]
        if mine == share:
            yield False, tokens
        elif mine * tp == share:
            yield True, tokens
    is_of_heads = heads is not None and (dim, len(shape), whole) == (1, 4, heads.length * tp)
    if heads is not None and is_of_heads and mine * tp == heads.positions(cpu, tp).shape[1]:
        yield tp > 1, heads


class FunctionalDropoutMode(TorchFunctionMode):
    """Torch function mode in which functional dropouts take their masks from a drawer."""

    def __init__(self, drawer: Drawer) -> None:
        super().__init__()
        self.drawer = drawer

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        function = FUNCTIONS.get(func)
        if function is None:
            return func(*args, **(kwargs or {}))
        return function(self.drawer, *args, **(kwargs or {}))


class DrawingForward:
    """Forward of a layer whose functional dropouts draw by name."""

    def __init__(self, forward: Callable[..., Any], drawer: FunctionalDropout) -> None:
        self.forward = forward
        self.drawer = drawer

    def __repr__(self) -> str:
        return "DrawingForward()"  # equal for equal layers: outlines compare it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.drawer.num_calls = 0
        with FunctionalDropoutMode(self.drawer):
            return self.forward(*args, **kwargs)


class RecordingDrawer:
    """Drawer that records the calls of a layer on meta, and drops nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], float]] = []

    def kept(self, like: Tensor, shape: torch.Size, p: float) -> Tensor | None:
        self.calls.append((tuple(shape[1:]), float(p)))
        return None


def _is_active(p: float, training: bool) -> bool:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return training and p > 0.0


def _scaled(x: Tensor, kept: Tensor, p: float, inplace: bool) -> Tensor:
    factor = 0.0 if p >= 1.0 else 1.0 / (1.0 - p)
    return x.mul_(kept).mul_(factor) if inplace else x * kept * factor


def _affine(x: Tensor, kept: Tensor, p: float, inplace: bool) -> Tensor:
    """Return x where it is kept and SELU's limit elsewhere, with the mean and variance of x."""
    if p >= 1.0:
        return x.mul_(0.0) if inplace else x * 0.0
    scale = 1.0 / math.sqrt((SELU_LIMIT**2 * p + 1.0) * (1.0 - p))
    noise = kept.to(x.dtype)
    shift = (noise - 1.0) * (SELU_LIMIT * scale) + SELU_LIMIT * scale * p
    return x.mul_(noise * scale).add_(shift) if inplace else x * (noise * scale) + shift


def _drop(
    apply: Callable[[Tensor, Tensor, float, bool], Tensor],
    of_channels: bool,
    drawer: Drawer,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Drop elements, or channels, of ``input`` (B, C, ...), with the arguments of torch's
    functions.
    """
    if not _is_active(p, training):
        return input
    shape = input.shape[:2] if of_channels else input.shape
    kept = drawer.kept(input, shape, p)
    if kept is None:
        return input
    if of_channels:
        kept = kept.view(*shape, *[1] * (input.dim() - 2))
    return apply(input, kept, p, inplace)


def _drop_by_aten(drawer: Drawer, input: Tensor, p: float, train: bool) -> Tensor:
    return _drop(_scaled, False, drawer, input, p, train)


def _drop_alpha(
    of_channels: bool,
    drawer: Drawer,
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    return _drop(_affine, of_channels, drawer, input, p, training, inplace)


def _attend(
    drawer: Drawer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attend as ``F.scaled_dot_product_attention``: query (B, H, L, d), key and value (B, G, S, d).

    With dropout the probabilities (B, H, L, S) are kept: a fused kernel draws its own masks.
    """
    given: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal}
    if not _is_active(dropout_p, True):
        return F.scaled_dot_product_attention(query, key, value, **given, **options)
    scale = options.get("scale")
    if options.get("enable_gqa"):
        groups = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
    of_batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
    shape = torch.Size((*of_batch, query.shape[-2], key.shape[-2]))
    kept = drawer.kept(query, shape, dropout_p)
    if kept is None:
        return F.scaled_dot_product_attention(query, key, value, **given, scale=scale)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return _scaled(_softmax(scores, attn_mask is not None), kept, dropout_p, False) @ value


def _softmax(scores: Tensor, is_masked: bool) -> Tensor:
    """Return the softmax in float32 or wider; zero in rows that a mask empties, as torch has it."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if not is_masked:
        return wide.softmax(-1).to(scores.dtype)
    empty = wide.isneginf().all(-1, keepdim=True)
    return wide.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).to(scores.dtype)


def _multi_head(drawer: Drawer, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run torch's function of nn.MultiheadAttention, query (L, B, D), with functions of this file in
    the place of those that it calls.
    """
    samples = query.shape[1] if query.dim() == 3 else 1

    def drop_of_heads(weights: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        by_head = weights.view(samples, -1, *weights.shape[1:])  # from (B H, L, S)
        return _drop(_scaled, False, drawer, by_head, p, training).view(weights.shape)

    function = F.multi_head_attention_forward
    names = {
        **function.__globals__,
        "has_torch_function": lambda tensors: False,
        "dropout": drop_of_heads,
        "scaled_dot_product_attention": partial(_attend, drawer),
    }
    own = FunctionType(function.__code__, names, argdefs=function.__defaults__)
    return own(query, *args, **kwargs)


def _of_dims(dims: tuple[int, ...], function: Any, drawer: Drawer, *args: Any, **kw: Any) -> Tensor:
    """Drop channels of an input with one of these numbers of dims; another one has no samples, or
    torch refuses it.
    """
    first = args[0] if args else kw["input"]
    if first.dim() in dims:
        return _drop(_scaled, True, drawer, *args, **kw)
    return function(*args, **kw)  # type: ignore[no-any-return]


FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    F.dropout: partial(_drop, _scaled, False),
    torch.dropout: _drop_by_aten,
    F.dropout1d: partial(_of_dims, (3,), F.dropout1d),
    F.dropout2d: partial(_of_dims, (3, 4), F.dropout2d),
    F.dropout3d: partial(_of_dims, (5,), F.dropout3d),
    F.alpha_dropout: partial(_drop_alpha, False),
    F.feature_alpha_dropout: partial(_drop_alpha, True),
    F.scaled_dot_product_attention: _attend,
    F.multi_head_attention_forward: _multi_head,
}
"""Functions of torch that drop elements -> (drawer, its arguments) -> its result."""


def draw_by_name(layer: nn.Module, drawer: FunctionalDropout) -> None:
    """Replace the functional dropouts of a layer by draws by name, in place."""
    layer.add_module(NAME, drawer)
    layer.forward = DrawingForward(layer.forward, drawer)
