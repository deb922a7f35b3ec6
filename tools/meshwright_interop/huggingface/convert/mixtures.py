"""Mixtral, OLMoE, Qwen3-MoE and DeepSeek-V3, built by ``meshwright_models.llama:build`` with ``moe`` and ``mla``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from meshwright_interop.huggingface.convert.decoders import (
    LLAMA,
    layer_types,
    misfit,
    other_bias,
    read_common,
    write_common,
    write_qwen3,
)
from meshwright_interop.huggingface.convert.family import Family, Options
from meshwright_interop.huggingface.convert.mixture_rules import (
    MOE_DEFAULTS,
    ExpertNames,
    mixture_rules,
    with_defaults_of,
)
from meshwright_interop.huggingface.convert.settings import MAX_LAYERS, MAX_WIDTH, Settings

MAX_EXPERTS = 2**14
MAX_TENSORS = 2**18
"""Upper limit of the experts of all layers together."""
LATENT_EPS = 1e-6
"""eps of DeepSeek-V3's norms of low rank, whatever ``rms_norm_eps`` is."""
DEEPSEEK: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "attention_bias": (False,),
}
"""Field -> its supported values, the default first."""


def _read_loss(settings: Settings) -> None:
    """Note a loss of the routers that transformers would add in training; the logits do not depend on it."""
    coefficient = settings.get("router_aux_loss_coef")
    if settings.flag("output_router_logits", False) and coefficient:
        settings.notes.append(
            f"{settings.place}: router_aux_loss_coef = {coefficient} is not carried: set model.options.moe.batch_loss"
        )


def read_mixtral(settings: Settings) -> dict[str, Any]:
    """Convert a MixtralConfig to model.options."""
    options = read_common(settings, length=4096 * 32, kv_heads=8, norm_eps=1e-5, theta=1_000_000.0)
    if settings.get("sliding_window") is not None:
        options["sliding_window"] = settings.number("sliding_window")
    settings.must_be("router_jitter_noise", 0.0)
    _read_loss(settings)
    experts = _num_experts(settings, "num_local_experts", 8, options)
    return options | {"moe": {"num_experts": experts, "top_k": settings.number("num_experts_per_tok", 2)}}


def write_mixtral(options: Options) -> dict[str, Any]:
    """Convert model.options to a MixtralConfig."""
    moe = options["moe"]
    sizes = {"num_local_experts": moe["num_experts"], "num_experts_per_tok": moe["top_k"]}
    return write_common(options) | {"sliding_window": options["sliding_window"]} | sizes


def read_olmoe(settings: Settings) -> dict[str, Any]:
    """Convert an OlmoeConfig to model.options."""
    options = read_common(settings, length=4096, norm_eps=1e-5) | {"qk_norm": "whole"}
    settings.must_be("clip_qkv", None)
    settings.must_be("attention_bias", False)
    _read_loss(settings)
    return options | {"moe": _read_routing(settings, options, num_experts=64)}


def write_olmoe(options: Options) -> dict[str, Any]:
    """Convert model.options to an OlmoeConfig."""
    fields = {name: value for name, value in write_common(options).items() if name != "head_dim"}
    return fields | {"clip_qkv": None, "attention_bias": False} | _write_routing(options)


def _num_experts(settings: Settings, name: str, default: int, options: Options) -> int:
    """Return a field with the number of experts of a layer."""
    found = settings.number(name, default, maximum=MAX_EXPERTS)
    if found * options["num_layers"] > MAX_TENSORS:
        settings.problems.append(f"{name} = {found} in {options['num_layers']} layers: more than {MAX_TENSORS} experts")
    return found


def _read_routing(settings: Settings, options: Options, *, num_experts: int) -> dict[str, Any]:
    moe: dict[str, Any] = {
        "num_experts": _num_experts(settings, "num_experts", num_experts, options),
        "top_k": settings.number("num_experts_per_tok", 8),
    }
    return moe if settings.flag("norm_topk_prob", False) else moe | {"normalise": False}


def _write_routing(options: Options) -> dict[str, Any]:
    moe = with_defaults_of(options["moe"])
    return {"num_experts": moe["num_experts"], "num_experts_per_tok": moe["top_k"], "norm_topk_prob": moe["normalise"]}


