"""Rotary embedding of a config.json, in the forms of transformers 4 and 5."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright_interop.huggingface.convert.settings import Settings

ORIGINAL_LENGTH = "original_max_position_embeddings"


MIN_THETA = 1e-3
"""Lower limit of ``rope_theta``: powers of smaller values leave the range of float32."""
YARN_REALS = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.0,
    "mscale_all_dim": 0.0,
    "attention_factor": 1.0,
}
"""Optional numbers of a YaRN, which have one name there and here -> their value where unset."""


KINDS = ("default", "llama3", "yarn")
"""Supported values of ``rope_type``."""


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
        options |= _read_llama3(settings, inner)
    elif kind == "yarn":
        options["rope_yarn"] = _read_yarn(settings, inner)
        if options["rope_theta"] <= 1:
            inner.problems.append(
                f"rope_theta = {options['rope_theta']}: YaRN needs a number above 1"
            )
    elif kind != "default":
        known = ", ".join(map(json.dumps, KINDS))
        inner.problems.append(
            f"rope_type = {json.dumps(kind)} is not supported, only {known}: it changes the"
            " rotary angles. To train without it, on sequences of the length of the original"
            " pretraining, remove it from config.json"
        )
    for name, value in rope.items():
        if isinstance(value, dict):
            inner.problems.append(f"{name}: rotary settings per layer type are not supported")
    settings.problems += [f"{section}: {problem}" for problem in inner.problems]
    for name in rope.keys() - inner.read_fields - {"type"} if kind in KINDS else ():
        settings.notes.append(
            f"{settings.place}: {section}.{name} = {json.dumps(rope[name])} is not known here"
        )
    return options


def _read_llama3(settings: Settings, inner: Settings) -> dict[str, Any]:
    """Convert Llama 3.1's scaling. ``inner``: the rotary table."""
    options: dict[str, Any] = {
        f"rope_{ours}": inner.positive(theirs, 0.0)
        for ours, theirs in (
            ("scaling_factor", "factor"),
            ("low_freq_factor", "low_freq_factor"),
            ("high_freq_factor", "high_freq_factor"),
        )
    }
    length = settings.get("max_position_embeddings")
    options["rope_original_length"] = _original_length(settings, inner, length)
    _need(inner, "llama3", "factor", "low_freq_factor", "high_freq_factor")
    return options


def _read_yarn(settings: Settings, inner: Settings) -> dict[str, Any]:
    """Convert a YaRN to the table ``rope_yarn``, with the fields that are set.
    ``inner``: the rotary table.
    """
    _need(inner, "yarn", "factor")
    if settings.get(ORIGINAL_LENGTH) is None:
        _need(inner, "yarn", ORIGINAL_LENGTH)
    yarn: dict[str, Any] = {
        "factor": inner.real("factor", 1.0, minimum=1.0),
        "original_length": _original_length(settings, inner, 1),
    }
    for name, default in YARN_REALS.items():
        if inner.get(name) is not None:
            read = inner.real if name.startswith("mscale") else inner.positive
            yarn[name] = read(name, default)
    if "truncate" in inner.fields:
        yarn["truncate"] = inner.flag("truncate", True)
    fast, slow = (yarn.get(name, YARN_REALS[name]) for name in ("beta_fast", "beta_slow"))
    if fast < slow:
        inner.problems.append(f"beta_fast = {fast:g} must not be below beta_slow = {slow:g}")
    longest = settings.get("max_position_embeddings")
    scaled = yarn["factor"] * yarn["original_length"]
    if longest is not None and longest not in (scaled, yarn["original_length"]):
        settings.notes.append(
            f"{settings.place}: max_position_embeddings = {json.dumps(longest)} is not factor ="
            f" {yarn['factor']:g} times {ORIGINAL_LENGTH} = {yarn['original_length']}: factor counts,"
            " as in transformers 5"
        )
    return yarn


def _original_length(settings: Settings, inner: Settings, default: Any) -> int:
    """Return the length of the original pretraining, in the rotary table or beside it, in tokens."""
    outer = settings.get(ORIGINAL_LENGTH)
    length = inner.number(ORIGINAL_LENGTH, default if outer is None else outer)
    if outer not in (None, length):
        inner.problems.append(
            f"{ORIGINAL_LENGTH} = {length}, and {json.dumps(outer)} outside of it, which"
            " transformers 5 reads, and 4 does not: leave one of them out"
        )
    return length


def _need(inner: Settings, kind: str, *names: str) -> None:
    """Add a problem for each missing field."""
    inner.problems += [
        f'{name} is missing, which rope_type "{kind}" needs'
        for name in names
        if inner.fields.get(name) is None
    ]


def write_rope(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary fields of a config.json, in the forms of transformers 4 and 5."""
    scaling: dict[str, Any] | None = None
    if options["rope_yarn"] is not None:
        yarn = dict(options["rope_yarn"])
        scaling = {"rope_type": "yarn", ORIGINAL_LENGTH: yarn.pop("original_length"), **yarn}
    elif options["rope_scaling_factor"] != 1:
        scaling = {
            "rope_type": "llama3",
            "factor": options["rope_scaling_factor"],
            "low_freq_factor": options["rope_low_freq_factor"],
            "high_freq_factor": options["rope_high_freq_factor"],
            ORIGINAL_LENGTH: options["rope_original_length"],
        }
    rotary = {"rope_theta": options["rope_theta"]}
    return {
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), **rotary},
        **rotary,
    }
