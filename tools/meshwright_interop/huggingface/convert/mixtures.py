"""Mixtral, OLMoE, Qwen3-MoE and DeepSeek-V3,
built by ``meshwright_models.llama:build`` with ``moe`` and ``mla``.
"""

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
    read_biases,
    read_common,
    write_common,
    write_qwen3,
)
from meshwright_interop.huggingface.convert.family import Family, Options
from meshwright_interop.huggingface.convert.settings import (
    MAX_LAYERS,
    MAX_WIDTH,
    Field,
    Settings,
    read_fields,
    write_fields,
)
from meshwright_interop.huggingface.convert.tables import (
    MIXTRAL_EXPERTS,
    MOE_DEFAULTS,
    decoder_rules,
    with_defaults_of,
)

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

MIXTRAL_CHOICE = (
    Field("num_local_experts", "num_experts", default=8, maximum=MAX_EXPERTS),
    Field("num_experts_per_tok", "top_k", default=2),
)
CHOICE = (
    Field("num_experts", "num_experts", maximum=MAX_EXPERTS),
    Field("num_experts_per_tok", "top_k", default=8),
    Field("norm_topk_prob", "normalise", "flag", False),
)
"""Fields of OLMoE's and Qwen3-MoE's routers that are keys of ``moe``."""
LATENT = (
    Field("kv_lora_rank", "kv_rank", default=512, maximum=MAX_WIDTH),
    Field("qk_nope_head_dim", "nope_dim", default=128, maximum=MAX_WIDTH),
    Field("qk_rope_head_dim", "rope_dim", default=64, maximum=MAX_WIDTH),
    Field("v_head_dim", "v_dim", default=128, maximum=MAX_WIDTH),
)
"""Fields of a latent attention that are keys of ``mla``."""
ROUTING = (
    Field("n_routed_experts", "num_experts", default=256, maximum=MAX_EXPERTS),
    Field("num_experts_per_tok", "top_k", default=8),
    Field("norm_topk_prob", "normalise", "flag", True),
    Field("routed_scaling_factor", "scaling", "positive", 2.5),
    Field("n_group", "num_groups", default=8, maximum=MAX_EXPERTS),
    Field("topk_group", "groups_per_token", default=4, maximum=MAX_EXPERTS),
)
"""Fields of DeepSeek-V3's routers that are keys of ``moe``."""


def _read_loss(settings: Settings) -> None:
    """Note a loss of the routers that transformers would add in training;
    the logits do not depend on it.
    """
    coefficient = settings.get("router_aux_loss_coef")
    if settings.flag("output_router_logits", False) and coefficient:
        settings.notes.append(
            f"{settings.place}: router_aux_loss_coef = {coefficient} is not carried: set"
            " model.options.moe.batch_loss"
        )


def read_mixtral(settings: Settings) -> dict[str, Any]:
    """Convert a MixtralConfig to model.options."""
    options = read_common(settings, length=4096 * 32, kv_heads=8, norm_eps=1e-5, theta=1_000_000.0)
    if settings.get("sliding_window") is not None:
        options["sliding_window"] = settings.number("sliding_window")
    settings.must_be("router_jitter_noise", 0.0)
    _read_loss(settings)
    moe = read_fields(settings, MIXTRAL_CHOICE)
    _check_experts(settings, "num_local_experts", moe["num_experts"], options)
    return options | {"moe": moe}


def write_mixtral(options: Options) -> dict[str, Any]:
    """Convert model.options to a MixtralConfig."""
    sizes = write_fields(options["moe"], MIXTRAL_CHOICE)
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
    return (
        fields
        | {"clip_qkv": None, "attention_bias": False}
        | write_fields(with_defaults_of(options["moe"]), CHOICE)
    )


def _check_experts(settings: Settings, name: str, num_experts: int, options: Options) -> None:
    """Check the number of experts of all layers together. ``name``: field with that of a layer."""
    if num_experts * options["num_layers"] > MAX_TENSORS:
        settings.problems.append(
            f"{name} = {num_experts} in {options['num_layers']} layers: more than {MAX_TENSORS}"
            " experts"
        )


def _read_routing(settings: Settings, options: Options, *, num_experts: int) -> dict[str, Any]:
    """Convert the routing of OLMoE and Qwen3-MoE. ``num_experts``: the class's default."""
    moe = read_fields(settings, CHOICE, num_experts=num_experts)
    _check_experts(settings, "num_experts", moe["num_experts"], options)
    if moe["normalise"]:
        del moe["normalise"]
    return moe


def read_qwen3_moe(settings: Settings) -> dict[str, Any]:
    """Convert a Qwen3MoeConfig to model.options: the first blocks may be dense,
    all others have experts.

    A sliding window is that of all layers, whatever ``max_window_layers`` is.
    """
    options = read_common(settings, length=32768, kv_heads=4) | {"qk_norm": True}
    has_window = (
        settings.flag("use_sliding_window", False)
        and settings.fields.get("sliding_window", 4096) is not None
    )
    if has_window:
        options["sliding_window"] = settings.number("sliding_window", 4096)
    settings.must_be("layer_types", *layer_types(options["num_layers"], sliding=has_window))
    options |= read_biases(settings)
    settings.must_be("decoder_sparse_step", 1)
    dense = settings.get("mlp_only_layers")
    num_dense = len(dense) if isinstance(dense, list) else 0
    settings.must_be("mlp_only_layers", None, list(range(num_dense)))
    _read_loss(settings)
    size = settings.number("moe_intermediate_size", 768, maximum=MAX_WIDTH)
    return options | _sizes(
        options["ffn_size"], _read_routing(settings, options, num_experts=128), size, num_dense
    )


