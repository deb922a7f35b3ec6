"""A model in Hugging Face's form on the disk: its config.json, its tensors one at a time. Nothing is unpickled.

    model.safetensors                                    all in one file; or
    model.safetensors.index.json                         {"weight_map": {tensor: file, ...}}
    model-00001-of-00002.safetensors ...

What is damaged is named by file and tensor before a number is read: the headers alone tell it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from framework.errors import CheckpointError

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin", "*.pt", "*.pth", "*.ckpt")

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of weights, under the names that safetensors gives them."""


class Stored(NamedTuple):
    """Where a tensor lies and what the header says of it."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


class Source:
    """Tensors by name. Each read opens its file anew: what was mapped for the one before is given back."""

    def __init__(self, path: Path, tensors: dict[str, Stored]) -> None:
        self.path = path
        self.tensors = tensors

    def read(self, name: str) -> Tensor:
        """A tensor, mapped from its file: to be copied, not kept."""
        stored = self.tensors[name]
        try:
            with safe_open(stored.file, framework="pt", device="cpu") as file:
                found = file.get_tensor(stored.key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{stored.file}: tensor {stored.key} cannot be read: {error}") from error
        assert isinstance(found, Tensor)
        return found

    def num_bytes(self, name: str) -> int:
        """Of a tensor whose element type is one that we read."""
        stored = self.tensors[name]
        return math.prod(stored.shape) * DTYPES[stored.dtype].itemsize

    def dtypes(self, names: Iterable[str]) -> Counter[str]:
        """How many of these tensors are of which element type."""
        return Counter(self.tensors[name].dtype for name in names)


def read_config(path: Path) -> dict[str, Any]:
    """The fields of the model's config.json.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    if not path.exists():
        raise CheckpointError(
            f"there is no directory {path}: nothing is downloaded here; fetch the model first, as with `hf download "
            f"NAME --local-dir DIR`, and give that directory"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file: give the directory that it lies in, with its {CONFIG}")
    if (path / ADAPTER).is_file() and not (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path} holds an adapter ({ADAPTER}) and not a model: merge it into its model first, with peft's "
            f"merge_and_unload() and save_pretrained(), and convert what that has written"
        )
    return read_json(path / CONFIG, "a directory of a model in Hugging Face's form has one")


def read_json(path: Path, why: str) -> dict[str, Any]:
    """One JSON object. ``why``: said when the file is missing."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: {why}")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}; get the file again") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror} (errno {error.errno})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object; get the file again")
    return found


def open_source(path: Path) -> Source:
    """The tensors of a directory, headers read and held against the index.

    Raises:
        CheckpointError: every file that is missing or damaged, and every tensor that is not where the index has it.
    """
    if (path / ONE_FILE).is_file():
        return Source(path, _header(path / ONE_FILE))
    if not (path / INDEX).is_file():
        raise CheckpointError(_no_weights(path))
    index = read_json(path / INDEX, "")
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise CheckpointError(f'{path / INDEX}: it has no "weight_map" of tensor names to file names; get it again')
    problems: list[str] = []
    tensors: dict[str, Stored] = {}
    for file in sorted(set(placed.values())):
        names = sorted(name for name, where in placed.items() if where == file)
        if Path(file).name != file or not file.endswith(".safetensors"):
            problems.append(f"{path / INDEX}: {file!r} is no plain name of a .safetensors file (of {names[0]}, ...)")
            continue
        if not (path / file).is_file():
            problems.append(
                f"{path / file} is missing: {INDEX} has {len(names)} tensors there ({', '.join(names[:2])}"
                f"{', ...' if names[2:] else ''}); get the file again"
            )
            continue
        try:
            found = _header(path / file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{path / file}: has no tensor {name}, which {INDEX} has there; get both files again"
            for name in names
            if name not in found
        ]
        for name, stored in found.items():
            if placed.get(name, file) == file:
                tensors[name] = stored
    if problems:
        raise CheckpointError("\n".join(problems[:20]))
    return Source(path, tensors)


def _header(path: Path) -> dict[str, Stored]:
    """What a file says of its tensors."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = {}
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_slice(key)
                found[key] = Stored(path, key, str(tensor.get_dtype()), tuple(tensor.get_shape()))
            return found
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file ({error}): it is cut short or damaged; get it again"
        ) from error


def _no_weights(path: Path) -> str:
    pickled = sorted({file.name for pattern in PICKLES for file in path.glob(pattern)})
    if not pickled:
        return f"{path} has neither {ONE_FILE} nor {INDEX}: the weights are missing; get them too"
    return (
        f"{path} has its weights in pickled files only ({', '.join(pickled[:3])}), which can run code when they are "
        f'opened: they are not read. Where you trust them, write them as safetensors first: python -c "from '
        f"transformers import AutoModelForCausalLM as M; M.from_pretrained('{path}').save_pretrained('{path}-safe')\" "
        f"(AutoModelForSeq2SeqLM for T5), copy the tokenizer's files there, and convert that directory"
    )
