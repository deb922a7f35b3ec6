"""Bounds of a model that a config.json of anyone describes: its fields,
and the tensors that it fills on the CPU.

config.json     fields within bounds                          before transformers reads them
the skeleton    parameters on meta, at any size
                buffers on the CPU: at most MAX_FILLED elements, counted before they are allocated
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.errors import ModelError
from meshwright.system.bounded import shortened
from meshwright.system.numbers import MAX_INT64

MAX_LAYERS = 512
MAX_HEADS = 2**16
MAX_EXPERTS = 2**12
MAX_WIDTH = 2**24
MAX_ROWS = 2**31
"""Largest vocabulary and largest number of positions."""
MAX_FILLED = 2**28
"""Largest number of elements of a tensor that building the model fills on the CPU:
1 GiB in float32.
"""
MAX_FILLED_IN_ALL = 2**30
"""Largest number of elements that all these operations fill together."""


class FieldBounds(NamedTuple):
    """Bounds of the numbers in fields whose name matches ``pattern`` as a whole."""

    pattern: re.Pattern[str]
    low: int
    """Lowest value."""
    high: int


COUNTS = (
    FieldBounds(re.compile(r"num_hidden_layers|num_layers|n_layers?"), 1, MAX_LAYERS),
    FieldBounds(
        re.compile(r"num_attention_heads|num_key_value_heads|num_heads|n_heads?|head_dim"),
        1,
        MAX_HEADS,
    ),
    FieldBounds(re.compile(r".*layers?"), -1, MAX_LAYERS),
    FieldBounds(re.compile(r".*heads?(_.*)?"), -1, MAX_HEADS),
    FieldBounds(re.compile(r".*experts?(_.*)?"), -1, MAX_EXPERTS),
    FieldBounds(re.compile(r"hidden_size|vocab_size|n_embd|d_model"), 1, MAX_WIDTH),
    FieldBounds(re.compile(r".*(_size|_dim|_rank|_inner)|d_(ff|kv)"), -1, MAX_WIDTH),
    FieldBounds(re.compile(r".*(position|vocab|sequence|length|window).*"), -1, MAX_ROWS),
)
"""Bounds of whole numbers; the first pattern that matches counts.
Lists hold several of such numbers.
"""
DIVISORS = re.compile(
    r"(.*_)?rope_theta|rotary(_emb)?_base|rope_base|rope_local_base_freq|beta_(fast|slow)|"
    r"factor|.*_freq_factor|(attention|short|long|partial_rotary)_factor|.*scaling_factor|"
    r"original_max_position_embeddings|(.*_)?(eps|epsilon)|logits_scaling|query_pre_attn_scalar|.*_softcapping"
)
"""Fields that the forward divides by, or raises to a power: finite and above 0."""
MAY_BE_INFINITE = re.compile(r".*limit.*")


def check_fields(fields: Mapping[str, Any], overrides: Mapping[str, Any], place: str) -> None:
    """Check all numbers of a config.json, at any depth.

    Args:
        fields: The fields, with ``overrides`` in place.
        overrides: ``model.options``, which errors name instead of the file.
        place: The file.

    Raises:
        ModelError: a number is out of its bounds, all such fields are listed.
    """
    problems = []
    for names, value in numbers_in(fields, ()):
        wanted = _wanted(names[-1], value)
        if wanted is not None:
            where = "model.options." if names[0] in overrides else f"{place}: "
            problems.append(f"{where}{'.'.join(names)} = {shortened(str(value), 40)}: {wanted}")
    if problems:
        raise ModelError("MW-INTEROP-055", "\n".join(problems[:20]))


def numbers_in(value: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int | float]]:
    """Yield (keys that lead to it, number) for each number in a tree of tables and lists."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from numbers_in(inner, (*names, str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from numbers_in(inner, names)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield names, value


def _wanted(name: str, value: int | float) -> str | None:
    """Return what a field needs instead of this number; None: the number is within its bounds."""
    if isinstance(value, float) and not math.isfinite(value):
        may_be = MAY_BE_INFINITE.fullmatch(name) is not None and not math.isnan(value)
        return None if may_be else "a finite number is needed"
    if DIVISORS.fullmatch(name):
        return (
            None
            if 0 < value < MAX_INT64
            else "a number above 0 and below 2^63 is needed: the model divides by it"
        )
    if isinstance(value, float):
        return None
    found = next((bounds for bounds in COUNTS if bounds.pattern.fullmatch(name)), None)
    low, high = (-MAX_INT64, MAX_INT64) if found is None else (found.low, found.high)
    return None if low <= value <= high else f"a whole number from {low:,} to {high:,} is needed"


class FillLimit(TorchDispatchMode):
    """Dispatch mode that refuses operations whose results
    on the CPU would exceed ``MAX_FILLED`` elements.

    Each operation runs on meta first, which takes no memory. Views, and tensors that are only
    reserved (torch.empty), as parameters are before they move to meta, cost nothing.
    """

    def __init__(self, place: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = place
        self._filled = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_free(func, args, kwargs):
            numel = _numel_of_result(func, args, kwargs)
            self._filled += numel
            if numel > MAX_FILLED or self._filled > MAX_FILLED_IN_ALL:
                what = (
                    f"a tensor of {numel:,}"
                    if numel > MAX_FILLED
                    else f"tensors of {self._filled:,}"
                )
                most = MAX_FILLED if numel > MAX_FILLED else MAX_FILLED_IN_ALL
                raise ModelError(
                    "MW-INTEROP-145",
                    f"{self._place}: building it would fill {what} elements outside of its weights"
                    f" (in {func._schema.name.partition('::')[2]}), and at most {most:,} are"
                    " allowed: correct the sizes in it, such as max_position_embeddings",
                )
        return func(*args, **kwargs)


def _is_free(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True for an operation on meta, a view, and one that only reserves memory."""
    tensors = [each for each in tree_leaves((args, dict(kwargs))) if isinstance(each, Tensor)]
    on_meta = any(each.is_meta for each in tensors) or str(kwargs.get("device", "")) == "meta"
    is_view = any(
        each.alias_info is not None and not each.alias_info.is_write
        for each in func._schema.returns
    )
    return (
        on_meta
        or is_view
        or func._schema.name.partition("::")[2].startswith(("empty", "new_empty"))
    )


def _numel_of_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the elements of the largest result; 0 if that cannot be computed on meta."""

    def on_meta(each: Any) -> Any:
        if isinstance(each, Tensor):
            return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        return torch.device("meta") if isinstance(each, torch.device) else each

    moved = tree_map(on_meta, dict(kwargs))
    if any(argument.name == "device" for argument in func._schema.arguments):
        moved["device"] = torch.device("meta")
    with _disable_current_modes():
        try:
            result = func(*tree_map(on_meta, args), **moved)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return 0
    return max(
        (each.numel() for each in tree_leaves(result) if isinstance(each, Tensor)), default=0
    )
