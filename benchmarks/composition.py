"""dp x pp x tp out of torch's own parts, wired by hand: DTensor tensor parallelism, torch.distributed.pipelining's 1F1B
and FSDP2 over dp. What one would write who wants our 2x2x2 without a framework.

The model is models/gpt2.py's with q, k and v in linears of their own: a fused one cannot be split by ColwiseParallel
unless its rows go head by head, which they do in ours. Same sizes, same weights, same FLOPs. The head is not tied to
the embedding: torch's pipelining has no tied weights across stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contenders import Shown, token_mean_loss, value
from einops import rearrange
from task import (
    BETAS,
    CLIP_NORM,
    EPS,
    GLOBAL_BATCH,
    HIDDEN_SIZE,
    LEARNING_RATE,
    MICRO_BATCH_SIZE,
    NUM_HEADS,
    Samples,
    decay_groups,
    plain_model,
    run_config,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from meshwright.blueprint import draw_blueprint
from meshwright.models.blocks import Block


class SplitAttention(nn.Module):
    """meshwright.models.blocks.Attention with q, k and v apart; the number of local heads follows from the shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE) for _ in range(3))
        self.out = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        q, k, v = (
            rearrange(linear(x), "b s (h d) -> b h s d", d=HIDDEN_SIZE // NUM_HEADS)
            for linear in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(rearrange(mixed, "b h s d -> b s (h d)"))
        return y


def split_attention(fused: nn.Module) -> SplitAttention:
    """The same attention with the fused projection taken apart: its rows are q, k, v of head 0, of head 1, ..."""
    apart = SplitAttention()
    qkv, out = fused.get_submodule("qkv"), fused.get_submodule("out")
    assert isinstance(qkv, nn.Linear) and isinstance(out, nn.Linear)
    with torch.no_grad():
        weights = rearrange(qkv.weight, "(h three d) i -> three (h d) i", three=3, h=NUM_HEADS)
        biases = rearrange(qkv.bias, "(h three d) -> three (h d)", three=3, h=NUM_HEADS)
        for linear, weight, bias in zip((apart.q, apart.k, apart.v), weights, biases, strict=True):
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
    apart.out = out
    return apart


def parallelize(layers: nn.Sequential, tp: DeviceMesh) -> None:
    """Tensor parallelism as torch's tutorial has it: column, row, vocabulary-parallel embedding and head."""
    plan: dict[str, ParallelStyle]
    for name, layer in layers.named_children():
        if name == "embedding":
            plan = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
        elif name == "head":
            plan = {"": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        elif name.startswith("block"):
            plan = {
                "attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(),
            }
        else:
            continue
        parallelize_module(layer, tp, plan.get("", plan))


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[DTensor]]:
    """Parameters on a mesh of dp alone, and those of modules under tensor parallelism, on one of (dp, tp).

    No foreach or fused operation takes both at once.
    """
    groups: dict[int, list[DTensor]] = {}
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        groups.setdefault(parameter.device_mesh.ndim, []).append(parameter)
    return [groups[ndim] for ndim in sorted(groups)]


def local_gradients(parameters: Sequence[DTensor]) -> list[Tensor]:
    """This rank's shards of the gradients."""
    return [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]


class Composition:
    """One rank of it."""

    def __init__(self, dp: int, pp: int, tp: int) -> None:
        mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        self.pp, self.dp, self.tp = (mesh.get_group(axis) for axis in ("pp", "dp", "tp"))
        self.dp_rank = mesh.get_local_rank("dp")
        stage_index = mesh.get_local_rank("pp")
        stages = draw_blueprint(run_config(dp, pp, tp, tied=False)).stages  # cut where ours is cut
        whole = plain_model(tied=False)
        for layer in whole:
            if isinstance(layer, Block):
                layer.attention = split_attention(layer.attention)
        layers = nn.Sequential()
        for index, (name, layer) in enumerate(whole.named_children()):
            if index in stages[stage_index]:
                layers.add_module(name, layer)
        parallelize(layers, mesh["tp"])
        for name, layer in layers.named_children():
            if name.startswith("block"):
                fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)  # gathered once a step, not per chunk
        fully_shard(layers, mesh=mesh["dp"], reshard_after_forward=False)
        self.on_dp, self.on_dp_and_tp = by_mesh(layers.parameters())
        self.optimizer = torch.optim.AdamW(
            [group for each in (self.on_dp, self.on_dp_and_tp) for group in decay_groups(each) if group["params"]],
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPS,
            fused=True,
        )
        self.is_first, self.is_last = stage_index == 0, stage_index == pp - 1
        stage = PipelineStage(layers, stage_index, pp, torch.device("cpu"), group=self.pp)
        self.per_replica = GLOBAL_BATCH // dp
        self.schedule = Schedule1F1B(
            stage, n_microbatches=self.per_replica // MICRO_BATCH_SIZE, loss_fn=token_mean_loss, scale_grads=True
        )
        self.samples = Samples()
        self.samples_seen = 0

    def step(self) -> Shown:
        """One optimizer step; the loss is known on the last stage, and 0 elsewhere."""
        self.optimizer.zero_grad()
        tokens, labels = self.samples.rows(self.samples_seen + self.dp_rank * self.per_replica, self.per_replica)
        losses: list[Tensor] = []
        with loss_parallel():
            self.schedule.step(
                *([tokens] if self.is_first else []),
                target=labels if self.is_last else None,
                losses=losses if self.is_last else None,
                return_outputs=False,
            )
        norm = self._clip()
        self.optimizer.step()
        self.samples_seen += GLOBAL_BATCH
        loss = sum(value(loss) for loss in losses) / len(losses) if losses else 0.0
        return Shown(loss * dist.get_world_size(self.pp), norm)  # times pp: the mean over all ranks is then the loss

    def _clip(self) -> float:
        """Clip to CLIP_NORM; the norm of the whole gradient. On local shards: clip_grad_norm_ knows no pp."""
        split = [p for p in self.on_dp_and_tp if p.placements[1].is_shard()]
        whole = [p for p in self.on_dp_and_tp if not p.placements[1].is_shard()]  # biases of row-parallel linears
        square_of_split = nn.utils.get_total_norm(local_gradients(split)) ** 2
        dist.all_reduce(square_of_split, group=self.tp)
        square = square_of_split + nn.utils.get_total_norm(local_gradients(self.on_dp + whole)) ** 2
        dist.all_reduce(square, group=self.dp)
        dist.all_reduce(square, group=self.pp)
        factor = (CLIP_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local_gradients(self.on_dp + self.on_dp_and_tp), factor)
        return float(square.sqrt())

    def settle(self) -> None:
        """Nothing is left under way."""
