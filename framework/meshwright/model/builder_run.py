"""First values as a model's builder sets them: those of one run of it on the CPU,
as in plain torch.

    torch.manual_seed(run.seed); random.seed(run.seed); numpy.random.seed(run.seed % 2**32)
    model = build(**options)

Every process that needs a value runs the builder in this way and takes its slices: the same bits in
every layout. The generators of the process are restored afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

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
from meshwright.model.write_record import WriteRecord, bytes_of
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
        """Digest of everything that goes into the values: where it differs between processes,
        they do too.
        """
        self.unrepeated: frozenset[str] = frozenset()
        """Those of :attr:`names` whose values no seed repeats:
        only the model's ``initialise`` can replace them.
        """
        self.unset: list[str] = []
        """Parameters that only the model's ``initialise`` can give a value."""
        self._values: dict[str, Tensor] = {}
        self._sizes: frozenset[int] = frozenset()
        """Bytes of large storages that get a pattern in outlines."""

    def layers(self, pattern: Pattern = MARKED) -> nn.Sequential:
        """Run the builder and return the model, with values;
        elements that nothing has written hold a pattern.

        Raises:
            ModelError: it has too many parameters for one process.
        """
        with generators_at(self.seed), MarkEmpty(pattern), _limited_parameters(self.path):
            return self.build()  # type: ignore[no-any-return]

    def value(self, name: str) -> Tensor:
        """Return a full parameter, float32 on CPU. The first call runs the builder;
        its values stay in memory.

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
        return [
            name for name, value in self._values.items() if name in self.names and is_marked(value)
        ]

    def release(self) -> None:
        """Free the memory of the values."""
        self._values = {}

    def draw(self) -> ModelOutline:
        """Run the builder with parameters on meta; again, if large tensors that are no parameters
        need a mark to be judged.
        """
        outline = self._draw("builder")
        assert outline.record is not None
        self._sizes = outline.record.unfilled_sizes()
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
        """Find which first values a run of the builder gives,
        and return the problems with first values.

        It gives all of them, if the builder sets any outside of the resets. A model with
        ``initialise`` may replace them later. Buffers that the builder draws, or computes from
        parameters, then become those of the run.

        Args:
            outline: the model; its buffers are changed in place.
            owners: owner of each parameter's first value.
            copies: names of parameters that are tied to another one, which have no value of their
                own.
        """
        layers, record = outline
        is_declared = getattr(layers, "initialise", None) is not None
        buffers = dict(layers.named_buffers(remove_duplicate=False))
        if record is None:
            digests, different, problems = self._take_values(is_declared)
        else:
            problems = self._judge_buffers(layers)
            values = find_first_values(layers, owners, record, copies)
            self.unset = values.by_nothing if is_declared else []
            problems += [] if is_declared else first_value_problems(self.path, values)
            on_meta = {name for name, buffer in buffers.items() if buffer.is_meta}
            if problems or not (values.by_builder or on_meta):
                return problems
            self.names = frozenset(values.built)
            digests = _digests(layers, record)
            different = _different(digests, self._outlined("builder"))
            taken = on_meta
            if not is_declared:
                drawn = _different(digests, self._outlined("builder, other seed"))
                taken |= drawn & buffers.keys()
            if taken:
                self._copy_buffers(layers, taken)
        self.digest = hashlib.blake2b(
            repr(sorted(digests.items())).encode(), digest_size=16
        ).hexdigest()
        if is_declared:  # which may give all values itself
            self.unrepeated, self.digest = self.names & different, ""
            different &= buffers.keys()
        if different:
            problems.append(_other_values(self.path, sorted(different)))
        return problems

    def _take_values(self, is_declared: bool) -> tuple[Digests, set[str], list[ModelError]]:
        """Take all values of a run on the CPU, and set :attr:`names` and :attr:`unset`.

        Returns:
            The digests, the names of values that no seed repeats, and the problems with unwritten
            ones.
        """
        built = self.layers()
        judged = judge(built, lambda: self.layers(OTHER))
        parameters = dict(built.named_parameters(remove_duplicate=False))
        self.names = frozenset(parameters)
        unset = [name for name in parameters if name in judged.unwritten]
        self.unset = unset if is_declared else []
        problems = self._unwritten_buffers(built, judged)
        if unset and not is_declared:
            problems.append(unwritten_error(self.path, "parameter", unset))
        return judged.digests, judged.unrepeated, problems

    def _judge_buffers(self, layers: nn.Module) -> list[ModelError]:
        """Return the problems with buffers of an outline; those of our own models are constants."""
        has_values = any(not buffer.is_meta for buffer in layers.buffers())
        is_judged = has_values and not is_own_package(self.path)
        judged = judge(layers, (lambda: self._draw("builder", OTHER).layers) if is_judged else None)
        problems = self._unwritten_buffers(layers, judged)
        if judged.unrepeated:
            problems.append(_other_values(self.path, sorted(judged.unrepeated)))
        return problems

    def _unwritten_buffers(self, layers: nn.Module, judged: Judgement) -> list[ModelError]:
        """Return the error for unwritten buffers, in the model's order, each buffer once."""
        names = [name for name, _ in layers.named_buffers() if name in judged.unwritten]
        return [unwritten_error(self.path, "buffer", names)] if names else []

    def _outlined(self, purpose: str) -> Digests:
        """Return the digests of another outline, built under the seed of a purpose."""
        return _digests(*self._draw(purpose))

    def _copy_buffers(self, layers: nn.Module, names: Collection[str]) -> None:
        """Copy buffers of a run into the outline ``layers``."""
        found = dict(self.layers().named_buffers(remove_duplicate=False))
        for name in names:
            owner, _, attribute = name.rpartition(".")
            layers.get_submodule(owner)._buffers[attribute] = found[name].detach().clone()


