"""First values as a model's builder sets them: those of one run of it on the CPU, as in plain torch.

    torch.manual_seed(run.seed); random.seed(run.seed); numpy.random.seed(run.seed % 2**32)
    model = build(**options)

Every process that needs a value runs the builder in this way and takes its slices: the same bits in every layout. The
generators of the process are restored afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.model.first_values import (
    ParameterOwner,
    find_first_values,
    first_value_problems,
    listed,
    unwritten_error,
)
from meshwright.model.outline import ModelOutline, draw_outline, to_meta
from meshwright.model.unwritten import MARKED, OTHER, MarkEmpty, Pattern, is_marked, to_float32
from meshwright.model.write_record import WriteRecord, bits_of, bytes_of
from meshwright.seeding import generators_at, seeded
from meshwright.system.packages import is_own_package

MAX_NUMEL = 2**31
"""Parameters of a model that one process can be expected to hold in float32, 8 GiB."""
Digests = dict[str, bytes]


class BuilderRun:
    """Seeded runs of a builder, and the values of the last one until :meth:`release`."""

    def __init__(self, path: str, build: Callable[[], Any], seed: int) -> None:
        self.path, self.build, self.seed = path, build, seed
        self.names: frozenset[str] = frozenset()
        """Parameters that get their first values from here; empty: none does."""
        self.digest = ""
        """Digest of everything that goes into the values: where it differs between processes, they do too."""
        self.unrepeated: frozenset[str] = frozenset()
        """Those of :attr:`names` whose values no seed repeats: only the model's ``initialise`` can replace them."""
        self.unset: list[str] = []
        """Parameters that only the model's ``initialise`` can give a value."""
        self._values: dict[str, Tensor] = {}
        self._sizes: frozenset[int] = frozenset()
        """Bytes of large storages that get a pattern in outlines."""

    def layers(self, pattern: Pattern = MARKED) -> nn.Sequential:
        """Run the builder and return the model, with values; elements that nothing has written hold a pattern.

        Raises:
            ModelError: it has too many parameters for one process.
        """
        with generators_at(self.seed), MarkEmpty(pattern), _limited_parameters(self.path):
            return self.build()  # type: ignore[no-any-return]

    def value(self, name: str) -> Tensor:
        """Return a full parameter, float32 on CPU. The first call runs the builder; its values stay in memory.

        Elements that nothing has written hold the mark of :mod:`meshwright.model.unwritten`.

        Raises:
            ModelError: no seed repeats the value.
        """
        if name in self.unrepeated:
            raise _other_values(self.path, [name])
        if not self._values:
            named = self.layers().named_parameters(remove_duplicate=False)
            self._values = {key: parameter.detach() for key, parameter in named}
        return to_float32(self._values[name])

    def unwritten(self) -> list[str]:
        """Return the names of the parameters in memory with elements that nothing has written."""
        return [name for name, value in self._values.items() if name in self.names and is_marked(value)]

    def release(self) -> None:
        """Free the memory of the values."""
        self._values = {}

    def draw(self) -> ModelOutline:
        """Run the builder with parameters on meta; again, if large tensors that it leaves need a mark to be judged."""
        outline = self._draw("builder")
        assert outline.record is not None
        self._sizes = outline.record.memory.unfilled_sizes()
        return self._draw("builder") if self._sizes else outline

    def _draw(self, purpose: str, pattern: Pattern = MARKED) -> ModelOutline:
        """Return an outline that is built under the seed of a purpose."""
        with seeded(self.seed, purpose):
            return draw_outline(self.build, pattern, self._sizes)

    def outline(self) -> ModelOutline:
        """Run the builder on the CPU, and return the model with its parameters moved to meta."""
        layers = self.layers()
        if isinstance(layers, nn.Module):
            to_meta(layers)
        return ModelOutline(layers)

    def take_over(
        self, outline: ModelOutline, owners: Mapping[str, ParameterOwner], copies: Collection[str]
    ) -> list[ModelError]:
        """Find which first values a run of the builder gives, and return the problems with first values.

        It gives all of them, if the builder sets any outside of the resets. A model with ``initialise`` may replace
        them later. Buffers that the builder draws, or computes from parameters, then become those of the run.

        Args:
            outline: the model; its buffers are changed in place.
            owners: owner of each parameter's first value.
            copies: names of parameters that are tied to another one, which have no value of their own.
        """
        layers, record = outline
        is_declared = getattr(layers, "initialise", None) is not None
        buffers = dict(layers.named_buffers(remove_duplicate=False))
        if record is None:
            found, different, problems = self._judge_values(is_declared)
        else:
            problems = self._buffer_problems(layers, record)
            values = find_first_values(layers, owners, record, copies)
            self.unset = values.by_nothing if is_declared else []
            problems += [] if is_declared else first_value_problems(self.path, values)
            on_meta = {name for name, buffer in buffers.items() if buffer.is_meta}
            if problems or not (values.by_builder or on_meta):
                return problems
            self.names = frozenset(values.built)
            found = _digests(layers, record)
            different = _different(found, self._outlined("builder"))
            drawn = set() if is_declared else _different(found, self._outlined("builder, other seed"))
            if taken := on_meta | (drawn & buffers.keys()):
                self._copy_buffers(layers, taken)
        self.digest = hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=16).hexdigest()
        if is_declared:  # which may give all values itself
            self.unrepeated, self.digest = self.names & different, ""
            different &= buffers.keys()
        if different:
            problems.append(_other_values(self.path, sorted(different)))
        return problems

    def _judge_values(self, is_declared: bool) -> tuple[Digests, set[str], list[ModelError]]:
        """Judge values of runs on the CPU, and set :attr:`names` and :attr:`unset`.

        Returns:
            The digests, the names of values that no seed repeats, and the problems with unwritten ones.
        """
        built = self.layers()
        found, other = _digests(built, None), _digests(self.layers(OTHER), None)
        differing = _different(found, other)
        different = differing and _different(other, _digests(self.layers(OTHER), None))
        parameters = dict(built.named_parameters(remove_duplicate=False))
        marked = {name for name, parameter in parameters.items() if is_marked(parameter)}
        marked |= {name for name, buffer in built.named_buffers(remove_duplicate=False) if is_marked(buffer)}
        unwritten = marked | (differing - different)
        self.names = frozenset(parameters)
        of_parameters = [name for name in parameters if name in unwritten]
        self.unset = of_parameters if is_declared else []
        of_buffers = [name for name, _ in built.named_buffers() if name in unwritten]
        problems = [unwritten_error(self.path, "buffer", of_buffers)] if of_buffers else []
        if of_parameters and not is_declared:
            problems.append(unwritten_error(self.path, "parameter", of_parameters))
        return found, different, problems

    def _buffer_problems(self, layers: nn.Module, record: WriteRecord) -> list[ModelError]:
        """Return the problems with buffers of an outline that are unwritten, or computed from unwritten memory."""
        buffers = dict(layers.named_buffers())
        unwritten = {name for name, buffer in buffers.items() if is_marked(buffer)}
        different: set[str] = set()
        if record.memory.is_undecided(buffers.values()) or self._may_differ(buffers.values()):
            other = self._draw("builder", OTHER).layers
            if differing := _other_buffers(layers, other):
                different = _other_buffers(other, self._draw("builder", OTHER).layers)
                unwritten |= differing - different
        names = [name for name in buffers if name in unwritten]  # in the model's order, each buffer once
        problems = [unwritten_error(self.path, "buffer", names)] if names else []
        if different:
            problems.append(_other_values(self.path, sorted(different)))
        return problems

    def _may_differ(self, buffers: Iterable[Tensor]) -> bool:
        """Return whether constants of the user's builder may differ between its runs: one number alone does not."""
        is_own = is_own_package(self.path)
        return not is_own and any(buffer.numel() > 1 and not buffer.is_meta for buffer in buffers)

    def _outlined(self, purpose: str) -> Digests:
        """Return the digests of another outline, built under the seed of a purpose."""
        return _digests(*self._draw(purpose))

    def _copy_buffers(self, layers: nn.Module, names: Collection[str]) -> None:
        """Copy buffers of a run into the outline ``layers``."""
        found = dict(self.layers().named_buffers(remove_duplicate=False))
        for name in names:
            owner, _, attribute = name.rpartition(".")
            layers.get_submodule(owner)._buffers[attribute] = found[name].detach().clone()


