"""The observer that records each step, and the sinks that a configuration names: metrics.jsonl,
the console, wandb.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from meshwright.blueprint import Blueprint
from meshwright.config import RunConfig, Tracking, batch_numbers
from meshwright.config.functions import find_function
from meshwright.errors import ConfigError
from meshwright.model.meter import causal_share
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.tracking.console import ConsoleSink
from meshwright.tracking.expert_load import COUNTS, ExpertLoad
from meshwright.tracking.gpu import GpuMetrics
from meshwright.tracking.jsonl import JsonlSink
from meshwright.tracking.record import StepRecord, perplexity
from meshwright.tracking.routing import RoutingObserver
from meshwright.tracking.routing import check_model as check_model
from meshwright.tracking.routing import check_routing as check_routing
from meshwright.tracking.routing import hooks_of as hooks_of
from meshwright.tracking.routing import step_key as step_key
from meshwright.tracking.tracker import LateSink, Sink, Tracker
from meshwright.tracking.wandb import WandbSink

SINKS = {
    "tensorboard": "meshwright.tracking.tensorboard:TensorBoardSink",
    "mlflow": "meshwright.tracking.mlflow:MlflowSink",
}
"""Short names in ``tracking.sinks`` of meshwright's own sinks."""
BF16_PEAKS = {
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2450e12,
}
"""Dense bf16 floating-point operations per second from the vendors' data sheets;
sparse figures are never used.
"""


def open_tracker(parts: Parts, metrics_file: Path, is_ours: Callable[[], bool]) -> Tracker:
    """Open the sinks of the configuration on rank 0; the other ranks get a tracker without sinks.

    Call it after a resume: records after the step of ``parts`` are dropped from ``metrics_file``.
    ``is_ours`` returns True while the directory of ``metrics_file`` belongs to this run.
    """
    if parts.mesh.rank != 0:
        return Tracker()
    config, step, steps = parts.config, parts.state.step, parts.config.train.steps
    sinks: list[Sink] = []
    if config.tracking.console:
        sinks.append(
            ConsoleSink(steps, config.tracking.log_every, unit=parts.blueprint.example.unit)
        )
    if config.tracking.wandb != "off" and step < steps:
        sinks.append(WandbSink(metrics_file.parent, config))
    if step < steps:
        sinks += [
            LateSink(name, partial(make_sink, config, metrics_file.parent))
            for name, make_sink in zip(
                config.tracking.sinks, find_sinks(config.tracking), strict=True
            )
        ]
    return Tracker(JsonlSink(metrics_file, step, is_ours), sinks)


def find_sinks(tracking: Tracking) -> list[Callable[[RunConfig, Path], Sink]]:
    """Import the functions of ``tracking.sinks``,
    which take the configuration and the run's directory.

    Raises:
        ConfigError: a module or function does not exist, or its import fails.
    """
    paths = [SINKS.get(name, name) for name in tracking.sinks]
    wanted = "a function (config, directory) -> sink with open(), write(record) and close(failed)"
    return [find_function(path, "tracking.sinks", wanted, ConfigError) for path in paths]


class Records(Observer):
    """Observer that passes one record per step to the tracker. Rank 0 writes;
    trackers of other ranks have no sinks.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Pass the step's record to the sinks. Blocks only for one small write to a local file."""
        self._tracker.write(record(parts, event))


def gpu_metrics(parts: Parts) -> list[Observer]:
    """Return the observer of the ranks' GPUs, if the run has GPUs and ``tracking.gpu_metrics``."""
    if parts.config.tracking.gpu_metrics and parts.mesh.device.type == "cuda":
        return [GpuMetrics()]
    return []


def expert_load(parts: Parts, directory: Path) -> list[Observer]:
    """Return the observer of the experts' load, if the model counts it."""
    if any(name.endswith(COUNTS) for name in parts.step_state.names):
        return [ExpertLoad(directory)]
    return []


def routing(parts: Parts, directory: Path) -> list[Observer]:
    """Return the observer that records or replays the routing, if the configuration has it."""
    return [RoutingObserver(parts, directory)] if parts.config.train.routing != "off" else []


def has_perplexity(blueprint: Blueprint) -> bool:
    """Return whether ``exp(loss)`` is a perplexity: the loss is the cross-entropy that is built in,
    over tokens.
    """
    return blueprint.model.loss is None and blueprint.example.has_token_labels


def loss_unit(blueprint: Blueprint) -> str:
    """Return the unit of the loss: nats for the cross-entropy that is built in,
    none for a ``model.loss``.
    """
    if blueprint.model.loss is not None:
        return "per label, of model.loss"
    return "nats per token" if blueprint.example.has_token_labels else "nats per label"


def record(parts: Parts, event: StepEvent) -> StepRecord:
    """Return the record of a step."""
    config, world_size, stats = parts.config, parts.mesh.grid.size, event.stats
    # less than 1 in a batch-size ramp
    share = stats.num_samples / batch_numbers(config.batch).global_batch
    flops_per_s = share * parts.blueprint.flops_per_step / event.step_s / world_size
    peak = peak_flops(parts.mesh.device, config.train.dtype)
    mfu = flops_per_s / peak if peak else None
    straggler, loss = event.straggler, event.validation_loss
    return StepRecord(
        step=parts.state.step,
        samples_seen=parts.state.samples_seen,
        tokens=parts.state.tokens_seen,
        loss=stats.loss,
        grad_norm=stats.grad_norm,
        learning_rate=stats.learning_rate,
        step_s=event.step_s,
        data_s=parts.data_s,
        tokens_per_s=stats.num_samples * parts.blueprint.example.tokens_per_sample / event.step_s,
        num_devices=world_size,
        tflops_per_device=flops_per_s / 1e12,
        mfu=mfu,
        mfu_causal=mfu
        and mfu * causal_share([cost.forward for cost in parts.blueprint.layer_costs]),
        bubble_share=stats.bubble_share,
        memory_bytes=parts.mesh.peak_memory_bytes(),
        validation_loss=loss,
        extra={name: float(value) for name, value in event.metrics.items()},
        validation_perplexity=perplexity(loss)
        if loss is not None and has_perplexity(parts.blueprint)
        else None,
        skipped=stats.skipped,
        loss_scale=stats.loss_scale if config.train.dtype == "float16" else None,
        restarts=parts.restarts,
        save_s=event.save_s,
        recoveries=event.recoveries,
        recovery_s=event.recovery_s,
        validation_s=event.validation_s,
        straggler=straggler.name if straggler is not None else None,
        straggler_rank=straggler.rank if straggler is not None and straggler.name else None,
        straggler_share=straggler.share if straggler is not None else None,
    )


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the dense peak FLOP/s of the device for MFU; None if it is no CUDA device in 16 bits,
    or unlisted.
    """
    if device.type != "cuda" or dtype not in ("bfloat16", "float16"):
        return None
    name = torch.cuda.get_device_name(device)
    longest_first = sorted(BF16_PEAKS, key=len, reverse=True)
    return next((BF16_PEAKS[key] for key in longest_first if re.search(rf"\b{key}\b", name)), None)
