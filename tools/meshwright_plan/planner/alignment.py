"""Warnings about sizes that are no multiple of 8 on a rank,
where 16-bit products use tensor cores inefficiently.

    weights    local shape of each parameter on a tp rank       vocabulary, hidden size, feed-forward size
    attention  head dim of its kernel, or of unfused products   hidden size over heads

Each warning names the next larger size of which every rank gets a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from meshwright.config import Model, RunConfig
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.operations import WorkKind

MULTIPLE = 8
"""Number of 16-bit elements in the 16 bytes that tensor cores load at once."""
SMALLEST = 8
"""Smaller sizes get no warning, as they are vectors in effect: a head with one output,
a router among few experts.
"""


def alignment_warnings(cache: ModelCache, hardware: Hardware, config: RunConfig) -> list[str]:
    """Return a sentence for each misaligned size of the model in the layout of ``config``;
    none on a CPU.
    """
    if hardware.kind != "cuda" or config.train.dtype not in ("bfloat16", "float16"):
        return []
    tp, sequence = config.parallel.tp, config.parallel.sequence and config.parallel.tp > 1
    found: dict[tuple[int, int], str] = {}
    for name, parameter in cache.split(tp, sequence).layers.named_parameters():
        full = cache.model.layers.get_parameter(name)
        for local, whole in _misaligned(parameter, full):
            found.setdefault((local, whole), name)
    lines = [_line(config.model, local, whole, name, tp) for (local, whole), name in found.items()]
    return lines + [
        f"head dim {dim}: 16-bit attention uses tensor cores inefficiently; the next good size is"
        f" {_next(dim)}"
        for dim in sorted(_head_dims(cache, config))
        if dim % MULTIPLE
    ]


def _misaligned(local: Tensor, full: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (size on a rank, whole size) of each of the last two dims of a weight
    that is no multiple of 8.
    """
    if local.dim() < 2 or local.dim() != full.dim():
        return
    for size, whole in list(zip(local.shape, full.shape, strict=True))[-2:]:
        if size % MULTIPLE and whole >= SMALLEST:
            yield size, whole


def _line(model: Model, local: int, whole: int, name: str, tp: int) -> str:
    # a vocabulary is padded: its parts are rounded up
    parts = tp if local != whole else 1
    keys = [
        key
        for key, value in model.options.items()
        if value == whole and not isinstance(value, bool)
    ]
    what = f"model.options.{keys[0]} = {whole:,}" if keys else f"{name} has a dim of {whole:,}"
    on_rank = f", {local:,} on each of {parts} tp ranks" if parts > 1 else ""
    better = -(-whole // (MULTIPLE * parts)) * MULTIPLE * parts
    return (
        f"{what}{on_rank}: 16-bit products use tensor cores inefficiently; the next good size is"
        f" {better:,}"
    )


def _next(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


def _head_dims(cache: ModelCache, config: RunConfig) -> set[int]:
    """Return the head dims of all attention, whether its kernel is fused or not."""
    dims: set[int] = set()
    for layer in {
        id(layer.forward): layer for layer in cache.profiles(config, splits_backward=False)
    }.values():
        for work in layer.forward:
            batch, _, columns, inner = work.shape
            if work.kind is WorkKind.ATTENTION:
                dims.add(inner)
            elif work.kind is WorkKind.PRODUCT and batch > 1 and layer.attended:
                dims.add(min(columns, inner))
    return dims
