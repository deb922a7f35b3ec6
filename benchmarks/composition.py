"""Layout dp x pp x tp wired by hand from torch's own parts: DTensor tensor parallelism,
torch.distributed.pipelining's 1F1B, and FSDP2 over dp. It is the code that a user without a
framework would write for 2x2x2.

The model is that of meshwright_models/gpt2.py with separate linears for q, k and v. ColwiseParallel
cannot split a fused linear unless its rows go head by head, as they do in this framework. Sizes,
weights and FLOPs are the same. The head is not tied to the embedding: torch's pipelining has no
tied weights across stages.
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
from meshwright_models.blocks import Block


class SplitAttention(nn.Module):
    """Attention of meshwright_models with separate q, k and v;
    tensor shapes give the number of local heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE) for _ in range(3))
        self.out = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

    def forward(self, x: Tensor, starts: None = None) -> Tensor:
        """Apply causal attention, (B, S, D) -> (B, S, D)."""
        q, k, v = (
            rearrange(linear(x), "b s (h d) -> b h s d", d=HIDDEN_SIZE // NUM_HEADS)
            for linear in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(rearrange(mixed, "b h s d -> b s (h d)"))
        return y


def split_attention(fused: nn.Module) -> SplitAttention:
    """Return the same attention with the fused projection split; its rows are q, k, v of head 0,
    of head 1, ...
    """
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
    """Apply tensor parallelism as in torch's tutorial: column, row,
    vocabulary-parallel embedding and head.
    """
    plan: dict[str, ParallelStyle]
    inputs = (Replicate(), None)  # hidden states; the starts of documents, None in this task
    for name, layer in layers.named_children():
        if name == "embedding":
            plan = {
                "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
            }
        elif name == "head":
            plan = {"": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        elif name.startswith("block"):
            plan = {
                "attention": PrepareModuleInput(input_layouts=inputs, desired_input_layouts=inputs),
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
    """Group parameters by mesh: those on dp alone, and those of tensor-parallel modules, on (dp,
    tp).

    No foreach or fused operation takes both at once.
    """
    groups: dict[int, list[DTensor]] = {}
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        groups.setdefault(parameter.device_mesh.ndim, []).append(parameter)
    return [groups[ndim] for ndim in sorted(groups)]


def local_gradients(parameters: Sequence[DTensor]) -> list[Tensor]:
    """Return this rank's shards of the gradients."""
    return [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]


class Composition:
    """Contender: one rank of the hand-written layout."""

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
                # gathered once a step, not per chunk
                fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(layers, mesh=mesh["dp"], reshard_after_forward=False)
        self.on_dp, self.on_dp_and_tp = by_mesh(layers.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                group
                for each in (self.on_dp, self.on_dp_and_tp)
                for group in decay_groups(each)
                if group["params"]
            ],
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPS,
            fused=True,
        )
        self.is_first, self.is_last = stage_index == 0, stage_index == pp - 1
        stage = PipelineStage(layers, stage_index, pp, torch.device("cpu"), group=self.pp)
        self.per_replica = GLOBAL_BATCH // dp
        self.schedule = Schedule1F1B(
            stage,
            n_microbatches=self.per_replica // MICRO_BATCH_SIZE,
            loss_fn=token_mean_loss,
            scale_grads=True,
        )
        self.samples = Samples()
        self.samples_seen = 0

    def step(self) -> Shown:
        """Take one optimizer step; the loss exists on the last stage only, and is 0 elsewhere."""
        self.optimizer.zero_grad()
        tokens, labels = self.samples.rows(
            self.samples_seen + self.dp_rank * self.per_replica, self.per_replica
        )
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
        # times pp: the mean over all ranks is then the loss
        return Shown(loss * dist.get_world_size(self.pp), norm)

    def _clip(self) -> float:
        """Clip the local gradients to CLIP_NORM; return the norm of the whole gradient.

        All-reduces one float32 over each of tp, dp and pp, and blocks. clip_grad_norm_ does not
        include pp.
        """
        split = [p for p in self.on_dp_and_tp if p.placements[1].is_shard()]
        # biases of row-parallel linears
        whole = [p for p in self.on_dp_and_tp if not p.placements[1].is_shard()]
        square_of_split = nn.utils.get_total_norm(local_gradients(split)) ** 2
        dist.all_reduce(square_of_split, group=self.tp)
        square = square_of_split + nn.utils.get_total_norm(local_gradients(self.on_dp + whole)) ** 2
        dist.all_reduce(square, group=self.dp)
        dist.all_reduce(square, group=self.pp)
        factor = (CLIP_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local_gradients(self.on_dp + self.on_dp_and_tp), factor)
        return float(square.sqrt())

    def settle(self) -> None:
        """Return at once: a step leaves no pending work."""
