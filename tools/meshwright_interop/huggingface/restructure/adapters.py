"""Import of peft's adapters of an ``hf:DIRECTORY`` model as a run directory, so that training starts from them.

PATH/adapter_config.json         -> config.toml: model.builder, [adapter]
PATH/adapter_model.safetensors   -> checkpoints/step-00000000; the base stays in its directory
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.adapters.magnitude import MAGNITUDE, row_lengths
from meshwright.checkpoint import TensorKind, TensorPiece
from meshwright.checkpoint.files import final_directory
from meshwright.config import given_keys, load_saved, resolve
from meshwright.errors import ConfigError, ModelError
from meshwright.model.build import build_model, configured_model
from meshwright.parameters import ParameterInfo
from meshwright.run.directory import check_own_directory
from meshwright_interop.huggingface.adapters import CONFIG, PREFIX, TENSORS
from meshwright_interop.huggingface.destination import check_output_directory, published_directory
from meshwright_interop.huggingface.files import read_json
from meshwright_interop.huggingface.peft_files import AdapterSettings, ImportedAdapter, settings_of, write_run
from meshwright_interop.huggingface.restructure.export import SCHEME
from meshwright_interop.huggingface.restructure.layers import names_in_transformers
from meshwright_interop.huggingface.source import SafetensorsDirectory, open_source


def import_adapter(source: Path, out: Path, overrides: Sequence[str] = ()) -> ImportedAdapter:
    """Import the adapters in ``source`` as a run directory.

    Args:
        source: directory that peft has written.
        out: the run directory to write, new or empty.
        overrides: configuration overrides, which go into its config.toml; ``model.builder`` names the base.

    Raises:
        ConfigError, ModelError, CheckpointError: the adapters are not supported, or do not fit the base. Nothing is
            written then.
    """
    out, fields = check_output_directory(out), read_json(source / CONFIG, "peft writes it beside an adapter")
    settings = settings_of(fields, source)
    found = open_source(source, single=TENSORS)
    if found is None:
        raise ModelError("MW-INTEROP-102", f"{source / TENSORS} is missing: it holds the adapters' weights")
    tree = _tree(fields, settings, source, out, overrides)
    base = load_saved(tree, overrides, f"the run {out}")
    check_own_directory(base, out)
    model = build_model(base.model.builder, base.model.options, base.run.seed)
    ours = {
        theirs.removesuffix(".weight"): n.removesuffix(".weight")
        for n, theirs in names_in_transformers(model.layers).items()
    }
    named = dict(_named(found, ours, settings.kinds, source))
    targets = sorted({name.rpartition(".lora_")[0] for name in named})
    tree["adapter"]["targets"] = targets
    config = load_saved(tree, overrides, f"the run {out}")
    model = configured_model(config)
    shapes = {name: tuple(p.shape) for name, p in model.layers.named_parameters() if name in named}
    wrong = [name for name in named if shapes.get(name) != _shape(found, named[name])]
    if wrong or len(named) != len(settings.kinds) * len(targets):
        name = wrong[0] if wrong else targets[0]
        raise ModelError(
            "MW-INTEROP-103",
            f"{source / TENSORS}: {named.get(name, name)} does not fit {base.model.builder}: expected A and B of each "
            f"target in the shapes of rank {config.adapter.rank}; is it the model that they were trained on?",
        )

    def pieces() -> Iterator[TensorPiece]:
        for name, theirs in named.items():
            tensor: Tensor = found.read(theirs)
            tensor = tensor.t() if theirs.endswith("lora_embedding_A") else tensor
            if name.endswith(f".{MAGNITUDE}"):
                lengths = row_lengths(model.initial(f"{name.removesuffix(MAGNITUDE)}weight"))
                tensor = (tensor.double() - lengths).to(torch.promote_types(tensor.dtype, torch.float32))
            yield TensorPiece(TensorKind.WEIGHTS, ParameterInfo(name, shapes[name]), tensor.contiguous())

    with published_directory(out, sum(map(found.num_bytes, named.values()))) as temporary:
        write_run(temporary, config, pieces(), f"Adapters of {source.name}")
    return ImportedAdapter(final_directory(out, 0), resolve(config), len(targets))


def _tree(
    fields: Mapping[str, Any], settings: AdapterSettings, source: Path, out: Path, overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the configuration of the run as a tree, without targets. Raise ConfigError if nothing names the base."""
    directory = fields.get("base_model_name_or_path")
    if ("model", "builder") not in {key[:2] for key in given_keys(overrides)} and not Path(str(directory)).is_dir():
        raise ConfigError(
            "MW-INTEROP-105",
            f"{source / CONFIG} names the base {json.dumps(directory)}, which is no directory here: give the model's "
            f"directory, --model.builder=hf:DIRECTORY",
        )
    return {
        "run": {"name": out.name, "directory": str(out.parent)},
        "model": {"builder": f"{SCHEME}{directory}"},
        "adapter": {
            "rank": settings.rank,
            "alpha": settings.factor * settings.rank,
            "targets": ["*"],
            "dropout": settings.dropout,
            "dora": settings.dora,
        },
        "batch": {"micro_batch_size": 1, "global_batch": 16},
        "optimizer": {"learning_rate": 1e-4, "weight_decay": 0.0},
    }


def _named(
    found: SafetensorsDirectory, ours: Mapping[str, str], kinds: set[str], source: Path
) -> Iterator[tuple[str, str]]:
    """Yield (parameter of ours, tensor of theirs) of each tensor.

    Raises:
        ModelError: a tensor belongs to no module of the base.
    """
    for theirs in sorted(found.tensors):
        module, _, factor = theirs.removeprefix(PREFIX).partition(".lora_")
        which = factor.removesuffix(".weight").removeprefix("embedding_")
        if module not in ours or which not in kinds:
            raise ModelError("MW-INTEROP-106", f"{source / TENSORS}: {theirs} belongs to no module of the base")
        name = MAGNITUDE if which not in ("A", "B") else f"lora_{which.lower()}.weight"
        yield f"{ours[module]}.{name}", theirs


def _shape(found: SafetensorsDirectory, theirs: str) -> tuple[int, ...]:
    shape = found.tensors[theirs].shape
    return shape[::-1] if theirs.endswith("lora_embedding_A") else shape
