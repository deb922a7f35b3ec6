"""Export of an ``hf:DIRECTORY`` model: config.json of the directory with the changes
of ``model.options``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.config import Data, RunConfig
from meshwright.data.tokenizer import load
from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright.system.bounded import read_bytes
from meshwright_interop.huggingface.end_tokens import add_document_ends
from meshwright_interop.huggingface.export import ExportPlan
from meshwright_interop.huggingface.export import export as export_with
from meshwright_interop.huggingface.files import CONFIG, TOKENIZER, copy_side_files, write_json
from meshwright_interop.huggingface.restructure.directory import (
    fields_of,
    with_overrides,
    without_quantisation,
)
from meshwright_interop.huggingface.restructure.layers import (
    OWN_OPTIONS,
    conversions_of_layers,
    names_in_transformers,
)
from meshwright_interop.huggingface.restructure.released import released_rules
from meshwright_interop.huggingface.rules import unchanged

SCHEME = "hf:"


def plan_export(config: RunConfig, checkpoint: Path) -> ExportPlan:
    """Plan the export of a model that was built from ``hf:DIRECTORY``, in the form in which such a
    model is released.

    Tied parameters are written under their first name, as in files saved by transformers.

    Raises:
        ModelError: the checkpoint is of another builder, or the model directory is missing.
    """
    builder, options = config.model.builder, config.model.options
    if not builder.startswith(SCHEME):
        raise ModelError(
            "MW-INTEROP-062",
            f"{checkpoint} was trained with model.builder = {builder}: only models of "
            f'model.builder = "hf:DIRECTORY" are exported here, as only they have names in'
            f" transformers",
        )
    model = build_model(builder, options | {"weights": False}, config.run.seed)
    names = names_in_transformers(model.layers)
    own = {name: names[name] for name in dict.fromkeys(map(model.canonical, names))}
    rules = [unchanged(name, theirs) for name, theirs in own.items()]
    released = released_rules(conversions_of_layers(model.layers), own)
    source = Path(builder.removeprefix(SCHEME)).expanduser()

    def write_files(directory: Path, dtype: str) -> list[str]:
        write_json(directory / CONFIG, _config(source, options, dtype))
        _copy_side_files(source, directory, config.data)
        return add_document_ends(directory, config.data)

    place = f"the current {source / CONFIG}"
    return ExportPlan(builder, rules, place, write_files, released=released)


export = partial(export_with, plan_export)
"""Export a checkpoint of an ``hf:DIRECTORY`` model as a Hugging Face directory."""


def _config(source: Path, options: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config.json of ``source`` with the changes of ``options``
    and the exported dtype.
    """
    raw = without_quantisation(fields_of(source))
    changed = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    if (
        "num_hidden_layers" in changed
        and isinstance(raw.get("layer_types"), list)
        and "layer_types" not in changed
    ):
        changed["layer_types"] = raw["layer_types"][: changed["num_hidden_layers"]]
    return with_overrides(raw, changed) | {
        key: dtype for key in ("dtype", "torch_dtype") if key in raw or key == "dtype"
    }


def _copy_side_files(source: Path, target: Path, data: Data) -> None:
    """Copy the run's tokenizer; if it is that of the model directory ``source``,
    all side files of the directory.
    """
    own, theirs = data.tokenizer, source / TOKENIZER
    if own is None or (theirs.is_file() and read_bytes(theirs) == read_bytes(own)):
        copy_side_files(source, target)
    elif Path(own).is_file():
        load(Path(own))  # it is a tokenizer, and no other file of this machine
        shutil.copyfile(own, target / TOKENIZER)
