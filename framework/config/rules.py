"""Rules between keys. Each rule lists the keys it reads, and its message contains the error and its remedy.

A rule runs only when all its keys are valid by themselves, so that one mistake is reported once. An option without
effect is an error too, because the user expects an effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from meshwright.config import batch
from meshwright.config.keys import Path, format_value, split
from meshwright.config.schema import Data, Pipeline, RunConfig, Train, Watch

MAX_RANKS = 2**20
MAX_FORWARDS = 2**18
"""Bound on pp x chunks x stages per rank: a schedule lists every forward."""
MAX_LAYERS = 4096


class Rule(NamedTuple):
    """A rule between keys. ``broken`` returns the error text, or None; ``code`` is that of the error."""

    code: str
    keys: tuple[Path, ...]
    broken: Callable[[RunConfig], str | None]


def known_dp(config: RunConfig) -> int | None:
    """Return dp, or None while it depends on the number of ranks."""
    dp = config.parallel.dp
    return None if dp == "auto" or dp == -1 else dp


def _warmup(config: RunConfig) -> str | None:
    warmup, steps = config.optimizer.warmup_steps, config.train.steps
    if warmup <= steps:
        return None
    return f"optimizer.warmup_steps = {warmup} is more than train.steps = {steps}: at most {steps} is allowed"


def _learning_rates(config: RunConfig) -> str | None:
    low, high = config.optimizer.min_learning_rate, config.optimizer.learning_rate
    if low <= high:
        return None
    return f"optimizer.min_learning_rate = {low} is above optimizer.learning_rate = {high}: at most {high} is allowed"


def _learning_rate_floor(config: RunConfig) -> str | None:
    low, schedule = config.optimizer.min_learning_rate, config.optimizer.schedule
    if low == 0 or schedule != "constant":
        return None
    return (
        f'optimizer.min_learning_rate = {low} has no effect with optimizer.schedule = "constant": leave it out, or '
        f'choose "cosine", "linear" or "wsd"'
    )


def _decay(config: RunConfig) -> str | None:
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.schedule != "wsd":
        if optimizer.decay_steps == 0:
            return None
        return (
            f"optimizer.decay_steps = {optimizer.decay_steps} has no effect with optimizer.schedule = "
            f'{format_value(optimizer.schedule)}: leave it out, or choose optimizer.schedule = "wsd"'
        )
    if optimizer.decay_steps == 0:
        return (
            'optimizer.schedule = "wsd" needs optimizer.decay_steps, the number of last steps in which the learning '
            f"rate falls, from 1 to {max(1, steps - optimizer.warmup_steps)}: set it, or choose "
            f'optimizer.schedule = "constant"'
        )
    together = optimizer.warmup_steps + optimizer.decay_steps
    if optimizer.warmup_steps > steps or together <= steps:  # _warmup reports the first case
        return None
    return (
        f"optimizer.warmup_steps {optimizer.warmup_steps} + optimizer.decay_steps {optimizer.decay_steps} = "
        f"{together}, more than train.steps {steps}: shorten one, or train longer"
    )


def _validation(config: RunConfig) -> str | None:
    if config.data.validation is not None or config.data.builder is not None:
        return None
    usual = Train()
    useless = [
        f"train.{name} = {value}"
        for name, value, default in (
            ("validate_every", config.train.validate_every, usual.validate_every),
            ("validate_steps", config.train.validate_steps, usual.validate_steps),
        )
        if value != default
    ]
    if not useless:
        return None
    return f"{' and '.join(useless)} without effect: there is no data.validation; set it, or leave the other out"


def _keep_every(config: RunConfig) -> str | None:
    every, kept = config.checkpoint.every, config.checkpoint.keep_every
    if kept == 0 or (every and kept % every == 0):
        return None
    if every == 0:
        return (
            f"checkpoint.keep_every = {kept} has no effect with checkpoint.every = 0, which saves after the last step "
            f"only: leave it out, or choose checkpoint.every = {kept}"
        )
    return (
        f"checkpoint.keep_every = {kept} is no multiple of checkpoint.every = {every}: few of those steps would be "
        f"saved at all; choose {math.lcm(every, kept)}, or checkpoint.every = {math.gcd(every, kept)}"
    )


def _most_skipped(config: RunConfig) -> str | None:
    most = config.watch.most_skipped
    if config.watch.on_nonfinite == "skip" or most == Watch().most_skipped:
        return None
    return (
        f'watch.most_skipped = {most} has no effect with watch.on_nonfinite = "stop": leave it out, or choose '
        f'watch.on_nonfinite = "skip"'
    )


def _sequence(config: RunConfig) -> str | None:
    if not config.parallel.sequence or config.parallel.tp > 1:
        return None
    return (
        "parallel.sequence = true has no effect with parallel.tp = 1: it splits the sequence over the tensor-parallel "
        "ranks; set parallel.tp to 2 or more, or --parallel.sequence=false"
    )


def _shard_factor(config: RunConfig) -> str | None:
    factor = config.parallel.shard_factor
    if factor is None or factor == 1 or config.parallel.zero:
        return None
    return (
        f"parallel.shard_factor = {factor} has no effect with parallel.zero = 0, which shards nothing: set "
        f"parallel.zero = 1, or leave it out"
    )


def _reduce(config: RunConfig) -> str | None:
    if config.parallel.reduce != "microbatch" or config.parallel.zero >= 2:
        return None
    return (
        f'parallel.reduce = "microbatch" saves nothing with parallel.zero = {config.parallel.zero}, which keeps the '
        f"whole gradient: set parallel.zero = 2, or leave it out"
    )


def _offload(config: RunConfig) -> str | None:
    if config.parallel.offload_directory is None or config.parallel.offload:
        return None
    return (
        f"parallel.offload_directory = {format_value(config.parallel.offload_directory)} has no effect without "
        f"parallel.offload = true: set it, or leave the directory out"
    )


def _across_nodes(config: RunConfig) -> str | None:
    if not config.parallel.tp_across_nodes or config.parallel.tp > 1:
        return None
    return (
        "parallel.tp_across_nodes = true has no effect with parallel.tp = 1: set parallel.tp to 2 or more, or "
        "--parallel.tp_across_nodes=false"
    )


def _balance(config: RunConfig) -> str | None:
    balance, pp, interleave = config.pipeline.balance, config.parallel.pp, config.pipeline.stages_per_rank
    if isinstance(balance, str) or config.pipeline.schedule_file is not None or len(balance) == pp * interleave:
        return None
    stages = f"parallel.pp = {pp}" + (f" with pipeline.interleave = {interleave}" if interleave > 1 else "")
    return (
        f"pipeline.balance = {format_value(balance)} names the layers of {len(balance)} stages, but {stages}: give "
        f'{pp * interleave} number{"s" * (pp * interleave > 1)}, or balance by "time", "parameters" or "layers"'
    )


def _corpus(config: RunConfig) -> str | None:
    data = config.data
    if data.builder is None:
        if not data.train:
            return (
                "data.train is missing: the path of a .bin/.idx pair without the suffix (`meshwright data` makes one), "
                'or set data.builder = "module:function" for a dataset of your own'
            )
        if data.options:
            return "data.options have no effect without data.builder: leave them out"
        useless = [
            f"data.{name}"
            for name, value in (
                ("eod_mask_loss", data.eod_mask_loss),
                ("packing", data.packing != Data().packing),
                ("document_boundaries", data.document_boundaries),
            )
            if value
        ]
        if useless and data.task == "span_corruption":
            return f'{" and ".join(useless)} has no effect with data.task = "span_corruption": leave it out'
        if data.eod_mask_loss and len(useless) > 1:
            return (
                f"data.eod_mask_loss has no effect with {useless[1]}, where nothing is learned across the end of a "
                f"document anyway: leave it out"
            )
        return None
    given = [
        f"data.{name} = {format_value(value)}"
        for name, value in (
            ("train", data.train or None),
            ("validation", data.validation),
            ("tokenizer", data.tokenizer),
            ("eod_mask_loss", data.eod_mask_loss or None),
            ("packing", None if data.packing == Data().packing else data.packing),
            ("document_boundaries", data.document_boundaries or None),
            ("task", None if data.task == Data().task else data.task),
            ("sequence_length", None if data.sequence_length == Data().sequence_length else data.sequence_length),
        )
        if value is not None
    ]
    if not given:
        return None
    return f"{' and '.join(given)} without effect: the samples come from data.builder; leave one or the other out"


def _recompute(config: RunConfig) -> str | None:
    pipeline = config.pipeline
    if pipeline.recompute == "none" and pipeline.recompute_layers != ["*"]:
        return (
            f"pipeline.recompute_layers = {format_value(pipeline.recompute_layers)} has no effect with "
            f'pipeline.recompute = "none": choose "selective" or "full", or leave it out'
        )
    if pipeline.recompute == "selective" and config.train.compile:
        return (
            'pipeline.recompute = "selective" with train.compile: a compiled layer is recomputed as a whole or not at '
            'all; choose "full", or --train.compile=false'
        )
    return None


def _schedule_file(config: RunConfig) -> str | None:
    pipeline = config.pipeline
    if pipeline.schedule_file is None or (pipeline.schedule == Pipeline().schedule and pipeline.interleave is None):
        return None
    useless = "schedule" if pipeline.schedule != Pipeline().schedule else "interleave"
    return (
        f"pipeline.{useless} = {format_value(getattr(pipeline, useless))} has no effect with pipeline.schedule_file, "
        f"which says it all: leave one of them out"
    )


def _processes(config: RunConfig) -> str | None:
    processes, dp = config.launch.processes, known_dp(config)
    pp, tp = config.parallel.pp, config.parallel.tp
    if processes == "auto":
        return None
    if dp is None:
        if processes % (pp * tp) == 0:
            return None
        near = [pp * tp * i for i in (processes // (pp * tp), processes // (pp * tp) + 1) if i]
        return (
            f"launch.processes = {processes} is no multiple of pp {pp} x tp {tp} = {pp * tp}, the ranks of one "
            f"replica: {' or '.join(map(str, near))} would do"
        )
    if processes == dp * pp * tp:
        return None
    return (
        f"launch.processes = {processes}, but dp {dp} x pp {pp} x tp {tp} = {dp * pp * tp} ranks: leave "
        f'launch.processes out, or set parallel.dp = "auto"'
    )


def _devices(config: RunConfig) -> str | None:
    devices = config.launch.devices.split(",") if config.launch.devices else []
    if config.train.device == "cpu" and devices:
        named = format_value(config.launch.devices)
        return f'launch.devices = {named} names GPUs, and train.device is "cpu": leave one out'
    twice = next((each for at, each in enumerate(devices) if each in devices[:at]), None)
    if twice is not None:
        named = format_value(config.launch.devices)
        return f"launch.devices = {named} names device {twice} twice: each rank has one of its own"
    return None


def _batch(config: RunConfig) -> str | None:
    return batch.find_problem(config.batch, known_dp(config))


def _ranks(config: RunConfig) -> str | None:
    pp, tp, dp = config.parallel.pp, config.parallel.tp, known_dp(config) or 1
    if dp * pp * tp <= MAX_RANKS:
        return None
    return f"dp {dp} x pp {pp} x tp {tp} = {dp * pp * tp:,} ranks: at most {MAX_RANKS:,} are allowed"


def _forwards(config: RunConfig) -> str | None:
    """Check the bound of meshwright.schedule.build before anything is built."""
    pp, chunks, interleave = config.parallel.pp, config.batch.chunks or 1, config.pipeline.stages_per_rank
    if pp * chunks * interleave <= MAX_FORWARDS:
        return None
    return (
        f"pp {pp} x chunks {chunks} x interleave {interleave} = {pp * chunks * interleave:,} forwards in a step: at "
        f"most {MAX_FORWARDS:,} are allowed; lower batch.chunks, parallel.pp or pipeline.interleave"
    )


def _layers(config: RunConfig) -> str | None:
    for name, value in config.model.options.items():
        if "layer" in name.lower() and isinstance(value, int) and value > MAX_LAYERS:
            return f"model.options.{name} = {format_value(value)}: at most {MAX_LAYERS:,} layers are allowed"
    return None


def _rule(code: str, broken: Callable[[RunConfig], str | None], *keys: str) -> Rule:
    return Rule(code, tuple(split(key) for key in keys), broken)


RULES = (
    _rule("MW-CONFIG-034", _ranks, "parallel.dp", "parallel.pp", "parallel.tp"),
    _rule("MW-CONFIG-035", _forwards, "parallel.pp", "batch.chunks", "pipeline.schedule", "pipeline.interleave"),
    _rule("MW-CONFIG-036", _layers, "model.options"),
    _rule("MW-CONFIG-037", _batch, "batch.micro_batch_size", "batch.chunks", "batch.global_batch", "parallel.dp"),
    _rule("MW-CONFIG-038", _processes, "launch.processes", "parallel.dp", "parallel.pp", "parallel.tp"),
    _rule("MW-CONFIG-039", _devices, "launch.devices", "train.device"),
    _rule("MW-CONFIG-040", _sequence, "parallel.sequence", "parallel.tp"),
    _rule("MW-CONFIG-041", _shard_factor, "parallel.shard_factor", "parallel.zero"),
    _rule("MW-CONFIG-042", _reduce, "parallel.reduce", "parallel.zero"),
    _rule("MW-CONFIG-043", _offload, "parallel.offload_directory", "parallel.offload"),
    _rule("MW-CONFIG-044", _across_nodes, "parallel.tp_across_nodes", "parallel.tp"),
    _rule("MW-CONFIG-045", _balance, "pipeline.balance", "parallel.pp"),
    _rule("MW-CONFIG-046", _corpus, "data.train", "data.builder"),
    _rule("MW-CONFIG-047", _recompute, "pipeline.recompute", "pipeline.recompute_layers", "train.compile"),
    _rule("MW-CONFIG-048", _schedule_file, "pipeline.schedule_file", "pipeline.schedule", "pipeline.interleave"),
    _rule("MW-CONFIG-049", _keep_every, "checkpoint.keep_every", "checkpoint.every"),
    _rule("MW-CONFIG-050", _most_skipped, "watch.most_skipped", "watch.on_nonfinite"),
    _rule("MW-CONFIG-051", _warmup, "optimizer.warmup_steps", "train.steps"),
    _rule("MW-CONFIG-052", _learning_rates, "optimizer.min_learning_rate", "optimizer.learning_rate"),
    _rule("MW-CONFIG-053", _learning_rate_floor, "optimizer.min_learning_rate", "optimizer.schedule"),
    _rule(
        "MW-CONFIG-054", _decay, "optimizer.decay_steps", "optimizer.schedule", "optimizer.warmup_steps", "train.steps"
    ),
    _rule("MW-CONFIG-055", _validation, "train.validate_every", "train.validate_steps", "data.validation"),
)
