"""What a device could do at best: the denominator of model-FLOPs utilisation."""

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
"""Dense bf16 floating-point operations per second, from the makers' data sheets; sparse figures are never used."""


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Dense peak of the device for the model-FLOPs utilisation; None where the comparison would mean nothing."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    for key in sorted(BF16_PEAKS, key=len, reverse=True):
        if key in name:
            return BF16_PEAKS[key]
    return None
