"""Kinds of a sharding plan, and checks that the plan fits a model, before any process group exists.

The plan is checked in full also with tp = 1, so that a typo in a pattern is an error in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from meshwright.errors import ModelError
from meshwright.fp8.linear import Fp8Linear
from meshwright.mesh import Grid
from meshwright.tensor_parallel.hints import close_word, nearest
from meshwright.tensor_parallel.own_rule import Rule
from meshwright.tensor_parallel.shared_units import SharedUnits, entry_of, unit_problems


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
    """A module that the plan names, its kind, the pattern that matched it, and its rule if the kind is OWN.

    ``shared``: its units, if several tp ranks share each of them (shared_units.py).
    """

    name: str
    module: nn.Module
    kind: ShardingKind
    pattern: str
    rule: Rule | None = None
    shared: SharedUnits | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.kind} by sharding_plan[{self.pattern!r}])"


def check_sequence_lengths(inputs: Any, tp: int, corpus_length: int | None) -> None:
    """Check the length of every sequence of token ids among a micro-batch's inputs: tensors (B, S, ...) on meta.

    ``corpus_length``: ``data.sequence_length``, for the message; None: a builder makes the samples.

    Raises:
        ModelError: tp does not divide a length.
    """
    for path, leaf in tree_flatten_with_path(inputs)[0]:
        if not leaf.is_floating_point() and leaf.dim() > 1:
            length = leaf.shape[1]
            check_sequence_length(length, tp, None if length == corpus_length else f"inputs{keystr(path)}")


def check_sequence_length(length: int, tp: int, name: str | None = None) -> None:
    """Check that tp divides the length of a sequence, since sequence parallelism gives each rank an equal part.

    Args:
        name: name of the sequence for the message; None: the length is ``data.sequence_length``.

    Raises:
        ModelError: tp does not divide it. Gives the numbers and the two nearest lengths that would do.
    """
    if length % tp == 0:
        return
    below = length // tp * tp
    nearest = " or ".join(str(near) for near in (below, below + tp) if near)
    what, use = f"data.sequence_length = {length}", f"use {nearest}"
    if name is not None:
        what, use = f"the length of {name}, {length},", f"make it {nearest}, use another parallel.tp"
    raise ModelError(
        "MW-TP-001",
        f"parallel.sequence cuts the sequence into parallel.tp = {tp} equal parts, and {what} is not divisible by "
        f"{tp}: {use}, or parallel.sequence = false",
    )


def check_plan(
    model: nn.Sequential,
    plan: Mapping[str, str | Rule],
    tied: Sequence[tuple[str, ...]],
    tp: int,
    sequence: bool,
    divisible: Mapping[str, int],
    shared: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, PlannedModule]:
    """Check the plan against the plain model and return the planned modules by name. Needs no process group.

    Raises:
        ModelError: every problem found, each with its pattern, module, numbers and next move.
    """
    problems: list[str] = []
    placements = _match(model, plan, problems)
    problems += _first_misfits(placements, tp)
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    columns = [name for name, placement in placements.items() if placement.kind is ShardingKind.COLUMN]
    problems += unit_problems(modules, columns, divisible, shared, tp)
    if tp > 1 and not problems:
        problems += _missing(placements, tp, sequence)
        problems += _uneven_ties(placements, tied)
    if problems:
        raise ModelError("MW-TP-002", "\n".join(problems))
    sharing = {name: entry for name in columns if (entry := entry_of(name, shared)) is not None}
    return placements | {
        name: placements[name]._replace(shared=entry)
        for name, entry in sharing.items()
        if entry.sharers(modules[name].out_features, tp) > 1
    }


def _match(model: nn.Sequential, plan: Mapping[str, str | Rule], problems: list[str]) -> dict[str, PlannedModule]:
    """Return the modules that the patterns match, by name; append problems of the plan itself to ``problems``."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    placements: dict[str, PlannedModule] = {}
    for pattern, word in plan.items():
        rule = None if isinstance(word, str) or not callable(word) else word
        if rule is None and word not in WORDS:
            problems.append(
                f"sharding_plan[{pattern!r}] = {word!r} is no kind{close_word(str(word), WORDS)}: use one of "
                f"{', '.join(WORDS)}, or a function"
            )
            continue
        kind = ShardingKind.OWN if rule else ShardingKind(str(word))
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            problems.append(
                f"sharding_plan[{pattern!r}] = {word!r} names no module of the model{nearest(pattern, modules)}"
            )
        for name in names:
            placement = PlannedModule(name, modules[name], kind, pattern, rule)
            other = placements.setdefault(name, placement)
            if (other.kind, other.rule) != (kind, rule):
                problems.append(
                    f"module {name} is {other.kind} by sharding_plan[{other.pattern!r}] and {kind} by "
                    f"sharding_plan[{pattern!r}]: make one of the patterns narrower"
                )
    for name, placement in placements.items():
        outers = [other for other in placements.values() if other.rule and name.startswith(f"{other.name}.")]
        for outer in outers if placement.kind not in BESIDE_RULES else ():
            problems.append(f"{placement} lies in {outer}, whose rule splits all of it: leave one of them out")
    return placements


def _first_misfits(placements: Mapping[str, PlannedModule], tp: int) -> Iterator[str]:
    """Yield one problem for each pattern and type of module, since the blocks of a deep model all have the same one."""
    found: dict[tuple[str, type[nn.Module]], list[str]] = {}
    for placement in placements.values():
        for problem in _misfits(placement, tp):
            found.setdefault((placement.pattern, type(placement.module)), []).append(problem)
    for problems in found.values():
        more = f" (and {len(problems) - 1} more modules of this pattern)" if len(problems) > 1 else ""
        yield problems[0] + more


