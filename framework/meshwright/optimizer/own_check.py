"""Checks of a user's optimizer while it trains: on the real shards, at steps long after its trial.

In a checked step a small part of each shard, cut anywhere, is copied with its gradient and its
states. After the step a new optimizer takes over the copies, as after a checkpoint on another
layout, and steps them, as matrices. Weights and states must then be those of the shard. So what
begins after a warm-up is seen: updates that are not element-wise any more, rules by the dims of a
parameter, random numbers, and state that no checkpoint holds.

Checked are the steps 1, 2, 4, 8, ..., each step that is saved, and the first one after a save and
after a start. All ranks check the same steps, exchange what they found, and raise the same error.

The copies are also stepped with gradients changed by the root of the dtype's eps (3.5e-4 in
float32), because rounding may decide an update. So a difference below about 5e-4 of an update in
float32 is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.errors import ConfigError, reason_of
from meshwright.mesh.comm import Group
from meshwright.optimizer.own import Groups, build_own, not_saved, set_rate
from meshwright.optimizer.own_states import OwnStates, StateNumber, UnknownStateError, find_states
from meshwright.optimizer.own_trial import (
    element_states,
    group_values,
    is_changed,
    numbers_beside,
    reads_dims,
    states_after,
)
from meshwright.optimizer.shard_states import ShardStates
from meshwright.seeding import kept_generators

ROWS, PART = 8, 96
"""Rows and elements of a shard's part that is stepped again; small shards have fewer,
so that they are cut as well.
"""


class _Part(NamedTuple):
    """Elements [start, stop) of a shard before a step."""

    shard: int
    start: int
    stop: int
    weights: Tensor
    gradient: Tensor
    states: OwnStates
    tensors: dict[str, Tensor]


class _Value(NamedTuple):
    """Values of a shard's part before and after a step,
    and after the step of its copy by a new optimizer.
    """

    what: str
    shard: int
    start: int
    before: Tensor
    real: Tensor
    copied: Tensor


class _Compared(NamedTuple):
    """Values of a shard's part after a step,
    and the lowest and highest ones that a new optimizer may give.
    """

    what: str
    shard: int
    start: int
    real: Tensor
    low: Tensor
    high: Tensor


class OwnCheck(ShardStates):
    """States and checks of the user's optimizer on one rank."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        groups: Groups,
        parameters: Sequence[nn.Parameter],
        config: Optimizer,
        name_of: Callable[[int, int], str],
    ) -> None:
        """Prepare checks of ``inner``, which was built from ``groups``.

        Args:
            parameters: flat shards, by index.
            name_of: function of a shard's index and an element's that returns the name of the
                element's parameter.
        """
        self.inner = inner
        self.groups = groups
        self.parameters = parameters
        self.config = config
        self.name_of = name_of
        self.states: OwnStates | None = None
        """States of every parameter, as all ranks agreed on them last, or as a checkpoint had them.
        None: not yet.
        """
        self.is_enabled = True
        """False in a dry run, whose tensors have no values."""
        self._is_requested = True
        self._is_due = False
        self._step, self._rate = 0, 0.0
        self._problem: ConfigError | None = None
        self._values = group_values(inner)
        self._numbers = numbers_beside(inner)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in the state of every parameter;
        before any step those of the trial.
        """
        return element_states(self.config).names if self.states is None else self.states.names

    def names_of(self, shard: Tensor) -> tuple[str, ...]:
        return self.names

    def read(self, shard: Tensor) -> dict[str, Tensor]:
        state = self.inner.state.get(shard, {})
        missing = [name for name in self.names if state.get(name) is None]
        if state and missing:  # without any state no step was taken
            raise KeyError(
                f"{type(self.inner).__name__} has states {sorted(state)}, and none for {missing}"
            )
        return {
            name: torch.zeros_like(shard) if name in missing else state[name].to(shard.dtype)
            for name in self.names
        }

    def restore(self, shard: Tensor, states: Mapping[str, Tensor], steps: int) -> None:
        """Set the states; those of step 0 are left to the optimizer itself."""
        if steps:
            tensors = {name: states[name].to(shard.dtype) for name in self.names}
            self.inner.state[shard] = self.states_at(steps).fill(tensors, shard.device)

    def states_at(self, steps: int) -> OwnStates:
        """Return the states of a checkpoint after ``steps`` steps;
        one without a record of them has counters alone.
        """
        return states_after(self.config, steps) if self.states is None else self.states

    def request_check(self) -> None:
        """Request a check of the next step. All ranks must do so."""
        self._is_requested = True

    def begin_step(self, step: int, learning_rate: float) -> None:
        """Set whether this step is checked. ``step``: from 1."""
        self._is_due = self.is_enabled and (self._is_requested or step & (step - 1) == 0)
        self._step = step
        self._rate = learning_rate
        self._is_requested = False

    def copy(self, indices: Sequence[int]) -> list[_Part]:
        """Copy the parts of these shards that this step is compared on; their gradients are set."""
        if not self._is_due:
            return []
        try:
            return [self._copy(index) for index in indices if self.parameters[index].numel()]
        except UnknownStateError as error:
            self._record(not_saved(self.config, f"at step {self._step:,} {error}"))
            return []

    def _copy(self, index: int) -> _Part:
        parameter = self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None
        numel = parameter.numel()
        length = min(PART, max(1, 2 * numel // 3))
        start = (self._step * 40_503 + index * 7_919) % (numel - length + 1)
        stop = start + length
        state = self.inner.state.get(parameter, {})
        states = find_states(state, parameter)
        tensors = {name: state[name].detach()[start:stop].clone() for name in states.names}
        weights = parameter.detach()[start:stop].clone()
        return _Part(
            index, start, stop, weights, gradient.detach()[start:stop].clone(), states, tensors
        )

    def compare(self, parts: Sequence[_Part]) -> None:
        """Step the parts by a new optimizer and compare; called after the step of their shards."""
        if not parts or self._problem is not None:
            return
        try:
            if (wrong := self._find_difference(parts, as_matrix=True)) is None:
                return
            flat = self._find_difference(parts, as_matrix=False)
            self._record(self._differs(*wrong) if flat is not None else self._reads_dims(*wrong))
        except UnknownStateError as error:
            self._record(not_saved(self.config, f"at step {self._step:,} {error}"))
        except ConfigError as error:
            self._record(error)

    def _find_difference(
        self, parts: Sequence[_Part], *, as_matrix: bool
    ) -> tuple[_Compared, int] | None:
        """Step copies of the parts again; return the first values that differ,
        and which of them does first.
        """
        exact, lower, upper = (
            self._step_again(parts, sign, as_matrix) for sign in (0.0, -1.0, 1.0)
        )
        compared = [_bounds(*same) for same in zip(exact, lower, upper, strict=True)]
        masks = [_is_outside(values) for values in compared]
        # one wait for the device where all are equal
        if not bool(torch.stack([mask.any() for mask in masks]).any()):
            return None
        first = next(index for index, mask in enumerate(masks) if bool(mask.any()))
        return compared[first], int(masks[first].long().argmax())

    def _step_again(self, parts: Sequence[_Part], sign: float, as_matrix: bool) -> list[_Value]:
        """Step copies of the parts by a new optimizer,
        and return all values with those of the shards.

        ``sign``: of a change of the gradients by rounding. Where rounding decides an update, such
            as the sign of an average that cancels, the values of the three signs differ.
        """
        copies = {
            part.shard: nn.Parameter(_shaped(part.weights.clone(), as_matrix)) for part in parts
        }
        index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        groups: list[dict[str, Any]] = []
        for group in self.groups:
            indices = [index_of[id(parameter)] for parameter in group["params"]]
            members = [copies[index] for index in indices if index in copies]
            groups.append({**group, "params": members})
        device = parts[0].weights.device
        with kept_generators([device] if device.type == "cuda" else []):
            again = build_own(groups, self.config)
            set_rate(again, self._rate)
            for part in parts:
                copy = copies[part.shard]
                change = 1.0 + sign * torch.finfo(copy.dtype).eps ** 0.5
                copy.grad = _shaped(part.gradient, as_matrix) * change
                if part.states.names or part.states.numbers:
                    tensors = {
                        name: _shaped(tensor.clone(), as_matrix)
                        for name, tensor in part.tensors.items()
                    }
                    again.state[copy] = part.states.fill(tensors, copy.device)
            try:
                again.step()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                text = f"at step {self._step:,} fails after a resume: {reason_of(error)}"
                raise not_saved(self.config, text) from error
        return [
            value for part in parts for value in self._values_of(part, again, copies[part.shard])
        ]

    def _values_of(
        self, part: _Part, again: torch.optim.Optimizer, copy: nn.Parameter
    ) -> list[_Value]:
        """Return the weights and states of a part and of its copy.

        Raises:
            ConfigError: they do not have the same states.
        """
        parameter = self.parameters[part.shard]
        state, other = self.inner.state.get(parameter, {}), again.state.get(copy, {})
        states, others = find_states(state, parameter), find_states(other, copy)
        if states != others:
            raise not_saved(
                self.config,
                f"at step {self._step:,} has another state[{_first_difference(states, others)!r}]"
                f" of {self.name_of(part.shard, part.start)} than after a resume",
            )
        here = slice(part.start, part.stop)
        real, copied = parameter.detach()[here], copy.detach().view(-1)
        values = [_Value("the weights", part.shard, part.start, part.weights, real, copied)]
        for name in states.names:
            before = part.tensors.get(name, torch.zeros_like(part.weights))
            real, copied = state[name].detach()[here], other[name].detach().reshape(-1)
            what = f"state[{name!r}]"
            values.append(_Value(what, part.shard, part.start, before, real, copied))
        return values

    def _differs(self, each: _Compared, at: int) -> ConfigError:
        name = self.name_of(each.shard, each.start + at)
        real, other = float(each.real[at]), float((each.low[at] + each.high[at]) / 2)
        return ConfigError(
            "MW-OPTIM-010",
            f"optimizer.builder = {self.config.builder!r}: in step {self._step:,} {each.what} of"
            f" {name} became {real:.9g}, and {other:.9g} by a new optimizer that went on from the"
            " states of a part of the tensor, as a resumed run does. So its numbers depend on the"
            " layout, or on when the run was resumed. It must be element-wise in all steps, draw"
            " no random numbers, and keep its state in optimizer.state[parameter]. This step is"
            " not saved; earlier checkpoints are sound",
        )

    def _reads_dims(self, each: _Compared, at: int) -> ConfigError:
        name = self.name_of(each.shard, each.start + at)
        return reads_dims(
            self.config, f"in step {self._step:,}, on {name}, gives other updates for a matrix"
        )

    def _check_beside(self) -> None:
        """Record numbers in the parameter groups or in attributes
        that have changed since the start.
        """
        for before, after in zip(self._values, group_values(self.inner), strict=True):
            changed = sorted(k for k in after if k not in before or is_changed(before[k], after[k]))
            if changed:
                text = (
                    f"at step {self._step:,} keeps {', '.join(changed)} in its parameter groups,"
                    " not per element"
                )
                self._record(not_saved(self.config, text))
        now = numbers_beside(self.inner)
        changed = sorted(
            n for n in now if n not in self._numbers or is_changed(self._numbers[n], now[n])
        )
        if changed:
            text = f"at step {self._step:,} counts in its attribute {', '.join(changed)}"
            self._record(not_saved(self.config, text))

    def _record(self, problem: ConfigError) -> None:
        self._problem = self._problem or problem

    def end_step(self, world: Group, added: Collection[str]) -> None:
        """Call :meth:`agree` if the step was checked; collective over all ranks then."""
        if self._is_due:
            self._is_due = False
            self.agree(world, added)

    def agree(self, world: Group, added: Collection[str]) -> OwnStates:
        """Find the states that exist, set :attr:`states`, and return them.
        Collective over all ranks; blocks.

        Args:
            added: names of callbacks' states.

        Raises:
            ConfigError: on every rank; a check has failed, or the parameters do not all have the
                same states.
        """
        found: list[list[Any]] = []
        if self._step:
            self._check_beside()
        try:
            for index, parameter in enumerate(self.parameters):
                record = find_states(self.inner.state.get(parameter, {}), parameter).record()
                if parameter.numel() and record not in [other for other, _ in found]:
                    found.append([record, self.name_of(index, 0)])
        except UnknownStateError as error:
            self._record(not_saved(self.config, f"at step {self._step:,} {error}"))
        problem = None if self._problem is None else [self._problem.code, self._problem.message]
        gathered = world.gather_objects([problem, found])
        for code, message in [other for other, _ in gathered if other is not None]:
            raise ConfigError(code, message)
        every = [pair for _, pairs in gathered for pair in pairs]
        for pair in every:
            if pair[0] != every[0][0]:
                raise self._unequal(every[0], pair)
        self.states = _of_record(every[0][0]) if every else OwnStates()
        for name in {*self.states.names, *self.states.numbers} & set(added):
            raise not_saved(self.config, f"keeps state[{name!r}], the name of a callback's state")
        return self.states

    def _unequal(self, one: list[Any], other: list[Any]) -> ConfigError:
        name = _first_difference(_of_record(one[0]), _of_record(other[0]))
        return not_saved(
            self.config,
            f"at step {self._step:,} has another state[{name!r}] of {other[1]} than of {one[1]}: a"
            " state must begin for all parameters in the same step, and a number must be the same"
            " for all",
        )


def _of_record(record: dict[str, Any]) -> OwnStates:
    numbers = {name: StateNumber(*number) for name, number in record["numbers"].items()}
    return OwnStates(tuple(record["tensors"]), numbers)


def _first_difference(one: OwnStates, other: OwnStates) -> str:
    """Return the name of the first state that only one has, or whose number differs."""
    names = sorted(set(one.names) ^ set(other.names))
    numbers = sorted(
        name
        for name in {*one.numbers, *other.numbers}
        if one.numbers.get(name) != other.numbers.get(name)
    )
    return next(iter([*names, *numbers]))


def _shaped(flat: Tensor, as_matrix: bool) -> Tensor:
    """Return a part as a matrix of :data:`ROWS` rows, or of one where they do not divide it;
    or as it is.
    """
    return flat.view(ROWS if flat.numel() % ROWS == 0 else 1, -1) if as_matrix else flat


def _bounds(*same: _Value) -> _Compared:
    """Return values of a part after a step (m,), and the bounds on them from its copies.

    The bounds allow for another order of rounding: a kernel may treat the ends of a tensor
    otherwise than its middle.
    """
    what, shard, start, before, real, _ = same[0]
    eps = torch.finfo(real.dtype).eps
    size = torch.maximum(before.abs(), real.abs())
    slack = 8 * eps * size + 1000 * eps * (real - before).abs().nan_to_num(0.0).max()
    copied = torch.stack([value.copied for value in same])
    return _Compared(what, shard, start, real, copied.amin(0) - slack, copied.amax(0) + slack)


def _is_outside(each: _Compared) -> Tensor:
    is_inside = (each.real >= each.low) & (each.real <= each.high)
    return ~(is_inside | (each.real.isnan() & each.low.isnan()))
