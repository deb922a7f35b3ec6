"""Search for layers that mix the tokens of a sample outside of attention cores,
by one forward on the meta device.

The samples of the search have p tokens per rank, for a prime p that divides no dim of a parameter:
so a dim of p elements holds tokens. p is at most S/cp. If there is no such prime, a larger one is
used, and a model that fails on longer samples is not searched. The aten operations listed here mix
tokens if they contract, reduce, sort, shift or cut a dim of p elements, or make a second one;
``arange(p)`` counts a rank's own tokens. Other operations that are not pointwise are probed with
random numbers (probe.py). Operations that gather by index, or have no CPU kernel, are missed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.context_parallel.cut import TokenCut
from meshwright.context_parallel.probe import mixes_tokens
from meshwright.errors import ModelError, UserError
from meshwright.model.build import meta_copy

SMALLEST, LARGEST = 10, 997
"""Bounds of the prime: above the first, at most the second."""
CONTRACTIONS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot")
ALONG_DIMS = (
    *(
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "argmax",
        "argmin",
        "var",
        "std",
        "var_mean",
        "prod",
        "logsumexp",
    ),
    *(
        "any",
        "all",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "logcumsumexp",
        "_softmax",
        "_log_softmax",
        "flip",
        "roll",
    ),
    *("sort", "topk", "select", "linalg_vector_norm", "norm"),
)
"""Operations on a tensor that take a dim, or several, or none for all."""
NORMS = ("native_batch_norm", "native_group_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
COUNTS = ("arange", "linspace")


def check_mixing(
    builder: str,
    model: nn.Sequential,
    inputs: Any,
    planned: Collection[str],
    cut: TokenCut,
    hooked: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that no layer mixes tokens outside of the modules named in ``planned``, on meta.

    ``inputs``: of a micro-batch, on meta; tensors (B, S, ...). ``hooked``: modules whose hooks
        share the tokens, with
    their kinds.

    Raises:
        ModelError: the first operation that does, by its module; or a hooked module is never
            called.
    """
    model = meta_copy(model)  # the model's own buffers are real
    dims = {size for parameter in model.parameters() for size in parameter.shape}
    sizes = (
        *range(min(cut.share, LARGEST), SMALLEST, -1),
        *range(max(cut.share, SMALLEST) + 1, LARGEST + 1),
    )
    prime = next(p for p in sizes if _is_prime(p) and all(size % p for size in dims))
    whole, is_longer = prime * cut.group.size, prime > cut.share  # the cut has another share below

    def resize(leaf: Tensor) -> Tensor:
        has_tokens = leaf.dim() > 1 and leaf.shape[1] == cut.length
        return leaf.new_empty(1, *([whole] if has_tokens else leaf.shape[1:2]), *leaf.shape[2:])

    search, resized, is_complete = _Search(prime), tree_map(resize, inputs), False
    entered: set[int] = set()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                enter = _Enter(search.inside, entered, name, is_planned=name in planned)
                stack.callback(module.register_forward_pre_hook(enter.push, prepend=True).remove)
                stack.callback(module.register_forward_hook(enter.pop).remove)
        stack.enter_context(cut.of_length(whole))
        stack.enter_context(torch.no_grad())
        try:
            with search:
                model(resized)
            is_complete = True
        except UserError:
            raise
        except Exception:  # a table of positions, as long as the samples
            if not is_longer:
                raise
    if is_complete:
        _check_called(
            builder,
            [name for name in hooked if id(model.get_submodule(name)) not in entered],
            hooked,
            cut,
        )
    if search.found is not None:
        where, operation = search.found
        raise ModelError(
            "MW-CP-009",
            f"{builder}: {where} mixes or counts the tokens of a sample ({operation}) outside of an"
            f" attention core of the sharding_plan, and with parallel.cp = {cut.group.size} it"
            " would see a rank's tokens alone: give it a kind in the plan if it is an attention"
            " core or indexed by position (docs/long-context.md), or use parallel.cp = 1",
        )


