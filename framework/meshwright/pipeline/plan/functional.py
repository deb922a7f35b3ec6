"""Search for the layers with functional dropouts, by one forward of the plain model on meta."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.model.build import PlainModel, meta_copy
from meshwright.model.functional_dropout import (
    NAME,
    FunctionalDropout,
    FunctionalDropoutMode,
    RecordingDrawer,
    draw_by_name,
)
from meshwright.pipeline.plan.boundaries import run_or_reuse
from meshwright.pipeline.plan.outline import outline_of, outline_of_value
from meshwright.system.packages import is_own_package

OF_TORCH = (
    nn.MultiheadAttention,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""Modules of torch that drop elements by a function."""


def draw_functions_by_name(model: PlainModel, inputs: Any) -> None:
    """Replace the functional dropouts of each layer by draws by name, in place.

    ``inputs``: of a micro-batch, on meta. A model that fails is left as it is: its description
    raises the error.
    """
    lengths = frozenset(
        int(leaf.shape[1])
        for leaf in tree_leaves(inputs)
        if isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.dim() > 1
    )
    if not any(map(_may_draw, model.layers.children())) or any(
        isinstance(module, FunctionalDropout) for module in model.layers.modules()
    ):
        return
    for name, calls in _calls_of_layers(meta_copy(model.layers), inputs).items():
        layer = model.layers.get_submodule(name)
        path = f"{name}.{NAME}"
        draw_by_name(layer, FunctionalDropout(path, model.seed, model.current, calls, lengths))


def _calls_of_layers(layers: nn.Sequential, value: Any) -> dict[str, list[Any]]:
    """Return the calls of each layer that has any; of equal layers with equal inputs one runs."""
    found: dict[str, list[Any]] = {}
    seen: dict[Any, tuple[list[Any], Any]] = {}
    for name, layer in layers.named_children():
        try:
            if not _may_draw(layer):
                value = run_or_reuse(layer, value)
                continue
            outline = outline_of(layer)
            key = outline, outline_of_value(value)
            if outline.is_passing or key not in seen:
                drawer = RecordingDrawer()
                with FunctionalDropoutMode(drawer):
                    seen[key] = drawer.calls, layer(value)
            calls, value = seen[key]
        except Exception:
            return found
        if calls:
            found[name] = calls
    return found


def _may_draw(layer: nn.Module) -> bool:
    """Return whether a layer may call functional dropouts; those of this project have modules."""
    for module in layer.modules():
        package = type(module).__module__
        is_ours = package.partition(".")[0] == "torch" or is_own_package(package)
        if not is_ours or isinstance(module, OF_TORCH):
            return True
    return False
