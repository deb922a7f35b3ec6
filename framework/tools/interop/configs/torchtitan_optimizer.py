"""Translation of torchtitan's optimizer and learning-rate schedule."""

from __future__ import annotations

from meshwright.tools.interop.configs.translation import Draft


def optimizer(draft: Draft) -> None:
    """Translate the optimizer, its weight decay and clipping, and the schedule of the learning rate."""
    name = draft.text("optimizer.name", "AdamW")
    draft.put("optimizer.name", "adamw")
    decay = draft.number("optimizer.weight_decay", 0.1)
    if name == "Adam" and decay:
        draft.refuse("optimizer.name", "weight decay is decoupled here (AdamW), not added to the gradient")
    elif name not in ("Adam", "AdamW"):
        draft.refuse("optimizer.name", "no such optimizer here, only AdamW")
    rate = draft.number("optimizer.lr", 8e-4)
    assert rate is not None
    draft.put("optimizer.learning_rate", rate)
    draft.put("optimizer.betas", [draft.number("optimizer.beta1", 0.9), draft.number("optimizer.beta2", 0.95)])
    draft.put("optimizer.eps", draft.number("optimizer.eps", 1e-8))
    draft.put(
        "optimizer.weight_decay", decay, "on matrices only; torchtitan decays norms and biases too" if decay else ""
    )
    draft.put("optimizer.clip_norm", draft.number("training.max_norm", 1.0))
    _learning_rate(draft, rate)


def _learning_rate(draft: Draft, rate: float) -> None:
    """Translate torchtitan's ``linear_warmup_stable_decay`` over ``total_steps``, or all steps of the run."""
    steps = draft.count("training.steps", 10000)
    draft.put("train.steps", steps)
    total = draft.optional_count("lr_scheduler.total_steps") or steps
    warmup = min(draft.integer("lr_scheduler.warmup_steps", 200) or 0, total)
    draft.put("optimizer.warmup_steps", min(warmup, steps))
    if warmup > steps:
        draft.refuse("lr_scheduler.warmup_steps", f"the warm-up ends with the run here, after {steps} steps")
    low = float(f"{rate * (draft.number('lr_scheduler.min_lr_factor', 0.0) or 0.0):.12g}")
    draft.put("optimizer.min_learning_rate", low)
    kind, ratio = draft.text("lr_scheduler.decay_type", "linear"), draft.number("lr_scheduler.decay_ratio")
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    if ratio == 0.0 or decay == 0:
        draft.put("optimizer.schedule", "constant")
        draft.tree.pop("optimizer.min_learning_rate")
        return
    if kind == "sqrt":
        draft.refuse("lr_scheduler.decay_type", "no such decay here, only cosine and linear")
    if warmup + decay < total:
        draft.put("optimizer.schedule", "wsd")
        draft.put("optimizer.decay_steps", decay, f"lr_scheduler.decay_ratio {ratio} of {total} steps")
        if kind == "cosine":
            draft.refuse("lr_scheduler.decay_type", "the decay after a constant rate is linear here")
    else:
        draft.put("optimizer.schedule", "cosine" if kind == "cosine" else "linear")
    if total != steps:
        draft.put("optimizer.decay_until", total, "lr_scheduler.total_steps")
