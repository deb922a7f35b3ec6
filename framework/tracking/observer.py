"""The observer that records each step: metrics.jsonl, the console, wandb."""

from __future__ import annotations

from meshwright.blueprint import batch_numbers
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.tracking.record import StepRecord
from meshwright.tracking.throughput import peak_flops
from meshwright.tracking.tracker import Tracker


class Records(Observer):
    """One record per step, written by rank 0."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Hand the step's record to the sinks. Does not block."""
        self._tracker.write(record(parts, event))


def record(parts: Parts, event: StepEvent) -> StepRecord:
    """Return the record of a step."""
    config, world_size, stats = parts.config, parts.mesh.grid.size, event.stats
    flops_per_s = parts.blueprint.flops_per_step / event.step_s / world_size
    peak = peak_flops(parts.mesh.device, config.train.dtype)
    straggler = event.straggler
    return StepRecord(
        step=parts.state.step,
        samples_seen=parts.state.samples_seen,
        tokens=parts.state.tokens_seen,
        loss=stats.loss,
        grad_norm=stats.grad_norm,
        learning_rate=stats.learning_rate,
        step_s=event.step_s,
        data_s=parts.data_s,
        tokens_per_s=batch_numbers(config).global_batch * parts.blueprint.example.tokens_per_sample / event.step_s,
        num_devices=world_size,
        tflops_per_device=flops_per_s / 1e12,
        mfu=flops_per_s / peak if peak else None,
        bubble_share=stats.bubble_share,
        memory_bytes=parts.mesh.peak_memory_bytes(),
        validation_loss=event.validation_loss,
        skipped=stats.skipped,
        restarts=parts.restarts,
        save_s=event.save_s,
        straggler=straggler.name if straggler is not None else None,
        straggler_rank=straggler.rank if straggler is not None and straggler.name else None,
        straggler_share=straggler.share if straggler is not None else None,
    )
