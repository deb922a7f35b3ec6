"""Keys of a layout on the command line of a plan: the search holds their values, and varies the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright.config import given_keys, load_keys, split_overrides
from meshwright.errors import ConfigError

AXES = ("pp", "dp", "cp", "tp", "ep")
FIELDS = {
    **{f"parallel.{axis}": axis for axis in AXES},
    "parallel.zero": "zero",
    "parallel.shard_factor": "shard_factor",
    "parallel.sequence": "sequence",
    "parallel.offload": "offload",
    "parallel.cp_exchange": "exchange",
    "parallel.cp_order": "order",
    "parallel.unit_layers": "unit_layers",
    "parallel.keep_gathered": "keeps_gathered",
    "pipeline.schedule": "schedule",
    "pipeline.interleave": "interleave",
    "pipeline.recompute": "recompute",
    "batch.micro_batch_size": "micro_batch_size",
    "batch.chunks": "chunks",
}
"""Key -> field of a layout (:class:`meshwright_plan.planner.choice.Choice`)."""
FREE = (None, "auto", -1)
"""Values that hold nothing."""
RECOMPUTED = "pipeline.recompute_layers"
"""Key of the layers that each recompute of the search is of."""


class HeldKeys(NamedTuple):
    """Keys of a layout on a command line, and the rest of it."""

    pins: dict[str, int | str | bool]
    """Fields that every layout has."""
    recompute_layers: list[str]
    """Layers that each recompute is of."""
    others: list[str]
    """Overrides that are no keys of a layout."""


def take_held(overrides: Sequence[str], options: Mapping[str, int | None]) -> HeldKeys:
    """Take the keys of a layout from a command line.

    Args:
        options: Degree of each axis by its option, such as ``--tp``; None: not given.

    Raises:
        ConfigError: A value that its key does not take, or a degree that is given twice.
    """
    held, others = split_overrides(overrides, {*FIELDS, RECOMPUTED})
    config = load_keys(held)
    pins: dict[str, int | str | bool] = {}
    for section, key in given_keys(held):
        if f"{section}.{key}" == RECOMPUTED:
            continue
        value = getattr(getattr(config, section), key)
        if isinstance(value, list):
            raise ConfigError(
                "MW-PLANNER-010",
                f"command line: {section}.{key} = {value}: a plan takes true or false for all layers;"
                " `meshwright dryrun` examines one layout",
            )
        if value not in FREE:
            pins[FIELDS[f"{section}.{key}"]] = value
    for axis, degree in options.items():
        if degree is not None and pins.setdefault(axis, degree) != degree:
            raise ConfigError(
                "MW-PLANNER-011",
                f"--{axis} {degree} and --parallel.{axis}={pins[axis]} are of one degree: leave one"
                " out",
            )
    return HeldKeys(pins, config.pipeline.recompute_layers, others)


def as_options(held: HeldKeys) -> list[str]:
    """Return what is held as options of a command line."""
    key_of = {field: key for key, field in FIELDS.items()}
    found = []
    for field, value in held.pins.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if field in AXES:
            found.append(f"--{field} {text}")
        else:
            found.append(f"--{key_of[field]}={text}")
    if held.recompute_layers != ["*"]:
        found.append(f"--{RECOMPUTED}={json.dumps(held.recompute_layers)}")
    return found
