"""Translation of Megatron-LM's flags.

Source of their meaning and defaults: ``megatron/training/arguments.py``, versions 0.12 to 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.config import Batch, phases
from meshwright.errors import ConfigError
from meshwright.system.numbers import MAX_RANKS, whole_number
from meshwright_interop.configs.flags import LAUNCHER
from meshwright_interop.configs.megatron_model import model
from meshwright_interop.configs.megatron_tables import (
    INDEXED_CORPUS,
    LAYOUT,
    LOSS_SCALE,
    OPTIMIZER,
    RULES,
    SERVICES,
)
from meshwright_interop.configs.schedules import put_betas, put_warmup
from meshwright_interop.configs.source_keys import (
    DropReason,
    KeyRule,
    SourceKey,
    is_off,
    is_variable,
)
from meshwright_interop.configs.translation import Translation

SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
FSDP = ("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2")
RAMP = "rampup-batch-size"
WORDS = ("data-path", RAMP)
"""Ends of the flags whose text in a functional test is several words."""


def functional_test_items(items: Mapping[str, SourceKey]) -> dict[str, SourceKey]:
    """Return the flags in ``MODEL_ARGS`` of a ``model_config.yaml``,
    the form of Megatron-LM's functional tests.

    True is a flag alone. A flag with the value False is left out, as in the command line made of
    the file.
    """
    flags: dict[str, SourceKey] = {}
    for key, item in items.items():
        section, _, flag = key.partition(".")
        value = item.value
        if section != "MODEL_ARGS" or value is False:
            continue
        if value is not None and not isinstance(value, bool | list):
            value = str(value)
        if isinstance(value, str) and flag.endswith(WORDS):
            value = value.split()
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        flags[flag.lstrip("-").replace("_", "-")] = SourceKey(flag, value, item.place)
    return flags


def translate(translation: Translation, ranks: int | None, more: Sequence[KeyRule] = ()) -> None:
    """Translate all flags.

    Args:
        translation: the flags; receives the meshwright keys.
        ranks: number of ranks of the whole job; None: as many as the launcher in the file starts.
        more: rules for keys without a translation, before those of Megatron-LM.

    Raises:
        ConfigError: Megatron-LM does not accept a value, or meshwright has no such model.
    """
    rules = (*more, *RULES)
    translation.refuse_by(rules)
    num_layers = model(translation)
    _layout(translation, ranks or _ranks(translation))
    _stages(translation, num_layers)
    _recompute(translation)
    samples = _batch(translation)
    _learning_rate(translation, samples)
    _optimizer(translation)
    _data(translation)
    _services(translation)
    translation.drop_rest(rules)


# -- layout


def _ranks(translation: Translation) -> int | None:
    """Return the number of ranks, nproc_per_node x nnodes (default 1 node);
    None if the file does not fix both.
    """
    per_node = translation.value(f"{LAUNCHER}nproc-per-node")
    nodes = translation.value(f"{LAUNCHER}nnodes")
    num_per_node = whole_number(str(per_node), high=MAX_RANKS)
    num_nodes = whole_number(str(1 if nodes is None else nodes), high=MAX_RANKS)
    return None if num_per_node is None or num_nodes is None else num_per_node * num_nodes


def _layout(translation: Translation, size: int | None) -> None:
    """Translate the degrees of parallelism. ``size``: number of ranks; None: unknown."""
    translation.put_rows(LAYOUT)
    tp, pp = translation.tree["parallel.tp"], translation.tree["parallel.pp"]
    cp = translation.count("context-parallel-size") or 1
    exchange = translation.value("cp-comm-type")
    if cp > 1:
        translation.put("parallel.cp", cp)
        translation.put("parallel.cp_exchange", "heads" if exchange in ("a2a", ["a2a"]) else None)
    replica = tp * pp * cp
    if size is None:
        translation.put("parallel.dp", "auto", "fills the ranks; --ranks N fixes it")
    elif not size or size % replica:
        translation.decide(
            f'parallel.dp = "auto": the launcher starts {size} ranks, not a multiple of {replica},'
            " the size of a replica; --ranks N fixes it"
        )
    else:
        axes = f"tp {tp} x pp {pp}" + (f" x cp {cp}" if cp > 1 else "")
        translation.put("parallel.dp", size // replica, f"{size} ranks / ({axes})")
    if translation.boolean("sequence-parallel"):
        if tp > 1:
            translation.put("parallel.sequence", True)
        else:
            translation.drop("sequence-parallel", DropReason.NEEDLESS, "tp is 1")
    _zero(translation)


def _zero(translation: Translation) -> None:
    """Translate FSDP or the distributed optimizer, and the number of its instances."""
    fsdp = next((name for name in FSDP if translation.boolean(name)), None)
    is_distributed = translation.boolean("use-distributed-optimizer")
    strategy = translation.text("data-parallel-sharding-strategy")
    if fsdp is not None:
        strategy = strategy or ("optim_grads_params" if "torch" in fsdp else "no_shard")
        if strategy not in SHARDING:
            raise ConfigError(
                "MW-INTEROP-004",
                f"{translation.place('data-parallel-sharding-strategy')}: one of"
                f" {', '.join(SHARDING)}",
            )
        translation.put("parallel.zero", SHARDING[strategy], f"--{fsdp}, {strategy}")
    elif is_distributed:
        translation.put("parallel.zero", 1, "--use-distributed-optimizer")
    else:
        why = "no --use-distributed-optimizer: each replica keeps the whole optimizer state"
        translation.put("parallel.zero", 0, why)
    name = "num-distributed-optimizer-instances"
    instances, dp = translation.count(name) or 1, translation.tree.get("parallel.dp")
    if instances > 1 and isinstance(dp, int) and dp % instances == 0:
        translation.put("parallel.shard_factor", dp // instances)
    elif instances > 1:
        note = "parallel.shard_factor, dp divided by this number"
        translation.drop(name, DropReason.BY_HAND, note)


def _stages(translation: Translation, num_layers: int) -> None:
    """Translate interleaved stages."""
    pp = translation.tree["parallel.pp"]
    name = "num-layers-per-virtual-pipeline-stage"
    per_stage = translation.count(name)
    virtual = translation.count("num-virtual-stages-per-pipeline-rank")
    if per_stage is not None:
        virtual, rest = divmod(num_layers, pp * per_stage)
        if rest or not virtual:
            raise ConfigError(
                "MW-INTEROP-005",
                f"{translation.place(name)}: {num_layers} layers over {pp} pipeline ranks do not"
                " divide into such stages",
            )
    if pp > 1 and virtual is not None and virtual > 1:
        translation.put("pipeline.schedule", "interleaved_1f1b")
        translation.put("pipeline.interleave", virtual)


def _recompute(translation: Translation) -> None:
    """Translate activation checkpointing, in the words of Megatron-LM or those of its past."""
    granularity = translation.text("recompute-granularity")
    is_old_full = translation.boolean("checkpoint-activations")
    if granularity is None and is_old_full:
        granularity = "full"
    elif granularity is None and translation.boolean("recompute-activations"):
        granularity = "selective"
    if granularity == "selective":
        translation.put("pipeline.recompute", "selective")
        modules = translation.value("recompute-modules")
        if modules not in (None, "core_attn", ["core_attn"]):
            note = "only core attention is recomputed"
            translation.drop("recompute-modules", DropReason.NONE, note)
    elif granularity is not None:
        translation.put("pipeline.recompute", "full")
        _recomputed_layers(translation)


def _recomputed_layers(translation: Translation) -> None:
    """List a choice of recomputed layers; every layer is recomputed here, with its input kept."""
    method, number = (
        translation.text("recompute-method"),
        translation.integer("recompute-num-layers"),
    )
    if method == "uniform" and number not in (None, 1):
        note = "the input of every layer is kept, not of one in this number"
        translation.drop("recompute-num-layers", DropReason.DIFFERS, note)
    elif method == "block" and number is not None:
        note = "pipeline.recompute_layers, name patterns such as block1?"
        translation.drop("recompute-num-layers", DropReason.BY_HAND, note)


# -- batch and learning rate


def _batch(translation: Translation) -> int | None:
    """Translate the batch, and return the samples per step;
    None if the data-parallel size is unknown.
    """
    micro = translation.count("micro-batch-size") or translation.count("batch-size")
    micro = translation.put_or_leave_open("batch.micro_batch_size", "micro-batch-size", micro, 1)
    total = translation.count("global-batch-size")
    ramp = translation.value(RAMP)
    if not is_off(ramp):
        _ramp(translation, ramp, total)
    if total is not None:
        translation.put("batch.global_batch", total)
        return total
    why = "without --global-batch-size Megatron-LM takes micro_batch_size x dp"
    translation.put("batch.chunks", 1, why)
    dp = translation.tree.get("parallel.dp")
    return micro * dp if isinstance(dp, int) else None


def _ramp(translation: Translation, ramp: object, total: int | None) -> None:
    """Translate the batch-size ramp to ``total`` samples: start, increment and samples."""
    words = ramp if isinstance(ramp, list) else [ramp]
    numbers = [whole_number(str(word).replace("_", ""), 1) for word in words]
    start, increment, samples = numbers if len(numbers) == 3 else (None, None, None)
    if total is None:
        translation.refuse(RAMP, "the ramp ends at --global-batch-size, which is missing")
    elif start is None or increment is None or samples is None:
        translation.refuse(RAMP, "it is no start, increment and number of samples")
    elif start >= total or (total - start) % increment:
        translation.refuse(RAMP, f"no number of increments leads from its start to {total}")
    elif RAMP in translation.without:
        translation.drop(RAMP, DropReason.NONE, "left out by --without")
    else:
        why = (
            "the learning rate follows steps here and samples there: with a decay, the two differ"
            " until it ends"
        )
        translation.put("batch.ramp", [start, increment, samples], why)


def _learning_rate(translation: Translation, samples: int | None) -> None:
    """Translate steps, learning-rate schedule and warm-up.

    ``samples``: samples per step, for flags that count samples; None: unknown.
    """

    def in_steps(name: str) -> float | None:
        """Return ``--NAME-iters``, or ``--NAME-samples`` converted to steps;
        None if neither is given.
        """
        iterations = translation.number(f"{name}-iters")
        by_samples = translation.number(f"{name}-samples", minimum=0)
        if iterations is not None or by_samples is None:
            return iterations
        if samples is None:
            raise ConfigError(
                "MW-INTEROP-006",
                f"{translation.place(f'{name}-samples')}: converting samples to steps needs"
                " --global-batch-size",
            )
        return _steps_of(translation, by_samples, samples)

    total, end, warmup = in_steps("train"), in_steps("lr-decay"), in_steps("lr-warmup")
    if total:
        translation.put("train.steps", int(total))
    else:
        why = translation.why_missing("train-iters", "train-samples")
        translation.leave_open("train.steps", int(max(100, end or 0, warmup or 0)), why)
    steps = translation.tree["train.steps"]
    _warmup(translation, steps, end or (total and steps), warmup)
    _decay(translation, end, in_steps("lr-wsd-decay"))
    rate = translation.number("lr")
    translation.put_or_leave_open("optimizer.learning_rate", "lr", rate, 3e-4)


def _steps_of(translation: Translation, num_samples: float, global_batch: int) -> float:
    """Return the number of steps with this many samples, the batch-size ramp included."""
    ramp = translation.tree.get("batch.ramp")
    batch = Batch(
        micro_batch_size=1, chunks=1, global_batch=global_batch, ramp=ramp and tuple(ramp)
    )
    last = [phase for phase in phases(batch) if phase.samples_seen <= num_samples][-1]
    return last.first_step + (num_samples - last.samples_seen) / last.global_batch


def _warmup(
    translation: Translation, steps: int, whole: float | None, warmup: float | None
) -> None:
    """Translate the warm-up. ``warmup``: its steps; ``whole``: the steps that a fraction is of,
    None: unknown.
    """
    fraction = translation.number("lr-warmup-fraction")
    name = "lr-warmup-iters" if translation.has("lr-warmup-iters") else "lr-warmup-samples"
    if fraction is not None and not whole:
        why = f"{fraction} of the steps, which are not known"
        translation.leave_open("optimizer.warmup_steps", 0, why)
        return
    if fraction is not None and whole:
        name, warmup = "lr-warmup-fraction", fraction * whole
        note = f"optimizer.warmup_steps = {round(warmup)}: {fraction} of {whole:.0f} steps"
        translation.decide(note)
    put_warmup(translation, name, round(warmup or 0), steps)


def _decay(translation: Translation, end: float | None, wsd: float | None) -> None:
    """Translate the form of the decay. ``end``, ``wsd``: step at which it ends,
    and its length for WSD.
    """
    style, low = translation.text("lr-decay-style", "linear"), translation.number("min-lr", 0.0)
    if style not in ("constant", "cosine", "linear", "WSD"):
        why = "no such decay here, only cosine, linear, wsd and constant"
        translation.refuse("lr-decay-style", why)
        style = "cosine"
    translation.put("optimizer.schedule", style.lower())
    if style == "constant":
        return
    translation.put("optimizer.min_learning_rate", low)
    if style == "WSD":
        translation.put("optimizer.decay_steps", max(1, round(wsd or 1)))
        shape = translation.text("lr-wsd-decay-style", "exponential")
        if shape != "linear":
            why = f"the decay of WSD is {shape} there, and linear here"
            translation.refuse("lr-wsd-decay-style", why)
    if end is not None and round(end) != translation.tree["train.steps"]:
        translation.put("optimizer.decay_until", round(end))


def _optimizer(translation: Translation) -> None:
    """Translate the optimizer, the dtype and the loss scale of float16."""
    name = translation.text("optimizer", "adam")
    translation.put("optimizer.name", "sgd" if name == "sgd" else "adamw")
    if name in ("lion", "muon", "dist_muon"):
        own = name.removeprefix("dist_")
        how = f'import with adam, then set optimizer.name = "{own}" and its keys'
        translation.refuse("optimizer", f"{own} has other flags there: {how}")
    elif name not in ("adam", "adamw", "sgd"):
        translation.refuse("optimizer", "no such optimizer here, only adam (AdamW) and sgd")
    if name == "sgd":
        translation.put("optimizer.momentum", translation.number("sgd-momentum", 0.9))
    else:
        put_betas(translation, "adam-", second=0.999)
    translation.put_rows(OPTIMIZER)
    is_half, is_bfloat16 = translation.boolean("fp16"), translation.boolean("bf16")
    dtype = "float16" if is_half else "bfloat16" if is_bfloat16 else "float32"
    translation.put("train.dtype", dtype)
    if not is_half:
        return
    fixed = translation.number("loss-scale")
    translation.put("loss_scale.fixed", fixed)
    if fixed is None:  # a scale that adapts; the defaults are the same
        translation.put_rows(LOSS_SCALE)


# -- data and services


def _data(translation: Translation) -> None:
    """Translate the corpora, the length of a sample and the boundaries of documents.

    Raises:
        ConfigError: the file has no ``--seq-length``.
    """
    length = translation.count("seq-length") or translation.count("encoder-seq-length")
    if length is None:
        raise ConfigError(
            "MW-INTEROP-007",
            "the file has no --seq-length, which Megatron-LM requires: give a file with all flags"
            " of the run",
        )
    translation.put("data.sequence_length", length)
    name = "data-path" if translation.has("data-path") else "train-data-path"
    train, valid = _corpora(translation.value(name)), _corpora(translation.value("valid-data-path"))
    if train:
        translation.put("data.train", train)
    else:
        why = translation.why_missing("data-path")
        if name in translation.items:
            why = f"{translation.items[name].written} is no path in the file"
        translation.leave_open("data.train", "runs/data/corpus/train", why)
        translation.drop(name, DropReason.BY_HAND, INDEXED_CORPUS)
    if isinstance(valid, str):
        translation.put("data.validation", valid)
        translation.put("train.validate_every", translation.integer("eval-interval", 1000))
        translation.put("train.validate_steps", translation.count("eval-iters", 100))
    elif translation.has("valid-data-path"):
        why = f"{translation.items['valid-data-path'].written} is not one path of a .bin/.idx pair"
        translation.leave_open("data.validation", "runs/data/corpus/validation", why)
        translation.drop("valid-data-path", DropReason.BY_HAND, "data.validation")
    _documents(translation)


def _documents(translation: Translation) -> None:
    """Translate the flags on document boundaries: positions, attention and labels across them."""
    resets = ("reset-position-ids", "reset-attention-mask")
    is_masked = translation.boolean("eod-mask-loss")
    are_reset = [translation.boolean(name) for name in resets]
    if all(are_reset) and not translation.own_model:
        why = "positions and attention restart at each document"
        why += "" if is_masked else "; its first token is no label either"
        translation.put("data.document_boundaries", True, why)
        return
    note = "data.document_boundaries separates attention, positions and labels, all three"
    for name in resets:
        translation.drop(name, DropReason.BY_HAND, note)
    if is_masked:
        translation.put("data.eod_mask_loss", True)


def _corpora(value: object) -> str | list[dict[str, object]] | None:
    """Parse a data path: one path, or several ``{path, weight}``;
    None if it is missing or of another form.
    """
    words = value if isinstance(value, list) else [value]
    if len(words) == 1:
        return str(words[0]) if _is_path(words[0]) else None
    weights, paths = [_weight(word) for word in words[::2]], words[1::2]
    if len(words) % 2 or not all(weights) or not all(map(_is_path, paths)):
        return None
    if len(paths) == 1:
        return str(paths[0])
    return [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]


def _weight(word: object) -> float | None:
    """Parse a finite number above 0; None if it is none."""
    try:
        weight = float(str(word))
    except ValueError:
        return None
    return weight if 0 < weight < float("inf") else None


def _is_path(value: object) -> bool:
    if not isinstance(value, str) or is_variable(value):
        return False
    return "<" not in value and value != "MOCK"


def _services(translation: Translation) -> None:
    """Translate seed, checkpoints and tracking."""
    translation.put_rows(SERVICES)
    every = translation.count("save-interval") or translation.count("persistent-save-interval")
    if every is not None:
        translation.put("checkpoint.every", every)
        translation.put("checkpoint.asynchronous", translation.boolean("async-save"))
    if "tracking.project" in translation.tree:
        translation.put("tracking.wandb", "auto")
