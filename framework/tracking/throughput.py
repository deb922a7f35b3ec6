"""Peak FLOP/s of devices: the denominator of model-FLOPs utilisation (MFU)."""

from __future__ import annotations

import torch

BF16_PEAKS = {
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
    "GB200": 2450e12,
}
"""Dense bf16 floating-point operations per second from the vendors' data sheets; sparse figures are never used."""


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the dense peak FLOP/s of the device for MFU; None if it is no CUDA device in bfloat16, or unlisted."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    for key in sorted(BF16_PEAKS, key=len, reverse=True):
        if key in name:
            return BF16_PEAKS[key]
    return None
