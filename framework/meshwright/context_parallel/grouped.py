"""Attention with cp_exchange = "keys", group of heads by group: gather the group's keys, attend,
release them.

    forward     gather k, v of group 0 | of group 1 ...             on the wire, meanwhile
                                       | attend with group 0 | attend with group 1 ...
    backward    gather the group again | reduce-scatter the gradients of the group before
                                       | attend again, block of queries by block, and its backward

Saved for backward are this rank's queries, keys and values. At most two groups' keys and values of
all tokens are in memory, 2 x 2 B S G/n d b bytes for n groups of b-byte elements; in backward also
the gradients of two. Heads are independent, so n does not affect numbers. With n = 1 the gathered
keys and values are saved, and not gathered again.

A core takes part if it has a method ``query_blocks``, see :meth:`GroupedAttention.blocks`.

Shapes: B samples, H query heads and G key-value heads of this rank, S tokens, d head_dim, n groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from meshwright.context_parallel.cut import TokenCut
from meshwright.context_parallel.exchange import KeyGathering, KeyScattering
from meshwright.errors import ModelError

PRIVATE_TORCH = {
    "torch.overrides._get_current_function_mode_stack": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""

PLACES = "places"
"""Keyword of an attention core: positions of its queries among the keys."""
BLOCKS = "query_blocks"
"""Method by which an attention core declares its blocks of queries."""


def num_groups(cp: int, num_heads: int, num_kv_heads: int, wanted: int | None = None) -> int:
    """Return n, the number of groups of heads; 0 if ``wanted`` does not divide the key-value heads.

    ``wanted``: ``parallel.cp_head_groups``. None: the smallest divisor n of G with which the
        gathered keys of a group
    have no more elements than this rank's queries, S G/n d <= S/cp H d; G if there is none.
    """
    divisors = [number for number in range(1, num_kv_heads + 1) if num_kv_heads % number == 0]
    if wanted is not None:
        return wanted if wanted in divisors else 0
    return next(
        number
        for number in divisors
        if number * num_heads >= cp * num_kv_heads or number == num_kv_heads
    )


class GroupedAttention:
    """Replacement of an attention core's forward that gathers keys group by group,
    instead of all before the call.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Tensor],
        blocks: Callable[..., Any],
        cut: TokenCut,
        wanted: int | None,
    ) -> None:
        """Wrap two methods of the core ``name``: forward, and ``query_blocks``.

        ``wanted``: see :func:`num_groups`.
        """
        self._name = name
        self._forward = forward
        self._query_blocks = blocks
        self._cut = cut
        self._wanted = wanted

    def __repr__(self) -> str:
        return f"GroupedAttention({self._wanted})"  # layers with equal attributes are alike

    def blocks(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Any, **kwargs: Any
    ) -> list[slice] | None:
        """Return the blocks of queries with which the core is called; None:
        it needs all queries and heads at once.

        The core's ``query_blocks`` takes the arguments of its forward, with this rank's keys, and
        the keywords ``places`` and ``length`` (S). Its forward must give the same numbers for a
        subset of heads and a block of queries. Only queries, keys and values may need gradients.
        """
        blocks: list[slice] | None = self._query_blocks(
            q,
            k,
            v,
            *others,
            places=self._cut.positions(q.device),
            length=self._cut.length,
            **kwargs,
        )
        return blocks

    def num_groups(self, q: Tensor, k: Tensor) -> int:
        """Return the number of groups of heads for queries (B, H, ..) and keys (B, G, ..)
        of this rank.

        Raises:
            ModelError: ``parallel.cp_head_groups`` does not divide the key-value heads.
        """
        number = num_groups(self._cut.group.size, q.shape[1], k.shape[1], self._wanted)
        if not number:
            raise ModelError(
                "MW-CP-014",
                f"{self._name}: parallel.cp_head_groups = {self._wanted} does not divide the"
                f" {k.shape[1]} key-value heads of a tensor-parallel rank: use one of their"
                " divisors, or leave the key out",
            )
        return number

    def recomputes(self, *args: Any, **kwargs: Any) -> bool:
        """Return True if backward computes this call again by itself,
        so that recompute need not wrap it.
        """
        return PLACES not in kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *others: Any, **kwargs: Any) -> Tensor:
        """Attend: q (B, H, S/cp, d), k and v (B, G, S/cp, d) -> (B, H, S/cp, d).
        Collective over cp; blocks.

        With the keyword ``places``, k and v are already gathered, (B, G, S, d): no communication.
        """
        if PLACES in kwargs:
            return self._forward(q, k, v, *others, **kwargs)
        cut, blocks = self._cut, self.blocks(q, k, v, *others, **kwargs)
        assert blocks is not None
        places, joined = cut.positions(q.device), cut.from_ranks(q.device)
        call = _Call(
            self._forward, others, kwargs, blocks, self.num_groups(q, k), cut, places, joined
        )
        mixed: Tensor = _AttendByGroup.apply(q, k, v, call)  # type: ignore[no-untyped-call]
        return mixed


