"""The peak of memory of every rank, which may differ by stage: ``memory.json``, where metrics.jsonl has that of rank 0.

No torch to read it. Gathered after the first step of each start and whenever the run is saved: one number of each rank.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, model_validator

from meshwright.errors import DataError
from meshwright.mesh.memory import peak_memory_bytes
from meshwright.system.bounded import read_bytes

if TYPE_CHECKING:
    from meshwright.mesh.mesh import Mesh

PEAKS = "memory.json"


class Peaks(BaseModel):
    """The file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["meshwright memory 1"] = "meshwright memory 1"
    step: NonNegativeInt
    """After which they were gathered."""
    device: str
    grid: tuple[PositiveInt, PositiveInt, PositiveInt]
    """pp, dp, tp."""
    peaks: tuple[NonNegativeInt, ...]
    """Bytes of each rank, since it was started."""

    @model_validator(mode="after")
    def _one_for_each_rank(self) -> Peaks:
        pp, dp, tp = self.grid
        if len(self.peaks) != pp * dp * tp:
            raise ValueError(f"{len(self.peaks)} peaks of {pp * dp * tp} ranks")
        return self


def note_peaks(mesh: Mesh, directory: Path, step: int) -> None:
    """Write them down. Every rank calls it; that it cannot be written is no reason not to train."""
    peaks = mesh.world.gather_objects(peak_memory_bytes(mesh.device.type))
    if mesh.rank != 0:
        return
    grid = (mesh.grid.pp, mesh.grid.dp, mesh.grid.tp)
    found = Peaks(step=step, device=mesh.device.type, grid=grid, peaks=tuple(peaks))
    place = directory / PEAKS
    with contextlib.suppress(OSError):
        aside = place.with_name(f"{PEAKS}.part")
        aside.write_text(found.model_dump_json() + "\n")
        aside.replace(place)


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
        raise DataError(f"{place} is damaged ({said}): the next checkpoint writes it anew") from None
