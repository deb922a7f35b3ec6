"""Callbacks of the user: observers named in ``train.callbacks``, or passed by a script.

    after_step    each callback -> all ranks agree whether one has raised -> the checkpoint of the step, if due -> raise

A callback that raises on one rank would leave the others in their next collective. The ranks
therefore agree on errors after each step, save what is due, and end together with the message of
the first rank that failed.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from meshwright.config import Train
from meshwright.config.functions import error_place, find_function
from meshwright.data.sources import StreamSource
from meshwright.errors import CallbackError, ConfigError, reason_of
from meshwright.parts import NOT_MIRRORED, Observer, Parts, StepEvent
from meshwright.system.bounded import parse_json
from meshwright.terminal.output import tell
from meshwright.tracking.record import MAX_EXTRA, is_extra_name

MAX_STATE_CHARS = 2**16
"""Largest state of a callback, in characters of JSON."""


def find_callbacks(train: Train) -> list[Callable[[Parts], Observer]]:
    """Import the functions of ``train.callbacks``;
    each takes the parts of a rank and returns an observer.

    Raises:
        ConfigError: a module or function does not exist, or its import fails.
    """
    wanted = (
        "a function (parts) -> Observer, or an Observer class whose constructor takes the parts"
    )
    return [find_function(path, "train.callbacks", wanted, ConfigError) for path in train.callbacks]


def make_callbacks(parts: Parts) -> list[Observer]:
    """Call the functions of ``train.callbacks`` and return their observers,
    in the order of the configuration.

    Raises:
        ConfigError: a function raises, or returns something other than an observer.
    """
    made: list[Observer] = []
    for path, function in zip(
        parts.config.train.callbacks, find_callbacks(parts.config.train), strict=True
    ):
        try:
            observer = function(parts)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ConfigError(
                "MW-LAUNCH-056",
                f"train.callbacks: {path} failed{error_place(error)}: {reason_of(error)}",
            ) from error
        if not isinstance(observer, Observer):
            raise ConfigError(
                "MW-LAUNCH-057",
                f"train.callbacks: {path} returned a {type(observer).__name__}: return an object of"
                " a class derived from meshwright.Observer",
            )
        made.append(observer)
    return made


def find_problem(metrics: Mapping[Any, Any]) -> str | None:
    """Return the reason why metrics of callbacks cannot be recorded, or None."""
    count = sum(not str(name).startswith("model/") for name in metrics)
    if count > MAX_EXTRA:
        return f"event.metrics has {count:,} numbers: record at most {MAX_EXTRA} a step"
    for name, value in metrics.items():
        if not is_extra_name(name):
            return (
                f"event.metrics[{repr(name)[:120]}]: a name has letters, digits, _, - and ., parts"
                " separated by /, at "
                f"most 100 characters, and is none of meshwright's own: call it"
                f' "evaluation/accuracy", for example'
            )
        if isinstance(value, bool) or not isinstance(value, Real) or not _is_finite(value):
            return (
                f"event.metrics[{name!r}] is {repr(value)[:60]}: record a finite int or float"
                " (.item() of a tensor)"
            )
    return None


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False


class Callbacks(Observer):
    """All observers of the user as one. Every rank has the same ones in the same order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = list(observers)
        self._problem: str | None = None
        """Error of a callback on this rank."""
        self._agreed: str | None = None
        """The first error on any rank; the same on all ranks."""
        names = [_name(each) for each in self.observers]
        self.names = [
            f"{name}-{number}" if (number := names[: at + 1].count(name)) > 1 else name
            for at, name in enumerate(names)
        ]
        """Names of the observers' states in a checkpoint."""

    def setup(self, parts: Parts) -> None:
        """Run ``setup`` of each callback, before a checkpoint is loaded. Collective over all ranks;
        blocks.

        Raises:
            CallbackError: on every rank; a callback has failed on some rank.
        """
        self._call("setup", parts, lambda each: each.setup(parts))
        self._agree(parts)
        self.raise_error()

    def load(self, parts: Parts) -> None:
        """Run ``load_state_dict`` of each callback with a state in the checkpoint.
        Collective over all ranks; blocks.

        Raises:
            CallbackError: on every rank; a callback has failed on some rank.
        """
        name_of = dict(zip(map(id, self.observers), self.names, strict=True))
        self._call(
            "load_state_dict",
            parts,
            lambda each: _load(each, parts.state.callbacks.get(name_of[id(each)])),
        )
        self._agree(parts)
        self.raise_error()

    def before_step(self, parts: Parts) -> None:
        """Run ``before_step`` of each callback, after the mirror of the step before: a callback may
        change what its thread copies.
        """
        if any(type(each).before_step is not Observer.before_step for each in self.observers):
            parts.flags[NOT_MIRRORED]()
        self._call("before_step", parts, lambda each: each.before_step(parts))

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Run ``after_step`` of each callback; then agree on errors. Collective over all ranks;
        blocks.
        """
        self._call("after_step", parts, lambda each: self._after_step(each, parts, event))
        if self._problem is not None:
            event.metrics = {}  # the record of the step is still written
        states: list[Mapping[str, Any]] = []
        self._call("state_dict", parts, lambda each: states.append(_as_json(each.state_dict())))
        if self._problem is None:  # otherwise those of the step before are saved
            parts.state.callbacks = {
                name: state for name, state in zip(self.names, states, strict=True) if state
            }
        self._agree(parts)

    def after_training(self, parts: Parts) -> None:
        """Run ``after_training`` of each callback; then agree on errors. Collective over all ranks;
        blocks.
        """
        self._call("after_training", parts, lambda each: each.after_training(parts))
        self._agree(parts)

    def on_error(self, parts: Parts, error: Exception) -> None:
        """Run ``on_error`` of each callback; print what they raise,
        since the run ends by ``error``.
        """
        for each in self.observers:
            try:
                each.on_error(parts, error)
            except KeyboardInterrupt:
                raise
            except BaseException as other:
                tell(f"callback {_name(each)}: on_error failed: {reason_of(other)}")

    def raise_error(self) -> None:
        """Raise :class:`CallbackError` on every rank if a callback has failed on some rank."""
        if self._agreed is not None:
            raise CallbackError("MW-LAUNCH-058", self._agreed)

    def _call(self, hook: str, parts: Parts, call: Callable[[Observer], None]) -> None:
        """Call one hook of each callback until one raises;
        each is an activity of the rank in the watchdog's report.
        """
        for each in self.observers:
            if self._problem is not None:
                return
            try:
                with parts.mesh.activity.during(f"callback {_name(each)}.{hook}"):
                    call(each)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                tell("".join(traceback.format_exception(error)))
                self._problem = (
                    f"callback {_name(each)}.{hook} failed after step {parts.state.step} on rank"
                    f" {parts.mesh.rank}{error_place(error)}: {reason_of(error)}"
                )

    def _after_step(self, each: Observer, parts: Parts, event: StepEvent) -> None:
        """Run one callback, and check the metrics that it has added."""
        each.after_step(parts, event)
        if problem := find_problem(event.metrics):
            self._problem = (
                f"callback {_name(each)}.after_step, step {parts.state.step}, rank"
                f" {parts.mesh.rank}: {problem}"
            )

    def _agree(self, parts: Parts) -> None:
        """Set ``_agreed`` if a callback has failed on any rank. All-reduces one number;
        a failure gathers texts too.
        """
        mesh = parts.mesh
        failed = torch.tensor(
            [float(self._problem is not None)], dtype=torch.float64, device=mesh.device
        )
        mesh.world.all_reduce(failed).wait()
        if failed.item():
            problems = mesh.world.gather_objects(self._problem)
            self._agreed = next(problem for problem in problems if problem is not None)


class StreamState(Observer):
    """Position in a stream of samples, saved in a checkpoint as the state of a callback.

    Only rank 0 keeps it: rank 0 reads samples on any layout, and writes the manifest. It is taken
    in steps that save. A checkpoint outside of these has an older position, from which the stream
    reads forward.
    """

    def __init__(self, source: StreamSource, rank: int) -> None:
        self._source, self._rank = source, rank
        self._state: Mapping[str, Any] = {}

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Store the position after the samples of a step that saves;
        on rank 0 the source reads up to it.
        """
        if event.is_saving and self._rank == 0:
            self._state = self._source.state_at(parts.state.samples_seen)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position; {} on ranks other than 0."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position from a checkpoint."""
        self._source.restore(state)
        self._state = state if self._rank == 0 else {}


class CallbackErrors(Observer):
    """Observer that ends the run on every rank after a callback has failed;
    runs after the observer that saves.
    """

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Raise :class:`CallbackError` on every rank if a callback has failed."""
        self._callbacks.raise_error()

    def after_training(self, parts: Parts) -> None:
        """Raise :class:`CallbackError` on every rank if a callback has failed."""
        self._callbacks.raise_error()


def _load(observer: Observer, state: Mapping[str, Any] | None) -> None:
    if state is not None:
        observer.load_state_dict(state)


def _as_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a callback's state as a checkpoint will return it; ValueError if it is no JSON object,
    or too large.
    """
    try:
        text = json.dumps(dict(state), allow_nan=False, ensure_ascii=False)
        table = parse_json(b"[[[" + text.encode() + b"]]]")[0][0][0]  # as deep as in a manifest
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the state is no plain JSON object: {error}") from error
    if len(text) > MAX_STATE_CHARS:
        raise ValueError(
            f"a state of {len(text):,} characters as JSON, at most {MAX_STATE_CHARS:,}: see"
            " Parts.add_state"
        )
    return dict(table)


def _name(observer: Observer) -> str:
    return type(observer).__name__
