"""Account of a start from other weights: which tensor of this model comes from which of the sources.

Every tensor of the model is taken or named as new, and every tensor of the sources is taken or named
as unused. Whatever is left out or added is named by a key.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.adapters.attach import is_adapter
from meshwright.checkpoint.preflight import SavedTensor
from meshwright.config import Model, RunConfig
from meshwright.config.functions import directory_of
from meshwright.config.schemes import is_own_scheme
from meshwright.errors import CheckpointError, UserError
from meshwright.model.builder import find_builder, vocabulary_size
from meshwright.placement.patterns import fits, unmatched
from meshwright.run.weight_source import Shape, WeightSource, settings_of
from meshwright.system.bounded import shortened

MOST_LISTED = 12
"""Tensors that a message lists by name."""
LARGEST_ALPHA = 1e300
"""Beyond this the number of a hostile manifest has no float."""
MOST_SHOWN = 3
"""Tensors that a line of the account shows by name."""


class Origin(NamedTuple):
    """Tensor of a source that becomes one of this model."""

    source: int
    """Index of the source."""
    name: str
    """Name in the source."""
    shape: Shape
    """Global shape in the source."""


class StartAccount(NamedTuple):
    """Origins of the tensors of a model, by their names here."""

    taken: Mapping[str, Origin]
    grown: Mapping[str, Shape]
    """Those of ``taken`` that have more rows here -> their shape here."""
    new: tuple[str, ...]
    """Tensors that ``run.start_new`` names, and adapters of a model that had none."""
    kept: tuple[str, ...]
    """Frozen base of adapters whose values are those of ``model.builder``'s directory."""
    unused: tuple[str, ...]
    """Tensors of the sources that ``run.start_unused`` names, or that new ones replace."""
    num_elements: int
    """Elements of ``taken``."""


def make_account(
    config: RunConfig, own: Sequence[SavedTensor], sources: Sequence[WeightSource]
) -> StartAccount:
    """Assign each tensor of the model an origin.

    Args:
        own: weights and saved buffers of the model.

    Raises:
        UserError: tensors that no key names are missing, of another shape, unused, or in two
            sources; or a pattern matches none. One error for each kind.
    """
    run, shapes = config.run, {tensor.name: tensor.shape for tensor in own}
    names, problems = _names_in_sources(run.start_names, list(shapes), sources)
    problems += _of_two(names, sources)
    if problems:
        raise UserError.join(problems)
    problems = [
        *unmatched("run.start_new", run.start_new, list(shapes), "tensor"),
        *_unmatched_unused(run.start_unused, sources),
    ]
    account, missing, reshaped = _assign(config, shapes, names, sources)
    used = {(origin.source, origin.name) for origin in account.taken.values()}
    replaced = {names[name] for name in account.new}
    replaced |= {origin.name for origin in reshaped.values()}
    unused = [
        (index, name)
        for index, source in enumerate(sources)
        for name in source.shapes
        if (index, name) not in used
    ]
    unnamed = [
        (index, name)
        for index, name in unused
        if name not in replaced and not fits(name, *run.start_unused)
    ]
    problems += _missing_tensors(missing, sources)
    problems += _other_shapes(config, reshaped, shapes, sources)
    problems += _other_vocabularies(account)
    problems += _other_scale(config, account, sources)
    if config.model.grow_vocabulary and not account.grown and not problems:
        problems.append(
            CheckpointError(
                "MW-RUN-061",
                f"model.grow_vocabulary = true has no effect: no tensor of {_places(sources)} has"
                " fewer rows than here: leave it out",
            )
        )
    problems += _unnamed_tensors(unnamed, sources)
    if not account.taken and not problems:
        problems.append(
            CheckpointError(
                "MW-RUN-046",
                f"{_places(sources)}: no tensor of this model is taken: leave run.start out, or"
                " give run.start_names (this model's name = the name there)",
            )
        )
    if problems:
        raise UserError.join(problems)
    return account._replace(unused=tuple(name for _, name in unused))


