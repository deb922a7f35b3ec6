"""Features by name: what a layout asks for, what a configuration sets, what a model has or lacks.

A search over layouts computes the features of a layout for each candidate, and those of the
settings and of the model once. Names of layouts are those of verify's table ("tp > 2" is more than
"tp": ranks without rows occur there first).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from meshwright.config.combinations.layout import Layout, layout_of
from meshwright.config.schema import RunConfig
from meshwright.config.sections import V_SCHEDULES

HEADS, BY_DOCUMENTS = "heads", "documents"
"""Words of a layout for ``parallel.cp_exchange`` and ``parallel.cp_order``."""
COPIED, GROUPED, WHOLE = "copies of experts", "expert shard groups", "zero3, whole experts"
OF_DOCUMENTS = "cp documents"
SPLIT_BACKWARD = ("zb_h1", "zb_h2")
EACH_SCHEDULE = ("zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v")
"""Schedules that share a feature ("split backward", "V") with others;
each is a feature by itself too.
"""


class Traits(NamedTuple):
    """Traits of a model and of its samples, found on the meta device."""

    num_layers: int
    num_parameters: int
    """Number of trained parameters; tied ones count once."""
    has_plan: bool = False
    """True if the model's sharding plan splits something, so that tp is possible."""
    couples_samples: bool = False
    """True if samples of a micro-batch depend on each other;
    the micro-batch size is then part of the model.
    """
    has_running: bool = False
    """True if forward changes buffers other than BatchNorm statistics and step sums."""
    impossible: tuple[str, ...] = ()
    """Features that the model declares impossible, each with the reason: ``"tp: why"``."""
    is_tied: bool = False
    """True if two layers share a weight."""
    has_dropout: bool = False
    """True if any dropout has p > 0."""
    has_selective: bool = False
    """True if the model names parts for selective recompute (activation checkpointing)."""
    coupling: str = ""
    """Layer in which samples depend on each other, if running the model revealed it; else ""."""
    vocab_sizes: tuple[int, ...] = ()
    """Row counts of the weights that are sharded as a vocabulary; tp pads them."""
    has_core: bool = False
    """True if the plan names an attention core."""
    has_rows: bool = False
    """True if each sample has a row of labels, one for each token."""
    has_heads: bool = False
    """True if the loss has several heads (multi-token prediction)."""
    has_documents: bool = False
    """True if the samples have document starts, so that their tokens can be dealt by documents."""
    has_statistics: bool = False
    """True if a BatchNorm that is not synchronised keeps running statistics."""
    is_synchronised: bool = False
    """True if batch statistics are those of all replicas (``nn.SyncBatchNorm``)."""
    couples_otherwise: bool = False
    """True if modules besides these couple the samples of one replica's micro-batch."""
    has_scalar: bool = False
    """True if a parameter is a single number."""
    experts: tuple[int, ...] = ()
    """Numbers of experts of the model's layers."""
    settings: frozenset[str] = frozenset()
    """Features of the configuration besides its layout: see :func:`settings_of`."""

    @property
    def of_coupling(self) -> str:
        """The coupling layer in parentheses with a leading space, or ""."""
        return f" ({self.coupling})" if self.coupling else ""

    def samples_together(self, layout: Layout) -> int:
        """Return the samples on which a sample's numbers depend: those of a batch of the plain
        model that has the layout's numbers.
        """
        if not self.couples_samples:
            return 1
        return layout.micro_batch_size * (layout.dp if self.is_synchronised else 1)

    def with_samples(self, layout: Layout, together: int) -> Layout | None:
        """Return a layout in which numbers depend on ``together`` samples, see
        :meth:`samples_together`; None if its replicas cannot share them evenly.
        """
        size, rest = divmod(together, layout.dp if self.is_synchronised else 1)
        return None if rest else layout._replace(micro_batch_size=size)

    def rules_out(self, name: str) -> bool:
        """Return True if the model declares an axis, or sequence parallelism, impossible."""
        return any(reason.startswith(f"{name}: ") for reason in self.impossible)


class Feature(NamedTuple):
    """Feature that a configuration asks for, with the keys by which it does."""

    holds: Callable[[RunConfig], bool]
    keys: tuple[str, ...]


