"""Configurations of the layouts of verify."""

from __future__ import annotations

from meshwright.blueprint import draw_blueprint
from meshwright.config import Checkpoint, RunConfig
from meshwright.config.combinations.apply import with_layout
from meshwright.config.combinations.features import Traits, features_of
from meshwright.config.combinations.layout import Layout, layout_of
from meshwright.config.combinations.refused import find_refused
from meshwright.config.combinations.sizes import LayoutSizes, fits
from meshwright.errors import ConfigError, UserError
from meshwright.schedule.load import read_schedule

FLOAT16_SCALE = {
    "fixed": None,
    "initial": 2.0**14,
    "minimum": 1.0,
    "window": 3,
    "growth": 2.0**16,
    "backoff": 2.0**-16,
}
"""float16 loss scale in verify: 3 steps without overflow,
a rise to 2^30 at which all layouts overflow, and a fall.

The largest gradient of a logit is about the scale over the tokens of a step: 4 million for the 256
tokens of a shrunk model, and float16 ends at 65,504. From 16,384 tokens on (--whole) there is
perhaps no overflow, and near that number rounding may decide in which layouts. The hysteresis is
the configuration's.
"""


def layout_config(
    config: RunConfig, layout: Layout, global_batch: int, dtype: str, device: str = "cpu"
) -> RunConfig:
    """Return the configuration of a layout and precision, on ``global_batch`` samples,
    without ``torch.compile`` and an object store.

    A batch-size ramp stays if it leads to ``global_batch`` samples.

    Raises:
        ConfigError: sizes of the layout leave a rest, it combines what the table of pairs refuses,
            or there is no ``pipeline.schedule_file`` for the word ``file``.
    """
    plain = config.replace(
        loss_scale=FLOAT16_SCALE if dtype == "float16" else {},
        checkpoint=Checkpoint().model_dump(),  # not in the store of a run
        train={
            "dtype": dtype,
            "device": device,
            "compile": False,
            "routing": "off",
            "routing_directory": None,
        },
    )
    return with_layout(plain, layout, global_batch)


def refusal(config: RunConfig, layout: Layout, global_batch: int) -> str | None:
    """Return the first line of the error with which configuration or blueprint refuses a layout,
    or None.
    """
    try:
        draw_blueprint(layout_config(config, layout, global_batch, "float64"))
    except UserError as error:
        return error.message.splitlines()[0]
    return None


def is_possible(layout: Layout, traits: Traits, global_batch: int, sequence_length: int) -> bool:
    """Return True if a layout fits the model, its samples and the batch, by the table of pairs and
    the divisions alone: a blueprint may still refuse it.
    """
    sizes = LayoutSizes.of(traits, global_batch, sequence_length)
    return fits(layout, sizes) and find_refused(features_of(layout, traits)) is None


def own_samples(config: RunConfig, traits: Traits) -> int:
    """Return the samples on which a sample's numbers depend in the run of a configuration."""
    own = Layout(dp=config.parallel.known_dp or 1)
    return traits.samples_together(
        own._replace(micro_batch_size=config.batch.micro_batch_size or 1)
    )


def own_layout(config: RunConfig, global_batch: int) -> Layout:
    """Return the configuration's own layout,
    with the micro-batch size reduced to give at least two per step.

    Raises:
        ConfigError: ``pipeline.schedule_file`` has a number of micro-batches that does not divide
            the global batch.
    """
    own = config.parallel
    dp = own.known_dp or 1
    micro = max(1, min(config.batch.micro_batch_size or 1, global_batch // (2 * dp)))
    while global_batch % (dp * micro) and micro > 1:
        micro -= 1
    if config.pipeline.schedule_file is not None:
        chunks = read_schedule(config.pipeline.schedule_file).chunks
        micro = max(1, global_batch // (dp * chunks))
        if micro * dp * chunks != global_batch:
            raise ConfigError(
                "MW-VERIFY-007",
                f"{config.pipeline.schedule_file} is for chunks={chunks}, which with dp {dp} does"
                f" not divide the {global_batch} samples of a step of verify: choose other"
                " --layouts",
            )
    layout = layout_of(config)._replace(dp=dp, micro_batch_size=micro)
    has_whole_shards = dp * own.cp % (layout.shard or 1) == 0
    return layout if has_whole_shards else layout._replace(shard=0)
