"""Check of initial values: the framework's draws by name against the user's builder.

Both are random, so the check compares statistics. It calls the builder several times under
different seeds. Elements that are equal in all calls are constants and must match exactly. For the
other elements, mean and standard deviation must lie within the spread of the calls, plus 8 standard
errors. A model with an ``initialise`` attribute declares its values there; the check then calls it
on the builder's module, for all parameters in order. Values that a run of the builder gives must
equal those of plain torch under ``run.seed``, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.config import Model, Run
from meshwright.model.build import PlainModel, build_model
from meshwright.model.builder import find_builder
from meshwright.seeding import generators_at, seeded

STANDARD_ERRORS = 8.0
"""Allowance in standard errors. For 1,000 normal parameters the chance
of a false alarm is 1e-12.
"""
INDEPENDENT = 6.0
"""Largest range over the builder's own draws, in standard errors, that independent elements can
explain. Beyond it, elements depend on each other (such as one random number in all of them), and
standard errors mean nothing.
"""
SPREADS = 8.0
"""Additional allowance for dependent elements,
in units of the range over the builder's own draws.
"""
FEWEST = 16
"""Smallest number of elements, over all draws, for statistics.
Constants are compared in any number.
"""
LARGE = 4_000_000
"""Number of parameters above which the builder is called 3 times instead of 5,
and on suspicion 6 instead of 20.
"""


def builder_values(keys: Model, seed: int, draw: int, model: PlainModel) -> dict[str, Tensor]:
    """Return the initial values of the untouched module under one seed, by name,
    without parameters on meta.

    A tied weight has one value, under its canonical name in ``model``. ``keys``: the section that
    ``model`` was built from.
    """
    with seeded(seed, "verify initial values", draw):
        layers: nn.Sequential = find_builder(keys.builder)(**keys.options)
        initialise = getattr(layers, "initialise", None)
        values: dict[str, Tensor] = {}
        for name, parameter in layers.named_parameters(remove_duplicate=False):
            if model.canonical(name) != name:
                continue
            if initialise is not None:  # it changes what the builder has set, all of it or a part
                empty = torch.empty(parameter.shape, dtype=torch.float32)
                full = empty if parameter.is_meta else parameter.detach().float().clone()
                with torch.no_grad():
                    initialise(name, full)
                values[name] = full
            elif not parameter.is_meta:
                values[name] = _real(parameter.detach())
    return values


@contextmanager
def plain_seed(run: Run, model: PlainModel) -> Iterator[None]:
    """Seed the generators for a build of the untouched module: as plain torch,
    where its own values are used.
    """
    seed = run.seed
    with seeded(seed, "verify plain run") if model.builder_run is None else generators_at(seed):
        yield


def copy_random_buffers(layers: nn.Sequential, keys: Model, seed: int, model: PlainModel) -> None:
    """Copy the framework's values into the constant buffers of ``layers``
    that the builder draws at random.

    A buffer is random if two builds under different seeds differ in it.
    """
    drawn = dict(model.layers.named_buffers())
    different = {
        name: buffer
        for name, buffer in layers.named_buffers()
        if name in drawn and not buffer.is_meta and not torch.equal(buffer, drawn[name].to(buffer))
    }
    if different:
        others = [build_model(keys.builder, keys.options, seed + i) for i in range(2)]
        first, second = (dict(each.layers.named_buffers()) for each in others)
        for name, buffer in different.items():
            if not torch.equal(first[name], second[name]):
                buffer.copy_(first[name])


def _real(tensor: Tensor) -> Tensor:
    """Return the tensor; a complex one with real and imaginary parts in a new last dim."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def initial_problems(keys: Model, run: Run, model: PlainModel) -> list[str]:
    """Return a sentence for each parameter whose initial value does not match the builder's.
    ``keys``: the section that ``model`` was built from.
    """
    if model.builder_run is not None and model.initialise is None:
        return _different_from_plain(keys, run, model)
    size = sum(parameter.numel() for parameter in model.layers.parameters())
    few, many = (3, 6) if size > LARGE else (5, 20)
    draws = [builder_values(keys, run.seed, draw, model) for draw in range(few)]
    problems = []
    for name in draws[0]:
        found = _real(model.initial(name))
        problem = difference(found, [draw[name] for draw in draws])
        if problem and len(draws) < many:  # a random sign can be equal in five draws by chance
            draws += [builder_values(keys, run.seed, draw, model) for draw in range(few, many)]
            problem = difference(found, [draw[name] for draw in draws])
        if problem:
            problems.append(
                f"initial value of {name}: {problem}. Set it in the module's reset_parameters(), or"
                " give the model an attribute initialise(name, tensor)"
            )
    return problems


