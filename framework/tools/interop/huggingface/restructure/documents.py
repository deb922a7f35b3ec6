"""Models whose layers pass tokens on over the borders of documents in a row."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from meshwright.tools.interop.huggingface.restructure.attention import CORE

RECURRENT = ("linear", "mamba", "recurrent", "conv", "lightning")
"""Parts of the names of layer types whose state goes on from token to token."""


def refuse_documents(layers: nn.Sequential, layer_types: Iterable[str]) -> None:
    """Make layers refuse rows of several documents, if tokens would reach later documents other than by attention.

    Attention sees the documents by its mask. Convolutions and recurrent states (linear attention) go on over their
    borders. They are found by an ``nn.Conv1d``, by a block without attention of transformers' registry, where others
    have it, or by the name of a layer type.

    Args:
        layers: the layers, with their attention cores.
        layer_types: ``config.layer_types`` of the model.
    """
    for layer in layers:
        vars(layer)["mixing"] = _mixing(layers, layer_types)


def _mixing(layers: nn.Sequential, layer_types: Iterable[str]) -> str:
    """Return what passes tokens on from document to document; "" for nothing."""
    convolution = next((name for name, module in layers.named_modules() if isinstance(module, nn.Conv1d)), None)
    if convolution is not None:
        return f"{convolution} is a convolution over tokens"
    with_core = {name.partition(".")[0] for name, _ in layers.named_modules() if name.endswith(f".{CORE}")}
    blocks = [name for name in layers._modules if name.startswith("block")]
    without = next((name for name in blocks if with_core and name not in with_core), None)
    if without is not None:
        return f"{without} has no attention of transformers' registry"
    recurrent = next((kind for kind in layer_types if any(word in kind for word in RECURRENT)), None)
    return "" if recurrent is None else f"layer_types names {recurrent}"
