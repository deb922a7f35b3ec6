"""Layouts of verify: their text form, such as ``dp2,pp2,tp2,sequence,gpipe,zero0``, and the configuration of each."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, get_args

from meshwright.blueprint import draw_blueprint
from meshwright.config import Pipeline, RunConfig
from meshwright.context_parallel.order import BY_DOCUMENTS, ORDERS
from meshwright.errors import ConfigError, UserError
from meshwright.schedule.load import read_schedule
from meshwright.verify.traits import Traits

SCHEDULES: tuple[str, ...] = get_args(get_args(Pipeline.model_fields["schedule"].annotation)[0])
LAYOUT_WORDS = (
    "dpN, ppN, tpN, cpN, epN, mbsN (micro_batch_size), interleaveN, zero0, zero1, zero2, zero3, shardN (shard_factor), "
    "step (parallel.reduce), offload, sequence, contiguous or documents (parallel.cp_order), heads "
    "(parallel.cp_exchange), pointwise, selective or full (recompute), "
    + ", ".join(SCHEDULES)
    + ", file (pipeline.schedule_file)"
)
SCHEDULE_FILE = "file"
"""Word for the schedule in ``pipeline.schedule_file``, in place of a schedule's name."""


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

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, derived from the schedule's name; ``pp`` for a schedule file."""
        if self.schedule == SCHEDULE_FILE:
            return self.pp
        return self.pp * Pipeline(schedule=self.schedule, interleave=self.interleave or None).stages_per_rank

    def __str__(self) -> str:
        words = [f"dp{self.dp}", f"pp{self.pp}", f"tp{self.tp}", *[f"cp{self.cp}"] * (self.cp > 1)]
        words += [f"ep{self.ep}"] if self.ep > 1 else []
        words += [self.schedule, f"zero{self.zero}", *[self.order] * (self.cp > 1 and self.order != "zigzag")]
        words += [self.exchange] if self.cp > 1 and self.exchange != "keys" else []
        words += ["sequence"] if self.sequence else []
        words += [f"interleave{self.interleave}"] if self.interleave else []
        words += [self.recompute] if self.recompute != "none" else []
        words += [f"shard{self.shard}"] if self.shard else []
        words += ["step"] if self.reduces_once else []
        words += ["offload"] if self.offload else []
        return ",".join([*words, f"mbs{self.micro_batch_size}"])


def parse_layout(text: str) -> Layout:
    """Parse ``dp2,pp2`` into Layout(dp=2, pp=2).

    Raises:
        ConfigError: an unknown word, or a number out of range.
    """
    layout = Layout()
    for word in filter(None, re.split(r"[,\s]+", text)):
        numbered = re.fullmatch(r"(dp|pp|tp|cp|ep|mbs|zero|interleave|shard)(\d+)", word)
        if numbered:
            key = {"mbs": "micro_batch_size"}.get(numbered[1], numbered[1])
            value = int(numbered[2])
            if (value < 1 and key != "zero") or (key == "zero" and value > 3):
                raise ConfigError(
                    "MW-VERIFY-002", f"--layouts {text!r}: {word} is out of range; the words are {LAYOUT_WORDS}"
                )
            layout = Layout(**{**layout._asdict(), key: value})
        elif word in ("pointwise", "selective", "full"):
            layout = layout._replace(recompute=word)
        elif word in (*SCHEDULES, SCHEDULE_FILE) or ":" in word:
            layout = layout._replace(schedule=word)
        elif word in ORDERS:
            layout = layout._replace(order=word)
        elif word == "heads":
            layout = layout._replace(exchange=word)
        elif word == "step":
            layout = layout._replace(reduces_once=True)
        elif word in ("sequence", "offload"):
            layout = Layout(**{**layout._asdict(), word: True})
        else:
            raise ConfigError(
                "MW-VERIFY-003", f"--layouts {text!r}: unknown word {word!r}; the words are {LAYOUT_WORDS}"
            )
    return layout


