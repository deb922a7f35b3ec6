"""Rotary embedding of a config.json, in the forms of transformers 4 and 5."""

from __future__ import annotations

import json
from typing import Any

from meshwright_interop.huggingface.convert.settings import Settings

ORIGINAL_LENGTH = "original_max_position_embeddings"


MIN_THETA = 1e-3
"""Lower limit of ``rope_theta``: powers of smaller values leave the range of float32."""


def read_rope(settings: Settings, default_theta: float) -> dict[str, Any]:
    """Convert the rotary embedding: ``rope_theta`` with ``rope_scaling``,
    or ``rope_parameters`` that holds both.
    """
    theta = settings.get("rope_theta", default_theta)
    outer = settings.get("rope_parameters")
    rope = settings.get("rope_scaling") or outer or {}
    if not isinstance(rope, dict):
        settings.problems.append(f"rope_scaling = {json.dumps(rope)}: an object is needed")
        return {}
    section = "rope_scaling" if rope is not outer else "rope_parameters"
    inner = Settings(
        {name: value for name, value in rope.items() if name != "type"}, settings.place
    )
    kind = rope.get("rope_type", rope.get("type", "default"))
    options: dict[str, Any] = {"rope_theta": inner.real("rope_theta", theta, minimum=MIN_THETA)}
    inner.get("rope_type")
    inner.must_be("partial_rotary_factor", 1.0)
    if kind == "llama3":
        options["rope_scaling_factor"] = inner.positive("factor", 0.0)
        options["rope_low_freq_factor"] = inner.positive("low_freq_factor", 0.0)
        options["rope_high_freq_factor"] = inner.positive("high_freq_factor", 0.0)
        outer_length = settings.get(ORIGINAL_LENGTH)
        length = settings.get("max_position_embeddings") if outer_length is None else outer_length
        options["rope_original_length"] = inner.number(ORIGINAL_LENGTH, length)
        if outer_length not in (None, options["rope_original_length"]):
            inner.problems.append(
                f"{ORIGINAL_LENGTH} = {options['rope_original_length']}, and"
                f" {json.dumps(outer_length)} outside of it, which transformers 5 reads, and 4 does"
                " not: leave one of them out"
            )
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            if rope.get(name) is None:
                inner.problems.append(f'{name} is missing, which rope_type "llama3" needs')
    elif kind != "default":
        inner.problems.append(
            f'rope_type = {json.dumps(kind)} is not supported, only "default" and "llama3": it'
            " changes the rotary angles. To train without it, on sequences of the length of the"
            " original pretraining, remove it from config.json"
        )
    for name, value in rope.items():
        if isinstance(value, dict):
            inner.problems.append(f"{name}: rotary settings per layer type are not supported")
    settings.problems += [f"{section}: {problem}" for problem in inner.problems]
    for name in (
        rope.keys() - inner.read_fields - {"type"} if kind == "llama3" or kind == "default" else ()
    ):
        settings.notes.append(
            f"{settings.place}: {section}.{name} = {json.dumps(rope[name])} is not known here"
        )
    return options
