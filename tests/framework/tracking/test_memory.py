"""The peak of memory is a peak, in bytes."""

from __future__ import annotations

import pytest

from meshwright.mesh.device import peak_memory_bytes


@pytest.mark.long
def test_the_cpu_peak_grows_with_what_is_held_and_does_not_fall() -> None:
    room = peak_memory_bytes("cpu") + 32 * 2**20  # more than the process ever held
    held = b"x" * room
    peak = peak_memory_bytes("cpu")
    assert room <= peak < 4 * room
    del held
    assert peak_memory_bytes("cpu") >= peak


@pytest.mark.gpu
def test_the_cuda_peak_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    del held
    assert peak_memory_bytes("cuda") >= before + 2**26
