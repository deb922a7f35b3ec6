"""Settings of verify under which faults show: a whole course of the learning rate in few steps,
large updates, clipping that acts, and several gradient buckets.

A step inside a warm-up of thousands hardly moves a weight: a wrong update of 10 such steps lies at
the tolerance. In a run with these settings, it lies orders of magnitude above.
"""

from __future__ import annotations

import torch

from meshwright.config import RunConfig
from meshwright.config.combinations.layout import Layout
from meshwright.model.build import configured_model
from meshwright.optimizer import peak_rate
from meshwright.verify.layouts import layout_config
from meshwright.verify.rank import open_verify_source
from meshwright.verify.reference import PlainRun, RunNumbers
from meshwright.verify.smaller import PreparedModel

LEAST_DECAY = 0.1
"""Smallest weight decay above 0."""
CLIPPED_SHARE = 0.8
"""Clip norm in units of the plain run's first gradient norm,
where the configured one is above it.
"""
NUM_BUCKETS = 12
"""Gradient buckets of the whole model at least, where its parameters allow;
by default a small model has one.
"""


def compress(config: RunConfig, steps: int) -> PreparedModel:
    """Compress the course of the learning rate to ``steps`` steps: warm-up, peak, decay,
    and what follows it.

    All later stages of the data are left out, also those that begin within these steps.
    """
    own, part = config.optimizer, steps * 3 // 10
    if not part:  # too few steps for a warm-up, a decay and a step between
        return PreparedModel(config, [])
    optimizer: dict[str, object] = {"warmup_steps": min(own.warmup_steps, part)}
    if own.decay_steps:
        optimizer["decay_steps"] = min(own.decay_steps, part)
    if own.decay_until:
        optimizer["decay_until"] = (
            steps - 1 if own.decay_until < config.train.steps else steps + part
        )
    compressed = config.replace(optimizer=optimizer, train={"steps": steps}, data={"stages": []})
    changes = []
    if config.train.steps != steps:
        changes = [f"train.steps {config.train.steps} -> {steps}"]
    changes += [
        f"optimizer.{name} {before} -> {after}"
        for name, after in optimizer.items()
        if (before := getattr(own, name)) != after
    ]
    changes += ["data.stages left out"] * bool(config.data.stages)
    return PreparedModel(
        compressed, [f"schedule compressed: {', '.join(changes)}"] if changes else []
    )


def amplify(config: RunConfig) -> PreparedModel:
    """Raise a small learning rate and weight decay,
    so that one wrong update moves weights far beyond the tolerance.

    A user's optimizer keeps its own: nothing is known of its scale.
    """
    own = config.optimizer
    if own.builder is not None:
        return PreparedModel(config, [])
    peak = peak_rate(own)
    factor = max(1.0, own.spec.least_rate / peak)
    values = {
        "learning_rate": factor * peak,
        "min_learning_rate": None
        if own.min_learning_rate is None
        else factor * own.min_learning_rate,
        "weight_decay": max(own.weight_decay, LEAST_DECAY) if own.weight_decay else 0.0,
    }
    changes = [
        f"optimizer.{name} {getattr(own, name):g} -> {value:g}"
        for name, value in values.items()
        if value is not None and value != getattr(own, name)
    ]
    if not changes:
        return PreparedModel(config, [])
    return PreparedModel(
        config.replace(optimizer=values), [f"larger updates: {', '.join(changes)}"]
    )


def clip_first(config: RunConfig, global_batch: int, micro_batch_size: int = 1) -> PreparedModel:
    """Lower a clip norm that the first gradient norm does not exceed, so that clipping acts.

    ``micro_batch_size``: that of the run where samples depend on each other, and the norm on it.
    """
    bound = config.optimizer.clip_norm
    if not bound:
        return PreparedModel(config, [])
    plain = layout_config(config, Layout(), global_batch, "float64")
    try:
        run = PlainRun(plain, open_verify_source(plain, True), torch.float64, micro_batch_size)
        found = RunNumbers([], [], [], {}, {}, {}, {}, [], [], [], [], {})
        with run.dropout.installed():
            run.step(0, found)
    except Exception:  # the reference run raises the error for it
        return PreparedModel(config, [])
    norm = found.grad_norms[0]
    if not 0 < norm <= bound:
        return PreparedModel(config, [])
    lower = float(f"{CLIPPED_SHARE * norm:.2g}")
    note = f"clipping acts: optimizer.clip_norm {bound:g} -> {lower:g}"
    return PreparedModel(config.replace(optimizer={"clip_norm": lower}), [note])


def split_buckets(config: RunConfig) -> PreparedModel:
    """Set a bucket size at which a small model has several gradient buckets,
    as a large one has by default.
    """
    parameters = {
        id(each): each
        for each in configured_model(config).layers.parameters()
        if each.requires_grad
    }
    size = max(1024, 8 * sum(each.numel() for each in parameters.values()) // NUM_BUCKETS)
    if config.parallel.bucket_bytes is not None and config.parallel.bucket_bytes <= size:
        return PreparedModel(config, [])
    return PreparedModel(
        config.replace(parallel={"bucket_bytes": size}), [f"parallel.bucket_bytes -> {size}"]
    )
