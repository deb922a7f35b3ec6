"""One optimizer step: feed, forward and backward by the schedule, all-reduce, update.

take_step
    executor.until_step     this rank's row of the schedule
        F, B, ...           forward and backward of every micro-batch; gradients accumulate in the buckets
        last B or W         posts reduce-scatters (ZeRO-0: all-reduces) of complete buckets; ZeRO-2, 3: every B, W
        REDUCE              waits for all of them; sums partial gradients over tp
    STEP                    sums over all ranks, clipping, optimizer, all-gather of the weights
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from meshwright.config import batch_numbers
from meshwright.data_parallel.ties import sum_ties
from meshwright.model.metrics import means
from meshwright.optimizer import next_scale
from meshwright.optimizer.flat import clip_factor
from meshwright.optimizer.learning_rate import learning_rate
from meshwright.parts import FLAGS, Parts, StepFeed, StepStats, is_saved

if TYPE_CHECKING:
    from meshwright.pipeline.executor import RowResult


def take_step(parts: Parts) -> StepStats:
    """Take one optimizer step on the next global batch. Collective over all ranks.

    NOTE [gradient factor]: the buckets hold the gradient of loss scale x loss_sum / label positions
    of the largest global batch (of a batch-size ramp). The labels of the global batch that count
    are summed only in STEP, so backward uses this constant, which keeps gradients near their final
    size, as 16 bits need. The mean over the labels that counted needs the factor positions /
    counted / loss scale: 1 unless labels are ignored, the batch size is still ramping up, or the
    run computes in float16. Clipping is one more factor. All are applied at once, by the optimizer.

    Raises:
        NonFiniteError: on every rank, from ``parts.on_nonfinite``.
    """
    state = parts.state
    batch = batch_numbers(parts.config.batch, state.samples_seen)
    _begin_step(parts, batch.chunks)
    is_balanced = parts.config.batch.balance == "work"
    feed = StepFeed(parts, parts.source, state.samples_seen, is_balanced)
    with parts.executor.until_step(feed) as row:
        # This block is STEP. The buckets hold the gradients of the global batch, apart from what
        # weights that are tied across stages lack; the norm must see that too.
        sum_ties(bucket for replica in parts.replicas.values() for bucket in replica.buckets)
        numbers = _read_sums(parts, all_reduce_sums(parts, row))
        counted = max(numbers.sums.num_tokens, 1.0)
        factor = parts.blueprint.label_positions / counted / state.loss_scale.value
        if parts.on_gradients is not None:
            parts.on_gradients(parts, factor)
        stats = _stats_of(parts, numbers, factor)
        if not stats.skipped:
            _update_weights(parts, stats, factor)
    parts.last = row
    if stats.skipped:  # the same on every rank
        if parts.on_nonfinite is not None:
            parts.on_nonfinite(parts, feed, stats)
        parts.step_state.undo()
    else:
        parts.step_state.end()
        state.optimizer_steps += 1
        state.skipped_in_a_row = 0
    overflow = not math.isfinite(stats.grad_norm)
    state.loss_scale = next_scale(
        parts.config.loss_scale, parts.config.train.dtype, state.loss_scale, overflow=overflow
    )
    state.step += 1
    state.samples_seen += batch.global_batch
    state.tokens_seen += stats.num_tokens
    return stats


def _begin_step(parts: Parts, chunks: int) -> None:
    """Prepare executor, replicas, stages and buffers for a step of ``chunks`` micro-batches."""
    parts.data_s = 0.0
    if parts.executor.schedule.chunks != chunks:  # in a batch-size ramp
        schedules = {schedule.chunks: schedule for schedule in parts.blueprint.schedules}
        parts.executor.set_schedule(schedules[chunks])
    for replica in parts.replicas.values():
        replica.begin_step()
    loss_scale = parts.state.loss_scale.value
    stages = list(parts.executor.stages.values())
    for stage in stages:
        stage.loss_scale = loss_scale
    parts.step_state.begin(stages[0].label_scale * loss_scale)  # the same for all stages


def _stats_of(parts: Parts, numbers: _StepNumbers, factor: float) -> StepStats:
    """Return the numbers of the step. ``factor``: see NOTE [gradient factor]."""
    config, state = parts.config, parts.state
    sums = numbers.sums
    loss = sums.loss_sum / max(sums.num_tokens, 1.0)
    grad_norm = math.sqrt(sums.square_norm) * factor
    # an average of the weights leaves skipped steps out
    leaves_out_skipped = config.optimizer.spec.averages_weights
    rate_index = state.optimizer_steps if leaves_out_skipped else state.step
    pp, last_end_s = config.parallel.pp, max(numbers.passed_s)
    return StepStats(
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate(config.optimizer, rate_index, config.train.steps),
        num_tokens=int(sums.num_tokens),
        bubble_share=1.0 - sums.busy_s / (pp * last_end_s),
        flags=frozenset(flag for flag in FLAGS if getattr(sums, flag) > 0),
        # from sums over all ranks, so that all of them skip, or none
        skipped=not (math.isfinite(sums.loss_sum) and math.isfinite(grad_norm)),
        loss_scale=state.loss_scale.value,
        num_samples=batch_numbers(config.batch, state.samples_seen).global_batch,
        metrics=means(parts.blueprint.metrics, numbers.recorded),
    )


def _update_weights(parts: Parts, stats: StepStats, factor: float) -> None:
    """Clip, step the optimizer over this rank's shards, and post the all-gather of the weights."""
    config, optimizer = parts.config, parts.optimizer
    own_optimizer = optimizer.own  # a user's, by optimizer.builder
    if own_optimizer is not None:
        every, last = config.checkpoint.every, config.train.steps
        if is_saved(parts.state.step + 1, stats.flags, every=every, last=last):
            own_optimizer.request_check()
    clip = clip_factor(stats.grad_norm, config.optimizer.clip_norm)
    optimizer.step(stats.learning_rate, factor * clip)
    if own_optimizer is not None:
        own_optimizer.end_step(parts.mesh.world, optimizer.added)


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
    not_mirrored: float
    """``stop`` to ``not_mirrored``: number of ranks that raise the flag of FLAGS of that name."""


