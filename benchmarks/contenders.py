"""Contenders: this framework in any layout, and plain torch, DDP,
ZeroRedundancyOptimizer and FSDP2 on the same task.

A contender is built on every rank of a world. Its steps run while the same process groups live.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import (
    BETAS,
    CLIP_NORM,
    EPS,
    GLOBAL_BATCH,
    LEARNING_RATE,
    MICRO_BATCH_SIZE,
    Samples,
    adamw,
    decay_groups,
    plain_model,
    run_config,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from meshwright.build import build
from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.step import take_step


class Shown(NamedTuple):
    """Result of one step on this rank: loss and gradient norm."""

    loss: float
    """Mean over the tokens of the batch, or of this rank's share of it;
    its mean over the ranks is the batch's.
    """
    grad_norm: float
    """Norm of the whole model's gradient, before clipping."""


class Contender(Protocol):
    """One rank of an implementation that trains."""

    def step(self) -> Shown:
        """Take one optimizer step on the next global batch."""

    def settle(self) -> None:
        """Block until no work of the last step is pending."""


def token_mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over the tokens, (B, S, V) and (B, S) -> ()."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def value(number: Any) -> float:
    """Return a scalar tensor as a Python float;
    a sharded one is gathered first (collective over its mesh).
    """
    number = number.detach()
    return float(number.full_tensor() if isinstance(number, DTensor) else number)


class TorchLoop:
    """Training loop without a framework: accumulate gradients over micro-batches, clip, step."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, dp_rank: int = 0, dp: int = 1
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.parameters = list(model.parameters())
        self.samples = Samples()
        self.per_replica = GLOBAL_BATCH // dp
        self.chunks = self.per_replica // MICRO_BATCH_SIZE
        self.dp_rank = dp_rank
        self.samples_seen = 0
        assert self.chunks == 1 or dp == 1, (
            "with DDP and FSDP2 more micro-batches than one would want no_sync()"
        )

    def step(self) -> Shown:
        """Accumulate gradients over micro-batches, clip and step;
        the wrapped model synchronises by itself.
        """
        self.optimizer.zero_grad()
        loss_sum = torch.zeros(())
        for m in range(self.chunks):
            first = self.samples_seen + self.dp_rank * self.per_replica + m * MICRO_BATCH_SIZE
            tokens, labels = self.samples.rows(first, MICRO_BATCH_SIZE)
            loss = token_mean_loss(self.model(tokens), labels) / self.chunks
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()
        self.samples_seen += GLOBAL_BATCH
        return Shown(value(loss_sum), value(norm))

    def settle(self) -> None:
        """Return at once: a step leaves no pending work."""


class Ours:
    """Layout of this framework, with the build and the step of a training run."""

    def __init__(
        self,
        dp: int,
        pp: int,
        tp: int,
        *,
        zero: int = 1,
        tied: bool = True,
        **changes: Mapping[str, object],
    ) -> None:
        """Build the layout. ``changes``: other keys of a section of the configuration."""
        config = run_config(dp, pp, tp, zero=zero, tied=tied)
        update = {
            section: getattr(config, section).model_copy(update=keys)
            for section, keys in changes.items()
        }
        self.mesh = open_mesh(Grid(pp=pp, dp=dp, tp=tp), "cpu")
        self.parts = build(config.model_copy(update=update), self.mesh, (Samples(), {}))

    def step(self) -> Shown:
        """Take the framework's own step."""
        stats = take_step(self.parts)
        return Shown(stats.loss, stats.grad_norm)

    def settle(self) -> None:
        """Wait for weights that are still being gathered;
        otherwise the next forward would wait for them.
        """
        for replica in self.parts.replicas.values():
            replica.wait_for_weights()


def one_process(*, tied: bool = True) -> Contender | None:
    """Build the plain loop on rank 0; return None on the other ranks, which have nothing to do."""
    if dist.get_rank() != 0:
        return None
    model = plain_model(tied=tied)
    return TorchLoop(model, adamw(model.parameters()))


def ddp() -> Contender:
    """Build DistributedDataParallel over all ranks, wrapped as in its documentation."""
    model = DistributedDataParallel(plain_model(tied=True))
    return TorchLoop(model, adamw(model.parameters()), dist.get_rank(), dist.get_world_size())


def zero_redundancy() -> Contender:
    """Build DDP with sharded optimizer state: torch's ZeRO-1."""
    model = DistributedDataParallel(plain_model(tied=True))
    decayed, others = decay_groups(model.parameters())
    optimizer = ZeroRedundancyOptimizer(
        decayed["params"],
        optimizer_class=torch.optim.AdamW,
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        weight_decay=decayed["weight_decay"],
        fused=True,
    )
    optimizer.add_param_group(dict(others))
    return TorchLoop(model, optimizer, dist.get_rank(), dist.get_world_size())


def fsdp2() -> Contender:
    """Apply fully_shard to each block and to the whole model: torch's ZeRO-3."""
    model = plain_model(tied=True)
    for name, layer in model.named_children():
        if name.startswith("block"):
            fully_shard(layer)
    fully_shard(model)
    return TorchLoop(model, adamw(model.parameters()), dist.get_rank(), dist.get_world_size())
