"""First values of parameters: the reset function or the builder that gives each,
found on the meta device.

A builder runs with its parameters on meta. Its operations on each parameter are recorded, and
compared with those of ``reset_parameters()`` of the module that owns it (``_reset_parameters()`` of
torch's attention, for the biases of its projections too). Where the last operations are the
reset's, the value is drawn by name in each process. Where the builder sets any value in another
way, all values are those of one seeded run of the builder: see builder_run.py.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.model.unwritten import mark
from meshwright.model.write_record import DRAWN, Write, WriteRecord

NAMED = 5
"""Names of parameters in a message; more are counted."""


class ParameterOwner(NamedTuple):
    """Module whose reset sets the first value of a parameter."""

    module: nn.Module
    path: str
    """Name of the parameter inside the module."""


def resetter(module: nn.Module) -> Callable[[], None] | None:
    """Return the method that initialises a module's parameters, or None.
    Torch's attention has a private one.
    """
    for name in ("reset_parameters", "_reset_parameters"):
        found = getattr(module, name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None


def find_owners(layers: nn.Sequential) -> dict[str, ParameterOwner]:
    """Return the owner of each parameter's first value, by parameter name."""
    owners: dict[str, ParameterOwner] = {}
    for module_name, module in layers.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        held = copy.deepcopy(module) if own else module
        owners |= {f"{module_name}.{name}".lstrip("."): ParameterOwner(held, name) for name in own}
    # the outermost module comes last and wins
    for module_name, module in reversed(list(layers.named_modules())):
        if not callable(getattr(module, "reset_parameters", None)) and resetter(module) is not None:
            held = copy.deepcopy(module)
            (reset,) = reset_writes([module])
            for path, writes in reset.items():
                if writes:
                    owners[f"{module_name}.{path}".lstrip(".")] = ParameterOwner(held, path)
    return owners


def reset_writes(modules: Sequence[nn.Module]) -> list[dict[str, list[Write]]]:
    """Return for each module the writes of its reset to each parameter at or below it.

    All resets share one record, because beginning a record looks through every imported module,
    which takes longer than a reset.
    """
    copies = [copy.deepcopy(module) for module in modules]
    with WriteRecord() as record:
        for copied in copies:
            reset = resetter(copied)
            if reset is not None:
                reset()
    return [
        {name: record.of(parameter) for name, parameter in copied.named_parameters()}
        for copied in copies
    ]


def first_value(owner: ParameterOwner) -> Tensor:
    """Return a parameter as its owner's reset draws it from torch's generator: full tensor,
    float32, on CPU.

    Elements that the reset leaves out hold the mark of :mod:`meshwright.model.unwritten`.
    """
    real = copy.deepcopy(owner.module).float().to_empty(device="cpu")
    for parameter in real.parameters():
        mark(parameter)
    for name, buffer in owner.module.named_buffers():
        real.get_buffer(name).copy_(buffer)
    reset = resetter(real)
    if reset is not None:
        reset()
    return real.get_parameter(owner.path).detach()


class FirstValues(NamedTuple):
    """Parameters of a model by what gives them their first values."""

    by_reset: list[str]
    """Their owner's reset, and nothing after it."""
    by_builder: list[str]
    """Other operations of the builder, or the tensor with which they were made."""
    lost: list[str]
    """Operations of the builder on the meta device, where it has put them itself:
    they have no effect.
    """
    by_nothing: list[str]
    built: list[str]
    """All parameters to which a run of the builder gives a value,
    those of ``by_reset`` included.
    """


