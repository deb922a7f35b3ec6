"""Weights of a Hugging Face directory that a run starts from, ``run.start``, under the names of its
model.

    model.builder              directory of a model                         names
    one of a family            converted by the family's rules              those of meshwright_models
    hf:DIRECTORY               restructured like it                         those of its Sequential
    any other                  as they are                                  those of transformers: run.start_names

A directory of peft has adapters alone. Tensors are read one at a time, and experts one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.adapters.magnitude import MAGNITUDE
from meshwright.config import Model
from meshwright.config.schemes import is_own_scheme
from meshwright.data.fingerprint import sampled_sha256
from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright.run.weight_source import Shape, WeightSource, settings_of
from meshwright.system.bounded import read_bytes
from meshwright_interop.huggingface.adapters import TENSORS
from meshwright_interop.huggingface.convert.families import (
    FAMILIES,
    family_of_model,
    with_defaults,
)
from meshwright_interop.huggingface.convert.mup import refuse_multipliers
from meshwright_interop.huggingface.convert.opening import (
    checked_rules,
    joined_dtype,
    open_model,
)
from meshwright_interop.huggingface.convert.weights import open_weights
from meshwright_interop.huggingface.files import ADAPTER, CONFIG, read_config, read_json
from meshwright_interop.huggingface.peft_files import settings_of as peft_settings_of
from meshwright_interop.huggingface.peft_import import Base, fuse_factors, read_factors
from meshwright_interop.huggingface.quantised import note_of, quantisation_of, with_values
from meshwright_interop.huggingface.restructure.directory import vocabulary
from meshwright_interop.huggingface.restructure.layers import (
    OWN_OPTIONS,
    left_over_of,
    names_in_transformers,
)
from meshwright_interop.huggingface.rules import TensorMapping, unchanged
from meshwright_interop.huggingface.source import SafetensorsDirectory, open_source

OF_THE_FILE = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("use_cache", "vocab_size", "quantization_config"),
)
"""Fields of a config.json that change no number of the same weights, or have a line of their own."""
MOST_FIELDS = 20
"""Fields that differ, of which the account has a line each."""


def weights(place: str, model: Model) -> WeightSource:
    """Open the weights of a directory under the names of a model.

    Raises:
        ModelError: the files are damaged, or of another architecture.
    """
    directory = Path(place).expanduser()
    if (directory / ADAPTER).is_file() and not (directory / CONFIG).is_file():
        return _adapter_weights(directory, model)
    if is_own_scheme(model.builder):
        return _restructured(directory, model)
    if any(family.builder == model.builder for family in FAMILIES):
        return _converted(directory, model)
    quantisation = quantisation_of(read_config(directory), str(directory / CONFIG))
    source = with_values(open_weights(directory), quantisation)
    note = note_of(source, quantisation)
    return _source(directory, source, {}, _as_they_are(source), (note,) if note else ())


class _Tensors(NamedTuple):
    """Tensors of a source under the names of a model."""

    shapes: Mapping[str, Shape]
    read_box: Callable[[str, Shape, Shape], Tensor]


def _source(
    directory: Path,
    source: SafetensorsDirectory,
    settings: Mapping[str, Any],
    tensors: _Tensors,
    notes: tuple[str, ...] = (),
) -> WeightSource:
    has_config = (directory / CONFIG).is_file()
    return WeightSource(
        place=str(directory),
        digest=_digest(directory, source),
        shapes=tensors.shapes,
        read_box=tensors.read_box,
        settings=settings,
        vocab_size=vocabulary(str(directory)) if has_config else None,
        notes=notes,
    )


def _digest(directory: Path, source: SafetensorsDirectory) -> str:
    """Return a hash of the files' headers, sizes and sampled bytes."""
    total = hashlib.sha256()
    files = set()
    for name in sorted(source.tensors):
        for place in source.tensors[name].stored:
            total.update(f"{name} {place.key} {place.dtype} {place.shape}\n".encode())
            files.add(place.file)
    for file in sorted(files):
        total.update(f"{file.name} {file.stat().st_size} {sampled_sha256(file)}\n".encode())
    for name in (CONFIG, ADAPTER):
        if (directory / name).is_file():
            total.update(read_bytes(directory / name))
    return total.hexdigest()


def _box(whole: Tensor, offset: Shape, shape: Shape) -> Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def _as_they_are(source: SafetensorsDirectory) -> _Tensors:
    """Return the tensors of the files under the names of transformers."""
    shapes = {name: place.shape for name, place in source.tensors.items()}

    def read_box(name: str, offset: Shape, shape: Shape) -> Tensor:
        return _box(source.read(name), offset, shape)

    return _Tensors(shapes, read_box)