class _StepNumbers(NamedTuple):
    """The all-reduced numbers of a step, read from the device."""

    sums: StepSums
    passed_s: list[float]
    """Seconds of each pipeline rank up to the end of its last computation,
    summed over its dp x cp x tp ranks, as ``busy_s`` is.
    """
    recorded: list[float]
    """Sums of values and of counts of each metric."""


def all_reduce_sums(parts: Parts, row: RowResult) -> Tensor:
    """All-reduce the step's scalars over all ranks, in float64.

    The vector has the fields of :class:`_StepNumbers`, then the buffers that sum over the step
    (model/buffers/step_state.py), which keep their sums. One vector, because a collective of a few
    numbers costs its latency. Does not wait for the device.
    """
    device = parts.mesh.device
    vectors = [
        _sums_on_device(parts, row),
        # one copy to the device for all numbers of the host
        parts.mesh.to_device(_sums_on_host(parts, row)),
        row.recorder.vector(device),
        parts.step_state.vector(device),
    ]
    sums = torch.cat(vectors)
    parts.mesh.world.all_reduce(sums).wait()
    return parts.step_state.split_off(sums)


def _sums_on_device(parts: Parts, row: RowResult) -> Tensor:
    """Return this rank's terms of the first three fields of :class:`StepSums`, (3,) float64."""
    mesh, optimizer = parts.mesh, parts.optimizer
    # all tp ranks have the same loss, of which one counts
    loss_parts = row.loss_parts if mesh.at.tp_rank == 0 else []
    zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
    # Copies of elements that another rank counts add nothing to the norm: 0, or NaN where they hold
    # NaN or Inf, so that such a copy stops the step too.
    uncounted = optimizer.uncounted_square_norm() * 0.0
    sums = {
        "loss_sum": sum((part.loss_sum.double() for part in loss_parts), zero),
        "num_tokens": sum((part.num_tokens.double() for part in loss_parts), zero),
        "square_norm": mesh.to_device(optimizer.square_norm() + uncounted),
    }
    assert tuple(sums) == StepSums._fields[:3]
    return torch.stack(list(sums.values()))


def _sums_on_host(parts: Parts, row: RowResult) -> Tensor:
    """Return this rank's terms of the other fields of :class:`StepSums`, then its place in the
    vector of all pipeline ranks' ``passed_s``: float64, on the CPU.
    """
    # On CUDA the times are those of the step before: reading this one's would wait for the device.
    timed = parts.last if row.times.is_on_device and parts.last is not None else row
    busy_s, last_end_s = timed.times.computing()
    sums = {"busy_s": busy_s, **{flag: float(parts.flags[flag]()) for flag in FLAGS}}
    assert tuple(sums) == StepSums._fields[3:]
    passed_s = [0.0] * parts.mesh.grid.pp
    passed_s[parts.mesh.at.pp_rank] = last_end_s
    return torch.tensor([*sums.values(), *passed_s], dtype=torch.float64)


def _read_sums(parts: Parts, sums: Tensor) -> _StepNumbers:
    """Copy the all-reduced vector to the host and take it apart. The only wait for the device."""
    numbers: list[float] = sums.tolist()
    num_sums = len(StepSums._fields)
    num_before_metrics = num_sums + parts.config.parallel.pp
    return _StepNumbers(
        StepSums(*numbers[:num_sums]),
        passed_s=numbers[num_sums:num_before_metrics],
        recorded=numbers[num_before_metrics:],
    )
