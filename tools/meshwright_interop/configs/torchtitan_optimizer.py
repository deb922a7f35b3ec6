"""Translation of torchtitan's optimizer and learning-rate schedule."""

from __future__ import annotations

from meshwright_interop.configs.schedules import put_adam, put_decay, put_warmup
from meshwright_interop.configs.translation import Translation


def optimizer(translation: Translation) -> None:
    """Translate the optimizer, its weight decay and clipping, and the schedule of the learning rate."""
    name = translation.text("optimizer.name", "AdamW")
    translation.put("optimizer.name", "adamw")
    decay = translation.number("optimizer.weight_decay", 0.1)
    if name == "Adam" and decay:
        translation.refuse("optimizer.name", "weight decay is decoupled here (AdamW), not added to the gradient")
    elif name not in ("Adam", "AdamW"):
        translation.refuse("optimizer.name", "no such optimizer here, only AdamW")
    rate = translation.number("optimizer.lr", 8e-4)
    assert rate is not None
    translation.put("optimizer.learning_rate", rate)
    put_adam(translation, "optimizer.", second=0.95)
    translation.put(
        "optimizer.weight_decay", decay, "on matrices only; torchtitan decays norms and biases too" if decay else ""
    )
    translation.put("optimizer.clip_norm", translation.number("training.max_norm", 1.0))
    _learning_rate(translation, rate)


def _learning_rate(translation: Translation, rate: float) -> None:
    """Translate torchtitan's ``linear_warmup_stable_decay`` over ``total_steps``, or all steps of the run."""
    steps = translation.count("training.steps", 10000)
    translation.put("train.steps", steps)
    total = translation.optional_count("lr_scheduler.total_steps") or steps
    warmup = min(translation.integer("lr_scheduler.warmup_steps", 200) or 0, total)
    put_warmup(translation, "lr_scheduler.warmup_steps", warmup, steps)
    low = float(f"{rate * (translation.number('lr_scheduler.min_lr_factor', 0.0) or 0.0):.12g}")
    translation.put("optimizer.min_learning_rate", low)
    ratio = translation.number("lr_scheduler.decay_ratio")
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    if ratio == 0.0 or decay == 0:
        translation.text("lr_scheduler.decay_type", "linear")
        translation.put("optimizer.schedule", "constant")
        translation.tree.pop("optimizer.min_learning_rate")
        return
    why = f"lr_scheduler.decay_ratio {ratio} of {total} steps"
    put_decay(translation, "lr_scheduler.decay_type", (warmup, total - decay, total), why)
    if total != steps:
        translation.put("optimizer.decay_until", total, "lr_scheduler.total_steps")
