"""Files of recorded routing: one safetensors file for each step,
with the expert ids of each router. No pickle.

    step-00000012.safetensors
        "block0.mlp.router"    (G, S, k)    row i: sample i of the step's global batch, S tokens in their order

An id e is an expert; E + e is expert e that dropped the token, because it was at capacity; -1
leaves the choice to the router. Files written here are uint8 where ids fit, else int16 or int32;
uint8 and int8 .. int64 are read. The metadata hold a fingerprint of the run. A file without one is
accepted by any run whose shapes it fits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.errors import ConfigError
from meshwright.system.atomic import make_directory_synced, replacing
from meshwright.system.bounded import open_regular, parse_json

FORMAT = "meshwright-routing-1"
DTYPES = {torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32"}
READ = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LARGEST = {torch.uint8: 255, torch.int16: 2**15 - 1}

Fingerprint = Mapping[str, str | int]
"""Facts of a run that decide which tokens its routers get, by name."""


def fingerprint_of(
    builder: str,
    options: Mapping[str, Any],
    data: Mapping[str, str],
    seed: int,
    sequence_length: int,
) -> dict[str, str | int]:
    """Return a run's fingerprint, to which each step adds its samples. ``data``:
    hashes of the corpus by name.
    """
    return {
        "model.builder": builder,
        "model.options": _digest(options),
        "data": _digest(data),
        "run.seed": seed,
        "data.sequence_length": sequence_length,
    }


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def compact_dtype(num_ids: int) -> torch.dtype:
    """Return the smallest dtype, of those written to files, that holds ids below ``num_ids``."""
    return next(
        (dtype for dtype, largest in LARGEST.items() if num_ids - 1 <= largest), torch.int32
    )


class TableShape(NamedTuple):
    """Dtype and shape (G, S, k) of the ids of one router."""

    dtype: torch.dtype
    shape: tuple[int, int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of the ids."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_file(
    path: Path, shapes: Mapping[str, TableShape], tables: Iterable[Tensor], fingerprint: Fingerprint
) -> None:
    """Write the ids of a step's routers, in the order of ``shapes``, one table in memory at a time.

    The file is not synced: a run syncs those of all steps at once, before each checkpoint.

    Raises:
        OSError: it cannot be written.
    """
    header: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "fingerprint": json.dumps(fingerprint)}
    }
    start = 0
    for name, each in shapes.items():
        stop = start + each.num_bytes
        header[name] = {
            "dtype": DTYPES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    make_directory_synced(path.parent)
    with replacing(path, is_durable=False) as aside, aside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for table in tables:
            file.write(table.contiguous().view(torch.uint8).numpy().data)


class RoutingFile:
    """Recorded routing of one step, open for reading."""

    def __init__(self, path: Path, fingerprint: Fingerprint | None = None) -> None:
        """Open a file and check its fingerprint. ``fingerprint``: of this run's step; None:
        no check.

        Raises:
            ConfigError: it cannot be read, or is of another model, corpus, seed or batch.
        """
        self.path = path
        try:
            open_regular(path).close()  # no FIFO, which would block
            self._file = _opened(path)
            metadata = self._file.metadata() or {}
            found = parse_json(metadata.get("fingerprint", "{}"))
        except (OSError, SafetensorError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ConfigError(
                "MW-EP-005",
                f"{path}: no routing can be read ({why}): record it by `--routing record`, and name"
                " its directory as train.routing_directory",
            ) from None
        self._check(found if isinstance(found, dict) else {}, fingerprint or {})

    def _check(self, found: Mapping[str, Any], expected: Fingerprint) -> None:
        if not found:
            return
        different = [
            f"{name} is {expected[name]}, the file's {found.get(name)}"
            for name in expected
            if found.get(name) != expected[name]
        ]
        if different:
            raise ConfigError(
                "MW-EP-006",
                f"{self.path} is a routing of another run: {'; '.join(different)}. Replay it with"
                " the configuration that recorded it",
            )

    @property
    def names(self) -> list[str]:
        """Names of the routers."""
        return list(self._file.keys())

    def read(self, name: str, rows: Sequence[int], shape: tuple[int, int], num_ids: int) -> Tensor:
        """Return the ids of samples ``rows`` of the step, (len(rows), S, k)
        int64 below ``num_ids``. ``shape``: (S, k).

        Raises:
            ConfigError: the file lacks this router or these samples, or its ids have another shape,
                type or range.
        """
        if name not in self.names:
            raise self._misfit(f"has no tensor {name!r}, one of the model's routers")
        table = self._file.get_slice(name)
        found = tuple(table.get_shape())
        if len(found) != 3 or found[1:] != shape or not all(0 <= row < found[0] for row in rows):
            samples = f"{max(rows, default=0) + 1} samples or more"
            raise self._misfit(
                f"has {list(found)} ids of {name}, not ({samples}, {shape[0]} tokens, {shape[1]}"
                " experts)"
            )
        runs = _runs(rows)
        ids = (
            torch.cat([table[start:stop] for start, stop in runs])
            if runs
            else torch.empty(0, *shape, dtype=torch.int64)
        )
        if ids.dtype not in READ:
            raise self._misfit(
                f"holds {str(ids.dtype).removeprefix('torch.')} for {name}, not integers"
            )
        ids = ids.to(torch.int64)
        if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < num_ids:
            raise self._misfit(
                f"has ids from {int(ids.min())} to {int(ids.max())} for {name}, not below {num_ids}"
            )
        return ids

    def table(self, name: str) -> Tensor:
        """Return all ids of a router, (G, S, k), as they are stored."""
        found: Tensor = self._file.get_tensor(name)
        return found

    def _misfit(self, what: str) -> ConfigError:
        return ConfigError(
            "MW-EP-007",
            f'{self.path} {what}: see docs/mixture-of-experts.md, "Routing as data", for its form',
        )


def _opened(path: Path) -> Any:
    return safe_open(path, framework="pt", device="cpu")


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers, each as (start, stop)."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


class OtherRouting(NamedTuple):
    """Number of one router's tokens in one step whose experts differ between two files."""

    router: str
    num_tokens: int
    num_all: int
    first: tuple[int, int]
    """Sample of the global batch and position of the first of them."""


def compare_files(ours: Path, theirs: Path) -> Iterator[OtherRouting]:
    """Yield the routers whose experts differ between two files.
    The order of a token's experts does not count.
    """
    mine, reference = RoutingFile(ours), RoutingFile(theirs)
    for name in reference.names:
        a, b = mine.table(name).to(torch.int64), reference.table(name).to(torch.int64)
        differs = (a.sort(-1).values != b.sort(-1).values).any(-1)
        if differs.any():
            sample, place = differs.nonzero()[0].tolist()
            yield OtherRouting(name, int(differs.sum()), differs.numel(), (sample, place))