SETTINGS: dict[str, Feature] = {
    "reduce = microbatch": Feature(
        lambda config: config.parallel.reduce == "microbatch", ("parallel.reduce",)
    ),
    "offload directory": Feature(
        lambda config: config.parallel.offload_directory is not None,
        ("parallel.offload_directory",),
    ),
    "trimmed rows": Feature(lambda config: config.batch.padding == "trim", ("batch.padding",)),
    "cp head groups": Feature(
        lambda config: config.parallel.cp_head_groups is not None, ("parallel.cp_head_groups",)
    ),
    "documents without boundaries": Feature(
        lambda config: config.data.builder is None and not config.data.document_boundaries,
        ("data.document_boundaries", "data.builder"),
    ),
    "whole-parameter optimizer": Feature(
        lambda config: config.optimizer.spec.unit == "parameter",
        ("optimizer.name", "optimizer.builder"),
    ),
    "optimizer without offload": Feature(
        lambda config: config.optimizer.spec.needs_full_weights,
        ("optimizer.name", "optimizer.builder"),
    ),
    "own optimizer": Feature(
        lambda config: config.optimizer.builder is not None, ("optimizer.builder",)
    ),
    "averaged weights": Feature(
        lambda config: config.optimizer.spec.averages_weights,
        ("optimizer.name", "optimizer.builder"),
    ),
    "rate schedule": Feature(
        lambda config: config.optimizer.schedule != "constant", ("optimizer.schedule",)
    ),
    "compile": Feature(lambda config: config.train.compile is True, ("train.compile",)),
    "fp8": Feature(lambda config: config.train.linear == "fp8", ("train.linear",)),
    "float16": Feature(lambda config: config.train.dtype == "float16", ("train.dtype",)),
    "GPU without bfloat16": Feature(
        lambda config: (
            config.train.device == "cuda" and config.train.dtype not in ("bfloat16", "float16")
        ),
        ("train.device", "train.dtype"),
    ),
    "16 bits": Feature(
        lambda config: config.train.dtype in ("bfloat16", "float16"), ("train.dtype",)
    ),
    "schedule file": Feature(
        lambda config: config.pipeline.schedule_file is not None, ("pipeline.schedule_file",)
    ),
    "batch ramp": Feature(lambda config: config.batch.ramp is not None, ("batch.ramp",)),
    "balance by work": Feature(lambda config: config.batch.balance == "work", ("batch.balance",)),
    "CPU": Feature(lambda config: config.train.device == "cpu", ("train.device",)),
    "GPU list": Feature(lambda config: bool(config.launch.devices), ("launch.devices",)),
    "shared GPUs": Feature(lambda config: config.launch.share_devices, ("launch.share_devices",)),
}
"""Features of a configuration besides its layout."""

LAYOUT: dict[str, Callable[[Layout], bool]] = {
    "dp": lambda layout: layout.dp > 1,
    "dp > 2": lambda layout: layout.dp > 2,
    "pp > 2": lambda layout: layout.pp > 2,
    "dp or cp": lambda layout: layout.dp * layout.cp > 1,
    "cp": lambda layout: layout.cp > 1,
    "cp heads": lambda layout: layout.cp > 1 and layout.exchange == HEADS,
    OF_DOCUMENTS: lambda layout: layout.cp > 1 and layout.order == BY_DOCUMENTS,
    "ep": lambda layout: layout.ep > 1,
    "ep > 2": lambda layout: layout.ep > 2,
    "tp": lambda layout: layout.tp > 1,
    "tp > 2": lambda layout: layout.tp > 2,
    "sequence": lambda layout: layout.sequence,
    "middle stage": lambda layout: layout.pp > 1 and layout.num_stages > 2,
    "middle rank": lambda layout: (
        layout.pp > 2 or (layout.pp > 1 and layout.schedule in V_SCHEDULES)
    ),
    "micro-batch > 1": lambda layout: layout.micro_batch_size > 1,
    "offload": lambda layout: layout.offload,
    "no offload": lambda layout: not layout.offload,
    "replicated weights": lambda layout: layout.zero < 3,
    "no ZeRO": lambda layout: layout.zero == 0,
    "whole gradients": lambda layout: layout.zero < 2 or layout.shard == 1,
    "shards": lambda layout: layout.shard > 1,
    "shard factor": lambda layout: layout.zero > 0 and 1 < layout.shard < layout.dp * layout.cp,
    "units of layers": lambda layout: layout.unit_layers > 1,
    "kept weights": lambda layout: layout.keeps_gathered,
    "reduce = step": lambda layout: _reduces_once(layout),
    "pointwise": lambda layout: layout.recompute == "pointwise",
    "selective": lambda layout: layout.recompute == "selective",
    "full": lambda layout: layout.recompute == "full",
    "ZeRO-3": lambda layout: layout.zero == 3 and layout.dp * layout.cp > 1 and layout.shard != 1,
    **{
        f"zero{stage}": lambda layout, stage=stage: (  # type: ignore[misc]
            layout.dp > 1
            and layout.zero == stage
            and not layout.offload
            and not _reduces_once(layout)
        )
        for stage in range(4)
    },
    **{
        f"zero{stage}, offload": lambda layout, stage=stage: (  # type: ignore[misc]
            layout.dp > 1 and layout.zero == stage and layout.offload
        )
        for stage in range(4)
    },
    **{
        f"zero{stage}, reduce = step": lambda layout, stage=stage: (  # type: ignore[misc]
            layout.zero == stage and _reduces_once(layout) and not layout.offload
        )
        for stage in (2, 3)
    },
    **{
        schedule: lambda layout, schedule=schedule: (  # type: ignore[misc]
            layout.pp > 1 and layout.schedule == schedule
        )
        for schedule in ("1f1b", "gpipe", *EACH_SCHEDULE)
    },
    "interleaved": lambda layout: layout.pp > 1 and layout.schedule == "interleaved_1f1b",
    "split backward": lambda layout: layout.pp > 1 and layout.schedule in SPLIT_BACKWARD,
    "V": lambda layout: layout.pp > 1 and layout.schedule in V_SCHEDULES,
}
"""Features that a layout has by itself."""