def _assign(
    config: RunConfig,
    shapes: Mapping[str, Shape],
    names: Mapping[str, str],
    sources: Sequence[WeightSource],
) -> tuple[StartAccount, list[str], dict[str, Origin]]:
    """Return the account, the tensors without an origin, and those whose origin has another
    shape.
    """
    all_names = [name for source in sources for name in source.shapes]
    has_adapters = any(map(is_adapter, all_names))
    only_adapters = has_adapters and all(map(is_adapter, all_names))
    keeps_base = only_adapters and _has_weights(config.model)
    vocab_size = _vocab_size(config.model)
    taken: dict[str, Origin] = {}
    grown: dict[str, Shape] = {}
    reshaped: dict[str, Origin] = {}
    new: list[str] = []
    kept: list[str] = []
    missing: list[str] = []
    for name, shape in shapes.items():
        origin = _origin(names[name], sources)
        if fits(name, *config.run.start_new) or (is_adapter(name) and not has_adapters):
            new.append(name)
        elif origin is None and keeps_base and not is_adapter(name):
            kept.append(name)
        elif origin is None:
            missing.append(name)
        elif origin.shape == shape:
            taken[name] = origin
        elif config.model.grow_vocabulary and _grows(
            origin.shape, shape, sources[origin.source].vocab_size, vocab_size
        ):
            taken[name], grown[name] = origin, shape
        else:
            reshaped[name] = origin
    num_elements = sum(math.prod(origin.shape) for origin in taken.values())
    account = StartAccount(taken, grown, tuple(new), tuple(kept), (), num_elements)
    return account, missing, reshaped


def _vocab_size(model: Model) -> int | None:
    """Return the vocabulary of this model, the default of its builder included; None: unknown."""
    given = vocabulary_size(model.builder, model.options)
    default = _default_options(model.builder).get("model.options.vocab_size")
    return default if given is None and isinstance(default, int) else given


def _has_weights(model: Model) -> bool:
    """Return whether the builder ``hf:DIRECTORY`` loads weights from there."""
    directory = directory_of(model.builder)
    if directory is None or not is_own_scheme(model.builder):
        return False
    return model.options.get("weights") is not False and any(directory.glob("*.safetensors"))


def other_settings(config: RunConfig, sources: Sequence[WeightSource]) -> list[str]:
    """Return a line for each setting of the sources' models that is another here."""
    model = config.model
    here = settings_of(model.builder, model.options, config.adapter.model_dump())
    defaults = _default_options(model.builder)
    lines = []
    for source in sources:
        there = source.settings
        if there.get("model.builder") not in (None, model.builder):
            lines.append(f"model.builder is {model.builder} here and was {there['model.builder']}")
        elif "model.builder" in there:
            before, now = {**defaults, **there}, {**defaults, **here}
            lines += [
                f"{key} is {now.get(key)!r} here and was {before.get(key)!r} there"
                for key in sorted(before.keys() | now.keys())
                if key.startswith("model.options.") and before.get(key) != now.get(key)
            ]
    more = [f"and {len(lines) - MOST_LISTED} more settings"] if lines[MOST_LISTED:] else []
    return [shortened(" ".join(line.split())) for line in lines[:MOST_LISTED]] + more


def _other_scale(
    config: RunConfig, account: StartAccount, sources: Sequence[WeightSource]
) -> list[CheckpointError]:
    """Return an error for each source whose adapters are taken and count more or less here."""
    own_scale = _adapter_scale(settings_of("", {}, config.adapter.model_dump()))
    problems = []
    for index, source in enumerate(sources):
        scale = _adapter_scale(source.settings)
        is_taken = takes_adapters(account, index)
        if scale is None or own_scale is None or not is_taken:
            continue
        if not math.isclose(scale, own_scale, rel_tol=1e-6):
            problems.append(
                CheckpointError(
                    "MW-RUN-047",
                    f"{source.place}: its adapters were trained with alpha / rank = {scale:.7g},"
                    f" and adapter.alpha / adapter.rank = {own_scale:.7g} here: they would count"
                    " more or less than before. Set adapter.alpha ="
                    f" {scale * config.adapter.rank!r}",
                )
            )
    return problems


def takes_adapters(account: StartAccount, source: int) -> bool:
    """Return whether adapters of a source are taken."""
    return any(
        origin.source == source and is_adapter(name) for name, origin in account.taken.items()
    )


def base_places(
    account: StartAccount, sources: Sequence[WeightSource], builder: str
) -> dict[int | None, str]:
    """Return the places of the frozen base beside adapters, by source; None: ``builder``."""
    found: dict[int | None, str] = {
        origin.source: sources[origin.source].place
        for name, origin in account.taken.items()
        if not is_adapter(name)
    }
    return found | ({None: str(directory_of(builder))} if account.kept else {})


