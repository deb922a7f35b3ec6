"""Optimizer keys and the form of the learning rate, which several frameworks have alike."""

from __future__ import annotations

from meshwright_interop.configs.translation import Translation


def put_betas(translation: Translation, prefix: str, *, second: float) -> None:
    """Set betas and eps of Adam from ``{prefix}beta1``, ``beta2``, ``eps``. ``second``:
    their default of beta2.
    """
    defaults = {"beta1": 0.9, "beta2": second}
    betas = [translation.number(f"{prefix}{name}", value) for name, value in defaults.items()]
    translation.put("optimizer.betas", betas)
    translation.put("optimizer.eps", translation.number(f"{prefix}eps", 1e-8))


def put_warmup(translation: Translation, name: str, warmup: int, steps: int) -> None:
    """Set the warm-up, and refuse one that is longer than the run."""
    translation.put("optimizer.warmup_steps", min(warmup, steps))
    if warmup > steps > 0:
        translation.refuse(name, f"the warm-up ends with the run here, after {steps} steps")


def put_decay(translation: Translation, name: str, bounds: tuple[int, int, int], why: str) -> None:
    """Set the form of the decay: at once after the warm-up, or after steps at the peak rate (wsd).

    Args:
        translation: the keys; receives the meshwright keys.
        name: key of the decay's form.
        bounds: steps at which the warm-up ends, and the decay starts and ends.
        why: source of the decay's length.
    """
    style = translation.text(name, "linear")
    warmup, first, last = bounds
    if style not in ("cosine", "linear"):
        translation.refuse(name, "no such decay here, only cosine and linear")
    if first > warmup:
        translation.put("optimizer.schedule", "wsd")
        translation.put("optimizer.decay_steps", max(1, last - first), why)
        if style == "cosine":
            translation.refuse(name, "the decay after a constant rate is linear here")
    else:
        translation.put("optimizer.schedule", "cosine" if style == "cosine" else "linear")
