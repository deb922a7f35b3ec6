"""Gateway to megatron.core.tensor_parallel; the only module that imports ``megatron``.

It returns megatron-core's autograd regions unchanged. They work on the *first* dim and take a bare
process group. They drop the all-reduce of a non-contiguous tensor without an error. Callers
therefore use ``regions.py``. The import takes seconds, so it happens at the first communication,
and never with tp = 1.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Mapping = Callable[..., Tensor]

_cuda_device = torch.cuda.current_device


def _the_cpu() -> torch.device:
    return torch.device("cpu")


class Mappings(NamedTuple):
    """megatron-core's regions: (tensor, group=process group) -> tensor."""

    copy_to: Mapping
    """Identity; backward all-reduces the gradient in place,
    and loses the sum when it is not contiguous.
    """
    reduce_from: Mapping
    """All-reduces in place, and loses the sum when the input is not contiguous;
    backward is the identity.
    """
    gather_sequence: Mapping
    """(S/tp, ...) -> (S, ...); backward reduce-scatters."""
    reduce_scatter_sequence: Mapping
    """(S, ...) partial sums -> (S/tp, ...); backward all-gathers."""
    gather_features: Mapping
    """(..., F/tp) -> (..., F); backward takes this rank's slice, without communication."""
    scatter_features: Mapping
    """(..., F) -> this rank's (..., F/tp), no communication; backward all-gathers."""


def load_mappings(device: torch.device) -> Mappings:
    """Return megatron-core's mappings for tensors on ``device``; import it on first use.

    They allocate results on ``torch.cuda.current_device()``. For CPU tensors, that function is
    patched to return the
    CPU: the only patch that they need. For CUDA tensors, torch's own function is restored.
    """
    if device.type == "cpu":
        torch.cuda.current_device = _the_cpu  # type: ignore[assignment]
    else:
        torch.cuda.current_device = _cuda_device
    if "megatron.core.tensor_parallel" not in sys.modules:
        with warnings.catch_warnings():
            # not needed here
            missing = r"(Transformer Engine and Apex are|absl\.logging is) not installed"
            warnings.filterwarnings("ignore", message=missing, category=UserWarning)
            import megatron.core.tensor_parallel  # noqa: F401
        # megatron-core calls two collectives by names that torch 2.13 deprecates; a user could not
        # change that
        warnings.filterwarnings(
            "ignore", message=r".*torch\.distributed.*is deprecated", category=FutureWarning
        )
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        scatter_to_tensor_model_parallel_region,
    )

    return Mappings(
        copy_to=copy_to_tensor_model_parallel_region,
        reduce_from=reduce_from_tensor_model_parallel_region,
        gather_sequence=gather_from_sequence_parallel_region,
        reduce_scatter_sequence=reduce_scatter_to_sequence_parallel_region,
        gather_features=gather_from_tensor_model_parallel_region,
        scatter_features=scatter_to_tensor_model_parallel_region,
    )