def _default_options(builder: str) -> dict[str, Any]:
    """Return the defaults of a builder's arguments, by the dotted key of the option."""
    return {
        f"model.options.{name}": parameter.default
        for name, parameter in inspect.signature(find_builder(builder)).parameters.items()
        if parameter.default is not parameter.empty
    }


def _adapter_scale(settings: Mapping[str, Any]) -> float | None:
    """Return alpha / rank of the adapters; None without any."""
    rank, alpha = settings.get("adapter.rank"), settings.get("adapter.alpha")
    if not isinstance(rank, int) or rank < 1:
        return None
    if not isinstance(alpha, int | float):
        return 1.0
    return float(alpha) / rank if abs(alpha) < LARGEST_ALPHA else math.inf


def describe(account: StartAccount, sources: Sequence[WeightSource], builder: str) -> list[str]:
    """Return the lines of the account, for the console."""
    lines = [f"starting from the weights of {_places(sources)}"]
    numbers = f"{len(account.taken):,} tensors, {account.num_elements:,} numbers"
    lines.append(f"  taken   {numbers}")
    lines += [
        f"  grown   {name}: {list(account.taken[name].shape)} -> {list(shape)}, the new part has its"
        " initial values"
        for name, shape in account.grown.items()
    ]
    base = f"  kept    {directory_of(builder)}: "
    for head, names in (("  new     ", account.new), (base, account.kept)):
        lines += [f"{head}{_abridged(names)}"] if names else []
    if account.unused:
        lines.append(f"  unused  {_abridged(account.unused)}")
    lines += [f"  note    {note}" for source in sources for note in source.notes]
    return lines


def _names_in_sources(
    renamed: Mapping[str, str], names: Sequence[str], sources: Sequence[WeightSource]
) -> tuple[dict[str, str], list[UserError]]:
    """Return the name in the sources of each tensor of the model, and an error for each entry of
    ``run.start_names`` that matches no tensor here, or none there.
    """
    found = {name: name for name in names}
    theirs = {name for source in sources for name in source.shapes}
    problems: list[UserError] = []
    for pattern, replacement in renamed.items():
        entry = f'run.start_names: "{pattern}" = "{replacement}"'
        match = re.compile("(.*)".join(map(re.escape, pattern.split("*")))).fullmatch
        matched = {name: _filled(replacement, each) for name in names if (each := match(name))}
        lost = [name for name in matched.values() if name not in theirs]
        if not matched:
            problems.append(
                CheckpointError(
                    "MW-RUN-055",
                    f"{entry}: this model has no tensor of this name; it has"
                    f" {_abridged(sorted(names))}",
                )
            )
        elif lost:
            problems.append(
                CheckpointError(
                    "MW-RUN-048",
                    f"{entry}: there is no tensor {lost[0]} in {_places(sources)}; it has"
                    f" {_abridged(sorted(theirs))}",
                )
            )
        found |= matched
    return found, problems


def _filled(replacement: str, match: re.Match[str]) -> str:
    """Return a name with the letters that each ``*`` of a pattern has matched."""
    first, *rest = replacement.split("*")
    letters = match.groups()  # as many as in ``rest``: config/rules.py
    return first + "".join(map("{}{}".format, letters, rest))


def _origin(name: str, sources: Sequence[WeightSource]) -> Origin | None:
    for index, source in enumerate(sources):
        if name in source.shapes:
            return Origin(index, name, tuple(source.shapes[name]))
    return None


def _grows(before: Shape, now: Shape, vocab_there: int | None, vocab_here: int | None) -> bool:
    """Return whether one dim, that of the vocabulary, has grown and the others are equal.

    ``vocab_there``, ``vocab_here``: vocabularies of the source and of this model; None: unknown,
    such as of a builder without this option, where any dim may grow.
    """
    if len(before) != len(now):
        return False
    changed = [(a, b) for a, b in zip(before, now, strict=True) if a != b]
    if len(changed) != 1:
        return False
    (old, new), *_ = changed
    is_there, is_here = vocab_there in (None, old), vocab_here in (None, new)
    return old < new and is_there and is_here


def _places(sources: Sequence[WeightSource]) -> str:
    return " and ".join(source.place for source in sources)


def _abridged(names: Sequence[str]) -> str:
    """Return the number of names and the first ones."""
    more = ", ..." if len(names) > MOST_SHOWN else ""
    kind = f"{len(names):,} tensor{'s' * (len(names) != 1)}"
    return f"{kind}: {', '.join(names[:MOST_SHOWN])}{more}"


