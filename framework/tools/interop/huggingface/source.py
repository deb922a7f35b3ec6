"""Safetensors weights of a Hugging Face model directory, read one tensor at a time. Nothing is unpickled.

    model.safetensors                                    all in one file; or
    model.safetensors.index.json                         {"weight_map": {tensor: file, ...}}
    model-00001-of-00002.safetensors ...

Damage is reported by file and tensor before any tensor data is read: the headers alone are enough to find it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.errors import ModelError
from meshwright.tools.interop.huggingface.files import CONFIG, DTYPES, INDEX, SINGLE, read_json

PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")


class TensorLocation(NamedTuple):
    """Location of a tensor on disk, and its header entry."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


class SafetensorsDirectory:
    """Tensors of a directory by name. Each read opens its file again, so that the previous mapping is released."""

    def __init__(self, path: Path, tensors: dict[str, TensorLocation]) -> None:
        self.path = path
        self.tensors = tensors

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU, memory-mapped from its file. The caller copies it and does not keep it."""
        stored = self.tensors[name]
        try:
            with safe_open(stored.file, framework="pt", device="cpu") as file:
                found = file.get_tensor(stored.key)
        except (SafetensorError, OSError) as error:
            raise ModelError("MW-INTEROP-082", f"{stored.file}: tensor {stored.key} cannot be read: {error}") from error
        assert isinstance(found, Tensor)
        return found

    def num_bytes(self, name: str) -> int:
        """Return the size in bytes of a tensor, whose element type must be one of ``DTYPES``."""
        stored = self.tensors[name]
        return math.prod(stored.shape) * DTYPES[stored.dtype].itemsize

    def apart(self, first: str, others: Iterable[str]) -> list[str]:
        """Return a problem for each of ``others`` that differs from ``first``, the same tied weight.

        The files then hold two values for one weight, and either may be the intended one.
        """
        return [
            f"{self.tensors[other].file}: tensor {other} is not equal to {first}, and {CONFIG} says that they are "
            f"tied: set tie_word_embeddings to false where the head is one of its own, or take {other} out"
            for other in others
            if first in self.tensors and other in self.tensors and not torch.equal(self.read(first), self.read(other))
        ]

    def dtypes(self, names: Iterable[str]) -> Counter[str]:
        """Count the tensors of each element type."""
        return Counter(self.tensors[name].dtype for name in names)


def open_source(path: Path) -> SafetensorsDirectory | None:
    """Open the safetensors files of a directory: read their headers and compare them with the index.

    Returns:
        The tensors; None if the directory has no safetensors files.

    Raises:
        ModelError: files are missing or damaged, or tensors are not in the file that the index names. Lists at most 20.
    """
    if (path / SINGLE).is_file():
        return SafetensorsDirectory(path, _header(path / SINGLE))
    if not (path / INDEX).is_file():
        return None
    index = read_json(path / INDEX, "")
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise ModelError(
            "MW-INTEROP-083", f'{path / INDEX}: it has no "weight_map" of tensor names to file names; get it again'
        )
    problems: list[str] = []
    tensors: dict[str, TensorLocation] = {}
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
        except ModelError as error:
            problems.append(error.message)
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
        raise ModelError("MW-INTEROP-084", "\n".join(problems[:20]))
    return SafetensorsDirectory(path, tensors)


def _header(path: Path) -> dict[str, TensorLocation]:
    """Read the header of a safetensors file: tensor name -> location, element type and shape."""
    try:
        path.open("rb").close()  # safetensors reports a file without read permission as missing
    except OSError as error:
        raise ModelError("MW-INTEROP-085", f"{path}: {error.strerror} (errno {error.errno})") from None
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = {}
            for key in file.keys():  # noqa: SIM118 - `file` is not a mapping
                tensor = file.get_slice(key)
                found[key] = TensorLocation(path, key, str(tensor.get_dtype()), tuple(tensor.get_shape()))
            return found
    except (SafetensorError, OSError) as error:
        raise ModelError(
            "MW-INTEROP-086",
            f"{path}: not a whole safetensors file ({error}): it is cut short or damaged; get it again",
        ) from error


def pickled_files(path: Path) -> list[str]:
    """Return the names of the pickled files of a directory: possible weights that can run code when opened."""
    return sorted({file.name for pattern in PICKLES for file in path.glob(pattern)})
