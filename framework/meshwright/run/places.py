"""Places of a run's checkpoints: the run's directory, or a path in an object store.

    checkpoint.directory = ""                      runs/demo/checkpoints/step-00000100
    checkpoint.directory = "s3://bucket/prefix"    s3://bucket/prefix/demo/step-00000100

A run saves to the place that its configuration names now, and resumes from the newest step of that
place and of its own directory: it may move to a store at any start. From a store it moves only with
its checkpoints, see :func:`check_former`.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint import Candidate, find
from meshwright.checkpoint.files import checkpoints_directory
from meshwright.config import RunConfig, read_resolved
from meshwright.errors import CheckpointError, ConfigError, StoreAwayError
from meshwright.run.directory import RESOLVED
from meshwright.system.store import Place, StoreAccess, StoreError, StorePath, parse_place
from meshwright.terminal.output import Warn, print_warning

CHECK_S = 60.0
"""Deadline of each request of :func:`check_store`."""


def store_of(config: RunConfig) -> StorePath | None:
    """Return the path of a run's checkpoints in an object store; None: they lie in its directory.

    Raises:
        ConfigError: ``checkpoint.directory`` is no such path.
    """
    if not config.checkpoint.directory:
        return None
    store = parse_place(config.checkpoint.directory)
    assert isinstance(store, StorePath)  # by the form of the key
    return store / config.run.name


def check_store(place: StorePath, warn: Warn = print_warning) -> None:
    """Check that checkpoints can be written and read there, before any rank exists.

    Raises:
        ConfigError: they cannot.
        StoreAwayError: the store does not answer.
    """
    try:
        StoreAccess(CHECK_S).check(place, warn)
    except OSError as error:
        if isinstance(error, StoreError) and error.is_passing:
            raise StoreAwayError(
                "MW-RUN-074",
                f"checkpoint.directory: {error.filename}: {error.strerror}. Run the same command"
                " again when the store answers",
            ) from None
        raise ConfigError(
            "MW-RUN-069",
            f"checkpoint.directory: {error.filename or place}: {error.strerror}. A run writes, reads"
            " and lists objects there: see docs/checkpoints.md#object-stores",
        ) from None


def saved_places(run: Place) -> list[Place]:
    """Return the places of the checkpoints of a run: that which its last start saved to, and its
    directory. Of a path in a store that path alone.
    """
    if isinstance(run, StorePath):
        return [run]
    try:
        store = store_of(read_resolved(run / RESOLVED))
    except ConfigError:  # never started, or by a later version
        store = None
    return [run] if store is None else [store, run]


def find_in(places: list[Place]) -> list[Candidate]:
    """Return the checkpoints of all places, newest first; of equal steps that of the first place.

    Raises:
        UnreadableError: a place cannot be read.
    """
    found = [
        (-each.step, index, each) for index, place in enumerate(places) for each in find(place)
    ]
    return [each for _, _, each in sorted(found, key=lambda row: row[:2])]


def find_own(config: RunConfig, directory: Path) -> list[Candidate]:
    """Return the checkpoints that a run may resume from, newest first.

    Raises:
        UnreadableError: a place cannot be read.
        CheckpointError: newer ones are in a store that the run does not name any more.
    """
    store = store_of(config)
    found = find_in([directory] if store is None else [store, directory])
    check_former(config, directory, max((each.step for each in found), default=-1))
    return found


def check_former(config: RunConfig, directory: Path, newest: int) -> None:
    """Check that the store of the run's last start, if it was another one, has no step after
    ``newest``: they would be lost without a word.

    Raises:
        CheckpointError: it has.
    """
    former, now = saved_places(directory)[0], store_of(config) or directory
    if not isinstance(former, StorePath) or former == now:
        return
    later = next((each for each in find(former) if each.step > newest), None)
    if later is None:
        return
    target = checkpoints_directory(now)
    raise CheckpointError(
        "MW-RUN-070",
        f"{later.path} is newer than every checkpoint in {target}, and the run saved there before:"
        f" copy it (aws s3 cp --recursive {later.path} {target / later.path.name}), or give"
        f" --checkpoint.directory={former.parent}. To leave it, move {directory / RESOLVED} away",
    )


def find_steps(directory: Path) -> frozenset[int]:
    """Return the steps of a run's checkpoints, damaged ones too. A store that is away has none."""
    steps: set[int] = set()
    for place in saved_places(directory):
        try:
            steps |= {each.step for each in find(place)}
        except CheckpointError as error:
            if not isinstance(error.__cause__, StoreError):
                raise
    return frozenset(steps)
