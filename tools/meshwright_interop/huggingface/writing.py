"""Export of a checkpoint's weights, saved under any layout,
to safetensors files with transformers names.

    model.safetensors                                    all in one file; or
    model-00001-of-00002.safetensors ...                 several, and
    model.safetensors.index.json                         the index: tensor -> file

One meshwright tensor, or one expert of it, is in memory at a time. Its transformers tensors are
written one by one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.checkpoint import TensorKind
from meshwright.checkpoint.files import as_checkpoint_error
from meshwright.checkpoint.manifest import Manifest
from meshwright.errors import CheckpointError, ModelError
from meshwright.parameters import ParameterInfo
from meshwright.system.store import Place
from meshwright_interop.huggingface.destination import OnBytes, ignore_progress
from meshwright_interop.huggingface.files import DTYPES, INDEX, SINGLE, write_json
from meshwright_interop.huggingface.rules import ExportRule

SHARD_BYTES = 5 * 10**9
BYTES_AT_ONCE = 16 * 2**20
HEADER_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Torch dtype -> name in a safetensors header."""
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in HEADER_NAMES}
"""Torch dtype -> name in config.json."""


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the torch dtype of a dtype name such as "bfloat16"; None stays None.

    Raises:
        ModelError: weights are not written in this dtype.
    """
    dtypes = {known: dtype for dtype, known in DTYPE_NAMES.items()}
    if name is not None and name not in dtypes:
        raise ModelError("MW-INTEROP-087", f"dtype {name!r}: choose one of {', '.join(dtypes)}")
    return None if name is None else dtypes[name]


class OutgoingTensor(NamedTuple):
    """One transformers tensor to be written: its name, shape and dtype, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size on disk, in bytes."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class WeightReader(Protocol):
    """Source of weights: a checkpoint, or one with its adapters merged."""

    path: Place
    manifest: Manifest

    def parameters(self, kind: TensorKind) -> list[str]:
        """Return the names of the tensors of a kind."""

    def shape(self, kind: TensorKind, parameter: str) -> tuple[int, ...]:
        """Return a tensor's global shape."""

    def read(self, kind: TensorKind, info: ParameterInfo) -> Tensor | None:
        """Read a whole tensor."""

    def close(self) -> None:
        """Release the files."""


