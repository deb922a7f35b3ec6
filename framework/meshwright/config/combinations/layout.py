"""A layout as a value, and its text form, such as ``dp2,pp2,tp2,sequence,gpipe,zero0``."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, get_args

from meshwright.config.combinations.axes import AXES
from meshwright.config.schema import RunConfig
from meshwright.config.sections import Parallel, Pipeline, stages_per_rank
from meshwright.errors import ConfigError

SCHEDULES: tuple[str, ...] = get_args(get_args(Pipeline.model_fields["schedule"].annotation)[0])
ORDERS: tuple[str, ...] = get_args(Parallel.model_fields["cp_order"].annotation)
SCHEDULE_FILE = "file"
"""Word for the schedule in ``pipeline.schedule_file``, in place of a schedule's name."""

LAYOUT_WORDS = (
    "dpN, ppN, tpN, cpN, epN, mbsN (micro_batch_size), interleaveN, zero0, zero1, zero2, zero3,"
    " shardN (shard_factor), unitN (unit_layers), kept (keep_gathered: the configuration's layers, or"
    " all), step (parallel.reduce), offload, sequence, contiguous or documents"
    " (parallel.cp_order), heads (parallel.cp_exchange), pointwise, selective or full (recompute), "
    + ", ".join(SCHEDULES)
    + ", file (pipeline.schedule_file)"
)
NUMBERED = {axis.name: axis.name for axis in AXES} | {
    "mbs": "micro_batch_size",
    "zero": "zero",
    "interleave": "interleave",
    "shard": "shard",
    "unit": "unit_layers",
}
"""Word that a number follows -> field of :class:`Layout`."""
SWITCHES: dict[str, dict[str, Any]] = {
    "sequence": {"sequence": True},
    "offload": {"offload": True},
    "step": {"reduces_once": True},
    "kept": {"keeps_gathered": True},
    "heads": {"exchange": "heads"},
    **{kind: {"recompute": kind} for kind in ("pointwise", "selective", "full")},
    **{order: {"order": order} for order in ORDERS},
    **{schedule: {"schedule": schedule} for schedule in (*SCHEDULES, SCHEDULE_FILE)},
}
"""Word -> the fields that it sets."""


class Layout(NamedTuple):
    """Parallel layout of a model: degrees, schedule, ZeRO stage and switches."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    zero: int = 1
    sequence: bool = False
    micro_batch_size: int = 1
    interleave: int = 0
    """Stages per pipeline rank; 0: the schedule's default."""
    recompute: str = "none"
    shard: int = 0
    """Value of ``parallel.shard_factor``; 0: None in the configuration, all dp x cp replicas."""
    reduces_once: bool = False
    """True for ``parallel.reduce = "step"``."""
    offload: bool = False
    cp: int = 1
    order: str = "zigzag"
    """Value of ``parallel.cp_order``."""
    exchange: str = "keys"
    """Value of ``parallel.cp_exchange``."""
    ep: int = 1
    unit_layers: int = 1
    """Value of ``parallel.unit_layers``."""
    keeps_gathered: bool = False
    """True for ``parallel.keep_gathered``: the layers that the configuration names, or all."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, derived from the schedule's name;
        ``pp`` for a schedule file.
        """
        if self.schedule == SCHEDULE_FILE:
            return self.pp
        return self.pp * stages_per_rank(self.schedule, self.interleave or None)

    def __str__(self) -> str:
        words = [f"dp{self.dp}", f"pp{self.pp}", f"tp{self.tp}", *[f"cp{self.cp}"] * (self.cp > 1)]
        words += [f"ep{self.ep}"] if self.ep > 1 else []
        words += [
            self.schedule,
            f"zero{self.zero}",
            *[self.order] * (self.cp > 1 and self.order != "zigzag"),
        ]
        words += [self.exchange] if self.cp > 1 and self.exchange != "keys" else []
        words += ["sequence"] if self.sequence else []
        words += [f"interleave{self.interleave}"] if self.interleave else []
        words += [self.recompute] if self.recompute != "none" else []
        words += [f"shard{self.shard}"] if self.shard else []
        words += [f"unit{self.unit_layers}"] if self.unit_layers > 1 else []
        words += ["kept"] if self.keeps_gathered else []
        words += ["step"] if self.reduces_once else []
        words += ["offload"] if self.offload else []
        return ",".join([*words, f"mbs{self.micro_batch_size}"])


def parse_layout(text: str) -> Layout:
    """Parse ``dp2,pp2`` into Layout(dp=2, pp=2).

    Raises:
        ConfigError: an unknown word, or a number out of range.
    """
    values: dict[str, Any] = {}
    for word in filter(None, re.split(r"[,\s]+", text)):
        numbered = re.fullmatch(rf"({'|'.join(NUMBERED)})(\d+)", word)
        if numbered:
            field, number = NUMBERED[numbered[1]], int(numbered[2])
            smallest, largest = (0, 3) if field == "zero" else (1, None)
            if number < smallest or (largest is not None and number > largest):
                raise ConfigError(
                    "MW-VERIFY-002",
                    f"layout {text!r}: {word} is out of range; the words are {LAYOUT_WORDS}",
                )
            values[field] = number
        elif word in SWITCHES:
            values |= SWITCHES[word]
        elif ":" in word:
            values["schedule"] = word
        else:
            raise ConfigError(
                "MW-VERIFY-003",
                f"layout {text!r}: unknown word {word!r}; the words are {LAYOUT_WORDS}",
            )
    return Layout(**values)


def layout_of(config: RunConfig) -> Layout:
    """Return the layout of a configuration; ``parallel.dp = "auto"`` counts as 1."""
    parallel, pipeline = config.parallel, config.pipeline
    has_file = pipeline.schedule_file is not None
    return Layout(
        dp=parallel.known_dp or 1,
        pp=parallel.pp,
        tp=parallel.tp,
        schedule=SCHEDULE_FILE if has_file else pipeline.schedule,
        zero=parallel.zero,
        sequence=parallel.sequence,
        micro_batch_size=config.batch.micro_batch_size or 1,
        interleave=pipeline.interleave or 0,
        recompute=pipeline.recompute,
        shard=parallel.shard_factor or 0,
        reduces_once=parallel.reduce == "step",
        offload=parallel.offload,
        cp=parallel.cp,
        order=parallel.cp_order,
        exchange=parallel.cp_exchange,
        ep=parallel.ep,
        unit_layers=parallel.unit_layers,
        keeps_gathered=bool(parallel.keep_gathered),
    )
