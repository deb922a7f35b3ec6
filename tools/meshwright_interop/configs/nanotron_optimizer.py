"""Translation of nanotron's optimizer and learning-rate schedule."""

from __future__ import annotations

from meshwright_interop.configs.nanotron_keys import FACTORY, RATE
from meshwright_interop.configs.schedules import put_adam, put_decay, put_warmup
from meshwright_interop.configs.source_keys import DropReason, is_off
from meshwright_interop.configs.translation import Translation


def optimizer(translation: Translation) -> None:
    """Translate the optimizer, its weight decay and clipping, and the schedule of the learning rate."""
    name = translation.text(f"{FACTORY}.name", "adamW") or ""
    translation.put("optimizer.name", "sgd" if name.lower() == "sgd" else "adamw")
    if name.lower() == "sgd":
        translation.put("optimizer.momentum", 0.0, "nanotron's SGD has none")
    elif name.lower() != "adamw":
        translation.refuse(f"{FACTORY}.name", "no such optimizer here, only adamW and sgd")
    else:
        put_adam(translation, f"{FACTORY}.adam_", second=0.95)
    decay = translation.number("optimizer.weight_decay", 0.01)
    translation.put(
        "optimizer.weight_decay", decay, "on matrices only; nanotron decays norms and biases too" if decay else ""
    )
    translation.put("optimizer.clip_norm", translation.number("optimizer.clip_grad") or 0.0)
    if not is_off(translation.value("optimizer.weight_decay_exclude_named_params")):
        translation.refuse(
            "optimizer.weight_decay_exclude_named_params", "biases and norms are never decayed here, everything else is"
        )
    if translation.boolean("optimizer.accumulate_grad_in_fp32", True) is False:
        translation.drop(
            "optimizer.accumulate_grad_in_fp32", DropReason.DIFFERS, "gradients are accumulated in float32"
        )
    _learning_rate(translation)


def _learning_rate(translation: Translation) -> None:
    """Translate nanotron's lr_scheduler_builder.

    Its rate rises until ``lr_warmup_steps``, is flat until ``lr_decay_starting_step``, falls, and is flat at the end.
    """
    steps = translation.optional_count("tokens.train_steps")
    if steps is None:
        steps = 10**6
        translation.leave_open("train.steps", steps, translation.why_missing("tokens.train_steps"))
    translation.put("train.steps", steps)
    rate = translation.number(f"{RATE}.learning_rate")
    if rate is None:
        rate = 3e-4
        translation.leave_open("optimizer.learning_rate", rate, translation.why_missing(f"{RATE}.learning_rate"))
    translation.put("optimizer.learning_rate", rate)
    low = translation.number(f"{RATE}.min_decay_lr", rate)
    assert low is not None
    given = translation.integer(f"{RATE}.lr_warmup_steps", 0) or 0
    warmup = min(given, steps)
    if (translation.text(f"{RATE}.lr_warmup_style", "linear")) == "constant":
        translation.put("optimizer.warmup_steps", 0, "lr_warmup_style constant starts at the peak rate")
    else:
        put_warmup(translation, f"{RATE}.lr_warmup_steps", given, steps)
    _decay(translation, steps, warmup, is_constant=low >= rate)
    if translation.tree["optimizer.schedule"] != "constant":
        translation.put("optimizer.min_learning_rate", low)


def _decay(translation: Translation, steps: int, warmup: int, *, is_constant: bool) -> None:
    """Translate the form of the decay, its first step and its last one."""
    start, length = (translation.integer(f"{RATE}.lr_decay_{name}") for name in ("starting_step", "steps"))
    first = warmup if start is None else start
    last = first + (length or steps - warmup - (start or 0))
    if is_constant or first >= steps:
        translation.text(f"{RATE}.lr_decay_style", "linear")
        translation.put("optimizer.schedule", "constant", "the rate never decays")
        return
    if first < warmup:
        translation.refuse(f"{RATE}.lr_decay_starting_step", "no decay here that starts inside of the warm-up")
    why = f"from lr_decay_starting_step {first} on"
    put_decay(translation, f"{RATE}.lr_decay_style", (warmup, first, last), why)
    if last != steps:
        translation.put("optimizer.decay_until", last)
