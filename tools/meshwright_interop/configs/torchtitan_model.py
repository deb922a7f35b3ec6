"""Model sizes that torchtitan's files name by a flavor, ``model.flavor = "8B"``;
torchtitan defines them in code.

Source: pytorch/torchtitan, ``torchtitan/models/llama3/__init__.py`` and ``qwen3`` beside it of
February 2026 (the last version with TOML files). torchtitan computes the ffn size: 2/3 of 4 x
hidden size, times ``ffn_dim_multiplier``, rounded up to ``multiple_of``. Here it is written out.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright_interop.configs.source_keys import DEPTH_INIT, TOKENIZER, DropReason
from meshwright_interop.configs.translation import Translation


class Size(NamedTuple):
    """Arguments of ``meshwright_models.llama:build`` for one flavor."""

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
QWEN3 = {
    "debugmodel": Size(256, 8, 16, 8, 3072, 2048, 1_000_000.0),
    "0.6B": Size(1024, 28, 16, 8, 3072, 151936, 1_000_000.0),
    "1.7B": Size(2048, 28, 16, 8, 6144, 151936, 1_000_000.0),
    "4B": Size(2560, 36, 32, 8, 9728, 151936, 1_000_000.0),
    "8B": Size(4096, 36, 32, 8, 12288, 151936, 1_000_000.0),
    "14B": Size(5120, 40, 40, 8, 17408, 151936, 1_000_000.0),
    "32B": Size(5120, 64, 64, 8, 25600, 151936, 1_000_000.0),
}
"""Dense models only; heads of 128, norms of q and k; the four smallest are tied."""
FLAVORS = {"llama3": LLAMA3, "qwen3": QWEN3}
"""Model name -> flavor -> sizes."""

VARIANTS = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
"""Suffixes of a flavor that change its attention and not its sizes."""


def model(translation: Translation) -> int:
    """Translate the model's name and flavor to its sizes, and return the number of layers."""
    name = translation.text("model.name", "llama3")
    flavor = translation.text("model.flavor", "debugmodel")
    if name not in FLAVORS:
        what = f"the name {name}, only {', '.join(FLAVORS)}"
        raise translation.unsupported_model("model.name", what)
    plain = next((flavor.removesuffix(end) for end in VARIANTS if flavor.endswith(end)), flavor)
    if plain not in FLAVORS[name]:
        what = f"the flavor {name} {flavor}, only {', '.join(FLAVORS[name])}"
        raise translation.unsupported_model("model.flavor", what)
    size = FLAVORS[name][plain]
    translation.put("model.builder", "meshwright_models.llama:build")
    for option, value in size._asdict().items():
        translation.put(f"model.options.{option}", value)
    translation.put("model.options.norm_eps", 1e-6 if name == "qwen3" else 1e-5)
    translation.put("model.options.residual_init", "layer_index", DEPTH_INIT)
    if name == "qwen3":
        translation.put("model.options.head_dim", 128)
        translation.put("model.options.qk_norm", True)
        translation.put("model.options.tied", plain in ("debugmodel", "0.6B", "1.7B", "4B"))
    translation.decide(
        f"model.options: {name} {plain} is {size.num_layers} layers of {size.hidden_size},"
        f" {size.num_heads} heads, {size.num_kv_heads} kv heads, ffn {size.ffn_size},"
        f" {size.vocab_size:,} tokens"
    )
    if plain != flavor:
        why = f"the mask of {flavor} separates documents; here positions and labels too"
        translation.put("data.document_boundaries", True, why)
    assets = translation.items.get("model.hf_assets_path")
    if name == "llama3" and assets is not None and assets.key == "model.hf_assets_path":
        reason = (
            "torchtitan scales rotary positions as Llama 3.1 since October 2025; set 1.0 for an"
            " older file"
        )
        translation.put("model.options.rope_scaling_factor", 8.0, reason)
    translation.drop("model.hf_assets_path", DropReason.BY_HAND, TOKENIZER)
    return size.num_layers