LAYOUT_KEYS: dict[str, tuple[str, ...]] = {
    "sequence": ("parallel.sequence",),
    "cp heads": ("parallel.cp_exchange",),
    OF_DOCUMENTS: ("parallel.cp_order",),
    "ep": ("parallel.ep",),
    "offload": ("parallel.offload",),
    "no offload": ("parallel.offload",),
    "dualpipe_v": ("pipeline.schedule",),
    "replicated weights": ("parallel.zero",),
    "no ZeRO": ("parallel.zero",),
    "whole gradients": ("parallel.zero", "parallel.shard_factor"),
    "shards": ("parallel.shard_factor",),
    "units of layers": ("parallel.unit_layers",),
    "kept weights": ("parallel.keep_gathered",),
    "pointwise": ("pipeline.recompute",),
    "selective": ("pipeline.recompute",),
}
"""Keys that ask for a feature of a layout, of those that some setting excludes."""

MODEL: dict[str, Callable[[Traits], bool]] = {
    "tp ruled out": lambda traits: traits.rules_out("tp"),
    "sequence ruled out": lambda traits: traits.rules_out("sequence"),
    "cp ruled out": lambda traits: traits.rules_out("cp"),
    "no sharding plan": lambda traits: not traits.has_plan,
    "one label per sample": lambda traits: not traits.has_rows,
    "no attention core": lambda traits: not traits.has_core,
    "multi-token prediction": lambda traits: traits.has_heads,
    "no document starts": lambda traits: not traits.has_documents,
    "no experts": lambda traits: not traits.experts,
    "no selective parts": lambda traits: not traits.has_selective,
    "BatchNorm statistics": lambda traits: traits.has_statistics,
    "SyncBatchNorm": lambda traits: traits.is_synchronised,
    "SyncBatchNorm and other coupling": lambda traits: (
        traits.is_synchronised and traits.couples_otherwise
    ),
    "other running buffers": lambda traits: traits.has_running,
    "single-number parameter": lambda traits: traits.has_scalar,
    "dropout": lambda traits: traits.has_dropout,
}
"""Features that a model and its samples have or lack."""

BOTH: dict[str, Callable[[Layout, Traits], bool]] = {
    "padded vocabulary": lambda layout, traits: any(
        size % layout.tp for size in traits.vocab_sizes
    ),
    "tie across ranks": lambda layout, traits: (
        traits.is_tied and layout.pp > 1 and layout.schedule not in V_SCHEDULES
    ),
    "tie inside a rank": lambda layout, traits: (
        traits.is_tied and layout.pp > 1 and layout.schedule in V_SCHEDULES
    ),
    COPIED: lambda layout, traits: _expert_copies(layout) > 1,
    GROUPED: lambda layout, traits: 1 < _expert_shards(layout) < _expert_copies(layout),
    WHOLE: lambda layout, traits: (
        layout.zero == 3
        and any(count // layout.ep % _expert_shards(layout) for count in traits.experts)
    ),
}
"""Features of a layout that depend on the model."""


def _reduces_once(layout: Layout) -> bool:
    return layout.zero > 1 and layout.dp > 1 and layout.reduces_once


def _expert_copies(layout: Layout) -> int:
    """Return the ranks with the same experts; 1 without expert parallelism."""
    return layout.dp * layout.cp * layout.tp // layout.ep if layout.ep > 1 else 1


def _expert_shards(layout: Layout) -> int:
    """Return the shards of the experts' optimizer state."""
    if not layout.zero:
        return 1
    return math.gcd(layout.shard or layout.dp * layout.cp, _expert_copies(layout))


def features_of(layout: Layout, traits: Traits) -> frozenset[str]:
    """Return the features that a layout of this model has, with those of the model and of the
    configuration.
    """
    names = {name for name, holds in LAYOUT.items() if holds(layout)}
    names |= {name for name, holds in BOTH.items() if holds(layout, traits)}
    return frozenset(names) | model_features(traits) | traits.settings


@lru_cache(maxsize=64)
def model_features(traits: Traits) -> frozenset[str]:
    """Return what the model and its samples have or lack."""
    return frozenset(name for name, holds in MODEL.items() if holds(traits))


SET_BY_LAYOUTS = {"reduce = microbatch", "offload directory", "cp head groups"}
"""Settings whose keys the configuration of a layout sets anew."""


def settings_of(config: RunConfig) -> frozenset[str]:
    """Return the features that a configuration sets, whatever its layout becomes."""
    kept = SETTINGS.keys() - SET_BY_LAYOUTS
    return frozenset(name for name in kept if SETTINGS[name].holds(config))


def keys_of(name: str) -> tuple[str, ...]:
    """Return the keys that ask for a feature; none for what a model has or lacks."""
    return SETTINGS[name].keys if name in SETTINGS else LAYOUT_KEYS.get(name, ())


def is_asked(name: str, config: RunConfig) -> bool:
    """Return True if a configuration asks for a feature."""
    if name in SETTINGS:
        return SETTINGS[name].holds(config)
    return LAYOUT[name](layout_of(config))