FLOAT16_SCALE = {"fixed": None, "initial": 2.0**14, "minimum": 1.0, "window": 3, "growth": 2.0**16, "backoff": 2.0**-16}
"""float16 loss scale in verify: 3 steps without overflow, a rise to 2^30 at which all layouts overflow, and a fall.

The largest gradient of a logit is about the scale over the tokens of a step: 4 million for the 256 tokens of a shrunk
model, and float16 ends at 65,504. From 16,384 tokens on (--whole) there is perhaps no overflow, and near that number
rounding may decide in which layouts. The hysteresis is the configuration's."""


def _check_experts(config: RunConfig, layout: Layout) -> None:
    """Raise :class:`ConfigError` if the layout's ep does not fit its other degrees or the optimizer."""
    stage = layout.dp * layout.cp * layout.tp
    if layout.ep == 1:
        return
    if stage % layout.ep or layout.ep % layout.tp:
        raise ConfigError(
            "MW-VERIFY-011",
            f"layout {layout}: ep{layout.ep} must divide dp x cp x tp = {stage} and be a multiple of tp {layout.tp}",
        )
    if layout.tp > 1 and not layout.sequence:
        raise ConfigError(
            "MW-VERIFY-012", f"layout {layout}: ep{layout.ep} with tp{layout.tp} needs the word sequence: add it"
        )
    if config.optimizer.name == "adafactor":
        raise ConfigError(
            "MW-VERIFY-013",
            f'layout {layout}: optimizer.name = "adafactor" steps whole experts: leave out ep{layout.ep}',
        )


def layout_config(config: RunConfig, layout: Layout, global_batch: int, dtype: str, device: str = "cpu") -> RunConfig:
    """Return the configuration of a layout and precision, on ``global_batch`` samples, without ``torch.compile``.

    A batch-size ramp stays if it leads to ``global_batch`` samples.

    Raises:
        ConfigError: the layout does not fit the global batch, its ep or shard factor its other degrees, the optimizer
            excludes its offload or ep, or there is no ``pipeline.schedule_file`` for the word ``file``.
    """
    replicas = layout.dp * layout.micro_batch_size
    if global_batch % replicas:
        raise ConfigError(
            "MW-VERIFY-004",
            f"layout {layout}: global_batch {global_batch} is not a multiple of micro_batch_size "
            f"{layout.micro_batch_size} x dp {layout.dp}",
        )
    sharing = layout.dp * layout.cp
    if layout.shard and sharing % layout.shard:
        divisors = ", ".join(str(number) for number in range(1, sharing + 1) if sharing % number == 0)
        raise ConfigError(
            "MW-VERIFY-005",
            f"layout {layout}: shard{layout.shard} does not divide dp x cp = {sharing}: choose one of {divisors}",
        )
    _check_experts(config, layout)
    if layout.offload and config.optimizer.needs_full_weights:
        name = config.optimizer.name
        raise ConfigError(
            "MW-VERIFY-010", f'layout {layout}: optimizer.name = "{name}" is not offloaded: leave the word offload out'
        )
    return config.replace(
        parallel={
            "dp": layout.dp,
            "pp": layout.pp,
            "tp": layout.tp,
            "cp": layout.cp,
            "ep": layout.ep,
            "ep_across_nodes": config.parallel.ep_across_nodes and layout.ep > 1,
            "cp_order": layout.order if layout.cp > 1 else "zigzag",
            "cp_exchange": layout.exchange if layout.cp > 1 else "keys",
            "cp_head_groups": config.parallel.cp_head_groups if layout.cp > 1 and layout.exchange == "keys" else None,
            "zero": layout.zero,
            "shard_factor": layout.shard or None,
            "reduce": "step" if layout.reduces_once else None,
            "sequence": layout.sequence,
            "offload": layout.offload,
            "offload_directory": config.parallel.offload_directory if layout.offload else None,
        },
        pipeline=_pipeline_values(config.pipeline, layout),
        batch={
            "micro_batch_size": layout.micro_batch_size,
            "chunks": global_batch // replicas,
            "global_batch": global_batch,
            "ramp": config.batch.ramp if config.batch.global_batch == global_batch else None,
        },
        loss_scale=FLOAT16_SCALE if dtype == "float16" else {},
        train={"dtype": dtype, "device": device, "compile": False, "routing": "off", "routing_directory": None},
    )


