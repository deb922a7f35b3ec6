"""Rewriting of a model by rules: modules in the place of others, and slices of their parameters.

    rule       pattern of module names, kind, replace: site -> a module with its slices, or
               None after a change in place
    feature    subject of several rules; one walk places it, after those before it in ORDER

    plain      a: Linear          b: Attention(q: Linear, drop)
    rules      "a" column         "b" gather: a hook    "*.q" column
    result     a: ColumnLinear    b: Attention(q: ColumnLinear, drop)

NOTE [shared objects]: a module at several places is replaced once, and gets its hooks once. A
parameter that was one object stays one object, whether two modules have it or one module has
it under two names. Objects are compared by id, so the walk keeps the old ones alive.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from meshwright.parameters import ParameterInfo, Slice
from meshwright.placement.patterns import check_patterns, fits
from meshwright.seeding import HOOKS, SeededDropout

ORDER = ("fp8", "adapters", "context", "tensor", "experts", "recompute")
"""Features in the order in which they are placed.

fp8         first: the factors of adapters are linears too, and stay in the training dtype
adapters    before all that splits: the plan has kinds for their factors
context     before tensor, which splits this rank's tokens, and whose hooks see them
tensor      before experts, which it does not cut
experts     their slices replace the whole parameters of the tensor feature's result
recompute   last, on the layers of a stage with their weights: it calls again what the others made
"""
CARRIED = ("_modules", *HOOKS)
"""Attributes that a new module takes over from the one that it replaces."""


class ModuleSite(NamedTuple):
    """Module that a rule matches, before it is replaced."""

    name: str
    module: nn.Module
    kinds: tuple[str, ...]
    """Kinds of the feature on the modules around it, the outermost first, and then on itself by
    earlier rules.
    """
    names: tuple[str, ...]
    """All names of the module: several if it is shared."""


class Placed(NamedTuple):
    """Module in the place of another, and the slices of parameters that a rule decides."""

    module: nn.Module
    slices: Mapping[str, Slice | None] = MappingProxyType({})
    """Name of a parameter in the module -> slice that this rank holds; None: the whole."""


Replace = Callable[[ModuleSite], Placed | None]


def stay(site: ModuleSite) -> None:
    """Leave a module as it is: its kind matters to the modules inside."""


@dataclass(frozen=True)
class PlacementRule:
    """Rule of one feature for the modules whose names match a pattern."""

    feature: str
    """One of ORDER."""
    pattern: str
    kind: str
    replace: Replace = stay
    of: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Module
    """Classes of the modules; others are left alone."""
    is_deep: bool = False
    """False: the new module takes over children and hooks. True: it is a copy, with the modules
    inside, of which rewriting cuts all parameters by its slices.
    """
    key: str = ""
    """Configuration key of the pattern, which must match a module; "": it is checked elsewhere."""


class Rewritten(NamedTuple):
    """Result of rewriting a model."""

    slices: dict[str, Slice | None]
    """Parameter name -> slice, for the parameters that rules have decided."""
    kinds: dict[str, str]
    """Module name -> kind of the first rule that matched."""


def rewrite(model: nn.Sequential, rules: Sequence[PlacementRule]) -> Rewritten:
    """Place features on a model by their rules, in place and in ORDER. No communication.

    Modules are visited in the model's order, outer ones first. Modules that a rule adds below its
    site are not visited for the same feature.

    Raises:
        ModelError: the pattern of a configuration key matches no module.
    """
    found = Rewritten({}, {})
    for feature, group in groupby(sorted(rules, key=_position), key=lambda rule: rule.feature):
        placed: list[str] = vars(model).setdefault("placed_features", [])
        assert all(ORDER.index(each) <= ORDER.index(feature) for each in placed), (placed, feature)
        placed.append(feature)
        of_feature = tuple(group)
        _check(model, of_feature)
        _Walk(model, of_feature, found).visit_children("", model, list(model._modules), ())
    return found


def _position(rule: PlacementRule) -> int:
    return ORDER.index(rule.feature)


def _check(model: nn.Sequential, rules: Sequence[PlacementRule]) -> None:
    for rule in rules:
        if rule.key:
            classes = rule.of if isinstance(rule.of, tuple) else (rule.of,)
            modules = model.named_modules(remove_duplicate=False)
            names = [name for name, module in modules if name and isinstance(module, classes)]
            what = " or ".join(each.__name__ for each in classes)
            check_patterns(rule.key, [rule.pattern], names, what)


class _Walk:
    """Walk over the modules of a model by the rules of one feature."""

    def __init__(
        self, model: nn.Sequential, rules: Sequence[PlacementRule], found: Rewritten
    ) -> None:
        self._rules = rules
        self._found = found
        self._names: dict[int, tuple[str, ...]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names[id(module)] = (*self._names.get(id(module), ()), name)
        # by id, see NOTE [shared objects]; the values keep the old objects alive
        self._placed: dict[tuple[int, str], tuple[nn.Module, Placed]] = {}
        self._parameters: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def visit_children(
        self, name: str, module: nn.Module, children: Sequence[str], kinds: tuple[str, ...]
    ) -> None:
        """Apply the rules to these children of a module, and to all modules inside of them."""
        for attribute in children:
            child = module._modules.get(attribute)
            if child is None:
                continue
            path = f"{name}.{attribute}" if name else attribute
            inner = list(child._modules)
            of_child = kinds
            for rule in self._rules:
                if isinstance(child, rule.of) and fits(path, rule.pattern):
                    child = self._place(rule, path, child, of_child)
                    of_child = (*of_child, rule.kind)
            if child is not module._modules[attribute]:
                setattr(module, attribute, child)
            self.visit_children(path, child, inner, of_child)

    def _place(
        self, rule: PlacementRule, name: str, module: nn.Module, kinds: tuple[str, ...]
    ) -> nn.Module:
        """Return the module in the place of another, which is made once."""
        key = id(module), rule.kind
        if key not in self._placed:
            names = self._names.get(id(module), (name,))
            placed = rule.replace(ModuleSite(name, module, kinds, names)) or Placed(module)
            if placed.module is not module:
                self._take_over(rule, module, placed)
            self._placed[key] = self._placed[id(placed.module), rule.kind] = module, placed
        _, placed = self._placed[key]
        for path, part in placed.slices.items():
            self._found.slices[f"{name}.{path}"] = part
        self._found.kinds.setdefault(name, rule.kind)
        return placed.module

    def _take_over(self, rule: PlacementRule, old: nn.Module, placed: Placed) -> None:
        """Give a new module the children, hooks and mode of the old one, and parameters that are
        shared as the old ones were.
        """
        new, slices = placed
        if not rule.is_deep:
            new.train(old.training)
            for attribute in CARRIED:
                setattr(new, attribute, getattr(old, attribute))
        for path, whole in old.named_parameters(recurse=rule.is_deep, remove_duplicate=False):
            if id(whole) not in self._parameters:
                local = new.get_parameter(path)
                if rule.is_deep:
                    part = slices.get(path)
                    local = whole if part is None else local_parameter(whole, part)
                self._parameters[id(whole)] = whole, local
            owner, _, attribute = path.rpartition(".")
            setattr(new.get_submodule(owner), attribute, self._parameters[id(whole)][1])


def copy_of(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module whose dropouts share their current micro-batch with it, and whose hooks are
    the same objects.
    """
    kept: list[object] = []
    for each in module.modules():
        kept += [*each._forward_pre_hooks.values(), *each._forward_hooks.values()]
        if isinstance(each, SeededDropout):
            kept.append(each.current)
    return copy.deepcopy(module, {id(each): each for each in kept})


def local_parameter(whole: Tensor, part: Slice | None) -> nn.Parameter:
    """Return a new parameter that holds a slice of a whole one (meta or real)."""
    info = ParameterInfo("", tuple(whole.shape), part)
    return nn.Parameter(info.take(whole.detach()), whole.requires_grad)
