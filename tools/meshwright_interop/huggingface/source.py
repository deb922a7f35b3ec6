"""Safetensors weights of a Hugging Face model directory, read one tensor at a time.
Nothing is unpickled.

    model.safetensors                                    all in one file; or
    model.safetensors.index.json                         {"weight_map": {tensor: file, ...}}
    model-00001-of-00002.safetensors ...

Damage is reported by file and tensor before any tensor data is read: the headers alone are enough
to find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.errors import ModelError
from meshwright.system.bounded import open_regular
from meshwright_interop.huggingface.files import CONFIG, DTYPES, INDEX, SINGLE, read_json
from meshwright_interop.huggingface.rules import TensorMapping

PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")


class TensorLocation(NamedTuple):
    """Location of a tensor on disk, and its header entry."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    encoded: EncodedValues | None = None
    """Quantised form in which the values are stored; None: they are stored as they are."""

    @property
    def stored(self) -> tuple[TensorLocation, ...]:
        """Return the locations of what the files hold: this one, or its codes and scales."""
        return (self,) if self.encoded is None else (self.encoded.codes, self.encoded.scales)


class EncodedValues(NamedTuple):
    """Tensor that is stored as codes and their scales, see quantised.py."""

    codes: TensorLocation
    scales: TensorLocation
    decode: Callable[[Tensor, Tensor], Tensor]
    """Function of both, which returns the values; of a stack of matrices also those of a part."""


class OpenFiles(ExitStack):
    """Safetensors files that stay open for several reads: to read a header takes longer than an
    expert.
    """

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Path, Any] = {}

    def tensor(self, stored: TensorLocation, part: slice = slice(None)) -> Any:
        """Return a tensor on the CPU, memory-mapped from its file; a quantised one dequantised.
        ``part``: of a quantised stack of matrices, those that are wanted.
        """
        if (encoded := stored.encoded) is not None:
            codes, scales = self.tensor(encoded.codes), self.tensor(encoded.scales)
            return encoded.decode(codes[part], scales[part])
        if stored.file not in self._files:
            file = safe_open(stored.file, framework="pt", device="cpu")
            self._files[stored.file] = self.enter_context(file)
        return self._files[stored.file].get_tensor(stored.key)


class SafetensorsDirectory:
    """Tensors of a directory by name. Each read opens its file again,
    so that the previous mapping is released.
    """

    def __init__(self, path: Path, tensors: dict[str, TensorLocation]) -> None:
        self.path = path
        self.tensors = tensors

    def read(self, name: str, files: OpenFiles | None = None, part: slice = slice(None)) -> Tensor:
        """Return a tensor on the CPU, memory-mapped from its file; a quantised one dequantised.
        The caller copies it and does not keep it.

        Args:
            name: that of the tensor.
            files: those that stay open for further reads; None: none does.
            part: of a quantised stack of matrices, those that are wanted.
        """
        stored = self.tensors[name]
        try:
            with OpenFiles() if files is None else nullcontext(files) as opened:
                tensor = opened.tensor(stored, part)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                "MW-INTEROP-082", f"{stored.file}: tensor {stored.key} cannot be read: {error}"
            ) from error
        assert isinstance(tensor, Tensor)
        return tensor

    def copy_to(self, name: str, target: Tensor, first: int = 0) -> None:
        """Copy rows of a tensor into ``target``, as many as this has; ``first``: the first row.
        Experts that are quantised as one tensor are dequantised one by one.
        """
        place = self.tensors[name]
        if place.encoded is not None and len(place.shape) == 3:
            with OpenFiles() as opened:
                for expert, row in enumerate(target, first):
                    row.copy_(self.read(name, opened, slice(expert, expert + 1))[0])
            return
        stored = self.read(name)
        target.copy_(stored if stored.dim() == 0 else stored[first : first + len(target)])

    def num_bytes(self, name: str) -> int:
        """Return the size in bytes of a tensor, whose element type must be one of ``DTYPES``."""
        stored = self.tensors[name]
        return math.prod(stored.shape) * DTYPES[stored.dtype].itemsize

    def check(
        self,
        rules: Sequence[TensorMapping],
        of_model: Mapping[str, tuple[int, ...]],
        is_ignored: Callable[[str], bool],
        architecture: str,
        remedy: str,
        dtypes: Collection[str] = DTYPES,
    ) -> None:
        """Check that the files hold exactly the tensors of a model, with its shapes.

        Args:
            rules: the rules of all tensors of the model.
            of_model: name in the model -> global shape.
            is_ignored: function that returns True for further tensors that the files may hold.
            architecture: name of the model's class, for error messages.
            remedy: last line of the error message.
            dtypes: accepted element types.

        Raises:
            ModelError: the problems, a line each with file and tensor; at most 20.
        """
        problems = []
        shapes: dict[str, tuple[int, ...]] = {}
        for rule in rules:
            shapes |= rule.shapes(of_model[rule.ours])
        for name, shape in shapes.items():
            stored = self.tensors.get(name)
            if stored is None:
                problems.append(f"{self.path}: tensor {name} {list(shape)} is in none of the files")
            elif stored.shape != shape:
                problems.append(
                    f"{stored.file}: tensor {name} has shape {list(stored.shape)}, and the model"
                    f" needs {list(shape)}"
                )
            elif stored.dtype not in dtypes:
                problems.append(
                    f"{stored.file}: tensor {name} is of {stored.dtype}: only {', '.join(dtypes)}"
                    " are read; take the weights before they were quantised"
                )
        pairs = [(rule.theirs[0], other) for rule in rules for other in rule.same_as]
        for first, other in pairs:
            is_stored_twice = first in self.tensors and other in self.tensors
            if is_stored_twice and not torch.equal(self.read(first), self.read(other)):
                problems.append(
                    f"{self.tensors[other].file}: tensor {other} differs from {first}, but {CONFIG}"
                    " ties them: set tie_word_embeddings to false if the model has a head of its"
                    f" own, or remove {other}"
                )
        second_names = {other for _, other in pairs}
        for name, stored in self.tensors.items():
            if name not in shapes and name not in second_names and not is_ignored(name):
                problems.append(
                    f"{stored.file}: tensor {name} {list(stored.shape)} is not of a {architecture}"
                )
        if problems:
            more = f"\nand {len(problems) - 20} more" if problems[20:] else ""
            raise ModelError("MW-INTEROP-037", "\n".join(problems[:20]) + more + f"\n{remedy}")