def _different_from_plain(keys: Model, run: Run, model: PlainModel) -> list[str]:
    """Return a sentence for each initial value that is not bit-equal to that
    of the untouched module.
    """
    with plain_seed(run, model):
        layers: nn.Sequential = find_builder(keys.builder)(**keys.options)
    return [
        f"initial value of {name} differs from that of the untouched module under"
        f" torch.manual_seed({run.seed})"
        for name, parameter in layers.named_parameters(remove_duplicate=False)
        if model.canonical(name) == name
        and model.is_built(name)
        and not torch.equal(
            model.initial(name).nan_to_num(), parameter.detach().float().nan_to_num()
        )
    ]


def difference(found: Tensor, draws: list[Tensor]) -> str:
    """Describe how ``found`` differs from the builder's draws;
    return "" if both may have one distribution.
    """
    if found.shape != draws[0].shape:
        return f"has shape {tuple(found.shape)}, the builder's {tuple(draws[0].shape)}"
    found = found.to(draws[0].dtype).flatten().double()
    values = torch.stack([each.flatten() for each in draws]).double()
    constant = (values == values[0]).all(0)
    random = values[:, ~constant]
    if not random.numel() or _is_continuous(random):
        off = constant & (found != values[0])
        if bool(off.any()):
            at = int(off.nonzero()[0])
            count = int(off.sum())
            return (
                f"{count} of {found.numel()} elements that the builder makes constant differ, the"
                f" first is {float(found[at]):.6g}, the builder's {float(values[0, at]):.6g}"
            )
        found = found[~constant]
    else:
        random = values
    if random.numel() < FEWEST:
        return ""
    for what, statistic, error in (("mean", _mean, _mean_error), ("std", _log_std, _log_std_error)):
        if what == "std" and found.numel() < FEWEST:
            continue
        theirs = [statistic(each) for each in random]
        one, spread = error(random.flatten(), found.numel()), max(theirs) - min(theirs)
        margin = STANDARD_ERRORS * one + (SPREADS * spread if spread > INDEPENDENT * one else 0.0)
        ours = statistic(found)
        if not min(theirs) - margin <= ours <= max(theirs) + margin:
            return (
                f"drawn with mean {_mean(found):.3g} and std {_std(found):.3g}, and the untouched"
                f" module has mean {_mean(random.flatten()):.3g} and std"
                f" {_std(random.flatten()):.3g}"
            )
    return ""


def _is_continuous(values: Tensor) -> bool:
    """Return True if hardly any value occurs twice;
    an element equal in all draws is then a constant.
    """
    return len(set(values.flatten().tolist())) > 0.9 * values.numel()


def _mean(values: Tensor) -> float:
    return float(values.mean())


def _std(values: Tensor) -> float:
    return float(values.std(correction=0))


def _log_std(values: Tensor) -> float:
    return math.log(_std(values) + 1e-30)


def _mean_error(values: Tensor, count: int) -> float:
    """Return the standard error of the mean of ``count`` elements."""
    return _std(values) / math.sqrt(count)


def _log_std_error(values: Tensor, count: int) -> float:
    """Return the standard error of the log standard deviation,
    from the values' own kurtosis (at least 3).
    """
    centred = values - values.mean()
    variance = float(centred.square().mean())
    kurtosis = float(centred.pow(4).mean()) / max(variance**2, 1e-300)
    return math.sqrt((max(kurtosis, 3.0) - 1.0) / (4.0 * count))
