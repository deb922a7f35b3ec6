"""CPU time, kept bytes and peak memory of masked attention, in blocks of queries,
by document or with one dense mask.

python benchmarks/attention_blocks.py BLOCK LENGTH WINDOW DOCUMENT     (WINDOW, DOCUMENT: tokens; 0: none)
"""

from __future__ import annotations

import resource
import sys
import time

import torch
from torch import Tensor

from meshwright_models import attention


def main(block: int, length: int, window: int, document: int) -> None:
    """Attend once with 4 heads of 64 features, 2 key-value heads, in float32 on one thread,
    and print them.
    """
    attention.QUERY_BLOCK = block
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, heads, length, 64, requires_grad=True) for heads in (4, 2, 2))
    starts = torch.zeros(1, length, dtype=torch.bool)
    starts[:, :: document or length] = True
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    begin = time.process_time()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = attention.AttentionCore(window or None)(q, k, v, None, starts if document else None)
    kept_mb = sum(kept.values()) / 1e6
    y.sum().backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{time.process_time() - begin:.2f} CPU s, kept {kept_mb:.1f} MB, peak of the process"
        f" {peak:.0f} MiB"
    )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:5]))
