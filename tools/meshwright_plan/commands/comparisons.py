"""Comparisons of a plan with other layouts: the configuration's own, and that of ``plan --why``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.config import RunConfig, load, resolve
from meshwright.config.sources import read_file
from meshwright.errors import ConfigError, UserError
from meshwright.system.numbers import whole_number
from meshwright_plan.planner.choice import EFFORTS, Pins
from meshwright_plan.planner.choices import SCHEDULES
from meshwright_plan.planner.comparison import own_layout, why_not
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import Plan

OWN = {*(f"parallel.{key}" for key in ("pp", "dp", "cp", "tp", "ep", "zero")), "pipeline.schedule"}
"""Keys that choose a layout: a configuration with any of them has a layout of its own."""
NUMBERS = (
    "pp",
    "dp",
    "cp",
    "tp",
    "ep",
    "micro_batch_size",
    "chunks",
    "interleave",
    "zero",
    "shard_factor",
    "unit_layers",
)
FLAGS = ("sequence", "offload")
WORDS = {"schedule": tuple(dict.fromkeys(name for name, _ in SCHEDULES)), "recompute": EFFORTS}


def read_wanted(text: str) -> dict[str, int | str | bool]:
    """Read the fields of a layout, such as ``tp=8,schedule=1f1b`` or ``sequence=false``.

    Raises:
        ConfigError: an unknown field, or a value that no layout of a search has.
    """
    wanted: dict[str, int | str | bool] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition("=")
        number = whole_number(value)
        if name in NUMBERS and number is not None:
            wanted[name] = number
        elif value in WORDS.get(name, ()):
            wanted[name] = value
        elif name in FLAGS and value in ("true", "false"):
            wanted[name] = value == "true"
        else:
            known = [
                *(f"{each}=N" for each in NUMBERS),
                *(f"{each}={'|'.join(of)}" for each, of in WORDS.items()),
                *(f"{each}=true|false" for each in FLAGS),
            ]
            raise ConfigError(
                "MW-LAUNCH-079",
                f"--why {part}: no field of a layout and its value: {', '.join(known)}",
            )
    if not wanted:
        raise ConfigError(
            "MW-LAUNCH-080", "--why names no field of a layout: give some, such as --why tp=8,pp=1"
        )
    return wanted


def answers(
    config: str,
    overrides: Sequence[str],
    wanted: Pins,
    cache: ModelCache,
    plan: Plan,
) -> list[str]:
    """Return the lines of the configuration's own layout, if it has one,
    and of the ``wanted`` fields of ``--why``.
    """
    lines: list[str] = []
    try:
        own = _own_config(
            config, overrides, cache.config.batch.global_batch, cache.config.train.device, plan.size
        )
    except UserError as error:
        lines += [
            "",
            f"your own layout cannot run on {plan.size:,} devices: {error.message.splitlines()[0]}",
        ]
    else:
        lines += ["", *own_layout(cache, plan, own)] if own is not None else []
    return lines + (["", *why_not(cache, plan, wanted)] if wanted else [])


def _own_config(
    path: str, overrides: Sequence[str], global_batch: int | None, device: str, size: int
) -> RunConfig | None:
    """Return the configuration with its own layout, resolved for ``size`` devices;
    None if it has no layout.

    It gets the samples per step and the device of the search, and the dp that fills the devices.
    """
    given = {each.key for each in read_file(Path(path)).given}
    if not given & OWN or "batch.micro_batch_size" not in given:
        return None
    config = load(path, overrides)
    batch = {"chunks": None, "global_batch": global_batch}
    config = config.replace(batch=batch, train={"device": device}, parallel={"dp": "auto"})
    return resolve(config, size)
