"""Micro-batches of a run, as the step of a layout reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from meshwright.config import Batch, RunConfig
from meshwright.context_parallel.cut import TokenCut
from meshwright.data.sources import Source
from meshwright.mesh.comm import Group
from meshwright.parts import StepFeed
from meshwright.pipeline.values import Microbatch


def microbatch(
    source: Source,
    samples_seen: int,
    dp_rank: int,
    dp: int,
    micro_batch_size: int,
    chunks: int,
    m: int,
) -> Microbatch:
    """Return micro-batch ``m`` of replica ``dp_rank`` in the step that starts
    at ``samples_seen``.
    """
    batch = Batch(
        micro_batch_size=micro_batch_size,
        chunks=chunks,
        global_batch=micro_batch_size * chunks * dp,
    )
    at, device = SimpleNamespace(dp_rank=dp_rank), torch.device("cpu")
    mesh = SimpleNamespace(at=at, device=device, to_device=lambda tensor: tensor)
    executor = SimpleNamespace(schedule=SimpleNamespace(chunks=chunks))
    cut = TokenCut(Group("cp", (0,), 0), "zigzag", torch.zeros(1, 1))
    blueprint = SimpleNamespace(cut=cut, is_synchronised=False, trim_multiple=0)
    parts: Any = SimpleNamespace(
        config=RunConfig(batch=batch), mesh=mesh, executor=executor, blueprint=blueprint, data_s=0.0
    )
    return StepFeed(parts, source, samples_seen).microbatch(m)


def samples(source: Source, first: int, count: int) -> Microbatch:
    """Return ``count`` samples of the run from index ``first`` on, as one micro-batch."""
    return microbatch(source, first, 0, 1, count, 1, 0)