def _pipeline_values(pipeline: Pipeline, layout: Layout) -> dict[str, Any]:
    """Return the pipeline section of a layout. A ``balance`` list for another number of stages becomes ``"time"``."""
    values: dict[str, Any] = {"recompute": layout.recompute}
    if layout.schedule == SCHEDULE_FILE:
        if pipeline.schedule_file is None:
            raise ConfigError("MW-VERIFY-006", f"layout {layout}: the configuration has no pipeline.schedule_file")
        return values
    values |= {"schedule": layout.schedule, "schedule_file": None, "interleave": layout.interleave or None}
    stages_per_rank = pipeline.model_copy(update=values).stages_per_rank
    if isinstance(pipeline.balance, list) and len(pipeline.balance) != layout.pp * stages_per_rank:
        values["balance"] = "time"
    return values


def refusal(config: RunConfig, layout: Layout, global_batch: int) -> str | None:
    """Return the first line of the error with which configuration or blueprint refuses a layout, or None."""
    try:
        draw_blueprint(layout_config(config, layout, global_batch, "float64"))
    except UserError as error:
        return error.message.splitlines()[0]
    return None


def is_possible(layout: Layout, traits: Traits, global_batch: int, sequence_length: int) -> bool:
    """Return True if a layout fits the model, its samples and the batch, judged by ``traits`` alone."""
    return (
        layout.num_stages <= traits.num_layers
        and global_batch % (layout.dp * layout.micro_batch_size) == 0
        and (
            not layout.sequence
            or (traits.is_sequence and layout.tp > 1 and sequence_length % (layout.cp * layout.tp) == 0)
        )
        and (layout.tp == 1 or traits.is_sharded)
        and (layout.cp == 1 or (traits.has_rows and traits.has_core and sequence_length % layout.cp == 0))
        and (layout.cp == 1 or layout.order != BY_DOCUMENTS or traits.has_documents)
        and (layout.recompute != "selective" or traits.has_selective)
        and not (layout.offload and traits.needs_full_weights)
        and not (traits.has_statistics and layout.tp * layout.cp > 1)
        and not (
            traits.has_running
            and (layout.dp * layout.cp > 1 or layout.tp > 1 or layout.recompute not in ("none", "pointwise"))
        )
    )


def own_layout(config: RunConfig, global_batch: int) -> Layout:
    """Return the configuration's own layout, with the micro-batch size reduced to give at least two per step.

    Raises:
        ConfigError: ``pipeline.schedule_file`` has a number of micro-batches that does not divide the global batch.
    """
    own = config.parallel
    dp = own.dp if isinstance(own.dp, int) and own.dp > 0 else 1
    micro = max(1, min(config.batch.micro_batch_size or 1, global_batch // (2 * dp)))
    while global_batch % (dp * micro) and micro > 1:
        micro -= 1
    schedule: str = config.pipeline.schedule
    if config.pipeline.schedule_file is not None:
        schedule, chunks = SCHEDULE_FILE, read_schedule(config.pipeline.schedule_file).chunks
        micro = max(1, global_batch // (dp * chunks))
        if micro * dp * chunks != global_batch:
            raise ConfigError(
                "MW-VERIFY-007",
                f"{config.pipeline.schedule_file} is for chunks={chunks}, which with dp {dp} does not divide the "
                f"{global_batch} samples of a step of verify: choose other --layouts",
            )
    return Layout(
        dp,
        own.pp,
        own.tp,
        schedule,
        own.zero,
        own.sequence,
        micro,
        config.pipeline.interleave or 0,
        config.pipeline.recompute,
        own.shard_factor if own.shard_factor and dp * own.cp % own.shard_factor == 0 else 0,
        own.reduce == "step",
        own.offload,
        own.cp,
        own.cp_order,
        own.cp_exchange,
        own.ep,
    )
