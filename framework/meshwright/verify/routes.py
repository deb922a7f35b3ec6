"""Expert choices in verify: the plain run's are recorded,
and layouts are compared with them or replay them.

record     every run chooses by itself; a layout's choices are compared with the plain run's
replay     every run takes the choices of the plain run (or of a directory), so that rounding changes no choice
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.blueprint import Blueprint
from meshwright.data.sources import data_fingerprint, open_sources
from meshwright.expert_parallel.routing import NO_ROUTING, RoutingPlan
from meshwright.expert_parallel.routing_file import Fingerprint, compare_files, fingerprint_of
from meshwright.tracking.observer import check_model


def validation_key(step: int, batch: int) -> str:
    """Return the file name of the validation after ``step``, on global batch ``batch``."""
    return f"validation-{step:08d}-batch-{batch:08d}"


class Routes:
    """Recordings of one verification.

    Args:
        mode: "record" or "replay".
        directory: where the plain run's recording lies, or is written; None: a temporary directory.
        fingerprint: that of the plain run, and so of every layout.
    """

    def __init__(self, mode: str, directory: Path | None, fingerprint: Fingerprint) -> None:
        self.mode = mode
        self.fingerprint = fingerprint
        self._given = directory
        self._temporary = tempfile.TemporaryDirectory(prefix="meshwright-routing-")

    def _of_plain(self, micro_batch_size: int) -> Path:
        """Return the plain run's directory, one per micro-batch size (above 1 only
        if samples depend on each other).
        """
        given = self._given or Path(self._temporary.name) / "plain"
        return given if micro_batch_size == 1 else given / f"mbs{micro_batch_size}"

    def of_reference(self, micro_batch_size: int) -> RoutingPlan:
        """Return the plan of the plain run: a record, or the replay of a given directory."""
        place = self._of_plain(micro_batch_size)
        is_given = self.mode == "replay" and self._given is not None
        if is_given:
            return RoutingPlan(replay=place, fingerprint=self.fingerprint)
        return RoutingPlan(record=place, fingerprint=self.fingerprint)

    def of_rounding(self, micro_batch_size: int) -> RoutingPlan:
        """Return the plan of layouts and rounding runs: in a replay the plain run's choices,
        otherwise none.
        """
        place = self._of_plain(micro_batch_size)
        if self.mode == "replay":
            return RoutingPlan(replay=place, fingerprint=self.fingerprint)
        return NO_ROUTING

    def difference(self, record: Path | None, micro_batch_size: int) -> str:
        """Compare a layout's ``record`` with the plain run's;
        describe the tokens with other experts, "" for none.
        """
        if record is None:
            return ""
        place = self._of_plain(micro_batch_size)
        found = [
            (file.stem, other)
            for file in sorted(place.glob("step-*.safetensors"))
            for other in compare_files(record / file.name, file)
        ]
        if not found:
            return ""
        key, first = found[0]
        total, (sample, position) = sum(other.num_tokens for _, other in found), first.first
        return (
            f"{total} tokens have other experts than in the plain run, first in step"
            f" {int(key.partition('-')[2])}: {first.num_tokens} of {first.num_all} tokens in"
            f" {first.router}, the first of them position {position} of sample {sample} of the"
            " batch"
        )


def open_routes(
    blueprint: Blueprint, mode: str | None, directory: Path | None, random_tokens: bool
) -> Routes | None:
    """Open the recordings of a verification; None without a mode.

    Raises:
        ConfigError: the model's routers cannot be recorded.
    """
    if mode is None:
        return None
    check_model(blueprint)
    config = blueprint.config
    if random_tokens:
        data = {"tokens": "random"}
    else:
        data = data_fingerprint(open_sources(config)[0])
    model, length = config.model, config.data.sequence_length
    fingerprint = fingerprint_of(model.builder, model.options, data, config.run.seed, length)
    return Routes(mode, directory, fingerprint)


@contextmanager
def of_layout(routes: Routes | None, micro_batch_size: int) -> Iterator[RoutingPlan]:
    """Yield the routing plan of one layout; its recording is deleted after the block."""
    if routes is None:
        yield NO_ROUTING
    elif routes.mode == "replay":
        yield routes.of_rounding(micro_batch_size)
    else:
        with tempfile.TemporaryDirectory(prefix="meshwright-routing-") as own:
            yield RoutingPlan(record=Path(own), fingerprint=routes.fingerprint)
