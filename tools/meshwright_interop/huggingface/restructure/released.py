"""Weights in the form in which models are released, under the names of transformers' modules, and
back: by transformers' own mapping (``transformers.conversion_mapping``).

    tensor of the files                                  parameter of the module
    ..block_sparse_moe.experts.0.w1.weight  (F, D)   }
    ..block_sparse_moe.experts.0.w3.weight  (F, D)   }   ..mlp.experts.gate_up_proj  (E, 2F, D)
    ..block_sparse_moe.experts.1.w1.weight  (F, D)   }
    ...

A mapping is a list of renamings and of converters, each with its operations. Where these stack
experts and work inside each, they are applied to one expert at a time: no more is in memory, and
some of the experts can be read without the others.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import ModelError
from meshwright.parameters import ParameterInfo, Slice
from meshwright_interop.huggingface.files import DTYPES
from meshwright_interop.huggingface.restructure.library import conversions_of, weight_loading
from meshwright_interop.huggingface.source import (
    OpenFiles,
    SafetensorsDirectory,
    TensorLocation,
)

Shape = tuple[int, ...]
PLAIN_NAME = re.compile(r"[!-~]{1,512}")
"""Names that the patterns of a mapping are applied to. Any other is no name of a model, and its
length or digits could occupy a pattern.
"""
MOST_PROBLEMS = 20
INSIDE_AN_EXPERT = ("Concatenate", "Transpose", "Interleave")
"""Operations of transformers that leave a dim alone that they do not name."""


class Place(NamedTuple):
    """Place of a tensor of the files in a parameter of the model."""

    parameter: str
    """Name in transformers' modules; the first one of a converter that makes several."""
    pattern: str | None = None
    """Source pattern of the converter that takes the tensor; None: it is the parameter itself."""
    expert: int | None = None
    """Index of the expert that it belongs to."""