class WeightExport:
    """Weights of a checkpoint under the names that ``rules`` give them: planned by the constructor,
    then written.

    Args:
        checkpoint: the weights, saved under any layout.
        rules: one rule for each parameter of the model that is exported.
        dtype: element type of all tensors; None keeps the saved ones. For float32 and float64,
            master weights are exported if the checkpoint has them.
        place: name of the model's configuration, for error messages.
        left_out: name patterns of parameters that are not exported.

    Raises:
        CheckpointError: the parameters of the checkpoint are not those of ``rules``.
    """

    def __init__(
        self,
        checkpoint: WeightReader,
        rules: Sequence[ExportRule],
        dtype: torch.dtype | None,
        place: str,
        left_out: Sequence[str] = (),
    ) -> None:
        _check_names(checkpoint, rules, place, left_out)
        masters = (
            set(checkpoint.parameters(TensorKind.MASTER))
            if dtype in (torch.float32, torch.float64)
            else set()
        )
        self.kinds = {
            rule.ours: TensorKind.MASTER if rule.ours in masters else TensorKind.WEIGHTS
            for rule in rules
        }
        self.checkpoint = checkpoint
        self.rules = rules
        self.planned: list[OutgoingTensor] = []
        """Tensors to write, in the order of the rules."""
        for rule in rules:
            entry = checkpoint.manifest.tensors[self.kinds[rule.ours].of(rule.ours)]
            written = entry.dtype.as_torch if dtype is None or rule.keeps_dtype else dtype
            self.planned += [
                OutgoingTensor(name, shape, written)
                for name, shape in rule.shapes(entry.shape).items()
            ]
        self.num_bytes = sum(each.num_bytes for each in self.planned)

    def dtypes(self) -> list[str]:
        """Return the names of the element types that occur, the one with the most bytes first."""
        sizes = dict.fromkeys(DTYPE_NAMES, 0)
        for each in self.planned:
            sizes[each.dtype] += each.num_bytes
        return [
            DTYPE_NAMES[dtype]
            for dtype in sorted(sizes, key=lambda dtype: -sizes[dtype])
            if sizes[dtype]
        ]

    def write(
        self, directory: Path, shard_bytes: int, on_bytes: OnBytes = ignore_progress
    ) -> dict[str, int]:
        """Write all tensors to safetensors files, with an index if there are several files.

        Args:
            directory: where the files go.
            shard_bytes: tensor bytes per file at most; a single larger tensor gets a file of its
                own.
            on_bytes: progress callback.

        Returns:
            File name -> size in bytes.
        """
        shards: list[list[OutgoingTensor]] = [[]]
        for each in self.planned:
            if (
                shards[-1]
                and sum(other.num_bytes for other in shards[-1]) + each.num_bytes > shard_bytes
            ):
                shards.append([])
            shards[-1].append(each)
        names = [SINGLE]
        if len(shards) > 1:
            names = [
                f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
                for index in range(len(shards))
            ]
            placed = {
                each.name: name for name, shard in zip(names, shards, strict=True) for each in shard
            }
            write_json(
                directory / INDEX,
                {"metadata": {"total_size": self.num_bytes}, "weight_map": placed},
            )
        tensors, done = self._tensors(), 0

        def on_tensor(written: OutgoingTensor) -> None:
            nonlocal done
            done += written.num_bytes
            on_bytes(done, self.num_bytes)

        return {
            name: _write_in_order(directory / name, shard, tensors, on_tensor)
            for name, shard in zip(names, shards, strict=True)
        }

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every transformers tensor in the order of ``planned``,
        reading one meshwright tensor at a time.
        """
        for rule in self.rules:
            kind = self.kinds[rule.ours]
            ours = self.checkpoint.read(kind, rule.info(self.checkpoint.shape(kind, rule.ours)))
            assert ours is not None, rule.ours
            self.checkpoint.close()  # releases the file mappings of this tensor
            yield from rule.split(ours)


def _check_names(
    checkpoint: WeightReader, rules: Sequence[ExportRule], place: str, left_out: Sequence[str]
) -> None:
    expected, saved = {rule.ours for rule in rules}, checkpoint.parameters(TensorKind.WEIGHTS)
    present = {
        name for name in saved if not any(fnmatchcase(name, pattern) for pattern in left_out)
    }
    problems = [f"it has no weights of {name}" for name in sorted(expected - present)]
    problems += [f"that model has no parameter {name}" for name in sorted(present - expected)]
    if problems:
        raise CheckpointError(
            "MW-INTEROP-088",
            f"{checkpoint.path} is not of the model that {place} names: {problems[0]}"
            + (f", and {len(problems) - 1} more" if problems[1:] else ""),
        )


def _write_in_order(
    path: Path,
    planned: Sequence[OutgoingTensor],
    tensors: Iterator[tuple[str, Tensor]],
    on_tensor: Callable[[OutgoingTensor], None],
) -> int:
    """Write one safetensors file from the next ``planned`` tensors of ``tensors``,
    and return its size in bytes.

    The header precedes the data and holds the offset of each tensor, which follows from ``planned``
    alone.
    """
    assert sys.byteorder == "little", "safetensors holds little-endian numbers"
    # Wide elements first, as in the safetensors library: each tensor is then aligned to its own
    # element size.
    start, places = 0, {}
    for each in sorted(planned, key=lambda each: -each.dtype.itemsize):
        places[each.name] = start
        start += each.num_bytes
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for each in sorted(planned, key=lambda each: places[each.name]):
        offsets = [places[each.name], places[each.name] + each.num_bytes]
        header[each.name] = {
            "dtype": HEADER_NAMES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with as_checkpoint_error(path), path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for each in planned:
            name, tensor = next(tensors)
            assert (name, tuple(tensor.shape)) == (each.name, each.shape), (
                name,
                tuple(tensor.shape),
                each,
            )
            file.seek(8 + len(text) + places[name])
            for part in torch.split(tensor.reshape(-1), BYTES_AT_ONCE // each.dtype.itemsize):
                file.write(narrowed(part, each.dtype, each.name).view(torch.uint8).numpy().data)
            on_tensor(each)
    return 8 + len(text) + start


def narrowed(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor in another element type. ``name``: of the tensor, for the error message.

    Raises:
        CheckpointError: a finite number lies beyond the largest one of ``dtype``.
    """
    found = tensor.to(dtype)
    if found.dtype != tensor.dtype and bool((found.isinf() & tensor.isfinite()).any()):
        raise CheckpointError(
            "MW-INTEROP-125",
            f"{name} has numbers up to {float(tensor.abs().max()):.3g}, beyond"
            f" {DTYPE_NAMES[dtype]}, whose largest is {torch.finfo(dtype).max:.3g}: export with"
            " --dtype bfloat16 or float32",
        )
    return found
