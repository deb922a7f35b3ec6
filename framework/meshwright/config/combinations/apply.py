"""Configuration of a layout."""

from __future__ import annotations

from typing import Any

from meshwright.config.combinations.axes import AXES, without_unused_options
from meshwright.config.combinations.layout import SCHEDULE_FILE, Layout
from meshwright.config.combinations.rules import LAYOUT_COMBINATIONS
from meshwright.config.combinations.sizes import EXPERT_RANKS, SAMPLES, SHARDS, LayoutSizes
from meshwright.config.schema import RunConfig
from meshwright.config.sections import Parallel, Pipeline
from meshwright.errors import ConfigError


def with_layout(config: RunConfig, layout: Layout, global_batch: int) -> RunConfig:
    """Return the configuration of a layout on ``global_batch`` samples.

    A batch-size ramp stays if it leads to ``global_batch`` samples.

    Raises:
        ConfigError: sizes of the layout leave a rest, it combines what the table of pairs refuses,
            or there is no ``pipeline.schedule_file`` for the word ``file``.
    """
    is_same_batch = config.batch.global_batch == global_batch
    found = config.replace(
        parallel=parallel_values(config.parallel, layout),
        pipeline=_pipeline_values(config.pipeline, layout),
        batch={
            "micro_batch_size": layout.micro_batch_size,
            "chunks": global_batch // (layout.dp * layout.micro_batch_size),
            "global_batch": global_batch,
            "ramp": config.batch.ramp if is_same_batch else None,
        },
    )
    _check_fits(found, layout, global_batch)
    return found


def parallel_values(parallel: Parallel, layout: Layout) -> dict[str, Any]:
    """Return the parallel section of a layout; what a layout does not name is that of ``parallel``,
    as far as it has an effect.
    """
    degrees = {axis.name: getattr(layout, axis.name) for axis in AXES}
    values = without_unused_options({**parallel.model_dump(), **degrees}) | {
        "sequence": layout.sequence,
        "cp_order": layout.order,
        "cp_exchange": layout.exchange,
        "zero": layout.zero,
        "shard_factor": layout.shard or None,
        "reduce": "step" if layout.reduces_once else None,
        "offload": layout.offload,
        "unit_layers": layout.unit_layers,
        "keep_gathered": layout.keeps_gathered and (parallel.keep_gathered or True),
        "offload_directory": parallel.offload_directory if layout.offload else None,
    }
    if layout.exchange == "heads":
        values["cp_head_groups"] = None
    return values


def _check_fits(config: RunConfig, layout: Layout, global_batch: int) -> None:
    """Raise :class:`ConfigError` if sizes of the layout leave a rest, or the layout combines what
    is refused.

    ``config``: that of the layout.
    """
    sizes = LayoutSizes(global_batch=global_batch)
    for division in (SAMPLES, SHARDS, EXPERT_RANKS):
        message = division.find_problem(layout, sizes)
        if message is not None:
            raise ConfigError(division.code, f"layout {layout}: {message}")
    for rule in LAYOUT_COMBINATIONS:
        message = rule.check(config)
        if message is not None:
            raise ConfigError(rule.code, f"layout {layout}: {message}")


def _pipeline_values(pipeline: Pipeline, layout: Layout) -> dict[str, Any]:
    """Return the pipeline section of a layout.
    A ``balance`` list for another number of stages becomes ``"time"``.
    """
    values: dict[str, Any] = {"recompute": layout.recompute}
    if layout.schedule == SCHEDULE_FILE:
        if pipeline.schedule_file is None:
            raise ConfigError(
                "MW-VERIFY-006", f"layout {layout}: the configuration has no pipeline.schedule_file"
            )
        return values
    values |= {
        "schedule": layout.schedule,
        "schedule_file": None,
        "interleave": layout.interleave or None,
    }
    stages_per_rank = pipeline.model_copy(update=values).stages_per_rank
    if isinstance(pipeline.balance, list) and len(pipeline.balance) != layout.pp * stages_per_rank:
        values["balance"] = "time"
    return values
