"""Weights that a run can start from: those of a run or checkpoint, or of a directory of a scheme,
such as a model or adapter of Hugging Face.

    runs/base               newest sound checkpoint of a run
    runs/base@9000          its checkpoint of step 9000
    .../step-00009000       a checkpoint
    s3://bucket/runs/base   any of these in an object store
    models/Llama-3.1-8B     a directory that a scheme of ``config/schemes.py`` reads

A source has names, global shapes and boxes of numbers. It has no layout, and nothing in it is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from meshwright.adapters.fingerprint import FINGERPRINT
from meshwright.checkpoint import CheckpointReader, TensorKind, open_checkpoint
from meshwright.config import Model
from meshwright.config.functions import current_name
from meshwright.config.schemes import is_scheme
from meshwright.errors import CheckpointError
from meshwright.model.builder import call_scheme
from meshwright.run.directory import AT_STEP, is_checkpoint, is_run
from meshwright.run.places import find_in, saved_places
from meshwright.system.store import Place, StorePath, parse_place

Shape = tuple[int, ...]

TOKENIZER = re.compile(r"(^|: )tokenizer\b")
"""Names in a data fingerprint that have the hash of a tokenizer."""
HUGGING_FACE_FILES = ("config.json", "adapter_config.json")
"""Files that mark a directory of Hugging Face: of a model, or of peft's adapters."""
DCP_METADATA = ".metadata"
"""File of a checkpoint in PyTorch's DCP format; it is a pickle."""


class WeightSource(NamedTuple):
    """Weights of another model, open for reading."""

    place: str
    """Path, for messages."""
    digest: str
    """Hash that changes with the weights."""
    shapes: Mapping[str, Shape]
    """Name of each tensor -> its global shape."""
    read_box: Callable[[str, Shape, Shape], Tensor]
    """Function of a name, offset and shape that returns this box of the tensor, on the CPU."""
    settings: Mapping[str, Any]
    """Keys of ``model.options``, ``adapter.alpha`` and the like that the weights were made with."""
    vocab_size: int | None = None
    """Vocabulary of its model; None: unknown."""
    dtype: str | None = None
    """``train.dtype`` of a run."""
    tokenizers: frozenset[str] = frozenset()
    """Hashes of the tokenizers of its training data; empty: unknown."""
    base: object = None
    """Fingerprint of the frozen base of its adapters; None: it has none."""
    notes: tuple[str, ...] = ()
    """Further lines of the account."""


def candidates_of(given: str) -> list[Place] | None:
    """Return the checkpoints that a value of ``run.start`` names, newest first;
    None: it names no run or checkpoint.

    Raises:
        CheckpointError: a run without a checkpoint, or without the one of the step.
    """
    at_step = AT_STEP.fullmatch(given)
    if at_step is not None and ("://" in given or not _path(given).exists()):
        return [_checkpoint_of_step(_place(at_step["run"]), int(at_step["step"]))]
    place = _place(given)
    if is_checkpoint(place):
        return [place]
    found = [each.path for each in find_in(saved_places(place))]
    if not found and (isinstance(place, StorePath) or is_run(place)):
        raise CheckpointError(
            "MW-RUN-042",
            f'run.start = "{given}": this run has no checkpoint yet: let it train to its first'
            " (checkpoint.every)",
        )
    return found or None


def _place(given: str) -> Place:
    return parse_place(given) if "://" in given else _path(given)


def _path(given: str) -> Path:
    try:
        return Path(given).expanduser()
    except RuntimeError as error:  # ~user of nobody
        raise CheckpointError(
            "MW-RUN-063", f'run.start = "{given}": {error} Give the whole path'
        ) from None


def _checkpoint_of_step(run: Place, step: int) -> Place:
    found = find_in(saved_places(run))
    for each in found:
        if each.step == step:
            return each.path
    steps = ", ".join(str(each.step) for each in reversed(found)) or "none"
    raise CheckpointError(
        "MW-RUN-043",
        f'run.start = "{run}@{step}": there is no checkpoint of this step; steps with one: {steps}',
    )