def read_qwen3_moe(settings: Settings) -> dict[str, Any]:
    """Convert a Qwen3MoeConfig to model.options: the first blocks may be dense, all others have experts.

    A sliding window is that of all layers, whatever ``max_window_layers`` is.
    """
    options = read_common(settings, length=32768, kv_heads=4) | {"qk_norm": True}
    has_window = settings.flag("use_sliding_window", False) and settings.fields.get("sliding_window", 4096) is not None
    if has_window:
        options["sliding_window"] = settings.number("sliding_window", 4096)
    settings.must_be("layer_types", *layer_types(options["num_layers"], sliding=has_window))
    if settings.flag("attention_bias", False):
        options |= {"qkv_bias": True, "out_bias": True}
    settings.must_be("decoder_sparse_step", 1)
    dense = settings.get("mlp_only_layers")
    num_dense = len(dense) if isinstance(dense, list) else 0
    settings.must_be("mlp_only_layers", None, list(range(num_dense)))
    _read_loss(settings)
    size = settings.number("moe_intermediate_size", 768, maximum=MAX_WIDTH)
    return options | _sizes(options["ffn_size"], _read_routing(settings, options, num_experts=128), size, num_dense)


def write_qwen3_moe(options: Options) -> dict[str, Any]:
    """Convert model.options to a Qwen3MoeConfig."""
    dense = list(range(with_defaults_of(options["moe"])["first_dense"]))
    more = {"decoder_sparse_step": 1, "mlp_only_layers": dense, **_write_sizes(options), **_write_routing(options)}
    return write_qwen3(options) | more


def _sizes(ffn_size: int, moe: dict[str, Any], size: int, first_dense: int) -> dict[str, Any]:
    """Return ffn_size and moe: the size of an expert is ffn_size where no block is dense."""
    if not first_dense:
        return {"ffn_size": size, "moe": moe}
    of_experts = {} if size == ffn_size else {"expert_ffn_size": size}
    return {"ffn_size": ffn_size, "moe": moe | of_experts | {"first_dense": first_dense}}


def _write_sizes(options: Options) -> dict[str, Any]:
    return {"moe_intermediate_size": options["moe"].get("expert_ffn_size") or options["ffn_size"]}


def read_deepseek(settings: Settings) -> dict[str, Any]:
    """Convert a DeepseekV3Config to model.options. The router's bias is updated as in DeepSeek-V3's training."""
    options = read_common(settings, length=4096)
    options.pop("head_dim", None)  # of the rotated features alone
    if options["num_kv_heads"] != options["num_heads"]:
        settings.problems.append("num_key_value_heads: a latent attention has as many as num_attention_heads")
    for name, values in DEEPSEEK.items():
        settings.must_be(name, *values)
    for name in ("ep_size", "aux_loss_alpha", "seq_aux", "qk_head_dim"):
        settings.get(name)
    _leave_out_modules(settings, options["num_layers"])
    mla: dict[str, Any] = {
        "kv_rank": settings.number("kv_lora_rank", 512, maximum=MAX_WIDTH),
        "nope_dim": settings.number("qk_nope_head_dim", 128, maximum=MAX_WIDTH),
        "rope_dim": settings.number("qk_rope_head_dim", 64, maximum=MAX_WIDTH),
        "v_dim": settings.number("v_head_dim", 128, maximum=MAX_WIDTH),
    }
    if settings.get("q_lora_rank") is not None or "q_lora_rank" not in settings.fields:
        mla["q_rank"] = settings.number("q_lora_rank", 1536, maximum=MAX_WIDTH)
    if options["norm_eps"] != LATENT_EPS:
        mla["norm_eps"] = LATENT_EPS
    moe: dict[str, Any] = {
        "num_experts": _num_experts(settings, "n_routed_experts", 256, options),
        "top_k": settings.number("num_experts_per_tok", 8),
        "router": "sigmoid",
        "normalise": settings.flag("norm_topk_prob", True),
        "scaling": settings.positive("routed_scaling_factor", 2.5),
        "num_groups": settings.number("n_group", 8, maximum=MAX_EXPERTS),
        "groups_per_token": settings.number("topk_group", 4, maximum=MAX_EXPERTS),
        "balance": "bias",
    }
    size = settings.number("moe_intermediate_size", 2048, maximum=MAX_WIDTH)
    num_shared = settings.number("n_shared_experts", 1, minimum=0, maximum=MAX_EXPERTS)
    moe["shared_ffn_size"] = size * num_shared
    if not num_shared:  # transformers saves a shared network without features
        settings.left_out.append("model.layers.*.mlp.shared_experts.*")
    dense = settings.number("first_k_dense_replace", 3, minimum=0, maximum=MAX_LAYERS)
    return options | {"mla": mla} | _sizes(options["ffn_size"], moe, size, dense)


