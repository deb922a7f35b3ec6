"""Rotary embedding of a config.json, in the forms of transformers 4 and 5."""

from __future__ import annotations

import json
from typing import Any

from meshwright.tools.interop.huggingface.convert.settings import Settings

ORIGINAL_LENGTH = "original_max_position_embeddings"


LEAST_THETA = 1e-3
"""Lower limit of ``rope_theta``: powers of smaller values leave the range of float32."""


def read_rope(settings: Settings) -> dict[str, Any]:
    """Convert the rotary embedding: ``rope_theta`` with ``rope_scaling``, or ``rope_parameters`` that holds both."""
    theta = settings.get("rope_theta", 10_000.0)
    outer = settings.get("rope_parameters")
    rope = settings.get("rope_scaling") or outer or {}
    if not isinstance(rope, dict):
        settings.problems.append(f"rope_scaling = {json.dumps(rope)}: an object is needed")
        return {}
    named = "rope_scaling" if rope is not outer else "rope_parameters"
    inside = Settings({name: value for name, value in rope.items() if name != "type"}, settings.place)
    kind = rope.get("rope_type", rope.get("type", "default"))
    found: dict[str, Any] = {"rope_theta": inside.real("rope_theta", theta, least=LEAST_THETA)}
    inside.get("rope_type")
    inside.must_be("partial_rotary_factor", 1.0)
    if kind == "llama3":
        found["rope_scaling_factor"] = inside.real("factor", 0.0)
        found["rope_low_freq_factor"] = inside.real("low_freq_factor", 0.0)
        found["rope_high_freq_factor"] = inside.real("high_freq_factor", 0.0)
        outside = settings.get(ORIGINAL_LENGTH)
        length = settings.get("max_position_embeddings") if outside is None else outside
        found["rope_original_length"] = inside.number(ORIGINAL_LENGTH, length)
        if outside not in (None, found["rope_original_length"]):
            inside.problems.append(
                f"{ORIGINAL_LENGTH} = {found['rope_original_length']}, and {json.dumps(outside)} outside of it, which "
                f"is what transformers 5 takes, and 4 does not: leave one of them out"
            )
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            if rope.get(name) is None:
                inside.problems.append(f'{name} is missing, which rope_type "llama3" needs')
    elif kind != "default":
        inside.problems.append(
            f'rope_type = {json.dumps(kind)} is not supported, only "default" and "llama3": with it positions would '
            f"turn at other angles. To go on without it, on sequences as long as the model was first trained on, take "
            f"it out of config.json"
        )
    for name, value in rope.items():
        if isinstance(value, dict):
            inside.problems.append(f"{name}: positions of their own for a kind of layers are not supported")
    settings.problems += [f"{named}: {problem}" for problem in inside.problems]
    for name in rope.keys() - inside.asked - {"type"} if kind == "llama3" or kind == "default" else ():
        settings.notes.append(f"{settings.place}: {named}.{name} = {json.dumps(rope[name])} is not known here")
    return found
