"""Rules between keys of the model, the data, training and saving.

``layout_rules.py`` has those of the layout, ``optimizer_rules.py`` those of one optimizer.

Each rule lists the keys it reads, and its message contains the error and its remedy.

A rule runs only when all its keys are valid by themselves, so that one mistake is reported once. An
option without effect is an error too, because the user expects an effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from meshwright.config.keys import Path, format_value, split
from meshwright.config.schema import RunConfig
from meshwright.config.sections import Section

MAX_LAYERS = 4096


class Rule(NamedTuple):
    """A rule between keys. ``check`` returns the error text, or None;
    ``code`` is that of the error.
    """

    code: str
    check: Callable[[RunConfig], str | None]
    dotted: tuple[str, ...]

    @property
    def keys(self) -> tuple[Path, ...]:
        """The keys that the rule reads."""
        return tuple(map(split, self.dotted))


def non_defaults(section: Section, *names: str) -> list[str]:
    """Return the keys of a section that differ from their default."""
    fields = type(section).model_fields
    return [
        name
        for name in names
        if getattr(section, name) != fields[name].get_default(call_default_factory=True)
    ]


def _warmup(config: RunConfig) -> str | None:
    warmup, steps = config.optimizer.warmup_steps, config.train.steps
    if warmup <= steps:
        return None
    return (
        f"optimizer.warmup_steps = {warmup} is more than train.steps = {steps}: at most {steps} is"
        " allowed"
    )


def _learning_rates(config: RunConfig) -> str | None:
    low, high = config.optimizer.min_learning_rate, config.optimizer.learning_rate
    if high is None:  # that of optimizer.builder, which is compared when it is known
        return None
    if low is None or low <= high:
        return None
    return (
        f"optimizer.min_learning_rate = {low} is above optimizer.learning_rate = {high}: at most"
        f" {high} is allowed"
    )


def _learning_rate_floor(config: RunConfig) -> str | None:
    low, schedule = config.optimizer.min_learning_rate, config.optimizer.schedule
    if not low or schedule != "constant":
        return None
    return (
        f'optimizer.min_learning_rate = {low} has no effect with optimizer.schedule = "constant":'
        ' leave it out, or choose "cosine", "linear" or "wsd"'
    )


def _decay(config: RunConfig) -> str | None:
    optimizer, steps = config.optimizer, config.optimizer.decay_until or config.train.steps
    if optimizer.schedule != "wsd":
        if optimizer.decay_steps == 0:
            return None
        return (
            f"optimizer.decay_steps = {optimizer.decay_steps} has no effect with"
            " optimizer.schedule = "
            f"{format_value(optimizer.schedule)}: leave it out, or choose optimizer.schedule ="
            ' "wsd"'
        )
    if optimizer.decay_steps == 0:
        return (
            'optimizer.schedule = "wsd" needs optimizer.decay_steps, the number of last steps in'
            f" which the learning rate falls, from 1 to {max(1, steps - optimizer.warmup_steps)}:"
            ' set it, or choose optimizer.schedule = "constant"'
        )
    together = optimizer.warmup_steps + optimizer.decay_steps
    if optimizer.warmup_steps > steps or together <= steps:  # _warmup reports the first case
        return None
    return (
        f"optimizer.warmup_steps {optimizer.warmup_steps} + optimizer.decay_steps"
        f" {optimizer.decay_steps} = {together}, more than"
        f" {'optimizer.decay_until' if optimizer.decay_until else 'train.steps'} {steps}: shorten"
        " one, or train longer"
    )


def _decay_until(config: RunConfig) -> str | None:
    optimizer, is_constant = config.optimizer, config.optimizer.schedule == "constant"
    if optimizer.decay_until == 0 or (
        optimizer.decay_until > optimizer.warmup_steps and not is_constant
    ):
        return None
    why = "is not after optimizer.warmup_steps"
    if is_constant:
        why = 'has no effect with optimizer.schedule = "constant"'
    return (
        f"optimizer.decay_until = {optimizer.decay_until} {why}: leave it out, or let the decay end"
        " later"
    )


def _own_optimizer(config: RunConfig) -> str | None:
    optimizer = config.optimizer
    if optimizer.builder is None:
        if optimizer.options:
            return "optimizer.options have no effect without optimizer.builder: leave them out"
        return None
    changed = non_defaults(optimizer, "name", "betas", "eps", "momentum", "block_size")
    if changed:
        given = " and ".join(
            f"optimizer.{name} = {format_value(getattr(optimizer, name))}" for name in changed
        )
        return (
            f"{given}: no effect with optimizer.builder, whose arguments are optimizer.options;"
            " leave it out"
        )
    return None


def _own_schedule(config: RunConfig) -> str | None:
    changed = non_defaults(config.optimizer, "warmup_steps", "min_learning_rate", "decay_until")
    if config.optimizer.min_learning_rate == 0:  # the former default, in saved runs
        changed = [name for name in changed if name != "min_learning_rate"]
    if ":" not in config.optimizer.schedule or not changed:
        return None
    given = " and ".join(
        f"optimizer.{name} = {getattr(config.optimizer, name)}" for name in changed
    )
    return (
        f"{given}: no effect, since the function of optimizer.schedule gives the factor of every"
        " step; leave it out"
    )


def _loss_scale(config: RunConfig) -> str | None:
    keys, dtype = config.loss_scale, config.train.dtype
    changed = [f"loss_scale.{name}" for name in non_defaults(keys, *type(keys).model_fields)]
    if changed and dtype != "float16":
        return (
            f'{changed[0]} has no effect with train.dtype = "{dtype}": leave it out, or choose'
            ' "float16"'
        )
    if keys.fixed is not None and len(changed) > 1:
        return (
            f"{changed[1]} has no effect with loss_scale.fixed = {keys.fixed:g}: leave one of the"
            " two out"
        )
    if keys.minimum > keys.initial:
        return (
            f"loss_scale.minimum = {keys.minimum:g} is above loss_scale.initial = {keys.initial:g}:"
            " lower it"
        )
    return None


def _fp8(config: RunConfig) -> str | None:
    train = config.train
    if train.linear != "fp8":
        given = f"train.fp8_keep = {format_value(train.fp8_keep)}"
        if train.fp8_keep is None:
            return None
        return f'{given} has no effect without train.linear = "fp8": leave it out'
    return None


def _validation(config: RunConfig) -> str | None:
    changed = non_defaults(config.train, "validate_every", "validate_steps")
    if config.data.validation is not None or config.data.builder is not None or not changed:
        return None
    given = [f"train.{name} = {getattr(config.train, name)}" for name in changed]
    return (
        f"{' and '.join(given)}: no effect, as there is no data.validation; set it, or leave"
        " this out"
    )


def _keep_every(config: RunConfig) -> str | None:
    every, kept = config.checkpoint.every, config.checkpoint.keep_every
    if kept == 0 or (every and kept % every == 0):
        return None
    if every == 0:
        return (
            f"checkpoint.keep_every = {kept} has no effect with checkpoint.every = 0, which saves"
            f" at no such step: leave it out, or choose checkpoint.every = {kept}"
        )
    return (
        f"checkpoint.keep_every = {kept} is not a multiple of checkpoint.every = {every}: few of"
        f" those steps would be saved at all; choose {math.lcm(every, kept)}, or checkpoint.every ="
        f" {math.gcd(every, kept)}"
    )


def _store(config: RunConfig) -> str | None:
    names = non_defaults(config.checkpoint, "upload_timeout_s", "most_failed")
    if config.checkpoint.directory or not names:
        return None
    return (
        f"checkpoint.{names[0]} has no effect without an object store: leave it out, or choose one"
        " by checkpoint.directory"
    )


def _most_skipped(config: RunConfig) -> str | None:
    most = config.watch.most_skipped
    if config.watch.on_nonfinite == "skip" or not non_defaults(config.watch, "most_skipped"):
        return None
    return (
        f'watch.most_skipped = {most} has no effect with watch.on_nonfinite = "stop": leave it out,'
        ' or choose watch.on_nonfinite = "skip"'
    )


def _mirror(config: RunConfig) -> str | None:
    if not config.watch.mirror or config.launch.max_restarts:
        return None
    return (
        "watch.mirror = true has no effect with launch.max_restarts = 0, which replaces no rank: leave"
        " it out, or choose launch.max_restarts = 10"
    )


def _fewest_replicas(config: RunConfig) -> str | None:
    changed = non_defaults(config.launch, "min_dp", "grow_after_s")
    if config.watch.mirror or not changed:
        return None
    return (
        f"launch.{changed[0]} = {getattr(config.launch, changed[0])} has no effect without watch.mirror ="
        " true, from which a run goes on with fewer replicas: leave it out, or set watch.mirror and"
        " launch.max_restarts"
    )


CORPUS_FORM = ("eod_mask_loss", "packing", "document_boundaries")
CORPUS_KEYS = (
    "train",
    "stages",
    "validation",
    "tokenizer",
    *CORPUS_FORM,
    "task",
    "sequence_length",
)


def _corpus(config: RunConfig) -> str | None:
    data = config.data
    if data.builder is not None:
        given = [
            f"data.{name} = {format_value(getattr(data, name))}"
            for name in non_defaults(data, *CORPUS_KEYS)
        ]
        if not given and data.processes and not data.workers:
            return (
                "data.processes = true has no effect with data.workers = 0: set the number of"
                " workers"
            )
        if not given:
            return None
        return (
            f"{' and '.join(given)}: no effect, as the samples come from data.builder; leave one or"
            " the other out"
        )
    if not data.train:
        return (
            "data.train is missing: the path of a .bin/.idx pair without the suffix (`meshwright"
            ' data` makes one), or set data.builder = "module:function" for a dataset of your own'
        )
    if without := non_defaults(data, "options", "collate", "workers", "processes"):
        return f"data.{without[0]} has no effect without data.builder: leave it out"
    form = [f"data.{name}" for name in non_defaults(data, *CORPUS_FORM)]
    if form and data.task == "span_corruption":
        return (
            f'{" and ".join(form)} has no effect with data.task = "span_corruption": leave it out'
        )
    if data.eod_mask_loss and len(form) > 1:
        return (
            f"data.eod_mask_loss has no effect with {form[1]}, which already excludes the token"
            " after the end of a document from the loss: leave it out"
        )
    return None


def _stages(config: RunConfig) -> str | None:
    steps, stages = config.train.steps, config.data.stages
    given = [
        name
        for name in ("from_step", "from_samples")
        if any(getattr(stage, name) for stage in stages)
    ]
    starts = [getattr(stage, name) for name in given for stage in stages]
    if len(starts) != len(stages) or None in starts:
        return "data.stages: give each stage its from_step, or each of them its from_samples"
    if starts != sorted(set(starts)):
        return (
            f"data.stages start at {', '.join(map(str, starts))}: list them in the order of the"
            " run, each once"
        )
    if given == ["from_step"] and starts[0] == 1:
        return (
            "data.stages: a stage from step 1 on leaves nothing for data.train: make its corpus"
            " data.train"
        )
    if given == ["from_step"] and starts[-1] > steps:
        return (
            f"data.stages: a stage from step {starts[-1]} on never starts in train.steps = {steps}:"
            " leave it out"
        )
    return None


def _recompute(config: RunConfig) -> str | None:
    pipeline = config.pipeline
    if pipeline.recompute == "none" and pipeline.recompute_layers != ["*"]:
        return (
            f"pipeline.recompute_layers = {format_value(pipeline.recompute_layers)} has no effect"
            " with "
            f'pipeline.recompute = "none": choose "pointwise", "selective" or "full", or leave'
            f" it out"
        )
    return None


def _schedule_file(config: RunConfig) -> str | None:
    changed = non_defaults(config.pipeline, "schedule", "interleave")
    if config.pipeline.schedule_file is None or not changed:
        return None
    return (
        f"pipeline.{changed[0]} = {format_value(getattr(config.pipeline, changed[0]))} has no"
        " effect with pipeline.schedule_file, which contains the whole schedule: leave one of"
        " them out"
    )


def _layers(config: RunConfig) -> str | None:
    for name, value in config.model.options.items():
        if "layer" in name.lower() and isinstance(value, int) and value > MAX_LAYERS:
            return (
                f"model.options.{name} = {format_value(value)}: at most {MAX_LAYERS:,} layers are"
                " allowed"
            )
    return None


def _adapter(config: RunConfig) -> str | None:
    adapter = config.adapter
    if not adapter.rank and (
        changed := non_defaults(adapter, "dora", "targets", "alpha", "dropout", "init")
    ):
        value = format_value(getattr(adapter, changed[0]))
        return (
            f"adapter.{changed[0]} = {value} has no effect with adapter.rank = 0: set a rank, such"
            " as 16"
        )
    if adapter.rank and not adapter.targets:
        return "adapter.rank needs adapter.targets, the names of the linears to adapt"
    return None


def _routing(config: RunConfig) -> str | None:
    mode, directory = config.train.routing, config.train.routing_directory
    if mode == "replay" and directory is None:
        return (
            'train.routing = "replay" needs train.routing_directory, the directory of a recording:'
            " set it"
        )
    if mode == "off" and directory is not None:
        return (
            f"train.routing_directory = {format_value(directory)} has no effect with train.routing"
            ' = "off": leave it out, or choose "record" or "replay"'
        )
    return None


def _start(config: RunConfig) -> str | None:
    run = config.run
    of_start = non_defaults(run, "start_names", "start_new", "start_unused")
    changed = [f"run.{name}" for name in of_start]
    changed += ["model.grow_vocabulary"] if config.model.grow_vocabulary else []
    if changed and not run.start:
        return f"{changed[0]} has no effect without run.start: leave it out, or set run.start"
    for pattern, replacement in run.start_names.items():
        if pattern.count("*") != replacement.count("*"):
            return (
                f'run.start_names: "{pattern}" = "{replacement}": both need the same number of *,'
                " which stand for the same letters"
            )
    return None


def _balance(config: RunConfig) -> str | None:
    if config.batch.balance == "index" or config.data.document_boundaries:
        return None
    return (
        'batch.balance = "work" has no effect without data.document_boundaries = true: the rows of'
        " a step cost all the same then; set that, or leave this out"
    )


def _padding(config: RunConfig) -> str | None:
    data = config.data
    if config.batch.padding == "keep" or data.builder is not None:
        return None
    if data.task == "span_corruption":
        return (
            'batch.padding = "trim" with data.task = "span_corruption": the encoder sees tokens in'
            ' both directions, so that padding counts; set batch.padding = "keep"'
        )
    if data.packing == "stream":
        return (
            'batch.padding = "trim" has no effect with data.packing = "stream", whose rows have no'
            ' padding: set data.packing = "documents", or leave this out'
        )
    return None


RULES = (
    Rule(
        "MW-CONFIG-109",
        _padding,
        ("batch.padding", "data.packing", "data.task", "data.builder"),
    ),
    Rule("MW-CONFIG-103", _balance, ("batch.balance", "data.document_boundaries")),
    Rule(
        "MW-CONFIG-102",
        _start,
        (
            "run.start",
            "run.start_names",
            "run.start_new",
            "run.start_unused",
            "model.grow_vocabulary",
        ),
    ),
    Rule("MW-CONFIG-066", _adapter, ("adapter.rank", "adapter.targets", "adapter.dora")),
    Rule("MW-CONFIG-036", _layers, ("model.options",)),
    Rule("MW-CONFIG-046", _corpus, ("data.train", "data.builder")),
    Rule("MW-CONFIG-061", _stages, ("data.stages", "train.steps")),
    Rule(
        "MW-CONFIG-047",
        _recompute,
        ("pipeline.recompute", "pipeline.recompute_layers"),
    ),
    Rule(
        "MW-CONFIG-048",
        _schedule_file,
        ("pipeline.schedule_file", "pipeline.schedule", "pipeline.interleave"),
    ),
    Rule("MW-CONFIG-049", _keep_every, ("checkpoint.keep_every", "checkpoint.every")),
    Rule(
        "MW-CONFIG-111",
        _store,
        ("checkpoint.directory", "checkpoint.upload_timeout_s", "checkpoint.most_failed"),
    ),
    Rule("MW-CONFIG-050", _most_skipped, ("watch.most_skipped", "watch.on_nonfinite")),
    Rule("MW-CONFIG-110", _mirror, ("watch.mirror", "launch.max_restarts")),
    Rule(
        "MW-CONFIG-112",
        _fewest_replicas,
        ("watch.mirror", "launch.min_dp", "launch.grow_after_s"),
    ),
    Rule("MW-CONFIG-051", _warmup, ("optimizer.warmup_steps", "train.steps")),
    Rule(
        "MW-CONFIG-052", _learning_rates, ("optimizer.min_learning_rate", "optimizer.learning_rate")
    ),
    Rule(
        "MW-CONFIG-053", _learning_rate_floor, ("optimizer.min_learning_rate", "optimizer.schedule")
    ),
    Rule(
        "MW-CONFIG-054",
        _decay,
        ("optimizer.decay_steps", "optimizer.schedule", "optimizer.warmup_steps", "train.steps"),
    ),
    Rule(
        "MW-CONFIG-057",
        _decay_until,
        ("optimizer.decay_until", "optimizer.schedule", "optimizer.warmup_steps"),
    ),
    Rule(
        "MW-CONFIG-060",
        _own_optimizer,
        ("optimizer.builder", "optimizer.name", "optimizer.options", "optimizer.betas"),
    ),
    Rule("MW-CONFIG-059", _own_schedule, ("optimizer.schedule", "optimizer.warmup_steps")),
    Rule(
        "MW-CONFIG-062",
        _loss_scale,
        ("train.dtype", "loss_scale.fixed", "loss_scale.minimum", "loss_scale.initial"),
    ),
    Rule("MW-CONFIG-065", _fp8, ("train.linear", "train.fp8_keep")),
    Rule("MW-CONFIG-078", _routing, ("train.routing", "train.routing_directory")),
    Rule(
        "MW-CONFIG-055",
        _validation,
        ("train.validate_every", "train.validate_steps", "data.validation"),
    ),
)