def _leave_out_modules(settings: Settings, num_layers: int) -> None:
    """Leave out modules of multi-token prediction, stored as layers beyond the last: transformers' class has none."""
    modules = settings.number("num_nextn_predict_layers", 0, minimum=0, maximum=MAX_LAYERS)
    if modules:
        settings.left_out += [f"model.layers.{num_layers + i}.*" for i in range(modules)]
        settings.notes.append(
            f"{settings.place}: num_nextn_predict_layers = {modules}: modules of multi-token prediction are left out, "
            f"as by {DEEPSEEK_V3.architecture}"
        )


def write_deepseek(options: Options) -> dict[str, Any]:
    """Convert model.options to a DeepseekV3Config."""
    moe, mla = with_defaults_of(options["moe"]), options["mla"]
    fields = {name: value for name, value in write_common(options).items() if name != "head_dim"}
    sizes = _write_sizes(options)
    return {
        **fields,
        **sizes,
        **{name: values[0] for name, values in DEEPSEEK.items()},
        **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), 0),
        "kv_lora_rank": mla["kv_rank"],
        "q_lora_rank": mla.get("q_rank"),
        "qk_nope_head_dim": mla["nope_dim"],
        "qk_rope_head_dim": mla["rope_dim"],
        "v_head_dim": mla["v_dim"],
        "n_routed_experts": moe["num_experts"],
        "num_experts_per_tok": moe["top_k"],
        "norm_topk_prob": moe["normalise"],
        "routed_scaling_factor": moe["scaling"],
        "n_group": moe["num_groups"],
        "topk_group": moe["groups_per_token"],
        "n_shared_experts": moe["shared_ffn_size"] // sizes["moe_intermediate_size"],
        "first_k_dense_replace": moe["first_dense"],
    }


def _holds(
    options: Options, free: tuple[str, ...] = (), moe: Mapping[str, Any] = MappingProxyType({}), **needed: Any
) -> str | None:
    """Describe the first option that does not fit. ``free``: keys of ``moe`` with any value; ``moe``: needed values."""
    if options["moe"] is None or options["moe"] == "none":
        return "model.options.moe is not set"
    given = with_defaults_of(options["moe"])
    for name, value in {**MOE_DEFAULTS, **moe}.items():
        if name not in free and given[name] != value:
            return f"model.options.moe.{name} = {json.dumps(given[name])}"
    return misfit(options, **needed)


def _holds_deepseek(options: Options) -> str | None:
    """Describe why a model is not of DeepSeek-V3; None: it is."""
    mla = options["mla"]
    if mla is None:
        return "model.options.mla is not set"
    sizes = ("scaling", "num_groups", "groups_per_token", "normalise", "shared_ffn_size", "first_dense")
    reason = _holds(options, sizes, {"router": "sigmoid", "balance": "bias"}, sliding_window=None, mlp_bias=False)
    if reason is not None:
        return reason
    if (mla.get("norm_eps") or options["norm_eps"]) != LATENT_EPS:
        return f"model.options.mla.norm_eps is not {LATENT_EPS}"
    shared, size = with_defaults_of(options["moe"])["shared_ffn_size"], _write_sizes(options)["moe_intermediate_size"]
    return f"model.options.moe.shared_ffn_size = {shared} is no multiple of {size}" if shared % size else None


def _holds_olmoe(options: Options) -> str | None:
    """Describe why a model is not of OLMoE; None: it is."""
    if options["head_dim"] not in (None, options["hidden_size"] // options["num_heads"]):
        return f"model.options.head_dim = {options['head_dim']}"
    return _holds(
        options, ("normalise",), **PLAIN, qk_norm="whole", qkv_bias=False, out_bias=False, sliding_window=None
    )


PLAIN: dict[str, Any] = {"mla": None, "mlp_bias": False}
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    LLAMA.builder,
    read_mixtral,
    write_mixtral,
    lambda options: _holds(options, **PLAIN, qk_norm=False, qkv_bias=False, out_bias=False),
    partial(mixture_rules, ExpertNames("block_sparse_moe", ("w1", "w3", "w2"))),
    LLAMA.left_out,
    LLAMA.prefix,
)
OLMOE = MIXTRAL._replace(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    read=read_olmoe,
    write=write_olmoe,
    holds=_holds_olmoe,
    rules=partial(mixture_rules, ExpertNames()),
)
QWEN3_MOE = OLMOE._replace(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    aliases={"num_local_experts": "num_experts"},
    read=read_qwen3_moe,
    write=write_qwen3_moe,
    holds=lambda options: _holds(options, ("normalise", "first_dense"), **PLAIN, qk_norm=True) or other_bias(options),
)
DEEPSEEK_V3 = OLMOE._replace(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    read=read_deepseek,
    write=write_deepseek,
    holds=_holds_deepseek,
)
