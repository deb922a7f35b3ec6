"""Transformers configuration of a directory, and checks of its config.json."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import ModelError
from meshwright_interop.huggingface.files import CONFIG, read_config
from meshwright_interop.huggingface.quantised import QUANTISATION, quantisation_of
from meshwright_interop.huggingface.restructure.bounds import check_fields
from meshwright_interop.huggingface.restructure.experts import tables_of
from meshwright_interop.huggingface.restructure.library import import_transformers

FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Configuration keys that may hold the number of layers."""
ROTARY = ("rope_scaling", "rope_parameters")
"""Names of the table of the rotary embedding; of two tables transformers takes the first one."""
OF_ROTARY = ("rope_theta", "partial_rotary_factor")
"""Fields of that table, which older files hold beside it; those in the table count."""
LOGITS_ALONE = {
    "return_dict": True,
    "use_cache": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
}
"""Keys of the form of transformers' output, with the values under which it holds the logits,
and nothing else.
"""
LEADING_TO_CODE = frozenset(
    {"auto_map", "custom_generate"}
    | {
        f"{start}{part}_implementation{end}"
        for start in ("", "_")
        for part in ("attn", "experts")
        for end in ("", "_internal")
    }
)
"""Configuration keys that can name code outside transformers (own modules, hub kernels);
ignored at any depth.
"""


def configuration(path: Path, overrides: Mapping[str, Any]) -> Any:
    """Return the transformers configuration of ``path``, with ``overrides`` (``model.options``)
    in place of its keys.

    Raises:
        ModelError: ``path`` has no valid configuration of a causal language model that transformers
            itself contains.
    """
    raw = fields_of(path)
    transformers = import_transformers()
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        code = raw.get("auto_map")
        code = list(code.values()) if isinstance(code, dict) else []
        own = (
            f", and code of its own ({', '.join(map(str, code))}), which is not run" if code else ""
        )
        close = difflib.get_close_matches(str(kind), list(transformers.CONFIG_MAPPING), 1)
        raise ModelError(
            "MW-INTEROP-051",
            f"{path / CONFIG}: model_type = {kind!r} is no architecture of transformers"
            f" {transformers.__version__}{own}{f'; did you mean {close[0]!r}?' if close else ''}."
            " Update transformers, or write the model as code (docs/huggingface-models.md)",
        )
    quantisation_of(raw, str(path / CONFIG))
    raw = without_quantisation(raw)
    kind_of_config = transformers.CONFIG_MAPPING[kind]
    _check_options(overrides, kind_of_config, raw)
    merged = with_overrides(_with_floats(raw), overrides)
    _check_decoder(merged, path)
    check_fields(merged, overrides, str(path / CONFIG))
    layers, kinds = merged.get("num_hidden_layers"), merged.get("layer_types")
    if isinstance(kinds, list) and isinstance(layers, int) and "layer_types" not in overrides:
        merged["layer_types"] = kinds[:layers]
    try:
        config = kind_of_config.from_dict(_without_code(merged))
        config.get_text_config().base_model_pp_plan  # noqa: B018 - raises if a nested part is no configuration
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            "MW-INTEROP-056", f"{path / CONFIG}: transformers rejects it: {reason}"
        ) from error
    _check_rotary(config, overrides)
    return config


