"""Manifest of a checkpoint: its fields and its text. `check` reads it back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field

FORMAT: Final = "meshwright-checkpoint"
VERSION: Final = 1
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"

Count = Annotated[int, Field(ge=0, lt=2**60)]
"""A number of elements or bytes."""
Int64 = Annotated[int, Field(ge=0, lt=2**63)]
"""A whole number; the bound is at least any bound of the configuration, see [bounds of whole
numbers] in framework/meshwright/config/bounds.py.
"""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors$")]
"""A plain file name: no separator and no leading dot,
so that no piece lies outside its checkpoint.
"""


KIND = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
"""Names of kinds of tensors."""


class TensorKind(str):
    """Role of a tensor for its parameter, the first part of the tensor's name: weights,
    master weights, or a state.

    The states are those of the optimizer (exp_avg, exp_avg_sq, momentum, those of a user's
    optimizer) and of callbacks.
    """

    WEIGHTS: ClassVar[TensorKind]
    MASTER: ClassVar[TensorKind]

    def __new__(cls, name: str) -> TensorKind:
        """Return the kind of this name. Raises ValueError: it is no identifier."""
        if not KIND.fullmatch(name):
            raise ValueError(f"{name!r} is no kind of tensor")
        return super().__new__(cls, name)

    def of(self, parameter: str) -> str:
        """Return the name of the tensor in manifest and shards."""
        return f"{self}/{parameter}"


TensorKind.WEIGHTS, TensorKind.MASTER = TensorKind("weights"), TensorKind("master")


class Dtype(StrEnum):
    """Element type of a saved tensor, with its name in safetensors."""

    F64 = "F64"
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    I64 = "I64"
    I32 = "I32"
    U8 = "U8"

    @property
    def as_torch(self) -> torch.dtype:
        """The torch dtype."""
        return _TORCH[self]

    @classmethod
    def of(cls, dtype: torch.dtype) -> Dtype | None:
        """Return the element type of a torch dtype; None: a checkpoint cannot hold it."""
        return next((own for own, other in _TORCH.items() if other == dtype), None)


_TORCH = {
    Dtype.F64: torch.float64,
    Dtype.F32: torch.float32,
    Dtype.F16: torch.float16,
    Dtype.BF16: torch.bfloat16,
    Dtype.I64: torch.int64,
    Dtype.I32: torch.int32,
    Dtype.U8: torch.uint8,
}


class CheckpointMetadata(NamedTuple):
    """Metadata of a checkpoint besides its tensors; all of it plain JSON."""

    step: int
    samples_seen: int
    seed: int
    config: Mapping[str, Any]
    """Resolved configuration: ``RunConfig.model_dump(mode="json")``."""
    data_fingerprint: Mapping[str, str]
    """Fingerprints that must not change in a resumed run, by name: ``{"train": "...", "tokenizer":
    "..."}``.
    """
    state: Mapping[str, Any]
    """Scalar state, such as the optimizer's step count."""


class StrictModel(BaseModel):
    """Base of the frozen parts of the JSON: no unknown keys, no numbers given as text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PieceEntry(StrictModel):
    """One piece of a tensor: the box ``[offset, offset + shape)``,
    and the file and key of its values.
    """

    file: FileName
    key: str
    offset: tuple[Count, ...]
    shape: tuple[Count, ...]


class TensorEntry(StrictModel):
    """One tensor of the model: global shape (no padding), dtype, pieces."""

    shape: tuple[Count, ...]
    dtype: Dtype
    pieces: tuple[PieceEntry, ...]


class FileEntry(StrictModel):
    """One file of a shard."""

    size: Count
    """Bytes."""
    sha256: Digest


class Manifest(StrictModel):
    """The whole manifest. ``version`` increases when an older reader could misinterpret a newer
    checkpoint.
    """

    format: Literal["meshwright-checkpoint"]
    version: Literal[1]
    step: Int64
    samples_seen: Int64
    seed: Int64
    saved_at_s: Annotated[int, Field(ge=0, lt=2**37)] | None = None
    """Time of publication on rank 0's clock, in seconds since 1970; None:
    an earlier version saved it.
    """
    config: dict[str, Any]
    data_fingerprint: dict[str, str]
    versions: dict[str, str]
    state: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[FileName, FileEntry]


def render(manifest: Manifest) -> bytes:
    """Render the manifest as JSON with a line per tensor and per file, suited for ``diff``."""
    data = manifest.model_dump(mode="json")
    lines = []
    for key, value in data.items():
        if key in ("tensors", "files") and value:
            inner = [f"  {_json(name)}: {_json(item)}" for name, item in sorted(value.items())]
            lines.append(f" {_json(key)}: {{\n" + ",\n".join(inner) + "\n }")
        else:
            lines.append(f" {_json(key)}: {_json(value)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def render_sums(manifest_sha256: str, files: Mapping[str, FileEntry]) -> bytes:
    """Render SHA256SUMS in the format of ``sha256sum -c``. The manifest comes first,
    because it lists the others.
    """
    lines = [f"{manifest_sha256}  {MANIFEST}\n"]
    lines += [f"{file.sha256}  {name}\n" for name, file in sorted(files.items())]
    return "".join(lines).encode()


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
