"""Cut of a transformers model at the modules of its pipeline plan."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from meshwright.errors import ModelError
from meshwright.tools.interop.huggingface.restructure.frame import ModelSkeleton, PipelineLayer
from meshwright.tools.interop.huggingface.restructure.marks import ModulePlaceholder, RunState


class LayerModules(NamedTuple):
    """One layer of the Sequential: its name, and child name -> name in transformers, in order of execution."""

    name: str
    modules: dict[str, str]


def cut(model: Any, place: str) -> tuple[dict[str, str], nn.Sequential]:
    """Cut the model: replace its planned modules by marks, and group these modules into layers.

    Returns:
        Name of each planned module in the Sequential -> its name in transformers, and the Sequential of layers.

    Raises:
        ModelError: the plan names a module that the model lacks, a parameter belongs to no planned module, or the
            forward does not call each planned module exactly once.
    """
    planned: dict[str, nn.Module] = {}
    in_lists: set[str] = set()
    for name in model._pp_plan:
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            raise ModelError(
                "MW-INTEROP-073", f"{place}: its pipeline plan names {name}, which the model does not have"
            ) from error
        if isinstance(module, nn.ModuleList):
            in_lists |= {f"{name}.{index}" for index in range(len(module))}
            planned |= {f"{name}.{index}": each for index, each in enumerate(module)}
        else:
            planned[name] = module
    state = RunState(model.config.get_text_config().hidden_size)
    for name, module in planned.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, ModulePlaceholder(name, module, state))
    unplanned = [name for name, _ in model.named_parameters()]
    if unplanned:
        raise ModelError(
            "MW-INTEROP-074",
            f"{place}: {unplanned[0]} belongs to no module of the pipeline plan ({', '.join(model._pp_plan)}), so that "
            f"its stage is undefined",
        )
    digest = hashlib.sha256(repr(model.config).encode()).hexdigest()[:16]
    frame = ModelSkeleton(model, state, f"{type(model).__name__} {digest}")
    try:
        order = frame.find_order()
    except Exception as error:
        raise ModelError(
            "MW-INTEROP-075",
            f"{place}: the computations of {type(model).__name__} between its planned modules need more of these "
            f"modules than a call: {type(error).__name__}: {error}",
        ) from error
    if sorted(order) != sorted(planned):
        name = next(name for name in planned if order.count(name) != 1)
        raise ModelError(
            "MW-INTEROP-076",
            f"{place}: its forward calls {name} {order.count(name)} times, not once: it cannot be cut into stages",
        )
    names: dict[str, str] = {}
    layers = OrderedDict[str, nn.Module]()
    position = 0
    for layer in _group(order, in_lists, planned):
        modules = {child: planned[theirs] for child, theirs in layer.modules.items()}
        layers[layer.name] = PipelineLayer(frame, position, list(modules), modules)
        names |= {f"{layer.name}.{child}": theirs for child, theirs in layer.modules.items()}
        position += len(modules)
    return names, nn.Sequential(layers)


def _group(order: list[str], in_lists: set[str], planned: Mapping[str, nn.Module]) -> list[LayerModules]:
    """Group the planned modules into layers: one for each layer of a module list.

    A module without weights joins the layer before it. So does every module between the embedding and the first block.
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
