"""Base of peft's adapters that is a run of a model of ours, whose linears are fused: usually one
that ``convert --from hf`` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.adapters.attach import is_adapter
from meshwright.checkpoint import CheckpointReader, TensorKind
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.config import Data, given_keys, parse
from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright.parameters import ParameterInfo
from meshwright.system.store import Place
from meshwright_interop.huggingface.convert import side_files
from meshwright_interop.huggingface.convert.exporting import plan_export
from meshwright_interop.huggingface.export import local_place, open_verified
from meshwright_interop.huggingface.files import CONFIG, copy_side_files, read_json, write_json
from meshwright_interop.huggingface.peft_import import Base


@contextmanager
def base_of_run(
    run: Place, fields: Mapping[str, Any], source: Path, overrides: Sequence[str]
) -> Iterator[Base]:
    """Yield the base in a run directory or a checkpoint, whose weights the new run holds too.

    Raises:
        CheckpointError, ModelError: it is damaged, or no plain model of ours.
    """
    with open_verified(run) as checkpoint:
        yield _base(checkpoint, run, overrides)


def _base(checkpoint: CheckpointReader, run: Place, overrides: Sequence[str]) -> Base:
    """Return the base in a checkpoint."""
    saved = parse(json.dumps(checkpoint.manifest.config), f"{checkpoint.path}/{MANIFEST}")
    names = checkpoint.parameters(TensorKind.WEIGHTS)
    place = local_place(checkpoint.path, saved)
    plan = plan_export(saved, place)
    why = ""
    if any(factor != 1 for rule in plan.rules for factor in rule.factors):
        why = "has muP multipliers, which an export folds in"
    elif any(map(is_adapter, names)):
        why = "has adapters already"
    if why:
        raise ModelError("MW-INTEROP-111", f"{checkpoint.path} {why}: --base takes a plain model")

    def read(name: str) -> Tensor:
        info = ParameterInfo(name, checkpoint.shape(TensorKind.WEIGHTS, name))
        weight = checkpoint.read(TensorKind.WEIGHTS, info)
        assert weight is not None, name
        return weight

    dumped = saved.model_dump(mode="json", exclude_defaults=True)
    of_model = dumped["model"]
    has_own_data = ("data", "builder") in {key[:2] for key in given_keys(overrides)}
    tree = {
        "model": {key: of_model[key] for key in ("builder", "options") if key in of_model},
        "data": {} if has_own_data else dumped.get("data", {}),
        "train": {"dtype": saved.train.dtype},
    }
    layers = build_model(saved.model.builder, saved.model.options, saved.run.seed).layers
    num_bytes = sum(file.size for file in checkpoint.manifest.files.values())
    write_files = partial(_copy_files, place.parent.parent, saved.data)
    comment = f" beside the weights of {run}"
    return Base(layers, plan.rules, tree, read, names, num_bytes, write_files, comment)


def _copy_files(source: Path, data: Data, run: Path) -> None:
    """Copy the tokenizer files and the config.json of an imported base into the new run."""
    beside = side_files.side_file_directory(source, data)
    if beside is None or beside.name != side_files.DIRECTORY:
        return
    copy_side_files(beside, run / side_files.DIRECTORY)
    if (beside / CONFIG).is_file():
        write_json(run / side_files.DIRECTORY / CONFIG, read_json(beside / CONFIG, ""))
