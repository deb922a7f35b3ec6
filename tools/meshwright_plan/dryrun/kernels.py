"""CUDA kernels whose saved tensors differ from those of a CPU,
for fake tensors on CPU that stand for a run on GPUs.

torch computes an RMSNorm on CPU by five operations, which keep four tensors of its input's size,
two of them in float32. On CUDA one kernel keeps the input and one number per row: a difference of
17 % of a Llama-3-8B rank's peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from meshwright.config import Train
from meshwright.kernels import treat_cpu_as
from meshwright.model.meter import reference
from meshwright_plan.planner.kernels import FusedNorm, stand_for


def kernels_of(train: Train, device: str, layers: nn.Module) -> AbstractContextManager[None]:
    """Return :func:`as_on_cuda` if fake tensors on CPU stand for a run on GPUs,
    else a null context.
    """
    is_for_gpus = reference(train.device, train.dtype).fused
    stand_for("cuda" if is_for_gpus else "", layers)
    return as_on_cuda() if device == "cpu" and is_for_gpus else nullcontext()


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Give fake CPU tensors CUDA's kernels, chunk sizes and saved tensors inside the context.

    ``torch.rms_norm`` is replaced, because a TorchFunctionMode is not active in ``backward``, where
    recompute runs.
    """
    torch.rms_norm = _rms_norm  # type: ignore[assignment]
    try:
        with treat_cpu_as("cuda"):
            yield
    finally:
        torch.rms_norm = _torch_rms_norm


_torch_rms_norm = torch.rms_norm


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        # CUDA has no kernel for two dtypes either
        return _torch_rms_norm(input, normalized_shape, weight, eps)
    output: Tensor = FusedNorm.apply(input, len(normalized_shape), weight)  # type: ignore[no-untyped-call]
    return output
