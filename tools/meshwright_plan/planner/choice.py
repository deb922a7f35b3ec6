"""A layout of a search, its configuration, and layouts that are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from meshwright.config import RunConfig, batch_numbers, shard_factor
from meshwright.config.combinations.apply import parallel_values
from meshwright.config.combinations.layout import Layout
from meshwright_plan.planner.context import EXCHANGE, ORDER, context_words

EFFORTS = ("none", "pointwise", "selective", "half", "full")
"""Values of ``pipeline.recompute``, the cheapest first; "half" is "full" for every second layer."""
EVERY_SECOND = "*[02468]"
"""Pattern of every second layer's name, by its last digit."""

Pins: TypeAlias = Mapping[str, int | str | bool]
"""Fields of a layout that a search holds, with their values; it varies the others."""
Degrees: TypeAlias = tuple[int, int, int, int, int]
"""Degrees of pp, dp, cp, tp and ep."""
Shape: TypeAlias = tuple[Degrees, str, int, int, str]
"""(degrees, schedule, stages per rank, samples per micro-batch,
exchange of context parallelism).
"""


class Choice(NamedTuple):
    """Layout of a search: degrees, schedule, batch, sharding and recompute."""

    pp: int
    dp: int
    tp: int
    schedule: str
    interleave: int
    micro_batch_size: int
    chunks: int
    zero: int
    shard_factor: int
    sequence: bool
    recompute: str
    offload: bool
    cp: int = 1
    ep: int = 1
    exchange: str = EXCHANGE
    order: str = ORDER
    unit_layers: int = 1
    keeps_gathered: bool = False

    @property
    def shape(self) -> Shape:
        """Fields shared by layouts that differ only in sharding and recompute."""
        return self.degrees, self.schedule, self.interleave, self.micro_batch_size, self.exchange

    @property
    def degrees(self) -> Degrees:
        """Degrees of pp, dp, cp, tp and ep."""
        return self.pp, self.dp, self.cp, self.tp, self.ep

    @property
    def num_replicas(self) -> int:
        """Number of replicas, dp x cp."""
        return self.dp * self.cp

    @property
    def effort(self) -> int:
        """Amount of recompute, from 0 for none."""
        return EFFORTS.index(self.recompute)

    @property
    def layout(self) -> Layout:
        """The layout as a value: the words that combine, or do not."""
        return Layout(
            dp=self.dp,
            pp=self.pp,
            tp=self.tp,
            schedule=self.schedule,
            zero=self.zero,
            sequence=self.sequence,
            micro_batch_size=self.micro_batch_size,
            interleave=self.interleave,
            recompute="full" if self.recompute == "half" else self.recompute,
            shard=self.shard_factor if self.zero and self.shard_factor < self.num_replicas else 0,
            offload=self.offload,
            cp=self.cp,
            order=self.order,
            exchange=self.exchange,
            ep=self.ep,
            unit_layers=self.unit_layers,
            keeps_gathered=self.keeps_gathered,
        )

    @property
    def samples_together(self) -> int:
        """Samples of a micro-batch of all replicas, whose statistics nn.SyncBatchNorm takes."""
        return self.dp * self.micro_batch_size

    @property
    def gather_words(self) -> list[str]:
        """Words of a layout for units and weights that stay gathered, where they are not the
        defaults.
        """
        units = [f"unit{self.unit_layers}"] if self.unit_layers > 1 else []
        return [*units, *(["kept"] if self.keeps_gathered else [])]

    def has(self, pins: Pins) -> bool:
        """Return True if the layout has the pinned values. A single replica shards nothing: it
        suits any ZeRO stage.
        """
        free = ("zero", "shard_factor") if self.num_replicas == 1 else ()
        return all(name in free or getattr(self, name) == value for name, value in pins.items())

    def __str__(self) -> str:
        pipeline = f", {self.schedule}" if self.pp > 1 else ""
        pipeline += f" x{self.interleave}" if self.schedule == "interleaved_1f1b" else ""
        sharded = (
            f" in groups of {self.shard_factor}"
            if self.zero and self.shard_factor < self.num_replicas
            else ""
        )
        words = context_words(self.exchange, self.order)
        context = f" x cp {self.cp}" + (f" ({words})" if words else "") if self.cp > 1 else ""
        shared = f", ep {self.ep}" if self.ep > 1 else ""
        return (
            f"pp {self.pp} x dp {self.dp}{context} x tp {self.tp}{shared}{pipeline}, "
            f"{self.micro_batch_size} x {self.chunks}, ZeRO-{self.zero}{sharded}"
            + "".join(f" {word}" for word in self.gather_words)
            + (", sequence" if self.sequence else "")
            + (f", recompute {self.recompute}" if self.recompute != "none" else "")
            + (", offload" if self.offload else "")
        )


class Rejection(NamedTuple):
    """Layouts that cannot be run or do not fit, for one reason."""

    rule: str
    """Broken rule, with the number that breaks it."""
    example: str
    times: int


def with_choice(base: RunConfig, choice: Choice) -> RunConfig:
    """Return the resolved configuration of a choice; everything else is that of ``base``."""
    parallel = parallel_values(base.parallel, choice.layout) | {"tp_across_nodes": False}
    layers = ["*"] if choice.recompute == "none" else base.pipeline.recompute_layers
    pipeline = {
        "schedule": choice.schedule,
        "schedule_file": None,
        "interleave": choice.interleave
        if choice.schedule == "interleaved_1f1b" or ":" in choice.schedule
        else None,
        "recompute": "full" if choice.recompute == "half" else choice.recompute,
        "recompute_layers": [EVERY_SECOND] if choice.recompute == "half" else layers,
        "balance": base.pipeline.balance if isinstance(base.pipeline.balance, str) else "time",
    }
    batch = {"micro_batch_size": choice.micro_batch_size, "chunks": choice.chunks}
    batch["global_batch"] = choice.micro_batch_size * choice.chunks * choice.dp
    launch = {"processes": choice.pp * choice.num_replicas * choice.tp}
    return base.replace(parallel=parallel, pipeline=pipeline, batch=batch, launch=launch)


def choice_of(config: RunConfig) -> Choice:
    """Return the layout of a resolved configuration."""
    parallel, pipeline, batch = config.parallel, config.pipeline, batch_numbers(config.batch)
    return Choice(
        *parallel.degrees[:3],
        pipeline.schedule,
        pipeline.stages_per_rank,
        batch.micro_batch_size,
        batch.chunks,
        parallel.zero,
        shard_factor(config.parallel),
        parallel.sequence,
        "half"
        if pipeline.recompute == "full" and pipeline.recompute_layers == [EVERY_SECOND]
        else pipeline.recompute,
        parallel.offload,
        parallel.cp,
        parallel.ep,
        parallel.cp_exchange,
        parallel.cp_order,
        parallel.unit_layers,
        bool(parallel.keep_gathered),
    )
