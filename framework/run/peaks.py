"""Peak memory of every rank in ``memory.json``; it differs by stage, and metrics.jsonl has that of rank 0 alone.

Reading needs no torch. Gathered after the first step of each start and at each checkpoint: one number per rank.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, model_validator

from meshwright.errors import DataError
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import read_bytes

if TYPE_CHECKING:
    from meshwright.mesh.mesh import Mesh

PEAKS = "memory.json"


class Peaks(BaseModel):
    """Contents of ``memory.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["meshwright memory 1"] = "meshwright memory 1"
    step: NonNegativeInt
    """Step after which the peaks were gathered."""
    device: str
    grid: tuple[PositiveInt, PositiveInt, PositiveInt]
    """Degrees (pp, dp, tp)."""
    peaks: tuple[NonNegativeInt, ...]
    """Peak bytes of each rank since its start."""

    @model_validator(mode="after")
    def _one_for_each_rank(self) -> Peaks:
        pp, dp, tp = self.grid
        if len(self.peaks) != pp * dp * tp:
            raise ValueError(f"{len(self.peaks)} peaks of {pp * dp * tp} ranks")
        return self


def note_peaks(mesh: Mesh, directory: Path, step: int) -> None:
    """Gather the peak memory of all ranks and write the file on rank 0. Collective over all ranks; blocks.

    Errors of writing are ignored, so they never stop the training.
    """
    peaks = mesh.world.gather_objects(mesh.peak_memory_bytes())
    if mesh.rank != 0:
        return
    grid = (mesh.grid.pp, mesh.grid.dp, mesh.grid.tp)
    found = Peaks(step=step, device=mesh.device.type, grid=grid, peaks=tuple(peaks))
    place = directory / PEAKS
    with contextlib.suppress(OSError):
        write_atomic(place, found.model_dump_json() + "\n", is_durable=False)


def read_peaks(run: Path) -> Peaks | None:
    """Read the peaks of a run; None: none were gathered yet.

    Raises:
        DataError: the file is damaged.
    """
    place = run / PEAKS
    try:
        return Peaks.model_validate_json(read_bytes(place))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise DataError("MW-RUN-015", f"{place} is damaged ({said}): the next checkpoint writes it anew") from None
