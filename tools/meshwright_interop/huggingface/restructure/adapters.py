"""Base of peft's adapters that is an ``hf:DIRECTORY`` model; its weights stay in the directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.config import given_keys, load_saved
from meshwright.errors import ConfigError
from meshwright.model.build import build_model
from meshwright_interop.huggingface.adapters import CONFIG
from meshwright_interop.huggingface.peft_import import BATCH, Base
from meshwright_interop.huggingface.restructure.export import SCHEME
from meshwright_interop.huggingface.restructure.layers import names_in_transformers
from meshwright_interop.huggingface.rules import unchanged


@contextmanager
def base_of_directory(
    fields: Mapping[str, Any], source: Path, overrides: Sequence[str]
) -> Iterator[Base]:
    """Yield the base that the adapters' file or ``model.builder`` names; it stays in its
    directory.
    """
    directory = fields.get("base_model_name_or_path")
    is_given = ("model", "builder") in {key[:2] for key in given_keys(overrides)}
    if not is_given and not Path(str(directory)).is_dir():
        raise ConfigError(
            "MW-INTEROP-105",
            f"{source / CONFIG} names the base {json.dumps(directory)}, which is no directory here:"
            " give the model's directory, --model.builder=hf:DIRECTORY",
        )
    tree = {"model": {"builder": f"{SCHEME}{directory}"}}
    given = load_saved({**tree, **BATCH}, overrides, f"the adapters in {source}")
    model = build_model(given.model.builder, given.model.options, given.run.seed)
    names = names_in_transformers(model.layers)
    rules = [unchanged(ours, theirs) for ours, theirs in names.items()]
    yield Base(model.layers, rules, tree, model.initial)