def _misfits(placement: PlannedModule, tp: int) -> Iterator[str]:
    """Yield the reasons why a module's type or size does not allow its kind of split."""
    module, kind = placement.module, placement.kind
    if kind is ShardingKind.FEATURES and any(True for _ in module.parameters()):
        yield (
            f"{placement} has parameters, and kind {kind} is for dropouts on activations whose last dim is split: "
            f"split its parameters with column or row, or leave it out of the plan"
        )
    if kind is ShardingKind.EXPERTS:
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
            yield (
                f"{placement} must have parameters whose dim 0 counts the experts, and has {shapes or 'none'}: name "
                f"the module that holds the experts' weights alone"
            )
    if kind not in SPLITTING:
        return
    wanted = (nn.Embedding, nn.Linear) if kind in (ShardingKind.COLUMN, ShardingKind.VOCAB) else (nn.Linear,)
    if type(module) not in (*wanted, Fp8Linear):
        names = " or ".join(f"nn.{type_.__name__}" for type_ in wanted)
        yield (
            f"{placement} is of type {type(module).__name__}, and kind {kind} splits only a plain {names}: name the "
            f"linear inside it, or leave it out of the plan"
        )
        return
    if isinstance(module, nn.Embedding):
        needing = ("max_norm", "scale_grad_by_freq", "sparse")
        unsupported = [name for name in needing if getattr(module, name) not in (None, False)]
        if unsupported and tp > 1:
            yield (
                f"{placement} has {' and '.join(unsupported)} set, which needs all of the table in one place: build it "
                f"without, or use parallel.tp = 1"
            )
        if kind is ShardingKind.COLUMN and module.embedding_dim % tp:
            yield (
                f"{placement} has a table of {module.num_embeddings} x {module.embedding_dim}, and its "
                f"{module.embedding_dim} features cannot be split over parallel.tp = {tp}: choose a tp that divides "
                f"{module.embedding_dim}, or another width"
            )
    elif kind is not ShardingKind.VOCAB:
        assert isinstance(module, nn.Linear)
        what, length = ("columns", module.in_features) if kind in ROWS else ("rows", module.out_features)
        if length % tp:
            yield (
                f"{placement} has a weight of {module.out_features} x {module.in_features}, and its {length} {what} "
                f"cannot be split over parallel.tp = {tp}: choose a tp that divides {length}, or another width"
            )


def _missing(placements: Mapping[str, PlannedModule], tp: int, sequence: bool) -> Iterator[str]:
    """Yield problems of a plan that splits nothing, or that never cuts or never gathers the sequence."""
    found = list(placements.values())
    if not any(placement.kind in SPLITTING or placement.rule for placement in found):
        yield (
            f"parallel.tp = {tp}, but the model's sharding_plan splits nothing: all {tp} ranks would compute the same. "
            f"Give the model a sharding_plan (column, row, vocab), or use parallel.tp = 1"
        )
        return
    if not sequence:
        return
    cuts = [
        p
        for p in found
        if p.rule
        or p.kind is ShardingKind.SEQUENCE
        or (p.kind is ShardingKind.VOCAB and isinstance(p.module, nn.Embedding))
    ]
    if not cuts:
        yield (
            "parallel.sequence = true, but no module of the sharding_plan cuts the sequence: give the token embedding "
            'the kind "vocab" (or "sequence"), or use parallel.sequence = false'
        )
    if not any(p.kind is ShardingKind.VOCAB and isinstance(p.module, nn.Linear) for p in found):
        yield (
            "parallel.sequence = true, but no module of the sharding_plan puts the sequence together for the loss: "
            'give the nn.Linear that makes the logits the kind "vocab", or use parallel.sequence = false'
        )


def _uneven_ties(placements: Mapping[str, PlannedModule], tied: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield tied weights whose modules are split in different ways. They are one weight, so one split must fit all."""
    owned = tuple(f"{placement.name}." for placement in placements.values() if placement.rule)
    for names in tied:
        if any(name.startswith(owned) for name in names):
            continue  # checked once the rule has returned its dims
        how = {}
        for name in names:
            placement = placements.get(name.rpartition(".")[0])
            how[name] = ShardingKind.REPLICATE.value if placement is None else _way(placement)
        if len(set(how.values())) > 1:
            ways = ", ".join(f"{name} is {kind}" for name, kind in how.items())
            yield f"tied weights must be split alike, but {ways}: give their modules the same kind in the sharding_plan"


def _way(placement: PlannedModule) -> str:
    """Return a name for the way a weight is split; it must be the same for all modules that share the weight."""
    if placement.kind not in SPLITTING:
        return ShardingKind.REPLICATE
    if placement.kind is ShardingKind.COLUMN and isinstance(placement.module, nn.Embedding):
        return "column by its features"
    return placement.kind


def check_supported(builder: str, impossible: Mapping[str, str], grid: Grid, *, sequence: bool) -> None:
    """Raise :class:`ModelError` for a degree, or sequence parallelism, that ``builder``'s model does not support."""
    wanted = {a: f"parallel.{a} = {n}: use parallel.{a} = 1" for a, n in (("tp", grid.tp), ("cp", grid.cp)) if n > 1}
    wanted |= {"sequence": "parallel.sequence = true: set it to false"} if sequence else {}
    for key in [key for key in wanted if key in impossible]:
        raise ModelError("MW-RUN-004", f"{builder}: {impossible[key]}; this rules out {wanted[key]}")