def find_first_values(
    layers: nn.Sequential,
    owners: Mapping[str, ParameterOwner],
    record: WriteRecord,
    copies: Collection[str],
) -> FirstValues:
    """Find what gives each parameter its first value.

    Args:
        layers: The model, with parameters on meta.
        owners: Owner of each parameter's first value.
        record: Writes during the builder's run.
        copies: Names of parameters that are tied to another one, and left out.
    """
    expected = _expected_writes(layers)
    values = FirstValues([], [], [], [], [])
    own = [parameter for parameter in layers.parameters() if parameter.is_meta]
    copied = Counter(record.version_of(parameter) for parameter in own)
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        if name in copies:
            continue
        wanted = expected.get(name, [])
        found = record.of(parameter)
        given = record.given_to(parameter)
        if found:
            ends_with_reset = found[-len(wanted) :] == wanted
        else:
            ends_with_reset = given is None or _is_reset_to(owners[name], given)
        is_left_on_meta = record.is_left_on_meta(parameter)
        if (found or given is not None) and not is_left_on_meta:
            values.built.append(name)
        version = record.version_of(parameter)
        is_copy = version is not None and copied[version] > 1  # drawn once, for several parameters
        if (wanted and ends_with_reset and not is_copy) or not parameter.numel():
            values.by_reset.append(name)
        elif not found and given is None:
            values.by_nothing.append(name)
        else:
            (values.lost if is_left_on_meta else values.by_builder).append(name)
    return values


def _expected_writes(layers: nn.Sequential) -> dict[str, list[Write]]:
    """Return the writes of the resets to each parameter, the outermost module's last."""
    names, modules, parameters = [], [], []
    for module_name, module in reversed(list(layers.named_modules())):
        own = {name for name, _ in module.named_parameters(recurse=False)}
        is_private = (
            not callable(getattr(module, "reset_parameters", None)) and resetter(module) is not None
        )
        if (own and resetter(module) is not None) or is_private:
            names.append(module_name)
            modules.append(module)
            parameters.append(None if is_private else own)
    expected: dict[str, list[Write]] = {}
    for module_name, counted, reset in zip(names, parameters, reset_writes(modules), strict=True):
        for name, writes in reset.items():
            if counted is None or name in counted:
                expected.setdefault(_joined(module_name, name), []).extend(writes)
    return expected


def first_value_problems(path: str, values: FirstValues) -> list[ModelError]:
    """Return an error for parameters without a first value,
    and one for those whose values would be lost.

    ``path``: name of the builder, for the messages.
    """
    problems = []
    if values.by_nothing:
        problems.append(unwritten_error(path, "parameter", values.by_nothing))
    if values.lost:
        problems.append(
            ModelError(
                "MW-MODEL-010",
                f"{path}: the builder puts {listed('parameter', values.lost)} on the meta device"
                " and sets the value there, which has no effect. Build the model without the meta"
                " device (its parameters take no memory here), or set the value in"
                " reset_parameters() or the model's attribute initialise(name, tensor)",
            )
        )
    return problems


def unwritten_error(path: str, what: str, names: Collection[str]) -> ModelError:
    """Return the error for tensors of which some elements are what torch.empty has left in memory."""
    return ModelError(
        "MW-MODEL-048",
        f"{path}: nothing gives {listed(what, names)} a first value, or not all elements of it:"
        " what torch.empty leaves in memory would be trained, other numbers in each process. Fill"
        " the whole tensor in __init__ (nn.init.normal_, torch.zeros for torch.empty), in the"
        " module's reset_parameters(), or by the model's attribute initialise(name, tensor)",
    )


def listed(what: str, names: Collection[str]) -> str:
    """Return "parameter a" or "parameters a, b and 3 more"."""
    first = list(names)[:NAMED]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return f"{what}{'s' if len(names) > 1 else ''} {', '.join(first)}{more}"


def _joined(module_name: str, name: str) -> str:
    return f"{module_name}.{name}".lstrip(".")


def _is_reset_to(owner: ParameterOwner, given: float | str) -> bool:
    """Return True if the reset fills the parameter with one number that equals ``given``."""
    if given == DRAWN:
        return False
    with torch.random.fork_rng(devices=[]):
        return bool(torch.all(first_value(owner) == float(given)))
