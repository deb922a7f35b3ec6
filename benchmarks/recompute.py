"""Saved bytes of a block, and CPU time of its forward and backward, for each kind of recompute.

python benchmarks/recompute.py [MODEL] [DTYPE] [REPEATS]     (MODEL: llama or gpt2)

The kinds take turns, one block after the other; a time is the ratio to ``none`` of the same turn,
median and range.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch

from meshwright.model.meter import Operation, OperationRecorder, StorageRegistry
from meshwright.pipeline.plan import recompute_parts, recomputed
from meshwright.pipeline.recompute import POINTWISE

HIDDEN, LENGTH, HEADS, KV_HEADS = 1024, 512, 16, 4
KINDS = {
    "none": [],
    "pointwise": [f"block0.{POINTWISE}"],
    "selective": ["*attention.core"],
    "full": [],
}


class Living(OperationRecorder):
    """Counter of the live bytes among the storages that operations made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.storages = StorageRegistry(lambda number: None)

    def record(self, operation: Operation) -> None:
        """Register the storages that an operation made."""
        given = {tensor.untyped_storage()._cdata for tensor in operation.inputs}
        for tensor in operation.outputs:
            if tensor.untyped_storage()._cdata not in given and self.storages.find(tensor) is None:
                self.sizes[self.storages.add(tensor)] = tensor.untyped_storage().nbytes()


def block(model: str, dtype: torch.dtype, kind: str) -> Callable[[Any], Any]:
    """Return one block of a model, with this kind of recompute."""
    options: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "num_layers": 1,
        "num_heads": HEADS,
    }
    if model == "llama":
        options |= {"num_kv_heads": KV_HEADS, "ffn_size": 7 * HIDDEN // 2}
    torch.manual_seed(0)
    layers = import_module(f"meshwright_models.{model}").build(
        **options, max_sequence_length=LENGTH
    )
    layer = layers.block0.to(dtype)
    if kind == "full":
        return lambda x: recomputed(layer, nullcontext, x)
    recompute_parts("block0", layer, KINDS[kind], nullcontext)
    return layer  # type: ignore[no-any-return]


def main(model: str = "llama", dtype: str = "float32", repeats: str = "9") -> None:
    """Print a table of the kinds."""
    torch.set_num_threads(1)
    blocks = {kind: block(model, getattr(torch, dtype), kind) for kind in KINDS}
    x = torch.randn(1, LENGTH, HIDDEN, dtype=getattr(torch, dtype)).requires_grad_()
    kept, times = {}, {kind: list[float]() for kind in KINDS}
    for kind, run in blocks.items():
        with Living() as living:
            out = run(x)
        kept[kind] = (
            sum(living.sizes[number] for number in living.storages.numbers())
            - out.untyped_storage().nbytes()
        )
    for _ in range(int(repeats)):
        turn = {}
        for kind, run in blocks.items():
            begin = time.process_time()
            run(x).backward(x.detach())
            turn[kind] = time.process_time() - begin
        for kind in KINDS:
            times[kind].append(turn[kind] / turn["none"])
    for kind in KINDS:
        freed = 1 - kept[kind] / kept["none"]
        ratio = (
            f"{statistics.median(times[kind]):.3f} [{min(times[kind]):.3f} .."
            f" {max(times[kind]):.3f}]"
        )
        print(f"{kind:10} {kept[kind]:>12,} bytes  {freed:5.1%} freed  time x {ratio}")


if __name__ == "__main__":
    main(*sys.argv[1:])
