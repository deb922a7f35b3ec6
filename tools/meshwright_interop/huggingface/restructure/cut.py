"""Cut of a transformers model at the modules of its pipeline plan,
or of a plan derived from its module lists.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from meshwright.errors import ModelError
from meshwright_interop.huggingface.restructure.derived import (
    DerivedLayer,
    DerivedPlaceholder,
    DerivedRunState,
    DerivedSkeleton,
    derive_plan,
)
from meshwright_interop.huggingface.restructure.frame import ModelSkeleton, PipelineLayer
from meshwright_interop.huggingface.restructure.marks import ModulePlaceholder, RunState
from meshwright_interop.huggingface.restructure.proof import ForwardProof

_PROVEN: set[tuple[str, frozenset[Any]]] = set()
"""Description and forwards of each model whose derived cut this process has proven:
the proof depends on these.
"""


class LayerModules(NamedTuple):
    """One layer of the Sequential: its name, and child name -> name in transformers,
    in order of execution.
    """

    name: str
    modules: dict[str, str]


def cut(model: Any, place: str) -> tuple[dict[str, str], nn.Sequential]:
    """Cut the model: replace its planned modules by marks, and group these modules into layers.

    Returns:
        Name of each planned module in the Sequential -> its name in transformers, and the
        Sequential of layers.

    Raises:
        ModelError: the plan names a module that the model lacks, a parameter belongs to no planned
            module, or the forward does not call each planned module exactly once.
    """
    plan = list(model._pp_plan)
    planned, in_lists = _planned(model, plan, place)
    state = RunState(model.config.get_text_config().hidden_size)
    marks = {name: ModulePlaceholder(name, each, state) for name, each in planned.items()}
    try:
        _set_marks(model, plan, marks, place)
        frame = ModelSkeleton(model, state, _description(model))
        order = _order(frame, planned, place)
    except ModelError:
        _replace(model, planned)
        raise
    return _layers(frame, order, planned, in_lists, PipelineLayer)


def cut_by_trace(model: Any, place: str) -> tuple[dict[str, str], nn.Sequential]:
    """Cut a model without a declared pipeline plan at its module lists, and prove the result;
    see derived.py.

    Raises:
        ModelError: the model has no module list, or its layers would not compute its logits.
    """
    refusal = (
        f"{place}: {type(model).__name__} declares no plan for a pipeline (base_model_pp_plan),"
        " and "
    )
    plan = derive_plan(model)
    if not plan:
        raise ModelError(
            "MW-INTEROP-071",
            f"{refusal}has no module list to cut at: write it as code, see"
            " docs/huggingface-models.md",
        )
    planned, in_lists = _planned(model, plan, place)
    known = (
        f"{_description(model)} {model.config._attn_implementation}",
        frozenset(type(module).forward for module in model.modules()),
    )
    try:
        proof = ForwardProof(model, list(planned))
    except Exception as error:
        raise ModelError(
            "MW-INTEROP-108",
            f"{refusal}none can be derived, because its forward fails on meta tensors:"
            f" {type(error).__name__}: {error}",
        ) from error
    _check_calls(proof.observation.order, planned, place)
    state = DerivedRunState(proof.observation.forms)
    _set_marks(
        model,
        plan,
        {name: DerivedPlaceholder(name, each, state) for name, each in planned.items()},
        place,
    )
    frame = DerivedSkeleton(model, state, _description(model))
    names, layers = _layers(frame, _order(frame, planned, place), planned, in_lists, DerivedLayer)
    frame.num_first = len(list(layers[0].children()))
    try:
        holds = known in _PROVEN or proof.holds_for(layers, frame, names)
        problem = None if holds else "the logits are computed in another way"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise ModelError(
            "MW-INTEROP-109",
            f"{refusal}the cut at its module lists is not the same model, because one tensor"
            f" between its layers is not enough ({problem}): write it as code, see"
            " docs/huggingface-models.md",
        )
    _PROVEN.add(known)
    return names, layers


def _layers(
    frame: ModelSkeleton,
    order: list[str],
    planned: Mapping[str, nn.Module],
    in_lists: set[str],
    kind: type[PipelineLayer],
) -> tuple[dict[str, str], nn.Sequential]:
    """Group the planned modules into layers of this kind; return their names,
    and the Sequential.
    """
    names: dict[str, str] = {}
    layers = OrderedDict[str, nn.Module]()
    position = 0
    for layer in _group(order, in_lists, planned):
        modules = {child: planned[theirs] for child, theirs in layer.modules.items()}
        layers[layer.name] = kind(frame, position, list(modules), modules)
        names |= {f"{layer.name}.{child}": theirs for child, theirs in layer.modules.items()}
        position += len(modules)
    return names, nn.Sequential(layers)


def _planned(model: Any, plan: Sequence[str], place: str) -> tuple[dict[str, nn.Module], set[str]]:
    """Return the planned modules by name,
    and the names of those that are elements of a module list.
    """
    planned: dict[str, nn.Module] = {}
    in_lists: set[str] = set()
    for name in plan:
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            raise ModelError(
                "MW-INTEROP-073",
                f"{place}: its pipeline plan names {name}, which the model does not have",
            ) from error
        if isinstance(module, nn.ModuleList):
            in_lists |= {f"{name}.{index}" for index in range(len(module))}
            planned |= {f"{name}.{index}": each for index, each in enumerate(module)}
        else:
            planned[name] = module
    return planned, in_lists


def _set_marks(model: Any, plan: Sequence[str], marks: Mapping[str, nn.Module], place: str) -> None:
    """Replace the planned modules of the model by marks; every parameter must be in one of them."""
    _replace(model, marks)
    unplanned = [name for name, _ in model.named_parameters()]
    if unplanned:
        raise ModelError(
            "MW-INTEROP-074",
            f"{place}: {unplanned[0]} belongs to no module of the pipeline plan"
            f" ({', '.join(plan)}), so that its stage is undefined",
        )


def _replace(model: Any, modules: Mapping[str, nn.Module]) -> None:
    """Set these modules of the model, in place."""
    for name, module in modules.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, module)


def _description(model: Any) -> str:
    digest = hashlib.sha256(repr(model.config).encode()).hexdigest()[:16]
    return f"{type(model).__name__} {digest}"


def _order(frame: ModelSkeleton, planned: Mapping[str, nn.Module], place: str) -> list[str]:
    """Return the order in which the model calls its planned modules: each exactly once."""
    try:
        order = frame.find_order()
    except Exception as error:
        raise ModelError(
            "MW-INTEROP-075",
            f"{place}: the computations of {frame.description.split()[0]} between its planned"
            f" modules use them in other ways than by calling them: {type(error).__name__}:"
            f" {error}",
        ) from error
    _check_calls(order, planned, place)
    return order


def _check_calls(order: Sequence[str], planned: Mapping[str, nn.Module], place: str) -> None:
    """Check that the forward calls each planned module exactly once."""
    if sorted(order) != sorted(planned):
        name = next(name for name in planned if order.count(name) != 1)
        raise ModelError(
            "MW-INTEROP-076",
            f"{place}: its forward calls {name} {order.count(name)} times, not once: it cannot be"
            " cut into stages",
        )


def _group(
    order: list[str], in_lists: set[str], planned: Mapping[str, nn.Module]
) -> list[LayerModules]:
    """Group the planned modules into layers: one for each layer of a module list.

    A module without weights joins the layer before it. So does every module between the embedding
    and the first block.
    """
    layers: list[LayerModules] = []
    blocks = 0
    for name in order:
        has_weights = any(True for _ in planned[name].parameters())
        if name in in_lists:
            layers.append(LayerModules(f"block{blocks}", {"layer": name}))
            blocks += 1
        elif not layers:
            layers.append(LayerModules("embedding", {_child(name, {}): name}))
        elif blocks == 0 or not has_weights:
            layers[-1].modules[_child(name, layers[-1].modules)] = name
        elif name == order[-1]:
            layers.append(LayerModules("head", {_child(name, {}): name}))
        else:
            taken = {layer.name for layer in layers}
            own = _child(name, dict.fromkeys(taken, ""))
            layers.append(LayerModules(own, {_child(name, {}): name}))
    return layers


def _child(name: str, taken: Mapping[str, str]) -> str:
    """Return the last part of a dotted name, with a number appended if it is taken."""
    last = name.rpartition(".")[2]
    return last if last not in taken else f"{last}_{len(taken)}"