def _check_options(overrides: Mapping[str, Any], kind: Any, raw: Mapping[str, Any]) -> None:
    """Check that a configuration has each key of ``model.options``.

    Args:
        overrides: ``model.options``.
        kind: transformers' class of the configuration.
        raw: fields of the config.json.

    Raises:
        ModelError: it lacks one; names the closest.
    """
    known = {*vars(kind()), *raw, *getattr(kind, "attribute_map", {})} - LEADING_TO_CODE
    if "rope_parameters" in known:
        known |= {*ROTARY, "rope_theta"}
    unknown = next((name for name in overrides if name not in known), None)
    if unknown is not None:
        close = difflib.get_close_matches(unknown, known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ModelError(
            "MW-INTEROP-054",
            f"model.options.{unknown}: the configuration of {raw['model_type']} has no such"
            f" key{hint}",
        )


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json with ``overrides`` in place of its keys.

    A rotary table replaces that of the file under either name, and a field of it replaces the one
    in the file's table.
    """
    fields = dict(raw)
    tables = {name: raw[name] for name in ROTARY if isinstance(raw.get(name), dict) and raw[name]}
    if any(name in overrides for name in ROTARY):
        counts: Mapping[str, Any] = next(iter(tables.values()), {})
        fields = {name: value for name, value in raw.items() if name not in ROTARY}
        fields |= {name: counts[name] for name in OF_ROTARY if name in counts}
    else:
        for name, table in tables.items():
            fields[name] = table | {
                key: overrides[key] for key in OF_ROTARY if key in overrides and key in table
            }
    return fields | dict(overrides)


def _check_rotary(config: Any, overrides: Mapping[str, Any]) -> None:
    """Check that the rotary table has the fields that ``overrides`` give.

    Raises:
        ModelError: transformers keeps another value.
    """
    for name in set(OF_ROTARY) & set(overrides):
        values = [
            table[name]
            for table in tables_of(getattr(config, "rope_parameters", None) or {})
            if name in table
        ]
        if values and overrides[name] not in values:
            raise ModelError(
                "MW-INTEROP-128",
                f"model.options.{name} = {overrides[name]} has no effect, since the rotary"
                " embedding has tables of its own: give model.options.rope_parameters",
            )


def return_logits_alone(config: Any) -> None:
    """Set the form of the output of a configuration, in place;
    an export keeps the keys of the file.
    """
    for each in (config, config.get_text_config()):
        for name, value in LOGITS_ALONE.items():
            if hasattr(each, name):
                setattr(each, name, value)


def _check_decoder(merged: Mapping[str, Any], path: Path) -> None:
    """Check that the model has no encoder.

    Raises:
        ModelError: it has one.
    """
    kind = merged["model_type"]
    if merged.get("is_encoder_decoder"):
        raise ModelError(
            "MW-INTEROP-052",
            f"{path / CONFIG}: {kind} is an encoder-decoder; only causal language models, whose"
            " plan is one chain of layers, are restructured. model.options.is_encoder_decoder ="
            " false takes its decoder alone, if transformers has it as such a model. For T5 use"
            " meshwright_models.t5:build",
        )


def _without_code(value: Any) -> Any:
    """Return the tree without the keys of ``LEADING_TO_CODE``."""
    if isinstance(value, dict):
        return {
            name: _without_code(inner)
            for name, inner in value.items()
            if name not in LEADING_TO_CODE
        }
    return [_without_code(inner) for inner in value] if isinstance(value, list) else value


def _with_floats(value: Any) -> Any:
    """Replace transformers' form of non-finite numbers, ``{"__float__": "Infinity"}``,
    by the numbers themselves.
    """
    if isinstance(value, dict):
        tag = value.get("__float__") if len(value) == 1 else None
        return (
            FLOATS[tag]
            if isinstance(tag, str) and tag in FLOATS
            else {name: _with_floats(inner) for name, inner in value.items()}
        )
    return [_with_floats(inner) for inner in value] if isinstance(value, list) else value


def fields_of(path: Path) -> dict[str, Any]:
    """Return the fields of ``config.json`` unchanged."""
    return read_config(path, f'model.builder = "hf:{path}": ')


def without_quantisation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json as they are of dequantised weights."""
    return {name: value for name, value in fields.items() if name != QUANTISATION}


def vocabulary(path: str) -> int | None:
    """Return ``vocab_size`` of the config.json in ``path``; None if it has none.
    Needs no transformers.
    """
    found = fields_of(Path(path).expanduser()).get("vocab_size")
    return found if isinstance(found, int) else None
