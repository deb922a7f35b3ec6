"""Model sizes that torchtitan's files name by a flavor, ``model.flavor = "8B"``; torchtitan defines them in code.

Source: pytorch/torchtitan, ``torchtitan/models/llama3/__init__.py`` of February 2026 (the last version with TOML
files), and ``torchtitan/models/llama/__init__.py`` of July 2024 for Llama 2. torchtitan computes the ffn size: 2/3 of
4 x hidden size, times ``ffn_dim_multiplier``, rounded up to ``multiple_of``. Here it is written out.
"""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    """Arguments of ``meshwright.models.llama:build`` for one flavor."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    rope_theta: float


LLAMA3 = {
    "debugmodel": Size(256, 6, 16, 16, 768, 2048, 500_000.0),
    "8B": Size(4096, 32, 32, 8, 14336, 128256, 500_000.0),
    "70B": Size(8192, 80, 64, 8, 28672, 128256, 500_000.0),
    "405B": Size(16384, 126, 128, 8, 53248, 128256, 500_000.0),
}
LLAMA2 = {
    "debugmodel": Size(256, 8, 16, 16, 768, 32000, 10_000.0),
    "271M": Size(1024, 16, 8, 8, 2816, 32000, 10_000.0),
    "1B": Size(2048, 18, 16, 16, 5632, 32000, 10_000.0),
    "7B": Size(4096, 32, 32, 32, 11008, 32000, 10_000.0),
    "13B": Size(5120, 40, 40, 40, 13824, 32000, 10_000.0),
    "26B": Size(5120, 80, 40, 40, 13824, 32000, 10_000.0),
    "70B": Size(8192, 80, 64, 8, 28672, 32000, 10_000.0),
}
FLAVORS = {"llama3": LLAMA3, "llama2": LLAMA2}
"""Model name -> flavor -> sizes."""

VARIANTS = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
"""Suffixes of a flavor that change its attention and not its sizes."""
