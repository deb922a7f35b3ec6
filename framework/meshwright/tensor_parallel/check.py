"""Kinds of a sharding plan, and checks that the plan fits a model, before any process group exists.

The plan is checked in full also with tp = 1, so that a typo in a pattern is an error in every
layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from meshwright.errors import ModelError
from meshwright.fp8.linear import Fp8Linear
from meshwright.mesh import Grid
from meshwright.placement.patterns import matching, unmatched
from meshwright.tensor_parallel.hints import close_word
from meshwright.tensor_parallel.own_rule import Rule
from meshwright.tensor_parallel.shared_units import unit_problems


class ShardingKind(StrEnum):
    """Kind of sharding of a module, as listed in :mod:`.plan` and :mod:`.unsplit`."""

    COLUMN = "column"
    ROW = "row"
    COLUMN_WHOLE = "column_whole"
    ROW_WHOLE = "row_whole"
    VOCAB = "vocab"
    SEQUENCE = "sequence"
    HEADS = "heads"
    FEATURES = "features"
    UNCUT = "uncut"
    GATHER = "gather"
    GATHER_CUT = "gather_cut"
    CONTEXT = "context"
    POSITIONS = "positions"
    PLACES = "places"
    EXPERTS = "experts"
    ROUTER = "router"
    REPLICATE = "replicate"
    OWN = "a rule"
    """A function in the plan instead of a word, see :mod:`meshwright.tensor_parallel.own_rule`."""


WORDS = [str(kind) for kind in ShardingKind if kind is not ShardingKind.OWN]
SPLITTING = (
    ShardingKind.COLUMN,
    ShardingKind.ROW,
    ShardingKind.COLUMN_WHOLE,
    ShardingKind.ROW_WHOLE,
    ShardingKind.VOCAB,
)
BESIDE_RULES = (ShardingKind.CONTEXT, ShardingKind.POSITIONS, ShardingKind.HEADS)
"""Kinds that modules inside a layer with a user's rule may have: they split no parameter."""
ROWS = (ShardingKind.ROW, ShardingKind.ROW_WHOLE)


class PlannedModule(NamedTuple):
    """A module that the plan names, its kind, the pattern that matched it,
    and its rule if the kind is OWN.
    """

    name: str
    module: nn.Module
    kind: ShardingKind
    pattern: str
    rule: Rule | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.kind} by sharding_plan[{self.pattern!r}])"


def check_sequence_lengths(inputs: Any, tp: int, corpus_length: int | None) -> None:
    """Check the length of every sequence of token ids among a micro-batch's inputs: tensors (B, S,
    ...) on meta.

    ``corpus_length``: ``data.sequence_length``, for the message; None: a builder makes the samples.

    Raises:
        ModelError: tp does not divide a length.
    """
    for path, leaf in tree_flatten_with_path(inputs)[0]:
        if not leaf.is_floating_point() and leaf.dim() > 1:
            length = leaf.shape[1]
            check_sequence_length(
                length, tp, None if length == corpus_length else f"inputs{keystr(path)}"
            )


def check_sequence_length(length: int, tp: int, name: str | None = None) -> None:
    """Check that tp divides the length of a sequence,
    since sequence parallelism gives each rank an equal part.

    Args:
        name: name of the sequence for the message; None: the length is ``data.sequence_length``.

    Raises:
        ModelError: tp does not divide it. Gives the numbers and the two nearest lengths that would
            do.
    """
    if length % tp == 0:
        return
    below = length // tp * tp
    nearest = " or ".join(str(near) for near in (below, below + tp) if near)
    what, use = f"data.sequence_length = {length}", f"use {nearest}"
    if name is not None:
        what = f"the length of {name}, {length},"
        use = f"make it {nearest}, use another parallel.tp"
    raise ModelError(
        "MW-TP-001",
        f"parallel.sequence cuts the sequence into parallel.tp = {tp} equal parts, and {what} is"
        f" not divisible by {tp}: {use}, or parallel.sequence = false",
    )


