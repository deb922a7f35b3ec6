"""Rules of the tensors of a decoder with experts, and of a latent attention.

    theirs  experts.0.gate_proj (F, D)  experts.0.up_proj (F, D)  experts.1.gate_proj ...   an entry for each expert
    ours    experts.gate_up (E, 2F, D)                                                      one tensor

Every expert has a rule of its own, so that a conversion holds one expert at a time. The counts of a router, which are
zero between steps, have no counterpart in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright_interop.huggingface.convert.decoder_rules import (
    attention_rules,
    embedding_rules,
    gated_rules,
    head_rules,
    norm_rules,
)
from meshwright_interop.huggingface.convert.family import Options
from meshwright_interop.huggingface.rules import TensorMapping, unchanged

MOE_DEFAULTS: dict[str, Any] = {"scaling": 1.0, "num_groups": 1, "groups_per_token": 1, "router": "softmax"}
MOE_DEFAULTS |= {
    "group_score": "top2",
    "normalise": True,
    "balance": "none",
    "shared_ffn_size": 0,
    "shared_gate": False,
}
MOE_DEFAULTS["first_dense"] = 0
"""Options of ``moe`` that change the logits, with their defaults."""


class ExpertNames(NamedTuple):
    """Names of a mixture in transformers, below ``model.layers.N``."""

    mixture: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down."""


def mixture_rules(names: ExpertNames, options: Options) -> list[TensorMapping]:
    """Return the rules of all tensors of a model with experts."""
    moe, mappings = with_defaults_of(options["moe"]), embedding_rules(options)
    for i in range(options["num_layers"]):
        ours, theirs = f"block{i}", f"model.layers.{i}"
        attention = attention_rules if options["mla"] is None else _latent_rules
        mappings += [*attention(options, ours, theirs), *norm_rules(ours, theirs)]
        if i < moe["first_dense"]:
            mappings += gated_rules(options, f"{ours}.mlp", f"{theirs}.mlp", options["ffn_size"])
        else:
            mappings += _expert_rules(names, options, f"{ours}.mlp", f"{theirs}.{names.mixture}")
    return mappings + head_rules(options)


def _expert_rules(names: ExpertNames, options: Options, ours: str, theirs: str) -> list[TensorMapping]:
    """Return the rules of a router, its experts, one by one, and a shared network."""
    moe = with_defaults_of(options["moe"])
    mappings = [unchanged(f"{ours}.router.weight", f"{theirs}.gate.weight")]
    if moe["balance"] == "bias":
        bias = unchanged(f"{ours}.router.bias", f"{theirs}.gate.e_score_correction_bias")
        mappings.append(bias._replace(keeps_dtype=True))
    size = moe.get("expert_ffn_size") or options["ffn_size"]
    for e in range(moe["num_experts"]):
        gate, up, down = (f"{theirs}.experts.{e}.{part}.weight" for part in names.parts)
        mappings.append(TensorMapping(f"{ours}.experts.gate_up", (gate, up), 1, (size, size), place=e))
        mappings.append(TensorMapping(f"{ours}.experts.down", (down,), place=e))
    if moe["shared_ffn_size"]:
        mappings += gated_rules(options, f"{ours}.shared", f"{theirs}.shared_experts", moe["shared_ffn_size"])
    return mappings


def _latent_rules(options: Options, ours: str, theirs: str) -> list[TensorMapping]:
    """Return the rules of a latent attention and of the norm before it."""
    mla, attention, other = options["mla"], f"{ours}.attention", f"{theirs}.self_attn"
    rope, head = mla["rope_dim"], mla["nope_dim"] + mla["rope_dim"]
    mappings = [unchanged(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight")]
    if mla.get("q_rank") is None:
        mappings.append(TensorMapping(f"{attention}.q.weight", (f"{other}.q_proj.weight",), pairs=(head, rope)))
    else:
        mappings.append(unchanged(f"{attention}.q_down.weight", f"{other}.q_a_proj.weight"))
        mappings.append(unchanged(f"{attention}.q_norm.weight", f"{other}.q_a_layernorm.weight"))
        mappings.append(TensorMapping(f"{attention}.q_up.weight", (f"{other}.q_b_proj.weight",), pairs=(head, rope)))
    down = f"{other}.kv_a_proj_with_mqa.weight"
    mappings.append(TensorMapping(f"{attention}.kv_down.weight", (down,), pairs=(mla["kv_rank"] + rope, rope)))
    mappings.append(unchanged(f"{attention}.kv_norm.weight", f"{other}.kv_a_layernorm.weight"))
    mappings.append(unchanged(f"{attention}.kv_up.weight", f"{other}.kv_b_proj.weight"))
    return [*mappings, unchanged(f"{attention}.out.weight", f"{other}.o_proj.weight")]


def with_defaults_of(moe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a table ``moe``, with the defaults of those that change the logits."""
    return MOE_DEFAULTS | dict(moe)
