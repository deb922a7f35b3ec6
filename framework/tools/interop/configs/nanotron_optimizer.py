"""Translation of nanotron's optimizer and learning-rate schedule."""

from __future__ import annotations

from meshwright.tools.interop.configs.nanotron_keys import FACTORY, RATE
from meshwright.tools.interop.configs.source_keys import DropReason, is_off
from meshwright.tools.interop.configs.translation import Draft


def optimizer(draft: Draft) -> None:
    """Translate the optimizer, its weight decay and clipping, and the schedule of the learning rate."""
    name = draft.text(f"{FACTORY}.name", "adamW") or ""
    draft.put("optimizer.name", "sgd" if name.lower() == "sgd" else "adamw")
    if name.lower() == "sgd":
        draft.put("optimizer.momentum", 0.0, "nanotron's SGD has none")
    elif name.lower() != "adamw":
        draft.refuse(f"{FACTORY}.name", "no such optimizer here, only adamW and sgd")
    else:
        betas = [draft.number(f"{FACTORY}.adam_beta1", 0.9), draft.number(f"{FACTORY}.adam_beta2", 0.95)]
        draft.put("optimizer.betas", betas)
        draft.put("optimizer.eps", draft.number(f"{FACTORY}.adam_eps", 1e-8))
    decay = draft.number("optimizer.weight_decay", 0.01)
    draft.put(
        "optimizer.weight_decay", decay, "on matrices only; nanotron decays norms and biases too" if decay else ""
    )
    draft.put("optimizer.clip_norm", draft.number("optimizer.clip_grad") or 0.0)
    if not is_off(draft.value("optimizer.weight_decay_exclude_named_params")):
        draft.refuse(
            "optimizer.weight_decay_exclude_named_params", "biases and norms are never decayed here, everything else is"
        )
    if draft.boolean("optimizer.accumulate_grad_in_fp32", True) is False:
        draft.drop("optimizer.accumulate_grad_in_fp32", DropReason.DIFFERS, "gradients are accumulated in float32")
    _learning_rate(draft)


def _learning_rate(draft: Draft) -> None:
    """Translate nanotron's lr_scheduler_builder.

    Its rate rises until ``lr_warmup_steps``, is flat until ``lr_decay_starting_step``, falls, and is flat at the end.
    """
    steps = draft.optional_count("tokens.train_steps")
    if steps is None:
        steps = 10**6
        draft.leave_open("train.steps", steps, draft.why_missing("tokens.train_steps"))
    draft.put("train.steps", steps)
    rate = draft.number(f"{RATE}.learning_rate")
    if rate is None:
        rate = 3e-4
        draft.leave_open("optimizer.learning_rate", rate, draft.why_missing(f"{RATE}.learning_rate"))
    draft.put("optimizer.learning_rate", rate)
    low = draft.number(f"{RATE}.min_decay_lr", rate)
    assert low is not None
    given = draft.integer(f"{RATE}.lr_warmup_steps", 0) or 0
    warmup = min(given, steps)
    if (draft.text(f"{RATE}.lr_warmup_style", "linear")) == "constant":
        draft.put("optimizer.warmup_steps", 0, "lr_warmup_style constant starts at the peak rate")
    else:
        draft.put("optimizer.warmup_steps", warmup)
        if given > steps:
            draft.refuse(f"{RATE}.lr_warmup_steps", f"the warm-up ends with the run here, after {steps} steps")
    _decay(draft, steps, warmup, is_constant=low >= rate)
    if draft.tree["optimizer.schedule"] != "constant":
        draft.put("optimizer.min_learning_rate", low)


def _decay(draft: Draft, steps: int, warmup: int, *, is_constant: bool) -> None:
    """Translate the form of the decay, its first step and its last one."""
    start, length = (draft.integer(f"{RATE}.lr_decay_{name}") for name in ("starting_step", "steps"))
    first = warmup if start is None else start
    last = first + (length or steps - warmup - (start or 0))
    style = draft.text(f"{RATE}.lr_decay_style", "linear")
    if is_constant or first >= steps:
        draft.put("optimizer.schedule", "constant", "the rate never decays")
        return
    if first < warmup:
        draft.refuse(f"{RATE}.lr_decay_starting_step", "no decay here that starts inside of the warm-up")
    if style == "1-sqrt":
        draft.refuse(f"{RATE}.lr_decay_style", "no such decay here, only cosine and linear")
    if first > warmup:
        draft.put("optimizer.schedule", "wsd")
        draft.put("optimizer.decay_steps", max(1, last - first), f"from lr_decay_starting_step {first} on")
        if style == "cosine":
            draft.refuse(f"{RATE}.lr_decay_style", "the decay after a constant rate is linear here")
    else:
        draft.put("optimizer.schedule", "cosine" if style == "cosine" else "linear")
    if last != steps:
        draft.put("optimizer.decay_until", last)