class Conversions:
    """Mapping between the files of a model and its parameters, in both directions.

    ``model``: of transformers, with parameters on meta.
    """

    def __init__(self, model: Any) -> None:
        self._core = core = weight_loading()
        self._model = model
        self._parameters: Mapping[str, Tensor] = model.state_dict()
        forward = conversions_of(model)
        number = len(conversions_of(model, add_legacy=False))
        self._renamings = [each for each in forward if isinstance(each, core.WeightRenaming)]
        self._converters = [each for each in forward if isinstance(each, core.WeightConverter)]
        self._of_pattern = {
            pattern: each for each in self._converters for pattern in each.source_patterns
        }
        # as in transformers' save_pretrained: without old names, and without prefixes of a larger
        # model; a converter that makes several parameters would need them all
        returned = [
            each
            for each in reversed(forward[:number])
            if not isinstance(each, core.PrefixChange) and len(each.target_patterns) == 1
        ]
        self._back = [
            (each, each.reverse_transform())
            for each in returned
            if isinstance(each, core.WeightConverter)
        ]
        self._names_back = [
            each.reverse_transform() for each in returned if isinstance(each, core.WeightRenaming)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversions:
        return self

    def place_of(self, key: str) -> Place | None:
        """Return the place of a tensor of the files; None: the model has none."""
        if PLAIN_NAME.fullmatch(key) is None:
            return None
        base, known = self._model.base_model_prefix, self._parameters
        rename = self._core.rename_source_key
        name, pattern = rename(key, self._renamings, self._converters, base, known)
        if name not in known and key in known:
            name, pattern = rename(key, [], [], base, known)
        if name not in known:
            return None
        expert = None
        if pattern is not None and is_by_expert(self._of_pattern[pattern]):
            numbered = pattern.replace("*.", r"(\d+)\.")
            match = re.search(numbered, self._core.apply_renamings(key, self._renamings))
            if match is None:
                return None
            expert = int(match[1])
        return Place(name, pattern, expert)

    def in_order(self, keys: Iterator[str]) -> list[str]:
        """Return names of tensors in the order in which transformers joins them."""
        plain = (key for key in keys if PLAIN_NAME.fullmatch(key))
        return sorted(plain, key=self._core.dot_natural_key)

    def converter(self, pattern: str) -> Any:
        """Return the converter that has a source pattern."""
        return self._of_pattern[pattern]

    def shape(self, parameter: str) -> Shape:
        """Return the shape of a parameter."""
        return tuple(self._parameters[parameter].shape)

    def convert(self, parameter: str, tensors: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """Apply a converter.

        Args:
            parameter: the first one that it makes.
            tensors: source pattern -> tensors, on meta or with values.

        Returns:
            Name of each parameter -> its tensor.
        """
        converter = copy.deepcopy(self._of_pattern[next(iter(tensors))])
        for pattern, given in tensors.items():
            for tensor in given:
                converter.add_tensor(parameter, parameter, pattern, tensor)
        return self._converted(converter, parameter)

    def released(self, parameter: str, tensor: Tensor, expert: int | None) -> dict[str, Tensor]:
        """Return the tensors of the files for a parameter, by name.

        Args:
            parameter: its name in transformers' modules.
            tensor: all of it, or (1, ...) of the expert.
            expert: index of the expert; None: all of the parameter.
        """
        _, converter = self._back_of(parameter)
        if converter is None:
            return {self._core.apply_renamings(parameter, self._names_back): tensor}
        targets = list(converter.target_patterns)
        if expert is not None:
            targets = [pattern.replace("*", str(expert)) for pattern in targets]
        own = converter.copy(
            list(converter.source_patterns), targets, operations=converter.operations
        )
        name, pattern = own.rename_source_key(parameter)
        own.add_tensor(name, parameter, pattern, tensor)
        return {
            self._core.apply_renamings(each, self._names_back): value
            for each, value in self._converted(own, name).items()
        }

    def experts_of(self, parameter: str) -> int | None:
        """Return the number of experts that the files have one by one; None: they do not."""
        converter, _ = self._back_of(parameter)
        is_split = converter is not None and is_by_expert(converter)
        return self.shape(parameter)[0] if is_split else None

    def outlines(self, parameter: str, expert: int | None) -> dict[str, Shape]:
        """Return name and shape of each tensor of the files for a parameter, or for an expert."""
        shape = self.shape(parameter)
        outline = torch.empty(shape if expert is None else (1, *shape[1:]), device="meta")
        found = self.released(parameter, outline, expert)
        return {name: tuple(tensor.shape) for name, tensor in found.items()}

    def comes_back(self, parameter: str) -> bool:
        """Return whether the files' tensors of a parameter are read as that parameter again."""
        experts = self.experts_of(parameter)
        names = self.outlines(parameter, None if experts is None else experts - 1)
        places = [self.place_of(name) for name in names]
        return all(place is not None and place.parameter == parameter for place in places)

    def _back_of(self, parameter: str) -> tuple[Any, Any]:
        """Return the converter whose target a parameter is, and its reverse; None: there is none."""
        for converter, reverse in self._back:
            _, pattern = reverse.rename_source_key(parameter)
            if pattern is not None:
                return converter, reverse
        return None, None

    def _converted(self, converter: Any, name: str) -> dict[str, Tensor]:
        found = converter.convert(name, model=self._model, config=self._model.config)
        return {
            each: value[0] if isinstance(value, list) else value for each, value in found.items()
        }


def is_by_expert(converter: Any) -> bool:
    """Return whether a converter stacks experts, and works on nothing but the inside of each."""
    first, *others = converter.operations
    dims = [
        dim
        for each in others
        for dim in (getattr(each, name, None) for name in ("dim", "dim0", "dim1"))
        if dim is not None
    ]
    return (
        type(first).__name__ == "MergeModulelist"
        and first.dim == 0
        and len(converter.target_patterns) == 1
        and all(pattern.count("*.") == 1 for pattern in converter.source_patterns)
        and all(type(each).__name__ in INSIDE_AN_EXPERT for each in others)
        and all(dim > 0 for dim in dims)
    )


class _Group(NamedTuple):
    """Tensors of the files that a converter joins."""

    parameter: str
    """First parameter that it makes."""
    keys: dict[str, list[str]]
    """Source pattern -> names in the files; of experts in the order of their indices."""
    is_by_expert: bool


class ReleasedDirectory(SafetensorsDirectory):
    """Tensors of a directory under the names of transformers' modules.

    ``tensors`` also has those of the files that belong to no parameter, under their own names.
    """

    def __init__(
        self,
        files: SafetensorsDirectory,
        conversions: Conversions,
        tensors: dict[str, TensorLocation],
        groups: Mapping[str, _Group],
    ) -> None:
        super().__init__(files.path, tensors)
        self._files = files
        self._conversions = conversions
        self._groups = groups

    def read(self, name: str, files: OpenFiles | None = None, part: slice = slice(None)) -> Tensor:
        """Return a tensor on the CPU; one that is not converted is memory-mapped."""
        group = self._groups.get(name)
        if group is None:
            return super().read(name, files, part)
        if not group.is_by_expert:
            with OpenFiles() as opened:
                return self._converted(name, group, None, opened)
        place = self.tensors[name]
        whole = torch.empty(place.shape, dtype=DTYPES[place.dtype])
        self.copy_to(name, whole)
        return whole

    def copy_to(self, name: str, target: Tensor, first: int = 0) -> None:
        """Copy rows of a tensor, see the base; of experts one by one, and no others."""
        group = self._groups.get(name)
        if group is None or not group.is_by_expert:
            super().copy_to(name, target, first)
            return
        with OpenFiles() as opened:
            for row, expert in zip(target, range(first, first + len(target)), strict=True):
                row.copy_(self._converted(name, group, expert, opened)[0])

    def _converted(self, name: str, group: _Group, expert: int | None, opened: OpenFiles) -> Tensor:
        keys = {
            pattern: each if expert is None else [each[expert]]
            for pattern, each in group.keys.items()
        }
        tensors = {
            pattern: [self._files.read(key, opened) for key in each]
            for pattern, each in keys.items()
        }
        return self._conversions.convert(group.parameter, tensors)[name]


def under_module_names(
    files: SafetensorsDirectory, conversions: Conversions
) -> SafetensorsDirectory:
    """Return the tensors of a directory under the names of the parameters that they become.

    Reads headers alone.

    Raises:
        ModelError: a parameter is there twice, or tensors that make it are missing, of another
            shape, or too many; a line each, at most 20.
    """
    direct: dict[str, list[str]] = {}
    converted: dict[str, list[tuple[str, Place]]] = {}
    tensors: dict[str, TensorLocation] = {}
    for key in conversions.in_order(iter(files.tensors)):
        place = conversions.place_of(key)
        if place is None:
            continue
        if place.pattern is None:
            direct.setdefault(place.parameter, []).append(key)
        else:
            converted.setdefault(place.parameter, []).append((key, place))
    problems = [
        f"{files.tensors[keys[1]].file}: {keys[1]} and {keys[0]} are both {name}: remove one"
        for name, keys in direct.items()
        if keys[1:]
    ]
    for name, keys in direct.items():
        tensors[name] = files.tensors[keys[0]]
    groups: dict[str, _Group] = {}
    for name, parts in converted.items():
        if name in direct:
            problems.append(
                f"{files.tensors[parts[0][0]].file}: {parts[0][0]} is a part of {name}, which"
                f" {files.tensors[direct[name][0]].file.name} has as a whole: remove one of the two"
                " forms"
            )
            continue
        found, faults = _joined(files, conversions, name, parts)
        problems += faults
        for each, (group, location) in found.items():
            groups[each], tensors[each] = group, location
    used = {key for keys in direct.values() for key in keys}
    used |= {key for parts in converted.values() for key, _ in parts}
    tensors |= {key: place for key, place in files.tensors.items() if key not in used}
    if problems:
        more = f"\nand {len(problems) - MOST_PROBLEMS} more" if problems[MOST_PROBLEMS:] else ""
        raise ModelError(
            "MW-INTEROP-158",
            "\n".join(problems[:MOST_PROBLEMS]) + f"{more}\nget these files again",
        )
    return ReleasedDirectory(files, conversions, tensors, groups)


Joined = dict[str, tuple[_Group, TensorLocation]]


def _joined(
    files: SafetensorsDirectory,
    conversions: Conversions,
    name: str,
    parts: list[tuple[str, Place]],
) -> tuple[Joined, list[str]]:
    """Return the parameters that a group of tensors makes, and what is wrong with the group."""
    converter = conversions.converter(parts[0][1].pattern or "")
    keys: dict[str, list[str]] = {pattern: [] for pattern in converter.source_patterns}
    foreign = [key for key, place in parts if place.pattern not in keys]
    by_expert = is_by_expert(converter)
    if by_expert:
        problems = _expert_problems(files, conversions, name, parts)
        if problems:
            return {}, problems
        parts = sorted(parts, key=lambda each: each[1].expert or 0)
    for key, place in parts:
        if place.pattern in keys:
            keys[place.pattern].append(key)
    keys = {pattern: each for pattern, each in keys.items() if each}
    first = files.tensors[parts[0][0]]
    dtypes = {files.tensors[key].dtype for key, _ in parts}
    unknown = min(dtypes - DTYPES.keys(), default=None)
    dtype = unknown or _widest(dtypes)
    group = _Group(name, keys, by_expert)
    # what a converter makes is stored nowhere: its parts are, quantised or not
    first = first._replace(dtype=dtype, encoded=None)
    if by_expert:
        return {name: (group, first._replace(shape=conversions.shape(name)))}, []
    problems = [
        f"{files.tensors[key].file}: {key} is another form of {name}: remove one of the two forms"
        for key in foreign
    ]
    outlines = {
        pattern: [torch.empty(files.tensors[key].shape, device="meta") for key in each]
        for pattern, each in keys.items()
    }
    try:
        made = conversions.convert(name, outlines)
    except Exception as error:  # of transformers' operations, on shapes of the file
        reason = " ".join(str(error).split())[:200]
        listed = ", ".join(key for key, _ in parts[:3])
        return {}, [f"{first.file}: {listed} do not make {name}: {reason}"]
    return {
        each: (group, first._replace(shape=tuple(tensor.shape))) for each, tensor in made.items()
    }, problems


def _widest(dtypes: set[str]) -> str:
    """Return the name of the dtype that torch promotes these to."""
    wide = None
    for each in sorted(dtypes):
        wide = DTYPES[each] if wide is None else torch.promote_types(wide, DTYPES[each])
    return next(name for name, dtype in DTYPES.items() if dtype == wide)


def _expert_problems(
    files: SafetensorsDirectory,
    conversions: Conversions,
    name: str,
    parts: list[tuple[str, Place]],
) -> list[str]:
    """Return what is wrong with the tensors of the experts of one parameter."""
    patterns = conversions.converter(parts[0][1].pattern or "").source_patterns
    number = conversions.shape(name)[0]
    found: dict[tuple[str, int], str] = {}
    problems = []
    for key, place in parts:
        expert = place.expert
        assert place.pattern is not None and expert is not None
        file = files.tensors[key].file
        other = found.setdefault((place.pattern, expert), key)
        if place.pattern not in patterns:
            problems.append(f"{file}: {key} is another form of {parts[0][0]}: remove one of them")
        elif other != key:
            problems.append(f"{file}: {key} and {other} are the same expert: remove one")
        elif expert >= number:
            problems.append(f"{file}: {key} is of expert {expert}, and the model has {number}")
    shapes = list(conversions.outlines(name, 0).values())
    for expert in range(number):
        for index, (pattern, shape) in enumerate(zip(patterns, shapes, strict=True)):
            here = found.get((pattern, expert))
            if here is None:
                released = list(conversions.outlines(name, expert))[index]
                problems.append(
                    f"{files.path}: tensor {released} {list(shape)}, a part of {name}, is in none of"
                    " the files"
                )
            elif files.tensors[here].shape != shape:
                problems.append(
                    f"{files.tensors[here].file}: tensor {here} has shape"
                    f" {list(files.tensors[here].shape)}, and the model needs {list(shape)}"
                )
    return problems


class ReleasedRule(NamedTuple):
    """Rule of an export: a parameter, or one expert of it, in the form of the files."""

    ours: str
    """Name in meshwright."""
    parameter: str
    """Name in transformers' modules."""
    convert: Callable[[str, Tensor, int | None], dict[str, Tensor]]
    """Function of the parameter, its tensor and the expert: the files' tensors by name."""
    expert: int | None = None
    keeps_dtype: bool = False

    def info(self, ours: Shape) -> ParameterInfo:
        """Return the metadata of the part of ours that this rule covers."""
        part = None if self.expert is None else Slice(0, self.expert, self.expert + 1, 1)
        return ParameterInfo(self.ours, ours, part)

    def shapes(self, ours: Shape) -> dict[str, Shape]:
        """Return the name and shape of each tensor of the files."""
        shape = ours if self.expert is None else (1, *ours[1:])
        found = self.convert(self.parameter, torch.empty(shape, device="meta"), self.expert)
        return {name: tuple(tensor.shape) for name, tensor in found.items()}

    def split(self, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the contiguous values of each tensor of the files."""
        for name, tensor in self.convert(self.parameter, ours, self.expert).items():
            yield name, tensor.contiguous()


def released_rules(conversions: Conversions, names: Mapping[str, str]) -> list[ReleasedRule]:
    """Return the rules of an export in the released form, as transformers' ``save_pretrained``
    writes it.

    A parameter whose released form would not be read as itself again keeps its name.

    Args:
        names: name in meshwright -> name in transformers' modules.
    """
    rules = []
    for ours, parameter in names.items():
        if not conversions.comes_back(parameter):
            rules.append(ReleasedRule(ours, parameter, _as_it_is))
            continue
        experts = conversions.experts_of(parameter)
        for expert in (None,) if experts is None else range(experts):
            rules.append(ReleasedRule(ours, parameter, conversions.released, expert))
    return rules


def _as_it_is(parameter: str, tensor: Tensor, expert: int | None) -> dict[str, Tensor]:
    return {parameter: tensor}
