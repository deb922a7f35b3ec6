"""Opening of a Hugging Face directory as a model of a family: its options, its tensors,
and the rules that join them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.config import Model
from meshwright.model.build import build_model
from meshwright_interop.huggingface.convert.families import family_of_type, with_defaults
from meshwright_interop.huggingface.convert.family import Family
from meshwright_interop.huggingface.convert.settings import Settings
from meshwright_interop.huggingface.convert.weights import (
    check_tensors,
    has_own_head,
    open_weights,
    rename_tied_weights,
    with_prefix,
)
from meshwright_interop.huggingface.files import CONFIG, DTYPES, read_config
from meshwright_interop.huggingface.quantised import note_of, quantisation_of, with_values
from meshwright_interop.huggingface.rules import TensorMapping
from meshwright_interop.huggingface.source import SafetensorsDirectory


class OpenedModel(NamedTuple):
    """Model of a directory, under the names of a family."""

    family: Family
    options: dict[str, Any]
    """Options of the builder that the files give."""
    settings: Settings
    source: SafetensorsDirectory


def open_model(source_path: Path) -> OpenedModel:
    """Open the model in a Hugging Face directory.

    Raises:
        ModelError: the files are damaged, or of no supported family.
    """
    fields = read_config(source_path)
    family = family_of_type(fields.get("model_type"), str(source_path / CONFIG))
    quantisation = quantisation_of(fields, str(source_path / CONFIG))
    source = with_values(open_weights(source_path), quantisation)
    note = note_of(source, quantisation)
    settings = Settings(fields, str(source_path / CONFIG), family.aliases)
    options = family.read(settings)
    settings.end()
    settings.notes += [note] if note else []
    source = with_prefix(source, family)
    if family.head_by_file:
        source = rename_tied_weights(
            source, family.rules(with_defaults(family.builder, options | {"tied": False}))
        )
        options["tied"] = not has_own_head(source)
    return OpenedModel(family, options, settings, source)


def checked_rules(
    opened: OpenedModel, model: Model, options: Mapping[str, Any], seed: int
) -> tuple[SafetensorsDirectory, list[TensorMapping], dict[str, tuple[int, ...]]]:
    """Return the tensors of the files, the rules of a model, and its global shapes by name.

    ``options``: those of ``model``, defaults included.

    Raises:
        ModelError: the files do not hold exactly the tensors of the model.
    """
    family, settings = opened.family, opened.settings
    shapes, buffers = shapes_of(model, seed)
    rules = family.rules(options)
    shapes |= {rule.ours: buffers[rule.ours] for rule in rules if rule.ours in buffers}
    source = rename_tied_weights(opened.source, rules)
    left_out = (*family.left_out, *settings.left_out)
    check_tensors(source, family._replace(left_out=left_out), rules, shapes)
    return source, rules, shapes


def joined_dtype(rule: TensorMapping, source: SafetensorsDirectory) -> torch.dtype:
    """Return the widest dtype of the files' tensors that a rule joins."""
    return functools.reduce(
        torch.promote_types, (DTYPES[source.tensors[name].dtype] for name in rule.theirs)
    )


def shapes_of(
    keys: Model, seed: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the global shapes of all parameters by canonical name, tied ones once, and of buffers.
    Builds on meta.
    """
    model = build_model(keys.builder, keys.options, seed)
    parameters = model.layers.named_parameters(remove_duplicate=False)
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in parameters
        if model.canonical(name) == name
    }
    return shapes, {name: tuple(buffer.shape) for name, buffer in model.layers.named_buffers()}
