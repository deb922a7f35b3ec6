"""Contenders of the race on one GPU: Llama models on random tokens,
in bfloat16 with float32 gradients and weights.

    ours, ours-compiled     this framework with one rank
    master                  plain loop: bfloat16 weights, float32 gradients and master weights, blocks compiled
    fully_shard             torchtitan's recipe: float32 weights, fully_shard on one rank with a bfloat16 policy, blocks
                            compiled
    megatron                megatron-core's GPTModel, local spec, with torch's attention as its core; the loop of master

All begin with the same weights, drawn on the device by name. megatron's have other names: the same
distribution.
"""

from __future__ import annotations

import argparse
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_step import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Flops, Job, Tokens, config_of
from torch import Tensor, nn

from meshwright.blueprint import draw_blueprint
from meshwright.build import build
from meshwright.config import RunConfig
from meshwright.config.functions import find_function
from meshwright.errors import ModelError
from meshwright.mesh import Grid
from meshwright.mesh.mesh import Mesh, open_mesh
from meshwright.model.build import PlainModel
from meshwright.model.meter import causal_share
from meshwright.parts import Parts
from meshwright.step import take_step
from meshwright.tensor_parallel import megatron

LLAMA = {"vocab_size": 32768, "num_kv_heads": 8, "max_sequence_length": 8192}
SHAPES: dict[str, dict[str, int]] = {
    "llama-8b-8-blocks": {"hidden_size": 4096, "num_layers": 8, "num_heads": 32, "ffn_size": 14336},
    "llama-1b": {"hidden_size": 2048, "num_layers": 16, "num_heads": 16, "ffn_size": 8192},
    "llama-3b": {"hidden_size": 3072, "num_layers": 28, "num_heads": 24, "ffn_size": 8192},
}
"""Name -> sizes; all with heads of 128."""
TINY = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 48,
}
CHUNKS = (1, 4)
"""Micro-batches per step."""


class Contender(Protocol):
    """One way to train: a step of several micro-batches."""

    def step(self, chunks: int) -> float:
        """Take an optimizer step of ``chunks`` micro-batches; return the loss."""


def parse(description: str | None, jobs: Iterable[str], argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of a stage's process: ``job``, ``device``, ``tiny`` and ``out``."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--job", choices=list(jobs), required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="toy sizes: exercises the code, measures nothing"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def job_of(name: str, chunks: int, tiny: bool) -> Job:
    """Return a model with one sequence per micro-batch."""
    options = {**TINY, "max_sequence_length": 32} if tiny else {**LLAMA, **SHAPES[name]}
    return Job("meshwright_models.llama:build", options, options["max_sequence_length"], 1, chunks)


def draw(name: str, weight: Tensor) -> Tensor:
    """Fill a weight on its device by its name, with values that bfloat16 holds: normal,
    or one for a norm.
    """
    if weight.dim() < 2:
        return weight.fill_(1.0)
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    drawn = torch.empty(weight.shape, device=weight.device).normal_(0.0, 0.02, generator=generator)
    return weight.copy_(drawn.bfloat16())


class DrawnOnDevice(PlainModel):
    """Model whose first values are drawn on a device instead of the CPU,
    which takes a minute for 8B parameters.
    """

    device = torch.device("cpu")

    def initial(self, name: str) -> Tensor:
        """Return the full initial tensor of a parameter, float32 on the device."""
        owner = self.owners[self.canonical(name)]
        shape = owner.module.get_parameter(owner.path).shape
        return draw(self.canonical(name), torch.empty(shape, device=self.device))


def build_on_device(config: RunConfig, mesh: Mesh, job: Job) -> Parts:
    """Build one rank's parts with weights drawn on its device."""
    blueprint = draw_blueprint(config, mesh.tp)
    model = DrawnOnDevice(**vars(blueprint.model))
    model.device = mesh.device
    return build(config, mesh, (Tokens(job), {}), replace(blueprint, model=model))


class Ours:
    """This framework with one rank."""

    def __init__(self, job: Job, device: torch.device, compiled: bool = False) -> None:
        config = config_of(job, device.type, compiled=compiled)
        self.parts = build_on_device(config, open_mesh(Grid(), device.type), job)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, chunks: int) -> float:
        """Take the framework's own step."""
        assert chunks == self.parts.config.batch.chunks
        return take_step(self.parts).loss


