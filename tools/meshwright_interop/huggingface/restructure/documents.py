"""Models whose layers carry state over the boundaries of the documents in a row."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from meshwright_interop.huggingface.restructure.attention import CORE

RECURRENT = ("linear", "mamba", "recurrent", "conv", "lightning")
"""Parts of the names of layer types with a recurrent state."""


def refuse_documents(layers: nn.Sequential, layer_types: Iterable[str]) -> None:
    """Make layers refuse rows of several documents if anything but attention mixes tokens.

    Attention has a mask of documents. Convolutions and recurrent states (linear attention) have
    none. A model has them if it holds an ``nn.Conv1d``, if a block lacks attention of transformers'
    registry where other blocks have it, or if the name of a layer type names them.

    Args:
        layers: the layers, with their attention cores.
        layer_types: ``config.layer_types`` of the model.
    """
    reason = _reason(layers, layer_types)
    for layer in layers:
        vars(layer)["one_document_reason"] = reason


def _reason(layers: nn.Sequential, layer_types: Iterable[str]) -> str:
    """Return what mixes tokens besides attention; "" for nothing."""
    convolution = next(
        (name for name, module in layers.named_modules() if isinstance(module, nn.Conv1d)), None
    )
    if convolution is not None:
        return f"{convolution} is a convolution over tokens"
    with_core = {
        name.partition(".")[0] for name, _ in layers.named_modules() if name.endswith(f".{CORE}")
    }
    blocks = [name for name in layers._modules if name.startswith("block")]
    without = next((name for name in blocks if with_core and name not in with_core), None)
    if without is not None:
        return f"{without} has no attention of transformers' registry"
    recurrent = next(
        (kind for kind in layer_types if any(word in kind for word in RECURRENT)), None
    )
    return "" if recurrent is None else f"layer_types names {recurrent}"
