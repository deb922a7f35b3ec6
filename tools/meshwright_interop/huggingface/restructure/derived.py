"""Cut of a model that declares no pipeline plan: derived from its module lists,
and from one traced forward.

The modules of the base model become units: each element of a module list is one, and so is each
other module with weights, or with dropout, that holds no module list. Two things are more general
than with a declared plan::

    several modules before the first block    they run in one layer, which sends the input of the first block
    blocks that return a tuple                its first element is sent; the model's code receives None for the others

No name of a module matters. A cut that loses or changes a value is refused by proof.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright_interop.huggingface.restructure.frame import (
    HIDDEN,
    IDS,
    POSITIONS,
    ModelSkeleton,
    PipelineLayer,
)
from meshwright_interop.huggingface.restructure.library import whole_rows
from meshwright_interop.huggingface.restructure.marks import (
    Arguments,
    ModulePlaceholder,
    RunState,
    TargetReached,
    first_argument,
    with_first_argument,
)
from meshwright_interop.huggingface.restructure.observation import (
    BATCH,
    LENGTH,
    OutputForm,
    hidden_states,
)

PLAIN = (bool, int, float, str)
"""Types of arguments that are compared by value;
objects such as configurations are compared by type.
"""


def derive_plan(model: Any) -> list[str]:
    """Return the names of the model's units: module lists,
    and modules outside them with weights or dropout.

    It is empty if the model holds no module list.
    """
    lists = [name for name, module in _outer_lists(model)]

    def units(module: nn.Module, prefix: str) -> Iterator[str]:
        for child, inner in module.named_children():
            name = f"{prefix}{child}"
            if name in lists:
                yield name
            elif any(other.startswith(f"{name}.") for other in lists):
                yield from units(inner, f"{name}.")
            elif any(True for _ in inner.parameters()) or isinstance(inner, nn.Dropout):
                yield name

    return list(units(model, "")) if lists else []


def _outer_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the module lists with weights that lie in no other module list."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if (
            isinstance(module, nn.ModuleList)
            and not inside
            and any(True for _ in module.parameters())
        ):
            found.append(name)
            yield name, module


def positions_like(ids: Tensor) -> Tensor:
    """Return positions 0, 1, .. of whole rows: (B, S) -> (B, S) int64."""
    return torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)


class DerivedRunState(RunState):
    """State of the marks of a derived plan: outputs have their module's form,
    and several may be substituted.
    """

    def __init__(self, forms: Mapping[str, OutputForm]) -> None:
        super().__init__(0)
        self.forms = forms
        self.given: dict[int, Tensor] = {}
        """Index of a mark -> its output in this run."""
        self.like = torch.zeros(())
        """Tensor with the dtype of outputs without values."""
        self.size = (BATCH, LENGTH)
        """Samples and tokens of this run."""

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call of a mark, and return the mark's output in the form of its module."""
        value, form = first_argument(args, kwargs), self.forms[name]
        if not self.positions:
            if value is self.last:
                self.direct.add(len(self.call_order))
            self.call_order.append(name)
            self.calls.append((args, kwargs))
            self.last = torch.zeros(form.shape, dtype=form.dtype)
            return form.wrap(self.last)
        position = self.positions[name]
        self.calls.append((args, kwargs))
        if position == self.target:
            raise TargetReached(self.calls)
        if position in self.given:
            return form.wrap(self.given[position])
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape[-1] == form.shape[-1]
        ):
            return form.wrap(value)
        around = (
            value.shape[: len(form.shape) - 1] if isinstance(value, Tensor) else self._around(form)
        )
        return form.wrap(self.like.new_zeros((*around, form.shape[-1])))

    def _around(self, form: OutputForm) -> list[int]:
        """Return the leading dims of an output,
        whose module takes no tensor (positions from a size), in this run.
        """
        of_this_run = {BATCH: self.size[0], LENGTH: self.size[1]}
        return [of_this_run.get(size, size) for size in form.shape[:-1]]


class DerivedPlaceholder(ModulePlaceholder):
    """Mark whose ``weight`` has a dtype, which some models read, and no elements."""

    @property
    def weight(self) -> Tensor:
        """Return an empty tensor in the dtype of the run."""
        assert isinstance(self.state, DerivedRunState)
        return self.state.like.new_empty(0)


