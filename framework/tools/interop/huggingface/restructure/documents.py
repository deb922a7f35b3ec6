"""Models whose layers pass tokens on over the borders of documents in a row."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

RECURRENT = ("linear", "mamba", "recurrent", "conv", "lightning")
"""Parts of the names of layer types whose state goes on from token to token."""


def one_document_only(layers: nn.Sequential, cores: Iterable[str], layer_types: Iterable[str]) -> str:
    """Return why tokens of a row may reach later documents in it, or "" if attention alone passes them on.

    Attention sees the documents by its mask. Convolutions and recurrent states (linear attention) go on over their
    borders: a block without attention of the registry, an ``nn.Conv1d`` anywhere, or a layer type that says so.

    Args:
        cores: names of the attention cores of :func:`context_plan`; empty: the model's attention is not known.
        layer_types: ``config.layer_types`` of the model.
    """
    convolution = next((name for name, module in layers.named_modules() if isinstance(module, nn.Conv1d)), None)
    if convolution is not None:
        return f"{convolution} is a convolution over tokens"
    with_core = {name.partition(".")[0] for name in cores}
    blocks = [name for name in layers._modules if name.startswith("block")]
    without = next((name for name in blocks if with_core and name not in with_core), None)
    if without is not None:
        return f"{without} has no attention of transformers' registry"
    recurrent = next((kind for kind in layer_types if any(word in kind for word in RECURRENT)), None)
    return "" if recurrent is None else f"layer_types names {recurrent}"
