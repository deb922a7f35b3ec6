"""A training forward on the meta device, watched: randomness that nobody can seed by name, and who works on what."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from framework.errors import ModelError


class Dropping(TorchFunctionMode):
    """Notes each function that would drop elements by the generator of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or (args[4:5] or (0,))[0]):
            self.found.append("the attention's probabilities")
            kwargs = kwargs | {"dropout_p": 0.0}
        elif func in (F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.alpha_dropout):
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", args[2] if len(args) > 2 else True)
            if p and training:
                self.found.append(f"{getattr(func, '__name__', func)}, p={p}")
        return func(*args, **kwargs)


def alike(layer: nn.Module) -> str:
    """Equal for layers that differ in their number alone."""
    plain = (bool, int, float, str, type(None))
    attributes = [
        (name, attribute, value)
        for name, module in layer.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, plain) and attribute not in ("layer_idx", "layer_id", "first")
    ]
    return f"{layer} {attributes}"


def probe(layers: nn.Sequential, beside: Mapping[str, Sequence[str]], place: str, config: Any) -> dict[str, bool]:
    """Run once on meta, of layers that are alike the first one, with dropout modules (which get masks by name later) at
    rest.

    Args:
        beside: modules with weights -> the columns beside them, whose output tensor parallelism puts together.

    Returns:
        of each of those modules whether it is called with the output of one of the columns, and nothing else.

    Raises:
        ModelError: dropout by a function, which draws from a generator of the process: other masks in each layout.
    """
    first_of_kind: dict[str, str] = {}
    twins = {name: first_of_kind.setdefault(alike(layer), name) for name, layer in layers.named_children()}
    on_meta = nn.Sequential()
    for name in dict.fromkeys(twins.values()):
        on_meta.add_module(name, copy.deepcopy(layers.get_submodule(name)).to("meta").train())
    for module in on_meta.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    outputs: list[Tensor] = []
    uncut = dict.fromkeys(beside, False)
    run = [name for name in beside if name.partition(".")[0] in on_meta._modules]
    for column in {column for name in run for column in beside[name]}:
        on_meta.get_submodule(column).register_forward_hook(lambda module, args, output: outputs.append(output))
    for name in run:

        def look(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            uncut[name] = len(args) == 1 and any(args[0] is output for output in outputs)

        on_meta.get_submodule(name).register_forward_pre_hook(look)
    with Dropping() as dropping, torch.no_grad():
        try:
            on_meta(torch.zeros(1, 4, dtype=torch.int64, device="meta"))
        except ModelError:
            raise
        except Exception:  # what does not run on meta is named, with its reason, when the stages are cut
            return uncut
    if dropping.found:
        keys = [
            name for name, value in vars(config).items() if ("drop" in name) and isinstance(value, float) and value > 0
        ]
        options = ", ".join(f"model.options.{key} = 0.0" for key in keys)
        raise ModelError(
            f"{place}: its code drops {dropping.found[0]} by a function, which draws from a generator of the process: "
            f"no layout could draw the same masks again. Set {options or 'it to 0 in config.json'}"
        )
    return {name: uncut[_twin(name, twins)] for name in beside}


def _twin(name: str, twins: Mapping[str, str]) -> str:
    """The same part of the layer that was run."""
    layer, _, inside = name.partition(".")
    return f"{twins[layer]}.{inside}"
