"""Conversion table of a model type: ``config.json`` <-> ``model.options``,
transformers <-> meshwright tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshwright_interop.huggingface.convert.settings import Settings
from meshwright_interop.huggingface.rules import TensorMapping

Options = Mapping[str, Any]
"""All options of the builder, with defaults filled in."""


class Family(NamedTuple):
    """Names, conversion functions and special cases of one ``model_type`` of transformers."""

    model_type: str
    architecture: str
    """Transformers class with the language-modelling head."""
    builder: str
    read: Callable[[Settings], dict[str, Any]]
    """Function from a transformers config.json to the options of the meshwright builder."""
    write: Callable[[Options], dict[str, Any]]
    """Function from options to the config.json fields that they determine."""
    holds: Callable[[Options], str | None]
    """Function that returns the reason why a model with these options is not of this family; None:
    it is.
    """
    rules: Callable[[Options], list[TensorMapping]]
    """Function that returns one rule per tensor of the model,
    in the order of the exported tensors.
    """
    left_out: tuple[str, ...] = ()
    """Name patterns of tensors in transformers files that are no weights (masks, rotary tables);
    they are ignored.
    """
    prefix: str = ""
    """Prefix of transformers names; files without it on any name hold the bare model,
    without the head class.
    """
    unprefixed: tuple[str, ...] = ("lm_head.weight",)
    """Transformers names that have no prefix in any case."""
    head_by_file: bool = False
    """True if the files decide on tying: the head is tied unless they hold one that differs
    from the embedding.
    """
    task: str = "causal"
    """Value of ``data.task`` for training this model."""
    aliases: Mapping[str, str] = {}
    """Second names of config.json fields -> their first names."""