def open_source(
    path: Path, alternative: str = "", single: str = SINGLE
) -> SafetensorsDirectory | None:
    """Open the safetensors files of a directory:
    read their headers and compare them with the index.

    Args:
        path: the directory.
        alternative: a further way to proceed without the weights, for the error message about
            pickled ones.
        single: name of the file that holds all tensors, if one does.

    Returns:
        The tensors; None if the directory has no weights.

    Raises:
        ModelError: the weights are pickled only, files are missing or damaged, or tensors are not
            in the file that the index names. Lists at most 20.
    """
    if (path / single).is_file():
        return SafetensorsDirectory(path, _header(path / single))
    if not (path / INDEX).is_file():
        _check_pickles(path, alternative)
        return None
    index = read_json(path / INDEX, "")
    placed = index.get("weight_map")
    if (
        not isinstance(placed, dict)
        or not placed
        or not all(isinstance(file, str) for file in placed.values())
    ):
        raise ModelError(
            "MW-INTEROP-083",
            f'{path / INDEX}: it has no "weight_map" of tensor names to file names; get it again',
        )
    problems: list[str] = []
    tensors: dict[str, TensorLocation] = {}
    for file in sorted(set(placed.values())):
        names = sorted(name for name, where in placed.items() if where == file)
        if Path(file).name != file or not file.endswith(".safetensors"):
            problems.append(
                f"{path / INDEX}: {file!r} is no plain name of a .safetensors file (of {names[0]},"
                " ...)"
            )
            continue
        if not (path / file).is_file():
            problems.append(
                f"{path / file} is missing: {INDEX} has {len(names)} tensors there"
                f" ({', '.join(names[:2])}{', ...' if names[2:] else ''}); get the file again"
            )
            continue
        try:
            header = _header(path / file)
        except ModelError as error:
            problems.append(error.message)
            continue
        problems += [
            f"{path / file}: has no tensor {name}, which {INDEX} has there; get both files again"
            for name in names
            if name not in header
        ]
        for name, stored in header.items():
            if placed.get(name, file) == file:
                tensors[name] = stored
    if problems:
        raise ModelError("MW-INTEROP-084", "\n".join(problems[:20]))
    return SafetensorsDirectory(path, tensors)


def _header(path: Path) -> dict[str, TensorLocation]:
    """Read the header of a safetensors file: tensor name -> location, element type and shape."""
    try:
        open_regular(path).close()  # safetensors reports a file without read permission as missing
    except OSError as error:
        raise ModelError(
            "MW-INTEROP-085", f"{path}: {error.strerror} (errno {error.errno})"
        ) from None
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            locations = {}
            for key in file.keys():  # noqa: SIM118 - `file` is not a mapping
                tensor = file.get_slice(key)
                locations[key] = TensorLocation(
                    path, key, str(tensor.get_dtype()), tuple(tensor.get_shape())
                )
            return locations
    except (SafetensorError, OSError) as error:
        raise ModelError(
            "MW-INTEROP-086",
            f"{path}: not a whole safetensors file ({error}): it is cut short or damaged; get it"
            " again",
        ) from error


def _check_pickles(path: Path, alternative: str) -> None:
    """Refuse pickled files: possible weights, which can run code when opened.

    Raises:
        ModelError: the directory has some.
    """
    pickles = sorted({file.name for pattern in PICKLES for file in path.glob(pattern)})
    if pickles:
        raise ModelError(
            "MW-INTEROP-035",
            f"{path} has its weights in pickled files only ({', '.join(pickles[:3])}), which can"
            " run code when they are opened: they are not read. Where you trust them, write them"
            ' as safetensors first: python -c "from transformers import AutoModelForCausalLM as'
            f" M; M.from_pretrained('{path}').save_pretrained('{path}-safe')\""
            " (AutoModelForSeq2SeqLM for T5), copy the tokenizer's files there, and take that"
            f" directory{alternative}",
        )
