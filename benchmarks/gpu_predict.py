"""Predicted step time of the race's models, from rates measured on the device;
no rate is fitted to a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_contenders import CHUNKS, config_of, job_of

from meshwright.blueprint import draw_blueprint
from meshwright_plan.commands.plans import execution_options
from meshwright_plan.planner.calibrate_device import Sizes, measure_hardware
from meshwright_plan.planner.choice import choice_of
from meshwright_plan.planner.hardware import Hardware
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.plan import evaluate

TINY = Sizes(side=64, heads=4, tokens=32, elements=2**12, aim_s=0.01)


def hardware_of(device: str, tiny: bool) -> Hardware:
    """Measure the device as ``meshwright calibrate --device cuda`` does."""
    return measure_hardware(
        torch.device(device, 0) if device == "cuda" else torch.device(device),
        TINY if tiny else None,
    )


def predicted_s(
    name: str, chunks: int, device: str, tiny: bool, hardware: Hardware, *, compiled: bool
) -> float:
    """Return the predicted seconds of a step of a model of the race."""
    config = config_of(job_of(name, chunks, tiny), device, compiled=compiled)
    cache = ModelCache(config, execution_options(config.train, hardware))
    return evaluate(
        cache, hardware, config, choice_of(config), draw_blueprint(config).schedule
    ).time.total


def rows(
    names: list[str], device: str, tiny: bool, hardware: Hardware, race: Path
) -> Iterator[dict[str, Any]]:
    """Yield the predicted ms of each of this framework's steps in the race,
    with the measured ms if there are any.
    """
    measured = {row["name"]: row for row in json.loads(race.read_text())} if race.exists() else {}
    for name in names:
        for chunks in CHUNKS:
            for contender in ("ours", "ours-compiled"):
                compiled = contender == "ours-compiled" and not tiny
                seconds = predicted_s(name, chunks, device, tiny, hardware, compiled=compiled)
                row: dict[str, Any] = {
                    "name": f"{name} x {chunks}: {contender}",
                    "predicted_ms": round(seconds * 1e3, 3),
                }
                found = measured.get(row["name"], {}).get("step_ms")
                if found:
                    row |= {
                        "measured_ms": found,
                        "error_percent": round(100 * (seconds * 1e3 / found - 1), 1),
                    }
                yield (
                    row
                    if found or tiny
                    else row | {"reason": "the race has no measured step of this name"}
                )
