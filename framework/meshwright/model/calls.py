"""Modules that something is placed on, and how a model uses them in the forward on meta
that describes it.

    placed on a module                          takes effect where
    adapter                                     training calls the module: a forward hook adds its output
    sequence, gather                            the module is called: hooks change its inputs or outputs
    column, row, vocab, experts, ...            its forward runs, and its parameters, then shards, are used nowhere else
    float8                                      its forward runs
    recompute                                   its forward runs

A layer may use a module's weight without running it, as ``F.linear(x, self.l.weight)`` does, and
torch's own nn.MultiheadAttention with its out_proj. An adapter would then keep B = 0 for the whole
run, and a shard would be taken for the whole weight, both without an error. So each use is counted,
and checked before any rank starts.

NOTE [calls that depend on something]: the forward on meta has the shapes and the mode of training,
and a layer may neither look at values nor draw numbers. So its calls are those of every training
step. A module that only eval calls is no error, except for an adapter, which training could not
train.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.adapters.attach import A, is_adapter
from meshwright.errors import ModelError
from meshwright.fp8.linear import Fp8Linear
from meshwright.placement.patterns import entries_for, fits
from meshwright.system.user_line import user_line

ADAPTER, FP8, RECOMPUTE, RULE = "an adapter", "float8", "recompute", "a rule"
HOOKED = ("sequence", "gather", "gather_cut", "vocab", RULE)
"""Kinds of a sharding plan that register hooks on the module. Those of context parallelism alone:
its mixing.py.
"""
NEEDED = ("sequence", "gather", "gather_cut")
"""Kinds whose module changes activations, so that one without a call leaves them as they are."""
SPLIT = ("column", "row", "column_whole", "row_whole", "vocab", "experts", RULE)
"""Kinds that split parameters."""
NESTED = ("experts", RULE)
"""Kinds that split the parameters of the modules inside as well."""


@dataclass
class ModuleUse:
    """Use of one module: marks are kinds of the sharding plan, ADAPTER, FP8 and RECOMPUTE."""

    name: str
    marks: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    """Names of the parameters, in the whole model, that belong to what is placed on it."""
    calls: int = 0
    """Calls of the module in training, with its hooks."""
    runs: int = 0
    """Runs of its forward in training, those of calls included."""
    eval_calls: int = 0
    eval_runs: int = 0
    used_at: str | None = None
    """File, line and code of the first use of one of its parameters outside of its forward."""

    @property
    def problem(self) -> str | None:
        """Use in training that misses its hooks, in words; None: there is none."""
        at = f" at {self.used_at}" if self.used_at else ""
        if self.used_at is not None:
            also = "also " if self.runs else ""
            return f"the layer {also}uses its weight without calling it{at}"
        if self.runs > self.calls:
            return "the layer runs its .forward(...), which no hook sees, instead of calling it"
        return None if self.calls else "the layer never calls it in training"


class ModuleCalls:
    """Uses of the modules of a model that something is placed on.

    Args:
        layers: the model, or a copy that is run in its place.
        marked: names of modules -> marks.
    """

    def __init__(self, layers: nn.Sequential, marked: Mapping[str, Iterable[str]]) -> None:
        self._layers = layers
        self._marked = {name: frozenset(marks) for name, marks in marked.items()}
        self.uses: dict[int, ModuleUse] = {}
        """Uses by id of the module: one that is at several places has one."""
        self._active: list[int] = []
        self._is_training = True
        self._watched: set[str] = set()
        for name, marks in self._marked.items():
            module = layers.get_submodule(name)
            use = self.uses.setdefault(id(module), ModuleUse(name))
            use.marks |= marks
            inside = module.named_parameters(
                name, recurse=bool(marks & {*NESTED}), remove_duplicate=False
            )
            use.parameters |= {path for path, _ in inside if not is_adapter(path)}
        self._users: dict[str, list[ModuleUse]] = {}
        """Parameter name -> uses that it belongs to."""
        for use in self.uses.values():
            for path in use.parameters:
                self._users.setdefault(path, []).append(use)

    @property
    def found(self) -> list[ModuleUse]:
        """Uses in the layers that were watched; others are equal to one of them."""
        return [use for use in self.uses.values() if use.name.partition(".")[0] in self._watched]

    def marks_in(self, layer_name: str) -> frozenset[tuple[str, frozenset[str]]]:
        """Return the names within a layer, and marks, of what is placed on its modules."""
        prefix = f"{layer_name}."
        inside = {
            name: marks for name, marks in self._marked.items() if f"{name}.".startswith(prefix)
        }
        return frozenset((name.removeprefix(layer_name), marks) for name, marks in inside.items())

    @contextmanager
    def watching(self, layer_name: str, layer: nn.Module) -> Iterator[None]:
        """Count the calls in a layer, inside this context."""
        self._watched.add(layer_name)
        self._active, self._is_training = [], True
        with ExitStack() as stack:
            for module in list(layer.modules()):
                if (
                    id(module) in self.uses
                    or next(module.parameters(recurse=False), None) is not None
                ):
                    self._watch(module, stack)
            yield

    def in_eval(self, layer: nn.Module, call: Callable[[], object]) -> None:
        """Run ``call`` with the layer in eval mode if a module in it was not called yet;
        its errors do not count.
        """
        uses = [self.uses[id(module)] for module in layer.modules() if id(module) in self.uses]
        if all(use.calls or use.marks == {ADAPTER} for use in uses):
            return
        modes = [(module, module.training) for module in layer.modules()]
        self._active, self._is_training = [], False
        try:
            layer.eval()
            with torch.no_grad():
                call()
        except Exception:  # validation reports it
            pass
        finally:
            self._is_training = True
            for module, training in modes:
                module.training = training

    def use(self, names: Sequence[str]) -> None:
        """Record that an operation takes a tensor that has these parameter names,
        or a view of it.
        """
        for name in names:
            for use in self._users.get(name, ()):
                if use.used_at is None and not self._is_inside(use, names):
                    use.used_at = user_line()

    def _is_inside(self, use: ModuleUse, names: Sequence[str]) -> bool:
        """Return whether the forward runs of the module of ``use``,
        or of another that holds the parameter as well.
        """
        active = {self.uses[number].name for number in self._active if number in self.uses}
        if use.name in active:
            return True
        others = [name.rpartition(".")[0] for name in names if name not in use.parameters]
        return any(id(self._layers.get_submodule(other)) in self._active for other in others)

    def _watch(self, module: nn.Module, stack: ExitStack) -> None:
        """Register hooks around the module's calls, and wrap its forward,
        until ``stack`` closes.
        """
        use = self.uses.get(id(module), ModuleUse(""))

        def begin(module: nn.Module, args: Any) -> None:
            if self._is_training:
                use.calls += 1
            else:
                use.eval_calls += 1
            self._active.append(id(module))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self._active.pop()

        stack.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
        stack.callback(module.register_forward_hook(end, always_call=True).remove)
        forward: Callable[..., Any] = module.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_training:
                use.runs += 1
            else:
                use.eval_runs += 1
            self._active.append(id(module))
            try:
                return forward(*args, **kwargs)
            finally:
                self._active.pop()

        own = vars(module)
        if "forward" in own:
            stack.callback(own.__setitem__, "forward", own["forward"])
        else:
            stack.callback(own.pop, "forward", None)
        own["forward"] = run


def marks_of(
    layers: nn.Sequential, plan: Mapping[str, Any], recomputed: Iterable[str]
) -> dict[str, set[str]]:
    """Return the marks of a model's modules by name. ``recomputed``:
    patterns of the parts with recompute, if any.
    """
    patterns = {pattern: RULE if callable(kind) else str(kind) for pattern, kind in plan.items()}
    found: dict[str, set[str]] = {}
    for name, module in layers.named_modules(remove_duplicate=False):
        marks = {*entries_for(name, patterns)} & {*HOOKED, *SPLIT}
        if A in module._modules:
            marks.add(ADAPTER)
        if isinstance(module, Fp8Linear):
            marks.add(FP8)
        if fits(name, *recomputed):
            marks.add(RECOMPUTE)
        if name and marks:
            found[name] = marks
    return found


def check_calls(builder: str, calls: ModuleCalls, recomputed: Iterable[str]) -> None:
    """Check that what is placed on modules takes effect. ``recomputed``: see :func:`marks_of`.

    Raises:
        ModelError: an adapter, float8 or recompute has no effect on a module, or a sharding plan a
            wrong one.
    """
    of_mark = {
        mark: [use for use in calls.found if mark in use.marks]
        for mark in (ADAPTER, FP8, RECOMPUTE)
    }
    _check_adapters(of_mark[ADAPTER])
    _check_fp8(of_mark[FP8])
    for use in calls.found:
        _check_plan(builder, use)
    for pattern in recomputed:
        uses = [use for use in of_mark[RECOMPUTE] if fits(use.name, pattern)]
        if uses and not any(use.runs for use in uses):
            raise ModelError(
                "MW-MODEL-054",
                f"{builder}: selective_recompute holds {pattern!r}, and no layer runs"
                f" {uses[0].name} in training: "
                f'nothing would be recomputed. Name a module that is called, or choose "pointwise"'
                f' or "full"',
            )


def _check_adapters(uses: Sequence[ModuleUse]) -> None:
    problems = [f"{use.name}: {use.problem}" for use in uses if use.problem]
    if problems:
        raise ModelError(
            "MW-MODEL-051",
            "adapter.targets: an adapter acts where its target is called, and would have no effect"
            f" on the rest. {_several(problems)}. Call the module in training (y = self.l(x) for y"
            " = F.linear(x, self.l.weight)), or leave it out of adapter.targets",
        )


def _check_fp8(uses: Sequence[ModuleUse]) -> None:
    """Refuse linears that no layer runs: the products with their weights would stay
    in the training dtype.
    """
    idle = [use for use in uses if not use.runs and not use.eval_runs]
    used = idle if len(idle) == len(uses) else [use for use in idle if use.used_at is not None]
    if used:
        raise ModelError(
            "MW-MODEL-052",
            'train.linear = "fp8" has no effect on'
            f" {_several([f'{use.name}: {use.problem}' for use in used])}. Call the module (y ="
            " self.l(x) for y = F.linear(x, self.l.weight)), or name it in train.fp8_keep",
        )


def _check_plan(builder: str, use: ModuleUse) -> None:
    """Refuse a planned module that is used past its hooks,
    or whose parameters are used outside of it.
    """
    split, hooked, needed = (
        ", ".join(sorted(use.marks & {*kinds})) for kinds in (SPLIT, HOOKED, NEEDED)
    )
    problem = None
    if split and use.used_at is not None:
        problem = (
            f"{use.problem}, which on a rank is a part: the sums over ranks are in the module's"
            " forward"
        )
    elif needed and not use.calls and not use.eval_calls and not use.runs:
        problem = f"{use.problem}, and what this kind does is done in its calls"
    elif hooked and use.runs > use.calls:
        problem = use.problem
    if problem is not None:
        raise ModelError(
            "MW-MODEL-053",
            f"{builder}: the sharding_plan gives {use.name} the kind {split or hooked}, but"
            f" {problem}. Call the module (y = self.l(x) for y = F.linear(x, self.l.weight)), or"
            " leave it out of the plan",
        )


def _several(problems: Sequence[str]) -> str:
    """Return the first problems, and the number of the others."""
    more = f" (and {len(problems) - 3} more modules)" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more
