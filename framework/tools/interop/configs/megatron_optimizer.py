"""Translation of Megatron-LM's flags on the optimizer and the learning rate."""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.tools.interop.configs.translation import FLOAT16, Draft, DropReason


def learning_rate(draft: Draft, samples: int | None) -> float:
    """Translate steps, learning-rate schedule and warm-up, and return the peak learning rate.

    ``samples``: samples per step, for flags that count samples; None: unknown.
    """

    def in_steps(name: str) -> float | None:
        """Return ``--NAME-iters``, or ``--NAME-samples`` converted to steps; None if neither is given."""
        iterations = draft.number(f"{name}-iters")
        by_samples = draft.number(f"{name}-samples")
        if iterations is None and by_samples is not None:
            if samples is None:
                raise ConfigError(
                    "MW-INTEROP-006",
                    f"{draft.place(f'{name}-samples')}: converting samples to steps needs --global-batch-size",
                )
            return by_samples / samples
        return iterations

    steps = int(in_steps("train") or 0)
    if not steps:
        steps = 100
        draft.put("train.steps", steps, "set by hand: the file has neither --train-iters nor --train-samples")
    draft.put("train.steps", steps)
    end = in_steps("lr-decay")
    fraction, warmup = draft.number("lr-warmup-fraction"), in_steps("lr-warmup")
    if fraction is not None:
        warmup = fraction * (end or steps)
        draft.decide(f"optimizer.warmup_steps = {round(warmup)}: {fraction} of {end or steps:.0f} steps")
    draft.put("optimizer.warmup_steps", min(round(warmup or 0), steps))
    rate = draft.number("lr")
    if rate is None:
        rate = 3e-4
        draft.put("optimizer.learning_rate", rate, "set by hand: the file has no --lr")
    style = draft.text("lr-decay-style", "linear") or ""
    low = draft.number("min-lr", 0.0)
    wsd = in_steps("lr-wsd-decay")
    if style == "constant":
        draft.put("optimizer.schedule", "constant")
        return rate
    draft.put("optimizer.min_learning_rate", low)
    if style == "WSD":
        draft.put("optimizer.schedule", "wsd")
        draft.put("optimizer.decay_steps", max(1, round(wsd or 1)))
        shape = draft.text("lr-wsd-decay-style", "exponential")
        if shape != "linear":
            draft.drop("lr-wsd-decay-style", DropReason.DIFFERS, "the decay of wsd is linear here")
            draft.decide(f"the decay of wsd is linear; Megatron-LM's is {shape}")
    elif style in ("cosine", "linear"):
        draft.put("optimizer.schedule", style)
    else:
        draft.put("optimizer.schedule", "cosine", "the nearest supported one")
        draft.drop("lr-decay-style", DropReason.NONE, 'optimizer.schedule = "cosine" instead')
    if end is not None and round(end) != steps:
        draft.put("optimizer.decay_until", round(end))
    return rate


def optimizer(draft: Draft, rate: float) -> None:
    """Translate the optimizer and its dtype. ``rate``: the peak learning rate."""
    draft.put("optimizer.learning_rate", rate)
    name = draft.text("optimizer", "adam")
    draft.put("optimizer.name", "sgd" if name == "sgd" else "adamw")
    if name == "sgd":
        draft.put("optimizer.momentum", draft.number("sgd-momentum", 0.9))
    else:
        if name != "adam":
            draft.drop("optimizer", DropReason.NONE, 'optimizer.name = "adamw" instead')
        draft.put("optimizer.betas", [draft.number("adam-beta1", 0.9), draft.number("adam-beta2", 0.999)])
        draft.put("optimizer.eps", draft.number("adam-eps", 1e-8))
    draft.put("optimizer.weight_decay", draft.number("weight-decay", 0.01))
    draft.put("optimizer.clip_norm", draft.number("clip-grad", 1.0))
    low = draft.boolean("bf16") or draft.boolean("fp16")
    if draft.has("fp16"):
        draft.drop("fp16", DropReason.NONE, FLOAT16)
    draft.put("train.dtype", "bfloat16" if low else "float32")
