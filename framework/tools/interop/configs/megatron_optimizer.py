"""Translation of Megatron-LM's flags on the optimizer and the learning rate."""

from __future__ import annotations

import math

from meshwright.config import Batch, phases
from meshwright.errors import ConfigError
from meshwright.tools.interop.configs.megatron_muon import muon
from meshwright.tools.interop.configs.translation import Draft


def learning_rate(draft: Draft, samples: int | None) -> float | None:
    """Translate steps, learning-rate schedule and warm-up, and return the peak learning rate; None: not in the file.

    ``samples``: samples per step, for flags that count samples; None: unknown.
    """

    def in_steps(name: str) -> float | None:
        """Return ``--NAME-iters``, or ``--NAME-samples`` converted to steps; None if neither is given."""
        iterations = draft.number(f"{name}-iters")
        by_samples = draft.number(f"{name}-samples", minimum=0)
        if iterations is None and by_samples is not None:
            if samples is None and draft.unset:
                draft.unset.setdefault(f"{name}-samples", f"{by_samples:.0f}, with a global batch")
                return None
            if samples is None:
                raise ConfigError(
                    "MW-INTEROP-006",
                    f"{draft.place(f'{name}-samples')}: converting samples to steps needs --global-batch-size",
                )
            return _steps_of(draft, by_samples, samples)
        return iterations

    total, end, warmup = in_steps("train"), in_steps("lr-decay"), in_steps("lr-warmup")
    steps = int(total or max(100, end or 0, warmup or 0))
    if total:
        draft.put("train.steps", steps)
    else:
        draft.leave_open("train.steps", steps, draft.why_missing("train-iters", "train-samples"))
    _warmup(draft, steps, end or (total and steps), warmup)
    if draft.number("lr-warmup-init"):
        draft.refuse("lr-warmup-init", "warm-up starts at 1/warmup_steps of the peak rate")
    rate = draft.number("lr")
    if rate is None:
        draft.leave_open("optimizer.learning_rate", 3e-4, draft.why_missing("lr"))
    _decay(draft, steps, end, in_steps("lr-wsd-decay"))
    _embedding_rate(draft, rate)
    return rate


def _warmup(draft: Draft, steps: int, whole: float | None, warmup: float | None) -> None:
    """Translate the warm-up. ``warmup``: its steps; ``whole``: the steps that a fraction is of, None: unknown."""
    fraction = draft.number("lr-warmup-fraction")
    name = "lr-warmup-iters" if draft.has("lr-warmup-iters") else "lr-warmup-samples"
    if fraction is not None and not whole:
        draft.leave_open("optimizer.warmup_steps", 0, f"{fraction} of the steps, which are not known")
        return
    if fraction is not None and whole:
        name, warmup = "lr-warmup-fraction", fraction * whole
        draft.decide(f"optimizer.warmup_steps = {round(warmup)}: {fraction} of {whole:.0f} steps")
    given = round(warmup or 0)
    draft.put("optimizer.warmup_steps", min(given, steps))
    if given > steps > 0:
        draft.refuse(name, f"the warm-up ends with the run here, after {steps} steps")


def _steps_of(draft: Draft, num_samples: float, global_batch: int) -> float:
    """Return the number of steps with this many samples, the batch-size ramp included."""
    ramp = draft.tree.get("batch.ramp")
    batch = Batch(micro_batch_size=1, chunks=1, global_batch=global_batch, ramp=ramp and tuple(ramp))
    last = [phase for phase in phases(batch) if phase.samples_seen <= num_samples][-1]
    return last.first_step + (num_samples - last.samples_seen) / last.global_batch


