"""Layers with activation checkpointing (recompute) or activation offload,
as the configuration selects them.
"""

from __future__ import annotations

from meshwright.config import Pipeline
from meshwright.errors import ModelError
from meshwright.model.build import PlainModel
from meshwright.pipeline.recompute import POINTWISE
from meshwright.placement.patterns import check_patterns, matching


def recomputed_names(pipeline: Pipeline, model: PlainModel, builder: str) -> tuple[str, ...]:
    """Return the names of the layers, or parts of layers,
    with activation checkpointing (recompute).

    Raises:
        ModelError: ``pipeline.recompute`` would recompute nothing, or a pattern fits nothing.
    """
    if pipeline.recompute == "none":
        return ()
    _check_patterns(pipeline, model, builder)
    names = _matching(pipeline, model)
    if not names:
        raise ModelError(
            "MW-PIPELINE-008",
            f"pipeline.recompute_layers = {pipeline.recompute_layers} fits no layer that"
            " holds a part of "
            f'{model.selective_recompute}, what the model names for "selective": nothing would be'
            " recomputed",
        )
    return tuple(names)


def _check_patterns(pipeline: Pipeline, model: PlainModel, builder: str) -> None:
    """Raise :class:`ModelError` for a pattern that fits nothing."""
    names = list(model.layers._modules)
    if not pipeline.recompute_layers:
        raise ModelError(
            "MW-PIPELINE-004",
            f'pipeline.recompute = "{pipeline.recompute}" with pipeline.recompute_layers = []: name'
            ' layers, such as ["block*"], or set pipeline.recompute = "none"',
        )
    check_patterns("pipeline.recompute_layers", pipeline.recompute_layers, names, "layer")
    if pipeline.recompute in ("full", "pointwise"):
        return
    if not model.selective_recompute:
        raise ModelError(
            "MW-PIPELINE-006",
            f'pipeline.recompute = "selective", but {builder} does not name what is cheap to'
            " compute and expensive to keep: set model.selective_recompute to patterns of"
            ' submodule names, such as ["block*.attention.core"], or choose "pointwise" or "full"',
        )
    parts = [name for name, _ in model.layers.named_modules() if name]
    key = f"{builder}: selective_recompute"
    check_patterns(key, model.selective_recompute, parts, "module")


def _matching(pipeline: Pipeline, model: PlainModel) -> list[str]:
    chosen = matching(pipeline.recompute_layers, model.layers._modules)
    if pipeline.recompute == "full":
        return chosen
    if pipeline.recompute == "pointwise":
        return [f"{name}.{POINTWISE}" for name in chosen]
    parts = [name for name, _ in model.layers.named_modules() if name.partition(".")[0] in chosen]
    return matching(model.selective_recompute, parts)


def offloaded_names(pipeline: Pipeline, model: PlainModel) -> tuple[str, ...]:
    """Return the names of the layers with activation offload.

    Raises:
        ModelError: a pattern of ``pipeline.offload_activations`` fits no layer.
    """
    names = list(model.layers._modules)
    patterns = pipeline.offload_activations
    check_patterns("pipeline.offload_activations", patterns, names, "layer")
    return tuple(matching(patterns, names))