def write_qwen3_moe(options: Options) -> dict[str, Any]:
    """Convert model.options to a Qwen3MoeConfig."""
    dense = list(range(with_defaults_of(options["moe"])["first_dense"]))
    more = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        **_write_sizes(options),
        **write_fields(with_defaults_of(options["moe"]), CHOICE),
    }
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
    """Convert a DeepseekV3Config to model.options.
    The router's bias is updated as in DeepSeek-V3's training.
    """
    options = read_common(settings, length=4096)
    options.pop("head_dim", None)  # of the rotated features alone
    if options["num_kv_heads"] != options["num_heads"]:
        settings.problems.append(
            "num_key_value_heads: a latent attention has as many as num_attention_heads"
        )
    for name, values in DEEPSEEK.items():
        settings.must_be(name, *values)
    for name in ("ep_size", "aux_loss_alpha", "seq_aux", "qk_head_dim"):
        settings.get(name)
    _leave_out_modules(settings, options["num_layers"])
    mla = read_fields(settings, LATENT)
    if settings.get("q_lora_rank") is not None or "q_lora_rank" not in settings.fields:
        mla["q_rank"] = settings.number("q_lora_rank", 1536, maximum=MAX_WIDTH)
    if options["norm_eps"] != LATENT_EPS:
        mla["norm_eps"] = LATENT_EPS
    moe = read_fields(settings, ROUTING) | {"router": "sigmoid", "balance": "bias"}
    _check_experts(settings, "n_routed_experts", moe["num_experts"], options)
    size = settings.number("moe_intermediate_size", 2048, maximum=MAX_WIDTH)
    num_shared = settings.number("n_shared_experts", 1, minimum=0, maximum=MAX_EXPERTS)
    moe["shared_ffn_size"] = size * num_shared
    if not num_shared:  # transformers saves a shared network without features
        settings.left_out.append("model.layers.*.mlp.shared_experts.*")
    dense = settings.number("first_k_dense_replace", 3, minimum=0, maximum=MAX_LAYERS)
    return options | {"mla": mla} | _sizes(options["ffn_size"], moe, size, dense)


def _leave_out_modules(settings: Settings, num_layers: int) -> None:
    """Leave out modules of multi-token prediction, stored as layers beyond the last:
    transformers' class has none.
    """
    modules = settings.number("num_nextn_predict_layers", 0, minimum=0, maximum=MAX_LAYERS)
    if modules:
        settings.left_out += [f"model.layers.{num_layers + i}.*" for i in range(modules)]
        settings.notes.append(
            f"{settings.place}: num_nextn_predict_layers = {modules}: modules of multi-token"
            f" prediction are left out, as by {DEEPSEEK_V3.architecture}"
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
        **write_fields(mla, LATENT),
        **write_fields(moe, ROUTING),
        "q_lora_rank": mla.get("q_rank"),
        "n_shared_experts": moe["shared_ffn_size"] // sizes["moe_intermediate_size"],
        "first_k_dense_replace": moe["first_dense"],
    }


def _holds(
    options: Options,
    free: tuple[str, ...] = (),
    moe: Mapping[str, Any] = MappingProxyType({}),
    **needed: Any,
) -> str | None:
    """Describe the first option that does not fit. ``free``: keys of ``moe`` with any value;
    ``moe``: needed values.
    """
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
    sizes = (
        "scaling",
        "num_groups",
        "groups_per_token",
        "normalise",
        "shared_ffn_size",
        "first_dense",
    )
    reason = _holds(
        options,
        sizes,
        {"router": "sigmoid", "balance": "bias"},
        sliding_window=None,
        mlp_bias=False,
    )
    if reason is not None:
        return reason
    if (mla.get("norm_eps") or options["norm_eps"]) != LATENT_EPS:
        return f"model.options.mla.norm_eps is not {LATENT_EPS}"
    shared, size = (
        with_defaults_of(options["moe"])["shared_ffn_size"],
        _write_sizes(options)["moe_intermediate_size"],
    )
    return (
        f"model.options.moe.shared_ffn_size = {shared} is no multiple of {size}"
        if shared % size
        else None
    )


def _holds_olmoe(options: Options) -> str | None:
    """Describe why a model is not of OLMoE; None: it is."""
    if options["head_dim"] not in (None, options["hidden_size"] // options["num_heads"]):
        return f"model.options.head_dim = {options['head_dim']}"
    return _holds(
        options,
        ("normalise",),
        **PLAIN,
        qk_norm="whole",
        qkv_bias=False,
        out_bias=False,
        sliding_window=None,
    )


PLAIN: dict[str, Any] = {"mla": None, "mlp_bias": False}
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    LLAMA.builder,
    read_mixtral,
    write_mixtral,
    lambda options: _holds(options, **PLAIN, qk_norm=False, qkv_bias=False, out_bias=False),
    partial(decoder_rules, experts=MIXTRAL_EXPERTS),
    LLAMA.left_out,
    LLAMA.prefix,
)
OLMOE = MIXTRAL._replace(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    read=read_olmoe,
    write=write_olmoe,
    holds=_holds_olmoe,
    rules=decoder_rules,
)
QWEN3_MOE = OLMOE._replace(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    aliases={"num_local_experts": "num_experts"},
    read=read_qwen3_moe,
    write=write_qwen3_moe,
    holds=lambda options: (
        _holds(options, ("normalise", "first_dense"), **PLAIN, qk_norm=True) or other_bias(options)
    ),
)
DEEPSEEK_V3 = OLMOE._replace(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    read=read_deepseek,
    write=write_deepseek,
    holds=_holds_deepseek,
)
