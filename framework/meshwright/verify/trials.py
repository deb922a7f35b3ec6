"""Trials of verify: the model as it is trained by default,
and variants that show what these settings hide.

A variant has another plain run, so it gets a few layouts only, those that have the most features
between them:

    without dropout   equal states of tokens stay equal, so that ties are decided; the batch size ramps up meanwhile
    shared heads      fewer key-value heads than the largest tp, which by default shares none
    8-bit blocks      blocks of a whole row, that shards do not end at by themselves
    16 bits           the dtype of the configuration: float32 sums and masters, overflows of float16
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwright.config import RunConfig
from meshwright.config.combinations.features import Traits, features_of
from meshwright.config.combinations.layout import Layout
from meshwright.config.combinations.proven import FEATURES
from meshwright.expert_parallel.routing import find_routers
from meshwright.model.build import configured_model
from meshwright.optimizer import SMALLEST
from meshwright.verify.layouts import is_possible, refusal
from meshwright.verify.smaller import get_option, turn_dropout_off, with_option

RAMP_STEPS = 3
"""Steps before the boundary of the batch-size ramp."""
SHORT = RAMP_STEPS + 2
"""Steps of a variant whose faults show in the first one, or at the boundary of the ramp."""
SHARING = (
    Layout(dp=2, tp=4, zero=3, sequence=True, recompute="full"),
    Layout(pp=2, tp=4, schedule="zb_h1"),
    Layout(tp=4),
)
"""Layouts with more tp ranks than 2 key-value heads; the last where no other is possible."""


class Trial(NamedTuple):
    """Configuration to train in plain torch and in some layouts."""

    name: str
    """Title beside each row; "" for the trial of the default settings."""
    config: RunConfig
    layouts: list[Layout]
    dtype: str
    replays: bool = False
    """True to take the plain run's choices of experts: rounding in 16 bits makes others."""
    max_steps: int | None = None
    """Steps at most; None: as many as the main trial."""

    def steps(self, steps: int) -> int:
        """Return the number of steps to train, where the main trial has ``steps``."""
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def titled(self, layout: Layout) -> str:
        """Return a layout's text with the name of the trial."""
        return f"{layout} ({self.name})" if self.name else str(layout)


def further_trials(main: Trial, traits: Traits, global_batch: int) -> list[Trial]:
    """Return the variants of the default trial ``main`` that apply to its configuration."""
    found = [
        _without_dropout(main, traits, global_batch),
        _shared_heads(main, traits, global_batch),
        _eight_bit_blocks(main, traits, global_batch),
        _sixteen_bits(main, traits),
    ]
    return [trial for trial in found if trial is not None and trial.layouts]


def spread(
    layouts: Sequence[Layout],
    traits: Traits,
    count: int,
    is_refused: Callable[[Layout], object] = lambda _: False,
) -> list[Layout]:
    """Return up to ``count`` of the layouts that have the most features between them,
    by a greedy search.

    ``is_refused`` is called for those alone that would be chosen: it may build the model.
    """

    def used(layout: Layout) -> frozenset[str]:
        return features_of(layout, traits).intersection(FEATURES)

    chosen: list[Layout] = []
    covered: frozenset[str] = frozenset()
    left = list(dict.fromkeys(layouts))
    while left and len(chosen) < count:
        best = max(left, key=lambda layout: (len(used(layout) - covered), -layout.size))
        left.remove(best)
        if is_refused(best):
            continue
        chosen.append(best)
        covered |= used(best)
    return chosen


def _without_dropout(main: Trial, traits: Traits, global_batch: int) -> Trial | None:
    """Turn dropout off, and double the batch size after :data:`RAMP_STEPS` steps
    where the layouts allow.
    """
    quiet, half = turn_dropout_off(main.config), global_batch // 2
    if quiet is None:
        return None
    ramp = {"global_batch": global_batch, "ramp": (half, half, RAMP_STEPS * half)}
    ramping = quiet.replace(batch=ramp)
    dividing = [
        layout for layout in main.layouts if half % (layout.dp * layout.micro_batch_size) == 0
    ]
    chosen = spread(dividing, traits, 3, lambda layout: refusal(ramping, layout, global_batch))
    if not chosen:
        return Trial(
            "without dropout", quiet, spread(main.layouts, traits, 3), main.dtype, max_steps=SHORT
        )
    return Trial(
        f"without dropout, {half} samples at first", ramping, chosen, main.dtype, max_steps=SHORT
    )


def _shared_heads(main: Trial, traits: Traits, global_batch: int) -> Trial | None:
    """Lower the number of key-value heads to 2, if the model allows a tp above it."""
    heads = get_option(main.config.model, "num_kv_heads")
    if not isinstance(heads, int) or heads <= 2:
        return None
    fewer, length = with_option(main.config, "num_kv_heads", 2), main.config.data.sequence_length
    possible = [
        layout
        for layout in SHARING
        if is_possible(layout, traits, global_batch, length)
        and refusal(fewer, layout, global_batch) is None
    ]
    return Trial("2 key-value heads", fewer, possible[:2], main.dtype, max_steps=SHORT)


def _eight_bit_blocks(main: Trial, traits: Traits, global_batch: int) -> Trial | None:
    """Set a block of optimizer state to the shortest row of a matrix:
    no shard ends at one by itself.
    """
    if not main.config.optimizer.has_blocks:
        return None
    matrices = [
        each for each in configured_model(main.config).layers.parameters() if each.dim() >= 2
    ]
    rows = [
        row
        for row in (each[0].numel() for each in matrices)
        if row > SMALLEST and row % SMALLEST == 0
    ]
    if not rows:
        return None
    config = main.config.replace(optimizer={"block_size": min(rows)})
    sharded = [layout for layout in main.layouts if layout.dp * layout.cp > 1 and layout.zero]
    chosen = spread(sharded, traits, 2, lambda layout: refusal(config, layout, global_batch))
    return Trial(f"blocks of {min(rows)}", config, chosen, main.dtype, max_steps=SHORT)


def _sixteen_bits(main: Trial, traits: Traits) -> Trial | None:
    """Compute in the configuration's own dtype, if that has 16 bits."""
    dtype = main.config.train.dtype
    if dtype not in ("bfloat16", "float16") or dtype == main.dtype:
        return None
    whole = [
        each for each in main.layouts if each.tp == each.cp == each.ep == each.micro_batch_size == 1
    ]
    layouts = list(
        dict.fromkeys(
            [*spread([each for each in whole if each.size > 1], traits, 1), *main.layouts[:1]]
        )
    )
    has_routers = bool(find_routers(configured_model(main.config).layers))
    return Trial(dtype, main.config, layouts, dtype, replays=has_routers)