def _unmatched_unused(
    patterns: Sequence[str], sources: Sequence[WeightSource]
) -> list[CheckpointError]:
    names = [name for source in sources for name in source.shapes]
    return [
        CheckpointError(
            "MW-RUN-049",
            f"run.start_unused: {pattern!r} matches no tensor of {_places(sources)}: leave it out;"
            f" it has {_abridged(sorted(names))}",
        )
        for pattern in patterns
        if not any(fits(name, pattern) for name in names)
    ]


def _of_two(names: Mapping[str, str], sources: Sequence[WeightSource]) -> list[CheckpointError]:
    """Return an error if two sources have a tensor of this model."""
    for ours, theirs in names.items():
        holders = [source.place for source in sources if theirs in source.shapes]
        if len(holders) > 1:
            return [
                CheckpointError(
                    "MW-RUN-050",
                    f"run.start: {ours} is in {holders[0]} and in {holders[1]}: name sources that"
                    " have different tensors, such as a model and an adapter of it",
                )
            ]
    return []


def _missing_tensors(
    missing: Sequence[str], sources: Sequence[WeightSource]
) -> list[CheckpointError]:
    if not missing:
        return []
    return [
        CheckpointError(
            "MW-RUN-051",
            f"not in {_places(sources)}: {_listed(missing)}\nName them in run.start_new to keep"
            " their initial values, or give their names there: run.start_names ="
            f' {{"{missing[0]}" = "..."}}',
        )
    ]


def _other_shapes(
    config: RunConfig,
    reshaped: Mapping[str, Origin],
    shapes: Mapping[str, Shape],
    sources: Sequence[WeightSource],
) -> list[CheckpointError]:
    if not reshaped:
        return []
    lines = [
        f"{name} {list(shapes[name])}, there {list(origin.shape)}"
        for name, origin in reshaped.items()
    ]
    change = "Set model.options as they were there"
    if all(map(is_adapter, reshaped)):
        ranks = {sources[each.source].settings.get("adapter.rank") for each in reshaped.values()}
        change = f"Set adapter.rank = {' or '.join(sorted(map(str, ranks)))}"
    vocab_size = _vocab_size(config.model)
    is_grown = any(
        _grows(origin.shape, shapes[name], sources[origin.source].vocab_size, vocab_size)
        for name, origin in reshaped.items()
    )
    grow = "; or set model.grow_vocabulary = true to add rows" if is_grown else ""
    return [
        CheckpointError(
            "MW-RUN-052",
            f"tensors with another shape in {_places(sources)}: {_listed(lines)}\n{change}, or name"
            f" the tensors in run.start_new to keep their initial values{grow}",
        )
    ]


def _other_vocabularies(account: StartAccount) -> list[CheckpointError]:
    """Return an error if tensors grow from or to several sizes: then it is no vocabulary alone."""
    sizes: dict[tuple[int, int], str] = {}
    for name, shape in account.grown.items():
        pairs = zip(account.taken[name].shape, shape, strict=True)
        changed = [pair for pair in pairs if pair[0] != pair[1]]
        sizes.setdefault(changed[0], name)
    if len(sizes) < 2:
        return []
    lines = [f"{name} {before} -> {now}" for (before, now), name in sizes.items()]
    return [
        CheckpointError(
            "MW-RUN-053",
            f"model.grow_vocabulary: the tensors do not grow alike: {_listed(lines)}\nOne"
            " vocabulary grows; set the other sizes of model.options as they were there",
        )
    ]


def _unnamed_tensors(
    unnamed: Sequence[tuple[int, str]], sources: Sequence[WeightSource]
) -> list[CheckpointError]:
    if not unnamed:
        return []
    return [
        CheckpointError(
            "MW-RUN-054",
            f"in {sources[unnamed[0][0]].place}, and not in this model:"
            f" {_listed([name for _, name in unnamed])}\nName them in run.start_unused to leave"
            " them out, or say which tensors here they are: run.start_names ="
            f' {{"..." = "{unnamed[0][1]}"}}',
        )
    ]


def _listed(lines: Sequence[str]) -> str:
    """Return lines below each other, at most :data:`MOST_LISTED` of them."""
    shown = "".join(f"\n  {line}" for line in lines[:MOST_LISTED])
    more = f"\n  and {len(lines) - MOST_LISTED:,} more" if len(lines) > MOST_LISTED else ""
    return f"{len(lines):,} tensor{'s' * (len(lines) != 1)}:{shown}{more}"
