"""Translation of Megatron-LM's flags on the optimizer and the learning rate."""

from __future__ import annotations

import math

from meshwright.config import Batch, phases
from meshwright.errors import ConfigError
from meshwright_interop.configs.megatron_muon import muon
from meshwright_interop.configs.schedules import put_adam, put_warmup
from meshwright_interop.configs.translation import Translation


def learning_rate(translation: Translation, samples: int | None) -> float | None:
    """Translate steps, learning-rate schedule and warm-up, and return the peak learning rate; None: not in the file.

    ``samples``: samples per step, for flags that count samples; None: unknown.
    """

    def in_steps(name: str) -> float | None:
        """Return ``--NAME-iters``, or ``--NAME-samples`` converted to steps; None if neither is given."""
        iterations = translation.number(f"{name}-iters")
        by_samples = translation.number(f"{name}-samples", minimum=0)
        if iterations is None and by_samples is not None:
            if samples is None:
                raise ConfigError(
                    "MW-INTEROP-006",
                    f"{translation.place(f'{name}-samples')}: converting samples to steps needs --global-batch-size",
                )
            return _steps_of(translation, by_samples, samples)
        return iterations

    total, end, warmup = in_steps("train"), in_steps("lr-decay"), in_steps("lr-warmup")
    steps = int(total or max(100, end or 0, warmup or 0))
    if total:
        translation.put("train.steps", steps)
    else:
        translation.leave_open("train.steps", steps, translation.why_missing("train-iters", "train-samples"))
    _warmup(translation, steps, end or (total and steps), warmup)
    if translation.number("lr-warmup-init"):
        translation.refuse("lr-warmup-init", "warm-up starts at 1/warmup_steps of the peak rate")
    rate = translation.number("lr")
    if rate is None:
        translation.leave_open("optimizer.learning_rate", 3e-4, translation.why_missing("lr"))
    _decay(translation, steps, end, in_steps("lr-wsd-decay"))
    _embedding_rate(translation, rate)
    return rate


def _warmup(translation: Translation, steps: int, whole: float | None, warmup: float | None) -> None:
    """Translate the warm-up. ``warmup``: its steps; ``whole``: the steps that a fraction is of, None: unknown."""
    fraction = translation.number("lr-warmup-fraction")
    name = "lr-warmup-iters" if translation.has("lr-warmup-iters") else "lr-warmup-samples"
    if fraction is not None and not whole:
        translation.leave_open("optimizer.warmup_steps", 0, f"{fraction} of the steps, which are not known")
        return
    if fraction is not None and whole:
        name, warmup = "lr-warmup-fraction", fraction * whole
        translation.decide(f"optimizer.warmup_steps = {round(warmup)}: {fraction} of {whole:.0f} steps")
    put_warmup(translation, name, round(warmup or 0), steps)


def _steps_of(translation: Translation, num_samples: float, global_batch: int) -> float:
    """Return the number of steps with this many samples, the batch-size ramp included."""
    ramp = translation.tree.get("batch.ramp")
    batch = Batch(micro_batch_size=1, chunks=1, global_batch=global_batch, ramp=ramp and tuple(ramp))
    last = [phase for phase in phases(batch) if phase.samples_seen <= num_samples][-1]
    return last.first_step + (num_samples - last.samples_seen) / last.global_batch


def _decay(translation: Translation, steps: int, end: float | None, wsd: float | None) -> None:
    """Translate the form of the decay. ``end``, ``wsd``: step at which it ends, and its length for WSD."""
    style = translation.text("lr-decay-style", "linear") or ""
    low = translation.number("min-lr", 0.0)
    if style == "constant":
        translation.put("optimizer.schedule", "constant")
        return
    translation.put("optimizer.min_learning_rate", low)
    if style == "WSD":
        translation.put("optimizer.schedule", "wsd")
        translation.put("optimizer.decay_steps", max(1, round(wsd or 1)))
        shape = translation.text("lr-wsd-decay-style", "exponential")
        if shape != "linear":
            translation.refuse("lr-wsd-decay-style", f"the decay of WSD is {shape} there, and linear here")
    elif style in ("cosine", "linear"):
        translation.put("optimizer.schedule", style)
    else:
        translation.put("optimizer.schedule", "cosine")
        translation.refuse("lr-decay-style", "no such decay here, only cosine, linear, wsd and constant")
    if end is not None and round(end) != steps:
        translation.put("optimizer.decay_until", round(end))


def _embedding_rate(translation: Translation, rate: float | None) -> None:
    """Translate ``--decoupled-lr``, the rate of embedding and head, to a factor; the minimum rates must have it too."""
    own = translation.number("decoupled-lr")
    if own is None:
        translation.skip("decoupled-min-lr")
        return
    low = translation.number("min-lr", 0.0) or 0.0
    own_low = translation.number("decoupled-min-lr", low) or 0.0
    is_constant = translation.tree.get("optimizer.schedule") == "constant"
    if not rate or not (is_constant or math.isclose(own_low * rate, low * own, rel_tol=1e-9)):
        why = "a learning rate of its own is a factor here, on --lr and --min-lr alike"
        translation.refuse("decoupled-lr", why)
        return
    head = "head.linear.weight" if translation.tree.get("model.options.mtp_layers") else "head.weight"
    names = ["embedding.tokens.weight", *([] if translation.tree.get("model.options.tied") else [head])]
    group = {"names": names, "learning_rate_factor": own / rate}
    translation.put("model.parameter_groups", [group], "--decoupled-lr over --lr")


def optimizer(translation: Translation, rate: float | None) -> None:
    """Translate the optimizer and its dtype. ``rate``: the peak learning rate."""
    translation.put("optimizer.learning_rate", rate)
    name = translation.text("optimizer", "adam")
    translation.put("optimizer.name", "sgd" if name == "sgd" else "adamw")
    if name == "sgd":
        translation.put("optimizer.momentum", translation.number("sgd-momentum", 0.9))
    else:
        if name in ("muon", "dist_muon"):
            muon(translation)
        elif name == "lion":
            why = 'lion has other flags there: import with adam, then set optimizer.name = "lion" and its keys'
            translation.refuse("optimizer", f"{why}, docs/optimizers.md")
        elif name not in ("adam", "adamw"):
            translation.refuse("optimizer", "no such optimizer here, only adam (AdamW) and sgd")
        put_adam(translation, "adam-", second=0.999)
    translation.skip("muon-*")  # of another optimizer, or refused above
    translation.put("optimizer.weight_decay", translation.number("weight-decay", 0.01))
    if translation.text("weight-decay-incr-style", "constant") != "constant":
        translation.refuse("weight-decay-incr-style", "the weight decay is constant here")
    translation.skip("start-weight-decay", "end-weight-decay")
    translation.put("optimizer.clip_norm", translation.number("clip-grad", 1.0))
    is_half = translation.boolean("fp16")
    translation.put("train.dtype", "float16" if is_half else "bfloat16" if translation.boolean("bf16") else "float32")
    if is_half:
        _loss_scale(translation)


def _loss_scale(translation: Translation) -> None:
    """Translate the loss scale of float16. The defaults are the same."""
    fixed = translation.number("loss-scale")
    translation.put("loss_scale.fixed", fixed)
    if fixed is not None:
        translation.skip("initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis")
        return
    translation.put("loss_scale.initial", translation.number("initial-loss-scale"))
    translation.put("loss_scale.minimum", translation.number("min-loss-scale"))
    translation.put("loss_scale.window", translation.optional_count("loss-scale-window"))
    translation.put("loss_scale.hysteresis", translation.optional_count("hysteresis"))
