"""Export of a checkpoint to PyTorch's distributed checkpoint format (DCP), by parameter name,
as torchtitan has them.

    weights/block0.norm.weight, any layout  ->  block0.norm.weight, one whole tensor in __0_0.distcp
                                                .metadata: names, shapes, dtypes, offsets (a pickle,
                                                    as DCP defines it)

A model in plain torch loads it under its own parameter names. DCP writes the files. The planner
hands it one tensor of the checkpoint after the other, so that one is in memory at a time.

There is no import: DCP's ``.metadata`` and every tensor in its files are pickles, which can run
code when loaded.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright.checkpoint import CheckpointReader, TensorKind, open_checkpoint
from meshwright.errors import CheckpointError
from meshwright.parameters import ParameterInfo
from meshwright.system.store import Place
from meshwright_interop.huggingface.destination import (
    OnBytes,
    check_output_directory,
    ignore_progress,
    published_directory,
)

FILE_BYTES = 4096
"""Estimated bytes per tensor besides its elements: its header in the file,
and its part of the metadata.
"""


class DcpExport(NamedTuple):
    """Result of an export."""

    path: Path
    kind: str
    num_tensors: int
    files: dict[str, int]
    """File name -> size in bytes."""


class _Tensors(DefaultSavePlanner):
    """Planner that reads each tensor from the checkpoint when DCP writes it."""

    def __init__(
        self, checkpoint: CheckpointReader, kind: TensorKind, num_bytes: int, on_bytes: OnBytes
    ) -> None:
        super().__init__()
        self.checkpoint, self.kind = checkpoint, kind
        self.num_bytes, self.done, self.on_bytes = num_bytes, 0, on_bytes

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Read one whole tensor, and release the file mappings."""
        shape = self.checkpoint.shape(self.kind, index.fqn)
        tensor = self.checkpoint.read(self.kind, ParameterInfo(index.fqn, shape))
        assert tensor is not None, index.fqn
        self.checkpoint.close()
        self.done += tensor.nbytes
        self.on_bytes(self.done, self.num_bytes)
        return tensor


def export_dcp(
    source: Place, out: Path, *, kind: str = "weights", on_bytes: OnBytes = ignore_progress
) -> DcpExport:
    """Export the tensors of one kind as a DCP directory.

    Args:
        source: a checkpoint.
        out: the directory to write, new or empty.
        kind: tensors to export: weights, master (float32 weights of a bfloat16 run), or a
            callback's, such as ema.
        on_bytes: progress callback.

    Raises:
        CheckpointError: the checkpoint is damaged or has no such tensors, or the files cannot be
            written.
    """
    out = check_output_directory(out)
    with _open_verified(source) as checkpoint:
        kinds = checkpoint.kinds()
        if kind not in kinds:
            raise CheckpointError(
                "MW-INTEROP-095",
                f"{source} has no tensors {kind!r} to export: it has {', '.join(sorted(kinds))}",
            )
        chosen = TensorKind(kind)
        names = checkpoint.parameters(chosen)
        tensors = checkpoint.manifest.tensors
        planned = {name: _unread(tensors[chosen.of(name)]) for name in names}
        num_bytes = sum(
            math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in planned.values()
        )
        space = num_bytes + FILE_BYTES * len(planned)
        with published_directory(out, space) as temporary, warnings.catch_warnings():
            # one process is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(
                planned,
                storage_writer=FileSystemWriter(temporary, thread_count=1, overwrite=False),
                planner=_Tensors(checkpoint, chosen, num_bytes, on_bytes),
                no_dist=True,
            )
            files = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
    return DcpExport(out, kind, len(planned), files)


def _open_verified(source: Place) -> CheckpointReader:
    """Open a checkpoint and verify all its bytes before any write."""
    try:
        checkpoint = open_checkpoint(source)
        checkpoint.verify()
    except CheckpointError as error:
        raise CheckpointError(
            "MW-INTEROP-099",
            f"{error.message}\nno export; choose another checkpoint (--step), or restore the file"
            " from a copy",
        ) from None
    return checkpoint


def _unread(entry: Any) -> Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype.as_torch, device="meta")
