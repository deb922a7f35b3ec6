"""What is known of one kind of model on both sides: ``config.json`` <-> ``model.options``, their tensors <-> ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshwright.tools.interop.huggingface.convert.settings import Settings
from meshwright.tools.interop.huggingface.rules import Rule

Options = Mapping[str, Any]
"""All of the builder's, defaults filled in."""


class Family(NamedTuple):
    """One ``model_type`` of transformers."""

    model_type: str
    architecture: str
    """The class with the language-modelling head."""
    builder: str
    read: Callable[[Settings], dict[str, Any]]
    """Its config.json -> options of our builder."""
    write: Callable[[Options], dict[str, Any]]
    """Options -> the fields of its config.json that they decide."""
    holds: Callable[[Options], str | None]
    """Why a model with these options is not of this family; None: it is."""
    rules: Callable[[Options], list[Rule]]
    """Every tensor of the model, in the order in which theirs are written."""
    left_out: tuple[str, ...] = ()
    """Patterns of tensors that their files may hold and that carry nothing: masks, tables."""
    prefix: str = ""
    """Of their names; a file without it on any name is of the bare model, without its head class."""
    unprefixed: tuple[str, ...] = ("lm_head.weight",)
    """Names without it all the same."""
    head_by_file: bool = False
    """Whether the head is tied is for the files to say: it is, when they have none that differs."""
    task: str = "causal"
    """What ``data.task`` trains it."""
    aliases: Mapping[str, str] = {}
    """Of fields of its config.json: second name -> first."""
