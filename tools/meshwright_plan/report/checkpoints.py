"""Checkpoints of a run as their manifests describe them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.system.bounded import (
    MAX_MANIFEST_BYTES,
    parse_json,
    read_bytes,
)
from meshwright.terminal.format import format_gib
from meshwright.tracking.record import MAX_COUNT

MAX_SAVED_AT_S = 2**37
"""Upper limit of the time of saving, as in checkpoint/manifest.py;
``time.localtime`` accepts all times below it.
"""


class CheckpointInfo(NamedTuple):
    """A checkpoint, as described by its manifest alone; its data files are not read."""

    step: int
    samples_seen: int
    layout: str
    size: int
    """Size of its files, in bytes."""
    parameters: int
    """Number of weight elements."""
    at_s: float
    """Time of saving, in seconds since 1970."""

    def cells(self, clock: Callable[[float], str]) -> tuple[str, ...]:
        """Return the cells of its row on the page. ``clock``: text of a time."""
        return (
            f"{self.step:,}",
            clock(self.at_s),
            self.layout,
            f"{self.samples_seen:,}",
            format_gib(self.size),
        )


def read_checkpoints(directory: Path, remarks: list[str]) -> tuple[CheckpointInfo, ...]:
    """Read the manifests of a run, oldest first. A damaged checkpoint becomes a remark."""
    found = []
    for path in sorted(directory.glob("step-*")) if directory.is_dir() else ():
        manifest = path / "manifest.json"
        try:
            tree = parse_json(read_bytes(manifest, MAX_MANIFEST_BYTES))
            shapes = [
                each["shape"]
                for name, each in tree["tensors"].items()
                if name.startswith("weights/")
            ]
            parallel = tree["config"]["parallel"]
            saved = CheckpointInfo(
                _count(tree["step"]),
                _count(tree["samples_seen"]),
                " ".join(
                    f"{axis}{parallel[axis]}"
                    for axis in ("pp", "dp", "tp", *["cp"] * (parallel.get("cp", 1) != 1))
                ),
                _count(sum(_count(file["size"]) for file in tree["files"].values())),
                _count(sum(map(_num_elements, shapes))),
                _saved_at_s(tree, manifest),
            )
        except FileNotFoundError:
            remarks.append(f"{path} has no manifest.json: it is ignored")
        except (OSError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError) as error:
            remarks.append(
                f"{manifest} is damaged ({type(error).__name__}); `meshwright checkpoint verify`"
                " lists the damage"
            )
        else:
            found.append(saved)
            missing = [name for name in tree["files"] if not (path / name).is_file()]
            if missing:
                remarks.append(f"{path} lacks {', '.join(missing[:3])}: it is damaged")
    return tuple(sorted(found))


def _count(value: object) -> int:
    """Return a count of a manifest; a larger one than any run has is damage."""
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise ValueError("no count")
    return value


def _num_elements(shape: list[object]) -> int:
    """Return the product of a shape, checked at each factor: a long list has a huge product."""
    product = 1
    for size in shape:
        product = _count(product * _count(size))
    return product


def _saved_at_s(tree: dict[str, Any], manifest: Path) -> float:
    """Return the time in the manifest; older manifests have none: then the file's mtime,
    which a copy may change.
    """
    saved_at_s = tree.get("saved_at_s")
    if saved_at_s is None:
        return manifest.stat().st_mtime
    if not 0 <= saved_at_s < MAX_SAVED_AT_S:
        raise ValueError(f"saved_at_s = {saved_at_s}")
    return float(saved_at_s)