def open_run_weights(path: Place) -> WeightSource:
    """Open the weights of a checkpoint: float32 masters where it has some.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    checkpoint = open_checkpoint(path)
    masters = set(checkpoint.parameters(TensorKind.MASTER))
    names = checkpoint.parameters(TensorKind.WEIGHTS)
    settings = _saved_settings(checkpoint)
    vocab_size = settings.get("model.options.vocab_size")

    def read_box(name: str, offset: Shape, shape: Shape) -> Tensor:
        kind = TensorKind.MASTER if name in masters else TensorKind.WEIGHTS
        return checkpoint.read_box(kind, name, offset, shape)

    return WeightSource(
        place=str(path),
        digest=checkpoint.digest,
        shapes={name: checkpoint.shape(TensorKind.WEIGHTS, name) for name in names},
        read_box=read_box,
        settings=settings,
        vocab_size=vocab_size if isinstance(vocab_size, int) else None,
        dtype=_saved_dtype(checkpoint),
        tokenizers=tokenizers_of(checkpoint.manifest.data_fingerprint),
        base=checkpoint.manifest.state.get(FINGERPRINT),
        notes=(f"taken from the float32 master weights of {path}",) if masters else (),
    )


def _saved_dtype(checkpoint: CheckpointReader) -> str | None:
    train = checkpoint.manifest.config.get("train")
    dtype = train.get("dtype") if isinstance(train, dict) else None
    return dtype if isinstance(dtype, str) else None


def _saved_settings(checkpoint: CheckpointReader) -> dict[str, Any]:
    saved = checkpoint.manifest.config
    model, adapter = (
        section if isinstance(section, dict) else {}
        for section in (saved.get("model"), saved.get("adapter"))
    )
    options = model.get("options")
    return settings_of(
        current_name(str(model.get("builder"))),
        options if isinstance(options, dict) else {},
        adapter,
    )


def tokenizers_of(data_fingerprint: Mapping[str, str]) -> frozenset[str]:
    """Return the hashes of tokenizers in the fingerprint of a run's data."""
    return frozenset(
        value for name, value in data_fingerprint.items() if TOKENIZER.search(name) is not None
    )


def settings_of(
    builder: str, options: Mapping[str, Any], adapter: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that change what the same weights compute, by dotted key."""
    settings = {f"model.options.{name}": value for name, value in options.items()}
    if builder:
        settings["model.builder"] = builder
    if adapter.get("rank"):
        for name in ("rank", "alpha", "dora"):
            settings[f"adapter.{name}"] = adapter.get(name)
    return settings


def open_directory_weights(given: str, model: Model) -> WeightSource:
    """Open a directory of a scheme, such as Hugging Face's, under the names of this model.

    Raises:
        CheckpointError: it is nothing that a run can start from.
        UserError: the directory is damaged, or of another architecture.
    """
    place = _path(given)
    has_scheme = ":" in given and is_scheme(given)
    if has_scheme or any((place / name).is_file() for name in HUGGING_FACE_FILES):
        path = given if has_scheme else f"hf:{place}"
        source = call_scheme(path, "weights", model, key="run.start")
        assert isinstance(source, WeightSource)
        return source
    if (place / DCP_METADATA).is_file():
        raise CheckpointError(
            "MW-RUN-044",
            f'run.start = "{given}" is a DCP checkpoint, whose {DCP_METADATA} is a pickle and is'
            " not read: give the run that it was exported from, or a directory of safetensors",
        )
    what = "has no weights to start from" if place.is_dir() else "is no directory"
    raise CheckpointError(
        "MW-RUN-045",
        f'run.start = "{given}" {what}: give a run (runs/base, or runs/base@9000 for the checkpoint'
        " of a step), one of its checkpoints, or a directory of Hugging Face, with"
        f" {' or '.join(HUGGING_FACE_FILES)}",
    )
