"""Llama's mixtures of experts and latent attention against nine architectures of transformers,
in float64.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright_models import llama

IDS = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79], [32, 38, 46, 26, 43, 38, 1, 2]])
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "max_sequence_length": 16,
}
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": None,
}
COMMON |= {
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
}
COMMON |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "eos_token_id": None}
GQA = {"num_key_value_heads": 2, "head_dim": 8}
GROUPS = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "intermediate_size": 44}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
# the eps of their norms of low rank, which is fixed
LATENT |= {"num_key_value_heads": 4, "rms_norm_eps": 1e-6}
ALL_FEATURES = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
}
THEIRS: dict[str, dict[str, Any]] = {
    "Mixtral": GQA | {"intermediate_size": 44, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Olmoe": {
        "num_key_value_heads": 2,
        "intermediate_size": 44,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
    "Qwen2Moe": {
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
    }
    | {"shared_expert_intermediate_size": 24, "intermediate_size": 44},
    "Qwen3Moe": GQA
    | {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    }
    | {"intermediate_size": 44, "mlp_only_layers": [0]},
    "DeepseekV2": LATENT
    | GROUPS
    | ROUTED
    | {"topk_method": "group_limited_greedy", "n_shared_experts": 2},
    "DeepseekV3": LATENT | GROUPS | ROUTED | {"n_shared_experts": 1, "num_mtp_layers": 0},
    "Dots1": GQA
    | GROUPS
    | ROUTED
    | {"n_shared_experts": 2, "norm_topk_prob": True, "sliding_window": None},
    "Glm4Moe": GQA
    | GROUPS
    | ROUTED
    | ALL_FEATURES
    | {"use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0},
    "MiniMaxM2": GQA
    | ALL_FEATURES
    | {
        "intermediate_size": 20,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": None,
    },
}
YARN = {"factor": 4.0, "beta_fast": 3.0, "mscale": 0.7, "mscale_all_dim": 0.9}
THEIR_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 4, **YARN}
THEIRS |= {
    f"{name}, YaRN": THEIRS[name] | {"rope_parameters": THEIR_YARN}
    for name in ("Qwen3Moe", "DeepseekV2", "DeepseekV3")
}
SIGMOID = {
    "num_experts": 8,
    "top_k": 3,
    "expert_ffn_size": 20,
    "router": "sigmoid",
    "balance": "bias",
}
SIGMOID |= {"scaling": 2.5, "num_groups": 4, "groups_per_token": 2, "first_dense": 1}
MLA = {"q_rank": 12, "kv_rank": 10, "nope_dim": 8, "rope_dim": 4, "v_dim": 6}
SOFTMAX = {"num_experts": 8, "top_k": 3}
OURS: dict[str, dict[str, Any]] = {
    "Mixtral": {"head_dim": 8, "ffn_size": 44, "moe": {"num_experts": 8, "top_k": 2}},
    "Olmoe": {"ffn_size": 44, "qk_norm": "whole", "moe": SOFTMAX | {"normalise": False}},
    "Qwen2Moe": {"ffn_size": 20, "qkv_bias": True}
    | {"moe": SOFTMAX | {"normalise": False, "shared_ffn_size": 24, "shared_gate": True}},
    "Qwen3Moe": {
        "ffn_size": 44,
        "qk_norm": True,
        "moe": SOFTMAX | {"first_dense": 1, "expert_ffn_size": 20},
    },
    "DeepseekV2": {"ffn_size": 44, "mla": MLA, "num_kv_heads": 4, "norm_eps": 1e-6}
    | {
        "moe": SIGMOID
        | {"router": "softmax", "balance": "none", "group_score": "max", "normalise": False}
    },
    "DeepseekV3": {"ffn_size": 44, "mla": MLA, "num_kv_heads": 4, "norm_eps": 1e-6},
    "Dots1": {"ffn_size": 44, "qk_norm": True},
    "Glm4Moe": {
        "ffn_size": 44,
        "qk_norm": True,
        "qkv_bias": True,
        "moe": SIGMOID | {"shared_ffn_size": 20},
    },
    "MiniMaxM2": {"ffn_size": 20, "qk_norm": "whole"}
    | {"moe": SOFTMAX | {"router": "sigmoid", "balance": "bias"}},
}
OURS["DeepseekV2"]["moe"] |= {"shared_ffn_size": 40}
OURS["DeepseekV3"]["moe"] = SIGMOID | {"shared_ffn_size": 20}
OURS["Dots1"]["moe"] = SIGMOID | {"shared_ffn_size": 40}
OURS |= {
    f"{name}, YaRN": OURS[name] | {"rope_yarn": {"original_length": 4, **YARN}}
    for name in ("Qwen3Moe", "DeepseekV2", "DeepseekV3")
}
NAMES = {
    "model.embed_tokens": "embedding.tokens",
    "model.norm": "norm",
    "lm_head": "head",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.q_a_proj": "attention.q_down",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.q_up",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.kv_up",
    "mlp.gate": "mlp.router",
    "mlp.down_proj": "mlp.down",
    "mlp.shared_experts.down_proj": "mlp.shared.down",
    "mlp.shared_expert.down_proj": "mlp.shared.down",
    "mlp.shared_expert_gate": "mlp.shared_gate",
    "mlp.experts.gate_up_proj": "mlp.experts.gate_up",
    "mlp.experts.down_proj": "mlp.experts.down",
}


class InFloat64(TorchFunctionMode):
    """A function mode in which float32 is float64: their norms,
    routers and rotary tables compute in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {
            k: torch.float64 if each is torch.float32 else each
            for k, each in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


def halves(rows: Tensor, rope_dim: int, each: int) -> Tensor:
    """Reorder the last ``rope_dim`` of every ``each`` rows:
    pairs of neighbours become two halves.
    """
    places = torch.arange(each)
    turned = places[-rope_dim:]
    order = torch.cat((places[:-rope_dim], turned[0::2], turned[1::2]))
    return rows.unflatten(0, (-1, each))[:, order].flatten(0, 1)


def our_values(theirs: dict[str, Tensor], ours: nn.Sequential) -> dict[str, Tensor]:
    """Return values of transformers' parameters, or their gradients, under our names."""
    found: dict[str, Tensor] = {}
    for full, value in theirs.items():
        layer = re.match(r"model\.layers\.(\d+)\.(.+)", full)
        name = full if layer is None else layer[2]
        owner, _, kind = name.rpartition(".")
        if "experts." in name and name.endswith("_proj"):
            owner, kind = name, ""
        block = "" if layer is None else f"block{layer[1]}."
        if owner == "self_attn.q_proj" and "kv_a_layernorm" not in str(theirs.keys()):
            k, v = (theirs[full.replace("q_proj", f"{each}_proj")].chunk(2) for each in "kv")
            parts = [part for group in zip(value.chunk(2), k, v, strict=True) for part in group]
            found[f"{block}attention.qkv.{kind}"] = torch.cat(parts)
        elif owner.endswith(".gate_proj"):
            inner = "mlp.shared" if "shared" in owner else "mlp"
            size = ours.get_submodule(block + inner).block_size
            up = theirs[full.replace("gate_proj", "up_proj")]
            pairs = [
                part
                for pair in zip(value.split(size), up.split(size), strict=True)
                for part in pair
            ]
            found[f"{block}{inner}.gate_up.{kind}"] = torch.cat(pairs)
        elif not re.fullmatch(r"self_attn\.[kv]_proj|.*\.up_proj", owner):
            if owner == "self_attn.q_b_proj":
                value = halves(value, 4, 12)
            elif owner == "self_attn.kv_a_proj_with_mqa":
                value = halves(value, 4, 14)
            found[f"{block}{NAMES[owner]}{kind and '.'}{kind}"] = value
    return found


def their_model(name: str) -> nn.Module:
    """Return a small model of theirs with random weights; biases of the choice too."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    kind = name.partition(",")[0]
    config = getattr(transformers, f"{kind}Config")(**COMMON | THEIRS[name])
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    torch.manual_seed(0)
    with InFloat64():
        model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.02, std=0.3)
    for buffer in biases(model):
        buffer.copy_(torch.randn(buffer.shape).sub(0.7))  # float32, and scores of both signs
    return model.train()


def biases(model: nn.Module) -> list[Tensor]:
    return [
        buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    ]


@pytest.mark.parametrize("name", THEIRS)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    theirs = their_model(name)
    ours = llama.build(**SIZES | {"num_kv_heads": 2, "rope_theta": 1e4} | OURS[name]).double()
    values = our_values({n: p.detach() for n, p in theirs.named_parameters()}, ours)
    assert values.keys() == {n for n, _ in ours.named_parameters()}
    with torch.no_grad():
        for parameter_name, parameter in ours.named_parameters():
            parameter.copy_(values[parameter_name])
    routers = [
        module
        for n, module in ours.named_modules()
        if n.endswith("mlp.router") and module.bias is not None
    ]
    for router, bias in zip(routers, biases(theirs), strict=True):
        router.bias.copy_(bias)
    with InFloat64():
        expected = theirs(IDS, use_cache=False).logits
        F.cross_entropy(expected.flatten(0, 1), IDS.flatten()).backward()
    found = ours(IDS)
    F.cross_entropy(found.flatten(0, 1), IDS.flatten()).backward()
    assert expected.dtype == torch.float64 and expected.std() > 0.1
    assert (found - expected).norm() / expected.norm() < 1e-12
    # an expert without a token has no gradient in transformers, or zeros
    given = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()
    }
    for parameter_name, gradient in our_values(given, ours).items():
        mine = ours.get_parameter(parameter_name).grad
        assert (mine - gradient).norm() <= 1e-10 * gradient.norm(), parameter_name
