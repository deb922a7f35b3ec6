"""megatron-core's GPT, optimizer and learning rate in one process without a GPU.

Its parts name CUDA in many places. ``pretend`` points those at the CPU, in this process alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain import cross_entropy, validate
from task import Result, Task, Windows, first_weights
from torch import Tensor, nn


def pretend() -> None:
    """Point what megatron-core asks of CUDA at the CPU."""
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(torch.cuda, name, lambda *given, **named: None)
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *given, **named: self  # type: ignore[assignment, method-assign]
    kind = torch.Tensor.type

    def type_name(self: Tensor, *given: Any, **named: Any) -> Any:
        found = kind(self, *given, **named)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = type_name  # type: ignore[assignment, method-assign]


def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a factory of tensors that makes those of CUDA on the CPU."""

    def made(*given: Any, **named: Any) -> Tensor:
        if "cuda" in str(named.get("device", "")):
            named["device"] = "cpu"
        return make(*given, **named)

    return made


def train(task: Task, corpus: Path, seed: int) -> Result:
    """Train with megatron-core's GPT and optimizer."""
    pretend()
    start_one_rank()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    parallel_state.initialize_model_parallel()
    model, config = build(task, seed)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=task.learning_rate,
        min_lr=task.min_learning_rate,
        weight_decay=task.weight_decay,
        adam_beta1=task.betas[0],
        adam_beta2=task.betas[1],
        adam_eps=task.eps,
        clip_grad=task.clip_norm,
    )
    optimizer = get_megatron_optimizer(settings, [wrapped], **decay_overrides(settings))
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=task.learning_rate,
        min_lr=task.min_learning_rate,
        lr_warmup_steps=task.warmup_steps * task.global_batch,
        lr_decay_steps=task.steps * task.global_batch,
        lr_decay_style="cosine",
        start_wd=task.weight_decay,
        end_wd=task.weight_decay,
        wd_incr_steps=task.steps * task.global_batch,
        wd_incr_style="constant",
    )
    windows = Windows(corpus, "train", task, seed)
    losses, rates = [], []
    for step in range(task.steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        total = 0.0
        for chunk in range(task.chunks):
            start = step * task.global_batch + chunk * task.micro_batch_size
            tokens, labels = windows.batch(start, task.micro_batch_size)
            loss = cross_entropy(logits_of(wrapped, tokens), labels) / task.chunks
            loss.backward()
            total += float(loss.detach())
        wrapped.finish_grad_sync()
        rates.append(max(group["lr"] for group in optimizer.param_groups))
        assert optimizer.step()[0]
        schedule.step(increment=task.global_batch)
        losses.append(total)
    model.eval()
    return Result(losses, rates, validate(task, corpus, lambda tokens: logits_of(model, tokens)))


def decay_overrides(settings: Any) -> dict[str, Any]:
    """Return the argument that keeps vectors from decaying, which Megatron-LM's trainer gives."""
    from megatron.core import optimizer

    make = getattr(optimizer, "get_standard_config_overrides", None)
    return {} if make is None else {"config_overrides": make(settings)}


def start_one_rank() -> None:
    """Start a process group of one rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=0, world_size=1)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return logits (B, S, V) of tokens (B, S)."""
    length = tokens.shape[1]
    positions = torch.arange(length)[None].expand_as(tokens)
    # True: masked
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    found: Tensor = model(tokens, positions, mask)
    return found


def build(task: Task, seed: int) -> tuple[nn.Module, Any]:
    """Return megatron-core's GPT with the first weights, and its configuration."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    config = TransformerConfig(
        num_layers=task.num_layers,
        hidden_size=task.hidden_size,
        num_attention_heads=task.num_heads,
        num_query_groups=task.num_kv_heads,
        ffn_hidden_size=task.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=task.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        task.vocab_size,
        task.sequence_length,
        position_embedding_type="rope",
        rotary_base=task.rope_theta,
        share_embeddings_and_output_weights=False,
    )
    weights = named_as_core(task, first_weights(task, seed))
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    assert weights.keys() == own.keys(), weights.keys() ^ own.keys()
    model.load_state_dict(weights, strict=False)
    return model, config


def named_as_core(task: Task, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under megatron-core's names, with its joined projections."""
    found = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    head = task.hidden_size // task.num_heads
    for layer in range(task.num_layers):
        there, here = f"model.layers.{layer}", f"decoder.layers.{layer}"
        # of each group of heads: its queries, its key, its value
        query, key, value = (
            weights[f"{there}.self_attn.{name}_proj.weight"].view(
                task.num_kv_heads, -1, head, task.hidden_size
            )
            for name in "qkv"
        )
        joined = torch.cat([query, key, value], dim=1).view(-1, task.hidden_size)
        gate_up = [weights[f"{there}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found |= {
            f"{here}.input_layernorm.weight": weights[f"{there}.input_layernorm.weight"],
            f"{here}.self_attention.linear_qkv.weight": joined,
            f"{here}.self_attention.linear_proj.weight": weights[
                f"{there}.self_attn.o_proj.weight"
            ],
            f"{here}.pre_mlp_layernorm.weight": weights[f"{there}.post_attention_layernorm.weight"],
            f"{here}.mlp.linear_fc1.weight": torch.cat(gate_up),
            f"{here}.mlp.linear_fc2.weight": weights[f"{there}.mlp.down_proj.weight"],
        }
    return found