def _digests(layers: nn.Module, record: WriteRecord | None) -> Digests:
    """Return a digest of each parameter, and of each buffer with values, by name.

    ``record``: writes to parameters on meta; None: they have values.
    """
    found = {}
    for name, tensor in (
        *layers.named_parameters(remove_duplicate=False),
        *layers.named_buffers(remove_duplicate=False),
    ):
        if not tensor.is_meta:
            found[name] = hashlib.blake2b(bytes_of(tensor), digest_size=16).digest()
        elif record is not None:
            found[name] = record.digest_of(tensor)
    return found


def _different(found: Digests, other: Digests) -> set[str]:
    """Return the names whose digests differ."""
    return {name for name in found.keys() | other.keys() if found.get(name) != other.get(name)}


def _other_buffers(layers: nn.Module, other: nn.Module) -> set[str]:
    """Return the names of buffers with values that are others, bit by bit, in another outline of the model."""
    others = dict(other.named_buffers(remove_duplicate=False))
    return {
        name
        for name, buffer in layers.named_buffers(remove_duplicate=False)
        if not _are_equal(buffer, others.get(name))
    }


def _are_equal(buffer: Tensor, other: Tensor | None) -> bool:
    if other is None or buffer.is_meta or other.is_meta:
        return other is not None and buffer.is_meta == other.is_meta
    is_alike = buffer.dtype == other.dtype and buffer.shape == other.shape
    return is_alike and torch.equal(bits_of(buffer), bits_of(other))


def _other_values(path: str, names: Collection[str]) -> ModelError:
    return ModelError(
        "MW-MODEL-049",
        f"{path}: two runs of the builder under one seed give {listed('tensor', names)} different first values: from "
        f"the time, os.urandom, the order of a set, or a generator of its own without a seed "
        f"(numpy.random.default_rng()). Each process would train another model. Draw from the global generator of "
        f"torch, numpy or Python, which run.seed seeds, or give that generator a seed",
    )


@contextmanager
def _limited_parameters(path: str) -> Iterator[None]:
    """Raise :class:`ModelError` as soon as modules hold more than MAX_NUMEL parameters that are not on meta."""
    register, seen, total = nn.Module.register_parameter, set[int](), 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal total
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta and id(parameter) not in seen:
            seen.add(id(parameter))
            total += parameter.numel()
        if total > MAX_NUMEL:
            raise ModelError(
                "MW-MODEL-050",
                f"{path} sets first values outside of reset_parameters(), or reads values while the model is built: a "
                f"run of the whole builder has to give them, and more than {MAX_NUMEL:,} parameters are too many for "
                f"the memory of one process. Set them in the modules' reset_parameters(), or by the model's attribute "
                f"initialise(name, tensor), which fill one tensor at a time",
            )

    nn.Module.register_parameter = count  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