def check_plan(
    model: nn.Sequential,
    plan: Mapping[str, str | Rule],
    tp: int,
    sequence: bool,
    divisible: Mapping[str, int],
    shared: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Check the plan against the plain model, in every layout. Needs no process group.

    Raises:
        ModelError: every problem found, each with its pattern, module, numbers and next move.
    """
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    errors = [
        error
        for key, patterns in (
            ("sharding_plan", plan),
            ("divisible", divisible),
            ("shared_units", shared),
        )
        for error in unmatched(key, patterns, list(modules), "module")
    ]
    problems: list[str] = []
    placements = _match(modules, plan, problems)
    problems += _first_misfits(placements, tp)
    columns = [
        name for name, placement in placements.items() if placement.kind is ShardingKind.COLUMN
    ]
    problems += unit_problems(modules, columns, divisible, shared, tp)
    if tp > 1 and not (errors or problems):
        problems += _missing(placements, tp, sequence)
    if problems:
        errors.append(ModelError("MW-TP-002", "\n".join(problems)))
    if errors:
        raise errors[0] if len(errors) == 1 else ModelError.join(errors)


def _match(
    modules: Mapping[str, nn.Module], plan: Mapping[str, str | Rule], problems: list[str]
) -> dict[str, PlannedModule]:
    """Return the modules that the patterns match, by name;
    append problems of the plan itself to ``problems``.
    """
    placements: dict[str, PlannedModule] = {}
    for pattern, word in plan.items():
        rule = None if isinstance(word, str) or not callable(word) else word
        if rule is None and word not in WORDS:
            problems.append(
                f"sharding_plan[{pattern!r}] = {word!r} is no kind{close_word(str(word), WORDS)}:"
                f" use one of {', '.join(WORDS)}, or a function"
            )
            continue
        kind = ShardingKind.OWN if rule else ShardingKind(str(word))
        for name in matching([pattern], modules):
            placement = PlannedModule(name, modules[name], kind, pattern, rule)
            other = placements.setdefault(name, placement)
            if (other.kind, other.rule) != (kind, rule):
                problems.append(
                    f"module {name} is {other.kind} by sharding_plan[{other.pattern!r}] and {kind}"
                    f" by sharding_plan[{pattern!r}]: make one of the patterns narrower"
                )
    for name, placement in placements.items():
        outers = [
            other
            for other in placements.values()
            if other.rule and name.startswith(f"{other.name}.")
        ]
        for outer in outers if placement.kind not in BESIDE_RULES else ():
            problems.append(
                f"{placement} lies in {outer}, whose rule splits all of it: leave one of them out"
            )
    return placements


def _first_misfits(placements: Mapping[str, PlannedModule], tp: int) -> Iterator[str]:
    """Yield one problem for each pattern and type of module,
    since the blocks of a deep model all have the same one.
    """
    misfits: dict[tuple[str, type[nn.Module]], list[str]] = {}
    for placement in placements.values():
        for problem in _misfits(placement, tp):
            misfits.setdefault((placement.pattern, type(placement.module)), []).append(problem)
    for problems in misfits.values():
        more = (
            f" (and {len(problems) - 1} more modules of this pattern)" if len(problems) > 1 else ""
        )
        yield problems[0] + more


def _misfits(placement: PlannedModule, tp: int) -> Iterator[str]:
    """Yield the reasons why a module's type or size does not allow its kind of split."""
    module, kind = placement.module, placement.kind
    if kind is ShardingKind.FEATURES and any(True for _ in module.parameters()):
        yield (
            f"{placement} has parameters, and kind {kind} is for dropouts on activations whose last"
            " dim is split: split its parameters with column or row, or leave it out of the plan"
        )
    if kind is ShardingKind.EXPERTS:
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
            yield (
                f"{placement} must have parameters whose dim 0 counts the experts, and has"
                f" {shapes or 'none'}: name the module that holds the experts' weights alone"
            )
    if kind not in SPLITTING:
        return
    wanted: tuple[type[nn.Module], ...] = (nn.Linear,)
    if kind in (ShardingKind.COLUMN, ShardingKind.VOCAB):
        wanted = (nn.Embedding, nn.Linear)
    if type(module) not in (*wanted, Fp8Linear):
        names = " or ".join(f"nn.{type_.__name__}" for type_ in wanted)
        yield (
            f"{placement} is of type {type(module).__name__}, and kind {kind} splits only a plain"
            f" {names}: name the linear inside it, or leave it out of the plan"
        )
        return
    if isinstance(module, nn.Embedding):
        needing = ("max_norm", "scale_grad_by_freq", "sparse")
        unsupported = [name for name in needing if getattr(module, name) not in (None, False)]
        if unsupported and tp > 1:
            yield (
                f"{placement} has {' and '.join(unsupported)} set, which needs all of the table in"
                " one place: build it without, or use parallel.tp = 1"
            )
        if kind is ShardingKind.COLUMN and module.embedding_dim % tp:
            yield (
                f"{placement} has a table of {module.num_embeddings} x {module.embedding_dim}, and"
                f" its {module.embedding_dim} features cannot be split over parallel.tp = {tp}:"
                f" choose a tp that divides {module.embedding_dim}, or another width"
            )
    elif kind is not ShardingKind.VOCAB:
        assert isinstance(module, nn.Linear)
        what, length = (
            ("columns", module.in_features) if kind in ROWS else ("rows", module.out_features)
        )
        if length % tp:
            yield (
                f"{placement} has a weight of {module.out_features} x {module.in_features}, and its"
                f" {length} {what} cannot be split over parallel.tp = {tp}: choose a tp that"
                f" divides {length}, or another width"
            )


def _missing(placements: Mapping[str, PlannedModule], tp: int, sequence: bool) -> Iterator[str]:
    """Yield problems of a plan that splits nothing,
    or that never cuts or never gathers the sequence.
    """
    planned = list(placements.values())
    if not any(placement.kind in SPLITTING or placement.rule for placement in planned):
        yield (
            f"parallel.tp = {tp}, but the model's sharding_plan splits nothing: all {tp} ranks"
            " would compute the same. Give the model a sharding_plan (column, row, vocab), or use"
            " parallel.tp = 1"
        )
        return
    if not sequence:
        return
    cuts = [
        p
        for p in planned
        if p.rule
        or p.kind is ShardingKind.SEQUENCE
        or (p.kind is ShardingKind.VOCAB and isinstance(p.module, nn.Embedding))
    ]
    if not cuts:
        yield (
            "parallel.sequence = true, but no module of the sharding_plan cuts the sequence: give"
            ' the token embedding the kind "vocab" (or "sequence"), or use parallel.sequence ='
            " false"
        )
    if not any(p.kind is ShardingKind.VOCAB and isinstance(p.module, nn.Linear) for p in planned):
        yield (
            "parallel.sequence = true, but no module of the sharding_plan puts the sequence"
            ' together for the loss: give the nn.Linear that makes the logits the kind "vocab", or'
            " use parallel.sequence = false"
        )


def check_supported(
    builder: str, impossible: Mapping[str, str], grid: Grid, *, sequence: bool
) -> None:
    """Raise :class:`ModelError` for a degree, or sequence parallelism,
    that ``builder``'s model does not support.
    """
    wanted = {
        a: f"parallel.{a} = {n}: use parallel.{a} = 1"
        for a, n in (("tp", grid.tp), ("cp", grid.cp))
        if n > 1
    }
    wanted |= {"sequence": "parallel.sequence = true: set it to false"} if sequence else {}
    for key in [key for key in wanted if key in impossible]:
        raise ModelError(
            "MW-RUN-004", f"{builder}: {impossible[key]}; this rules out {wanted[key]}"
        )