class DerivedSkeleton(ModelSkeleton):
    """Skeleton of a model without a declared plan:
    the marks before the first block are not skipped in any run.
    """

    def __init__(self, model: nn.Module, state: DerivedRunState, description: str) -> None:
        super().__init__(model, state, description)
        self.takes_positions = False
        """True if explicit positions 0, 1, ..
        give each module the arguments of a call without positions.
        """
        self.num_first = 1
        """Number of modules before the first block."""

    def find_order(self) -> list[str]:
        """Find and store the order of the marks, by runs on tokens with and without positions,
        and return it.
        """
        model, state = self._at(torch.device("cpu"))
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        runs: list[dict[str, Tensor]] = [{}]
        if "position_ids" in inspect.signature(model.forward).parameters:
            runs.append({"position_ids": torch.arange(LENGTH)[None]})
        calls = []
        for extra in runs:
            state.reset(-1, None)
            state.positions, state.call_order, state.direct, state.last = {}, [], set(), None
            with torch.no_grad(), whole_rows():
                model(input_ids=ids, use_cache=False, **extra)
            calls.append(state.calls)
        self.takes_positions = len(calls) == 2 and _are_equal(calls[0], calls[1])
        state.positions, state.last = (
            {name: position for position, name in enumerate(state.call_order)},
            None,
        )
        state.reset(-1, None)
        return state.call_order

    def positions_for(self, positions: Tensor) -> dict[str, Tensor]:
        """Return the keyword argument for these positions (B, S),
        if the model's forward takes one.
        """
        return {"position_ids": positions[:1]} if self.takes_positions else {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def call(
        self,
        position: int,
        value: Tensor,
        positions: Tensor,
        documents: bool,
        places: Tensor | None = None,
    ) -> Arguments:
        """Return the arguments with which the model calls its block, or a later module,
        at index ``position``.

        ``value``: output of the module before, (B, S, D), or (B, S/tp, D); for the first block its
            input.
        """
        _, state = self._at(value.device)
        if position in state.direct or position == self.num_first:
            return with_first_argument(
                self._all_arguments(value, positions, documents, places)[position], value
            )
        return self._run_to_mark(position, value, positions, documents, None)[-1]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def call_first(
        self, ids: Tensor, positions: Tensor, outputs: Mapping[int, Tensor], like: Tensor
    ) -> Arguments:
        """Return the arguments of the module that follows those with ``outputs``,
        up to the first block's.

        ``ids``, ``positions``: (B, S). ``like`` gives dtype and device.
        """
        try:
            self._run_given(len(outputs), outputs, positions, ids, like)
        except TargetReached as reached:
            return reached.calls[-1]
        raise AssertionError(f"{self!r} ended before mark {len(outputs)}")

    def _run(
        self,
        target: int,
        substitute: Tensor | None,
        positions: Tensor,
        documents: bool,
        first: Tensor | None,
        like: Tensor,
    ) -> Any:
        given = {} if substitute is None else {target - 1: substitute}
        return self._run_given(target, given, positions, first, like)

    def _run_given(
        self,
        target: int,
        given: Mapping[int, Tensor],
        positions: Tensor,
        ids: Tensor | None,
        like: Tensor,
    ) -> Any:
        """Run the model's forward up to the mark at ``target``;
        the marks in ``given`` return these outputs.
        """
        model, state = self._at(like.device)
        assert isinstance(state, DerivedRunState)
        ids = torch.zeros_like(positions) if ids is None else ids
        state.reset(target, None)
        state.given, state.like, state.size = (
            dict(given),
            like,
            (len(positions), positions.shape[1]),
        )
        try:
            with whole_rows():
                return model(input_ids=ids, use_cache=False, **self.positions_for(positions))
        finally:
            state.reset(-1, None)
            state.given, state.like = {}, torch.zeros(())


def _are_equal(first: Any, second: Any) -> bool:
    """Compare two trees of arguments: tensors by value, numbers and strings, too;
    other leaves by type.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return (
            first.shape == second.shape
            and first.dtype == second.dtype
            and torch.equal(first, second)
        )
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_are_equal, first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            _are_equal(first[key], second[key]) for key in first
        )
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return False
    return type(first) is type(second) and (bool(first == second) or not isinstance(first, PLAIN))


class DerivedLayer(PipelineLayer):
    """Layer of a derived plan. The first one runs all modules before the first block,
    and sends the block's input.
    """

    def _run_modules(self, value: dict[str, Tensor], places: Tensor | None) -> Any:
        frame = self.frame
        assert isinstance(frame, DerivedSkeleton)
        positions = value.get(POSITIONS)
        if IDS in value:
            if positions is not None:
                raise ModelError(
                    "MW-INTEROP-107",
                    f"{frame.description} declares no pipeline plan, and its cut is proven for"
                    " whole rows only: leave positions and data.document_boundaries out",
                )
            return self._run_first(frame, value[IDS])
        assert positions is not None
        hidden = value[HIDDEN]
        for position, name in enumerate(self.names, self.first):
            args, kwargs = frame.call(position, hidden, positions, False)
            hidden = hidden_states(self.get_submodule(name)(*args, **kwargs))
        if self.first + len(self.names) == frame.num_marks:
            return frame.end(hidden, positions, False)
        return {HIDDEN: hidden, POSITIONS: positions}

    def _run_first(self, frame: DerivedSkeleton, ids: Tensor) -> dict[str, Tensor]:
        positions = positions_like(ids)
        outputs: dict[int, Tensor] = {}
        like = next(self.parameters())
        for position, name in enumerate(self.names):
            args, kwargs = frame.call_first(ids, positions, outputs, like)
            outputs[position] = hidden_states(self.get_submodule(name)(*args, **kwargs))
        hidden = first_argument(*frame.call_first(ids, positions, outputs, like))
        return {HIDDEN: hidden, POSITIONS: positions}
