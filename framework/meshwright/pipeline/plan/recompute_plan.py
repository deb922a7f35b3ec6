"""Layers with activation checkpointing (recompute) or activation offload, as the configuration selects them."""

from __future__ import annotations

from fnmatch import fnmatchcase

from meshwright.config import Pipeline, RunConfig
from meshwright.errors import ModelError
from meshwright.model.build import PlainModel
from meshwright.pipeline.recompute import POINTWISE


def recomputed_names(config: RunConfig, model: PlainModel) -> tuple[str, ...]:
    """Return the names of the layers, or parts of layers, with activation checkpointing (recompute).

    Raises:
        ModelError: ``pipeline.recompute`` would recompute nothing, or a pattern fits nothing.
    """
    if config.pipeline.recompute == "none":
        return ()
    _check_patterns(config.pipeline, model, config.model.builder)
    found = _matching(config.pipeline, model)
    if not found:
        raise ModelError(
            "MW-PIPELINE-008",
            f"pipeline.recompute_layers = {config.pipeline.recompute_layers} fits no layer that holds a part of "
            f'{model.selective_recompute}, what the model names for "selective": nothing would be recomputed',
        )
    return tuple(found)


def _check_patterns(pipeline: Pipeline, model: PlainModel, builder: str) -> None:
    """Raise :class:`ModelError` for a pattern that fits nothing."""
    names = list(model.layers._modules)
    if not pipeline.recompute_layers:
        raise ModelError(
            "MW-PIPELINE-004",
            f'pipeline.recompute = "{pipeline.recompute}" with pipeline.recompute_layers = []: name layers, such as '
            f'["block*"], or set pipeline.recompute = "none"',
        )
    for pattern in pipeline.recompute_layers:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                "MW-PIPELINE-005",
                f"pipeline.recompute_layers holds {pattern!r}, which fits no layer; the layers are {', '.join(names)}",
            )
    if pipeline.recompute in ("full", "pointwise"):
        return
    if not model.selective_recompute:
        raise ModelError(
            "MW-PIPELINE-006",
            f'pipeline.recompute = "selective", but {builder} does not name what is cheap to compute and '
            f"expensive to keep: set model.selective_recompute to patterns of submodule names, such as "
            f'["block*.attention.core"], or choose "pointwise" or "full"',
        )
    parts = [name for name, _ in model.layers.named_modules()]
    for pattern in model.selective_recompute:
        if not any(fnmatchcase(name, pattern) for name in parts):
            raise ModelError(
                "MW-PIPELINE-007", f"{builder}: selective_recompute holds {pattern!r}, which fits no submodule"
            )


def _matching(pipeline: Pipeline, model: PlainModel) -> list[str]:
    chosen = [name for name in model.layers._modules if any(fnmatchcase(name, p) for p in pipeline.recompute_layers)]
    if pipeline.recompute == "full":
        return chosen
    if pipeline.recompute == "pointwise":
        return [f"{name}.{POINTWISE}" for name in chosen]
    parts = [name for name, _ in model.layers.named_modules() if name.partition(".")[0] in chosen]
    return [part for part in parts if any(fnmatchcase(part, p) for p in model.selective_recompute)]


def offloaded_names(pipeline: Pipeline, model: PlainModel) -> tuple[str, ...]:
    """Return the names of the layers with activation offload.

    Raises:
        ModelError: a pattern of ``pipeline.offload_activations`` fits no layer.
    """
    names = list(model.layers._modules)
    for pattern in pipeline.offload_activations:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                "MW-PIPELINE-037",
                f"pipeline.offload_activations holds {pattern!r}, which fits no layer; the layers are "
                f"{', '.join(names)}",
            )
    patterns = pipeline.offload_activations
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
