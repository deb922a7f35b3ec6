"""CPU time and kernels of one block's rotary angles: computed at each call,
and read from the table of the process.

python benchmarks/rotary.py LENGTH
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright_models.llama import rope_frequencies
from meshwright_models.rotary import Rotary, _compute

CALLS = 20
NO_KERNELS = {"select", "slice", "view", "unsqueeze", "promote_types"}


class Kernels(TorchDispatchMode):
    """Counts operators that run a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += func.overloadpacket.__name__ not in NO_KERNELS
        return func(*args, **(kwargs or {}))


def measure(name: str, call: Callable[[], object]) -> None:
    """Print the fewest CPU milliseconds of CALLS calls, and the kernels of one."""
    call()
    times = []
    for _ in range(CALLS):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    with Kernels() as kernels:
        call()
    print(f"{name}: {1e3 * min(times):.3f} CPU ms, {kernels.counts.total()} kernels")


def main(length: int) -> None:
    """Measure Llama-3's 64 pairs on one thread, bfloat16 activations."""
    torch.set_num_threads(1)
    module = Rotary(rope_frequencies(128, 500_000.0))
    x = torch.zeros(1, 1, length, 128, dtype=torch.bfloat16)
    measure("computed", lambda: _compute(module.frequencies, 1.0, length, x.device, torch.float32))
    measure("table", lambda: module(x))


if __name__ == "__main__":
    main(int(sys.argv[1]))