def _decay(draft: Draft, steps: int, end: float | None, wsd: float | None) -> None:
    """Translate the form of the decay. ``end``, ``wsd``: step at which it ends, and its length for WSD."""
    style = draft.text("lr-decay-style", "linear") or ""
    low = draft.number("min-lr", 0.0)
    if style == "constant":
        draft.put("optimizer.schedule", "constant")
        return
    draft.put("optimizer.min_learning_rate", low)
    if style == "WSD":
        draft.put("optimizer.schedule", "wsd")
        draft.put("optimizer.decay_steps", max(1, round(wsd or 1)))
        shape = draft.text("lr-wsd-decay-style", "exponential")
        if shape != "linear":
            draft.refuse("lr-wsd-decay-style", f"the decay of WSD is {shape} there, and linear here")
    elif style in ("cosine", "linear"):
        draft.put("optimizer.schedule", style)
    else:
        draft.put("optimizer.schedule", "cosine")
        draft.refuse("lr-decay-style", "no such decay here, only cosine, linear, wsd and constant")
    if end is not None and round(end) != steps:
        draft.put("optimizer.decay_until", round(end))


def _embedding_rate(draft: Draft, rate: float | None) -> None:
    """Translate ``--decoupled-lr``, the rate of embedding and head, to a factor; the minimum rates must have it too."""
    own = draft.number("decoupled-lr")
    if own is None:
        draft.skip("decoupled-min-lr")
        return
    low = draft.number("min-lr", 0.0) or 0.0
    own_low = draft.number("decoupled-min-lr", low) or 0.0
    is_constant = draft.tree.get("optimizer.schedule") == "constant"
    if not rate or not (is_constant or math.isclose(own_low * rate, low * own, rel_tol=1e-9)):
        why = "a learning rate of its own is a factor here, on --lr and --min-lr alike"
        draft.refuse("decoupled-lr", why)
        return
    head = "head.linear.weight" if draft.tree.get("model.options.mtp_layers") else "head.weight"
    names = ["embedding.tokens.weight", *([] if draft.tree.get("model.options.tied") else [head])]
    group = {"names": names, "learning_rate_factor": own / rate}
    draft.put("model.parameter_groups", [group], "--decoupled-lr over --lr")


def optimizer(draft: Draft, rate: float | None) -> None:
    """Translate the optimizer and its dtype. ``rate``: the peak learning rate."""
    draft.put("optimizer.learning_rate", rate)
    name = draft.text("optimizer", "adam")
    draft.put("optimizer.name", "sgd" if name == "sgd" else "adamw")
    if name == "sgd":
        draft.put("optimizer.momentum", draft.number("sgd-momentum", 0.9))
    else:
        if name in ("muon", "dist_muon"):
            muon(draft)
        elif name == "lion":
            why = 'lion has other flags there: import with adam, then set optimizer.name = "lion" and its keys'
            draft.refuse("optimizer", f"{why}, docs/optimizers.md")
        elif name not in ("adam", "adamw"):
            draft.refuse("optimizer", "no such optimizer here, only adam (AdamW) and sgd")
        draft.put("optimizer.betas", [draft.number("adam-beta1", 0.9), draft.number("adam-beta2", 0.999)])
        draft.put("optimizer.eps", draft.number("adam-eps", 1e-8))
    draft.skip("muon-*")  # of another optimizer, or refused above
    draft.put("optimizer.weight_decay", draft.number("weight-decay", 0.01))
    if draft.text("weight-decay-incr-style", "constant") != "constant":
        draft.refuse("weight-decay-incr-style", "the weight decay is constant here")
    draft.skip("start-weight-decay", "end-weight-decay")
    draft.put("optimizer.clip_norm", draft.number("clip-grad", 1.0))
    is_half = draft.boolean("fp16")
    draft.put("train.dtype", "float16" if is_half else "bfloat16" if draft.boolean("bf16") else "float32")
    if is_half:
        _loss_scale(draft)


def _loss_scale(draft: Draft) -> None:
    """Translate the loss scale of float16. The defaults are the same."""
    fixed = draft.number("loss-scale")
    draft.put("loss_scale.fixed", fixed)
    if fixed is not None:
        draft.skip("initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis")
        return
    draft.put("loss_scale.initial", draft.number("initial-loss-scale"))
    draft.put("loss_scale.minimum", draft.number("min-loss-scale"))
    draft.put("loss_scale.window", draft.optional_count("loss-scale-window"))
    draft.put("loss_scale.hysteresis", draft.optional_count("hysteresis"))