def _converted(directory: Path, model: Model) -> WeightSource:
    """Open the weights of a family's model, joined by its rules.

    The rules are those of the model that the files describe: what this run's model has otherwise,
    the account names.
    """
    opened = open_model(directory)
    family = opened.family
    if family.builder != model.builder:
        raise ModelError(
            "MW-INTEROP-152",
            f"{directory} holds a {family.architecture}, which is {family.builder} here, and"
            f" model.builder = {model.builder}: give that builder, or hf:{directory}",
        )
    refuse_multipliers(with_defaults(model.builder, model.options))
    options = with_defaults(family.builder, opened.options)
    described = Model(builder=family.builder, options=dict(opened.options))
    source, rules, shapes = checked_rules(opened, described, options, seed=0)
    of_name: dict[str, list[TensorMapping]] = {}
    for rule in rules:
        of_name.setdefault(rule.ours, []).append(rule)

    def read_box(name: str, offset: Shape, shape: Shape) -> Tensor:
        group = of_name[name]
        if group[0].place is None:
            whole = group[0].join(source.read, shapes[name], joined_dtype(group[0], source))
            return _box(whole, offset, shape)
        wanted = range(offset[0], offset[0] + shape[0])
        experts = [rule for rule in group if rule.place in wanted]
        inside = [
            _box(
                rule.join(source.read, shapes[name], joined_dtype(rule, source)),
                offset[1:],
                shape[1:],
            )
            for rule in experts
        ]
        return torch.stack(inside)

    tensors = _Tensors(shapes, read_box)
    return _source(
        directory,
        source,
        settings_of(model.builder, options, {}),
        tensors,
        tuple(opened.settings.notes),
    )


def _restructured(directory: Path, model: Model) -> WeightSource:
    """Open the weights of a directory under the names of ``hf:DIRECTORY``'s layers."""
    source = open_weights(directory)
    # only its names, shapes and numbers are needed; a dropout by default would be refused
    without_dropout = {name: value for name, value in model.options.items() if "drop" in name}
    built = build_model(f"hf:{directory}", {"weights": True, **without_dropout}, seed=0)
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in built.layers.named_parameters(remove_duplicate=False)
        if built.canonical(name) == name
    }

    def read_box(name: str, offset: Shape, shape: Shape) -> Tensor:
        if not shape:
            return built.initial(name)
        rows = torch.empty((shape[0], *shapes[name][1:]))
        built.copy_rows(name, rows, offset[0])  # type: ignore[misc]
        return _box(rows, (0, *offset[1:]), shape)

    own = Path(model.builder.partition(":")[2]).expanduser()
    notes = _other_fields(read_config(directory), read_config(own) | model.options)
    notes += (built.weights_note,) if built.weights_note else ()
    left_over = left_over_of(built.layers)
    if left_over:
        more = ", ..." if left_over[3:] else ""
        notes += (
            f"{len(left_over)} tensors of {directory} are left over, as in transformers:"
            f" {', '.join(left_over[:3])}{more}",
        )
    return _source(directory, source, {}, _Tensors(shapes, read_box), notes)


def _other_fields(there: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line for each field of two config.json that differs."""
    names = sorted((there.keys() | here.keys()) - {*OF_THE_FILE, *OWN_OPTIONS})
    lines = [
        f"{name} is {here.get(name)!r} here and was {there.get(name)!r} there"
        for name in names
        if there.get(name) != here.get(name)
    ]
    more = [f"and {len(lines) - MOST_FIELDS} more fields"] if len(lines) > MOST_FIELDS else []
    return tuple(lines[:MOST_FIELDS] + more)


def _adapter_weights(directory: Path, model: Model) -> WeightSource:
    """Open the adapters of peft, fused as the linears of the model are."""
    settings = peft_settings_of(read_json(directory / ADAPTER, "peft writes it"), directory)
    built = build_model(model.builder, model.options, seed=0)
    if is_own_scheme(model.builder):
        names = names_in_transformers(built.layers)
        rules = [unchanged(ours, theirs) for ours, theirs in names.items()]
    else:
        family = family_of_model(model)
        rules = family.rules(with_defaults(model.builder, model.options))
    if settings.dora and not is_own_scheme(model.builder):
        raise ModelError(
            "MW-INTEROP-153",
            f"{directory}: DoRA's magnitudes need the weights of their base: import them with"
            f" `meshwright convert --from peft {directory} RUN --base RUN`, and start from that run",
        )
    base = Base(built.layers, rules, {}, built.initial)
    fused = dict(fuse_factors(read_factors(directory, settings), base, directory))
    rank = max(len(adapter.down) for adapter in fused.values())
    tensors: dict[str, Tensor] = {}
    for name, adapter in fused.items():
        tensors |= {piece.info.name: piece.tensor for piece in adapter.pieces(name, rank)}
        if settings.dora:
            offsets = adapter.magnitude_offsets(base.read(f"{name}.weight"))
            tensors[f"{name}.{MAGNITUDE}"] = offsets

    def read_box(name: str, offset: Shape, shape: Shape) -> Tensor:
        return _box(tensors[name], offset, shape)

    trained = {"rank": rank, "alpha": settings.factor * rank, "dora": settings.dora}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    source = open_source(directory, single=TENSORS)
    assert source is not None  # read_factors has read it
    return _source(directory, source, settings_of("", {}, trained), _Tensors(shapes, read_box))