class _Call(NamedTuple):
    """Non-differentiable arguments of one call of a core, for its forward and backward."""

    forward: Callable[..., Tensor]
    others: tuple[Any, ...]
    kwargs: dict[str, Any]
    blocks: Sequence[slice]
    groups: int
    cut: TokenCut
    places: Tensor
    joined: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, block: slice) -> Tensor:
        """Attend with a block of queries of some heads: (B, H/n, Q, d), k and v (B, G/n, S, d)
        -> (B, H/n, Q, d).
        """
        return self.forward(q, k, v, *self.others, **self.kwargs, places=self.places[:, block])

    def gathered(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (group, keys, values) with k and v (B, G/n, S, d);
        the all-gather of the next group overlaps.

        The caller deletes its references before the next iteration (``enumerate`` would hold some).
        """
        ks, vs = k.chunk(self.groups, 1), v.chunk(self.groups, 1)
        ahead = KeyGathering(ks[0], vs[0], self.cut, self.joined)
        for group in range(self.groups):
            keys = ahead.wait()
            if group + 1 < self.groups:
                ahead = KeyGathering(ks[group + 1], vs[group + 1], self.cut, self.joined)
            yield group, *keys
            del keys  # before the next group's are put in order


class _AttendByGroup(torch.autograd.Function):
    """Attention by groups of heads: q (B, H, S/cp, d), k and v (B, G, S/cp, d) -> (B, H, S/cp,
    d).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        out: Tensor | None = None
        saved_keys: tuple[Tensor, ...] = ()
        for group, all_k, all_v in call.gathered(k, v):
            saved_keys = (all_k, all_v) if call.groups == 1 else ()
            for block in call.blocks:
                mixed = call.attend(_of_group(q, group, call)[:, :, block], all_k, all_v, block)
                if out is None:
                    out = mixed.new_empty(*q.shape[:-1], mixed.shape[-1])
                _of_group(out, group, call)[:, :, block] = mixed
            del all_k, all_v
        assert out is not None
        ctx.save_for_backward(q, *(saved_keys or (k, v)))
        ctx.call, ctx.modes = call, _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v), call = ctx.saved_tensors, ctx.call
        needs_q, *needs_keys = ctx.needs_input_grad[:3]
        dq = torch.empty_like(q) if needs_q else None
        waiting: KeyScattering | None = None
        parts: list[tuple[Tensor, Tensor]] = []
        for group, all_k, all_v in [(0, k, v)] if call.groups == 1 else call.gathered(k, v):
            sums = _backward_of_group(ctx, q, (all_k, all_v), gradient, dq, group)
            del all_k, all_v
            if waiting is not None:
                parts.append(waiting.wait())
            waiting = KeyScattering(*sums, call.cut, call.joined) if any(needs_keys) else None
            del sums
        if waiting is not None:
            parts.append(waiting.wait())
        if not parts:
            return dq, None, None, None
        dk_parts, dv_parts = zip(*parts, strict=True)
        return dq, torch.cat(dk_parts, 1), torch.cat(dv_parts, 1), None


def _backward_of_group(
    ctx: Any,
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    gradient: Tensor,
    dq: Tensor | None,
    group: int,
) -> tuple[Tensor, Tensor]:
    """Recompute a group's attention block by block; return the gradients of its keys and values,
    (B, G/n, S, d) each.

    ``dq``: (B, H, S/cp, d), filled for these heads. Blocks add up in the order of autograd: the
        last one first.
    """
    call: _Call = ctx.call
    all_k, all_v = (tensor.detach().requires_grad_() for tensor in keys)
    sums: list[Tensor] = []
    for block in reversed(call.blocks):
        of_block = _of_group(q, group, call)[:, :, block].detach().requires_grad_(dq is not None)
        with torch.enable_grad(), _entered(ctx.modes):
            mixed = call.attend(of_block, all_k, all_v, block)
        wanted = [*([] if dq is None else [of_block]), all_k, all_v]
        gradients = list(
            torch.autograd.grad(mixed, wanted, _of_group(gradient, group, call)[:, :, block])
        )
        del mixed
        if dq is not None:
            _of_group(dq, group, call)[:, :, block] = gradients.pop(0)
        if sums:
            sums = [total.add_(tensor) for total, tensor in zip(sums, gradients, strict=True)]
        else:
            sums = gradients
    return sums[0], sums[1]


def _of_group(whole: Tensor, group: int, call: _Call) -> Tensor:
    """Return a group's heads, (B, H, ...) -> (B, H/n, ...)."""
    heads = whole.shape[1] // call.groups
    return whole.narrow(1, group * heads, heads)


@contextmanager
def _entered(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Enter the function modes that were active in forward:
    on CUDA autograd's thread runs backward without them.
    """
    now = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        for mode in modes:
            if mode not in now:
                stack.enter_context(mode)
        yield