class Judgement(NamedTuple):
    """Tensors of a model whose values are not those of every run of its builder."""

    unwritten: set[str]
    """Names of those with elements that nothing has written, or computed from such."""
    unrepeated: set[str]
    """Names of those that no seed repeats."""
    digests: Digests
    """Digest of each tensor with values; empty where no second run is compared."""


def judge(layers: nn.Module, rerun: Callable[[], nn.Module] | None) -> Judgement:
    """Judge the parameters and buffers of a model that have values.

    Most unwritten elements hold the mark. A tensor without one is unwritten, or depends on such
    elements, if it is another one as soon as uninitialised memory holds other bits. A tensor
    that no seed repeats differs between two runs with these bits, too.

    Args:
        rerun: Run the builder with :data:`OTHER` in uninitialised memory; None: marks alone count.
    """
    named = (
        *layers.named_parameters(remove_duplicate=False),
        *layers.named_buffers(remove_duplicate=False),
    )
    unwritten = {name for name, tensor in named if is_marked(tensor)}
    if rerun is None:
        return Judgement(unwritten, set(), {})
    digests, other = _digests(layers), _digests(rerun())
    differing = _different(digests, other)
    unrepeated = _different(other, _digests(rerun())) if differing else set()
    return Judgement(unwritten | (differing - unrepeated), unrepeated, digests)


def _digests(layers: nn.Module, record: WriteRecord | None = None) -> Digests:
    """Return a digest of each parameter and buffer with values, by name.

    ``record``: writes to tensors on meta, which have digests too.
    """
    digests = {}
    for name, tensor in (
        *layers.named_parameters(remove_duplicate=False),
        *layers.named_buffers(remove_duplicate=False),
    ):
        if not tensor.is_meta:
            digests[name] = hashlib.blake2b(bytes_of(tensor), digest_size=16).digest()
        elif record is not None:
            digests[name] = record.digest_of(tensor)
    return digests


def _different(digests: Digests, other: Digests) -> set[str]:
    """Return the names whose digests differ."""
    names = digests.keys() | other.keys()
    return {name for name in names if digests.get(name) != other.get(name)}


def _other_values(path: str, names: Collection[str]) -> ModelError:
    return ModelError(
        "MW-MODEL-049",
        f"{path}: two runs of the builder under one seed give {listed('tensor', names)} different"
        " first values: from the time, os.urandom, the order of a set, or a generator of its own"
        " without a seed (numpy.random.default_rng()). Each process would train another model."
        " Draw from the global generator of torch, numpy or Python, which run.seed seeds, or give"
        " that generator a seed",
    )


@contextmanager
def _limited_parameters(path: str) -> Iterator[None]:
    """Raise :class:`ModelError` as soon as modules hold more than MAX_NUMEL parameters
    that are not on meta.
    """
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
                f"{path} sets first values outside of reset_parameters(), or reads values while the"
                " model is built: a run of the whole builder has to give them, and more than"
                f" {MAX_NUMEL:,} parameters are too many for the memory of one process. Set them in"
                " the modules' reset_parameters(), or by the model's attribute initialise(name,"
                " tensor), which fill one tensor at a time",
            )

    nn.Module.register_parameter = count  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