def _check_called(
    builder: str, idle: Sequence[str], kinds: Mapping[str, str], cut: TokenCut
) -> None:
    """Refuse modules whose hooks share the tokens and that no layer calls."""
    if idle:
        raise ModelError(
            "MW-CP-017",
            f"{builder}: {idle[0]} has the kind {kinds[idle[0]]!r} in the sharding_plan and is"
            f" never called in training: with parallel.cp = {cut.group.size} the ranks share tokens"
            " by hooks on its calls, so that each would see its own tokens alone. Call the module"
            " (self.core(q, k, v), not self.core.forward and not a function in its place), or name"
            " the one that is called",
        )


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))


class _Enter:
    """Forward hooks of one module, which keep the stack of the modules whose forward runs."""

    def __init__(
        self, inside: list[tuple[str, bool]], entered: set[int], name: str, *, is_planned: bool
    ) -> None:
        self._inside, self._entered, self._entry = inside, entered, (name, is_planned)

    def push(self, module: nn.Module, args: Any) -> None:
        """Push the module as its forward begins."""
        self._entered.add(id(module))
        self._inside.append(self._entry)

    def pop(self, module: nn.Module, args: Any, output: Any) -> None:
        """Pop it as its forward ends."""
        self._inside.pop()


class _Search(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that finds the first operation on tokens outside of planned modules."""

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens = tokens
        self.inside: list[tuple[str, bool]] = []
        self.found: tuple[str, str] | None = None
        """Name of the module, and operation."""
        self._probed: dict[object, bool] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        is_planned = any(planned for _, planned in self.inside)
        if self.found is None and not is_planned and self._mixes(func, args, kwargs or {}, output):
            self.found = (
                (self.inside[-1][0] if self.inside else "the model"),
                str(func.overloadpacket),
            )
        return output

    def _mixes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        name = func.overloadpacket.__name__.rstrip("_")
        tokens = self._tokens
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if name in COUNTS:
            return any(tuple(tensor.shape) == (tokens,) for tensor in outputs)
        most = max((tuple(tensor.shape).count(tokens) for tensor in tensors), default=0)
        if not tensors or not most:
            return False
        first = tensors[0]
        if (
            any(tuple(tensor.shape).count(tokens) > max(most, 1) for tensor in outputs)
            or "scaled_dot_product" in name
        ):
            return True
        if name in CONTRACTIONS:
            return any(tensor.shape[-1] == tokens for tensor in tensors[-2:-1]) or tensors[
                -1
            ].shape[:-1][-1:] == (tokens,)
        if name == "convolution":
            kernel = args[1].shape[2:]
            return any(
                tokens <= size < 2 * tokens and k > 1
                for size, k in zip(first.shape[2:], kernel, strict=True)
            )
        if name == "slice" or name in ALONG_DIMS:
            return self._along(name, first, args, outputs[0])
        return name in NORMS or self._probe(func, args, kwargs, output)

    def _probe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        """Probe the operation, once for the same shapes."""
        facts = tree_map(
            lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf,
            (args, kwargs),
        )
        key = (func, repr(facts))
        if key not in self._probed:
            self._probed[key] = mixes_tokens(func, args, kwargs, output, self._tokens)
        return self._probed[key]

    def _along(self, name: str, first: Tensor, args: tuple[Any, ...], output: Tensor) -> bool:
        """Return True if the operation reduces or cuts a dim of tokens."""
        if name == "slice":
            dim = args[1] if len(args) > 1 else 0
            return bool(first.shape[dim] == self._tokens != output.shape[dim])
        at = 2 if name in ("topk", "norm", "linalg_vector_norm", "roll") else 1
        last = -1 if name in ("topk", "sort") else None
        dims = args[at] if len(args) > at else last
        chosen = [dims] if isinstance(dims, int) else list(dims or range(first.dim()))
        return any(first.dim() and first.shape[dim] == self._tokens for dim in chosen)
