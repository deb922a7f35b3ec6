"""One optimizer step: feed, forward and backward by the schedule, all-reduce, update.

take_step
    executor.run(feed)      this rank's row of the schedule
        F, B, ...           forward and backward of every micro-batch; gradients accumulate in the buckets
        last B or W         posts reduce-scatters (ZeRO-0: all-reduces) of complete buckets; ZeRO-2, 3: every B, W
        REDUCE              waits for all of them; sums partial gradients over tp
        STEP                _optimizer_step: sums over all ranks, clipping, optimizer, all-gather of the weights
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.config import batch_numbers
from meshwright.data_parallel.members import sum_ties
from meshwright.model.metrics import means
from meshwright.optimizer import next_scale
from meshwright.optimizer.flat import clip_factor
from meshwright.optimizer.learning_rate import learning_rate
from meshwright.parts import FLAGS, Parts, StepFeed, StepStats, is_saved
from meshwright.pipeline.executor import RowResult


def take_step(parts: Parts) -> StepStats:
    """Take one optimizer step on the next global batch. Collective over all ranks.

    Raises:
        NonFiniteError: on every rank, from ``parts.on_nonfinite``.
    """
    state, parts.data_s = parts.state, 0.0
    batch = batch_numbers(parts.config, state.samples_seen)
    if parts.executor.schedule.chunks != batch.chunks:  # in a batch-size ramp
        parts.executor.set_schedule(next(each for each in parts.blueprint.schedules if each.chunks == batch.chunks))
    for replica in parts.replicas.values():
        replica.begin_step()
    stages = list(parts.executor.stages.values())
    for stage in stages:
        stage.step_scale = state.loss_scale.value
    parts.step_state.begin(stages[0].loss_scale * state.loss_scale.value)  # the same for all stages
    feed = StepFeed(parts, parts.source, state.samples_seen)
    found: list[StepStats] = []  # filled by STEP, an item of the row that the executor calls
    parts.last = parts.executor.run(feed, lambda row: found.append(_optimizer_step(parts, row)))
    (stats,) = found
    if stats.skipped:  # the same on every rank
        if parts.on_nonfinite is not None:
            parts.on_nonfinite(parts, feed, stats)
        parts.step_state.undo()
    else:
        parts.step_state.end()
        state.optimizer_steps += 1
        state.skipped_in_a_row = 0
    state.loss_scale = next_scale(parts.config, state.loss_scale, overflow=not math.isfinite(stats.grad_norm))
    state.step += 1
    state.samples_seen += batch.global_batch
    state.tokens_seen += stats.num_tokens
    return stats


def _optimizer_step(parts: Parts, row: RowResult) -> StepStats:
    """Run STEP of the schedule: sum tied gradients, all-reduce the sums of all ranks, then update this rank's shards.

    The buckets hold the gradient of loss scale x loss_sum / label positions of the largest global batch. The mean over
    the labels that counted needs the factor positions / counted / loss scale: 1 unless labels are ignored, the batch
    size is still ramping up, or the run computes in float16. Clipping is one more factor. All are applied at once.
    """
    config = parts.config
    numbers: list[float] = all_reduce_sums(parts, row).tolist()
    fields, pp = len(StepSums._fields), config.parallel.pp
    sums, passed_s, recorded = StepSums(*numbers[:fields]), numbers[fields : fields + pp], numbers[fields + pp :]
    counted = max(sums.num_tokens, 1.0)
    scale = parts.state.loss_scale.value
    factor = parts.blueprint.label_positions / counted / scale
    if parts.on_gradients is not None:
        parts.on_gradients(parts, factor)
    grad_norm = math.sqrt(sums.square_norm) * factor
    skips = config.optimizer.name == "schedule_free_adamw"  # its average leaves skipped steps out
    index = parts.state.optimizer_steps if skips else parts.state.step
    rate = learning_rate(config.optimizer, index, config.train.steps)
    stats = StepStats(
        loss=sums.loss_sum / counted,
        grad_norm=grad_norm,
        learning_rate=rate,
        num_tokens=int(sums.num_tokens),
        bubble_share=1.0 - sums.busy_s / (pp * max(passed_s)),
        flags=frozenset(flag for flag in FLAGS if getattr(sums, flag) > 0),
        skipped=not (math.isfinite(sums.loss_sum) and math.isfinite(grad_norm)),  # the same on every rank
        loss_scale=scale,
        num_samples=batch_numbers(config, parts.state.samples_seen).global_batch,
        metrics=means(parts.blueprint.metrics, recorded),
    )
    if not stats.skipped:
        own = parts.optimizer.own
        if own is not None and is_saved(config, parts.state.step + 1, stats.flags):
            own.request_check()
        parts.optimizer.step(rate, factor * clip_factor(grad_norm, config.optimizer.clip_norm))
        if own is not None:
            own.end_step(parts.mesh.world, parts.optimizer.added)
    return stats


class StepSums(NamedTuple):
    """Sums over all ranks that a step needs before its update."""

    loss_sum: float
    num_tokens: float
    """Labels that counted."""
    square_norm: float
    """Square of the norm of the gradient in the buckets."""
    busy_s: float
    """Seconds of computation."""
    stop: float
    enough: float
    save_due: float
    not_written: float
    files_lost: float
    """Number of ranks that raise each of FLAGS, which have these names."""


def all_reduce_sums(parts: Parts, row: RowResult) -> Tensor:
    """Sum tied-weight gradients, then all-reduce the step's scalars, in float64.

    The ties come before the norm, which must see the whole gradient in each copy, and after REDUCE of every stage.
    The vector has :class:`StepSums`, the seconds of each pipeline rank up to the end of its last computation, 2 sums
    per metric, and the step state. Does not wait for the device. On CUDA the times are those of the step before.
    """
    mesh, optimizer = parts.mesh, parts.optimizer
    sum_ties(bucket for replica in parts.replicas.values() for bucket in replica.buckets)
    loss_parts = row.loss_parts if mesh.at.tp_rank == 0 else []  # all tp ranks have the same loss
    zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
    spare = optimizer.uncounted_square_norm() * 0.0  # NaN if this rank's copy of others' elements has NaN or Inf
    timed = parts.last if row.times.is_on_device and parts.last is not None else row
    busy_s, passed_s = timed.times.computing()
    on_device = {
        "loss_sum": sum((part.loss_sum.double() for part in loss_parts), zero),
        "num_tokens": sum((part.num_tokens.double() for part in loss_parts), zero),
        "square_norm": mesh.to_device(optimizer.square_norm() + spare),
    }
    on_host = {"busy_s": busy_s, **{flag: float(parts.flags[flag]()) for flag in FLAGS}}
    assert (*on_device, *on_host) == StepSums._fields
    passed = [passed_s if pp_rank == mesh.at.pp_rank else 0.0 for pp_rank in range(mesh.grid.pp)]
    host_sums = mesh.to_device(torch.tensor([*on_host.values(), *passed], dtype=torch.float64))  # one copy
    numbers = (torch.stack(list(on_device.values())), host_sums, row.recorder.vector(mesh.device))
    sums = torch.cat([*numbers, parts.step_state.vector(mesh.device)])
    mesh.world.all_reduce(sums).wait()
    return parts.step_state.split_off(sums)