def decay_groups(weights: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Return the optimizer's groups: no decay of vectors."""
    weights = list(weights)
    return [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]


class Loop:
    """A loop without a framework: accumulate gradients, clip, step."""

    def __init__(
        self, job: Job, device: torch.device, loss_of: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self.job, self.device, self.loss_of, self.tokens, self.samples_seen = (
            job,
            device,
            loss_of,
            Tokens(job),
            0,
        )

    def accumulate(self, chunks: int) -> Tensor:
        """Run forward and backward of each micro-batch; return the mean loss."""
        total = torch.zeros((), device=self.device)
        for _ in range(chunks):
            found = self.tokens.read(range(self.samples_seen, self.samples_seen + 1))
            tokens, labels = (tensor.to(self.device) for tensor in found)
            loss = self.loss_of(tokens, labels) / chunks
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            self.samples_seen += 1
        return total


class MasterLoop(Loop):
    """Loop over bfloat16 weights, with float32 gradients that hooks add to,
    and float32 master weights.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        model: nn.Module,
        loss_of: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(job, device, loss_of)
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float() for p in self.weights]
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(self._adder(master.grad))
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.masters), lr=LEARNING_RATE, betas=BETAS, fused=True
        )

    @staticmethod
    def _adder(total: Tensor) -> Callable[[Tensor], None]:
        def add(weight: Tensor) -> None:
            total.add_(weight.grad)  # type: ignore[arg-type]
            weight.grad = None

        return add

    def step(self, chunks: int) -> float:
        """Accumulate, clip, step the masters, copy them into the weights."""
        loss = self.accumulate(chunks)
        nn.utils.clip_grad_norm_(self.masters, CLIP_NORM)
        self.optimizer.step()
        torch._foreach_copy_([weight.detach() for weight in self.weights], self.masters)
        torch._foreach_zero_([master.grad for master in self.masters])  # type: ignore[arg-type]
        return float(loss)


class ShardedLoop(Loop):
    """torchtitan's recipe on one rank."""

    def __init__(self, job: Job, device: torch.device, compiled: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = model_on(job, device)
        one_rank(device)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            ),
        }
        for name, layer in model.named_children():
            if name.startswith("block"):
                if compiled:
                    layer.compile()
                fully_shard(layer, **options)
        fully_shard(model, **options)
        self.parameters = list(model.parameters())
        super().__init__(job, device, cross_entropy_of(model))
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.parameters), lr=LEARNING_RATE, betas=BETAS, fused=True
        )

    def step(self, chunks: int) -> float:
        """Accumulate, clip, step."""
        loss = self.accumulate(chunks)
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def cross_entropy_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (tokens, labels), both (B, S) -> mean loss, in float32."""

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten())

    return loss_of


def model_on(job: Job, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Build the job's model on the device, with weights by name."""
    builder = find_function(
        job.builder, "builder", "a function that returns an nn.Sequential", ModelError
    )
    with torch.device(device):
        model: nn.Sequential = builder(**job.options)
    model.to(device=device, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw(name, parameter)
    return model


def one_rank(device: torch.device) -> None:
    """Join a process group of this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)


def master(job: Job, device: torch.device, compiled: bool) -> MasterLoop:
    """Build the plain loop with master weights."""
    model = model_on(job, device, torch.bfloat16)
    for name, layer in model.named_children():
        if compiled and name.startswith("block"):
            layer.compile()
    return MasterLoop(job, device, model, cross_entropy_of(model))


def megatron_core(job: Job, device: torch.device) -> MasterLoop:
    """Build megatron-core's GPTModel of the same shape, with torch's attention as core."""
    megatron.load_mappings(device)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    one_rank(device)
    parallel_state.initialize_model_parallel()
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(1234)
    options = job.options
    config = TransformerConfig(
        num_layers=options["num_layers"],
        hidden_size=options["hidden_size"],
        num_attention_heads=options["num_heads"],
        num_query_groups=options["num_kv_heads"],
        ffn_hidden_size=options["ffn_size"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = TorchAttention  # type: ignore[union-attr]
    length = job.sequence_length
    model = GPTModel(
        config,
        spec,
        options["vocab_size"],
        length,
        position_embedding_type="rope",
        rotary_base=500000,
    ).to(device)
    model.bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw(name, parameter)
    positions = torch.arange(length, device=device)[None]

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        return model(tokens, positions, None, labels=labels).float().mean()  # type: ignore[no-any-return]

    return MasterLoop(job, device, model, loss_of)


class TorchAttention(nn.Module):
    """Core attention of megatron-core by torch's fused kernel: (S, B, H, d) -> (S, B, H * d)."""

    def __init__(self, **options: object) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *rest: object, **more: object
    ) -> Tensor:
        """Attend causally; key and value (S, B, H_kv, d)."""
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return y.permute(2, 0, 1, 3).flatten(2)


CONTENDERS = ("ours-compiled", "master", "fully_shard", "megatron", "ours")


def make(name: str, job: Job, device: torch.device, tiny: bool) -> Contender:
    """Build a contender; tiny ones are not compiled."""
    if name.startswith("ours"):
        return Ours(job, device, compiled=name == "ours-compiled" and not tiny)
    if name == "master":
        return master(job, device, compiled=not tiny)
    if name == "fully_shard":
        return ShardedLoop(job, device, compiled=not tiny)
    return megatron_core(job, device)


def flops_of(job: Job) -> Flops:
    """Return the model FLOPs of a step, in both counts."""
    blueprint = draw_blueprint(config_of(job, "cpu"), None)  # type: ignore[arg-type]
    full = blueprint.flops_per_step
    return Flops(full, full * causal_share([cost.forward for cost in blueprint.layer_costs]))
