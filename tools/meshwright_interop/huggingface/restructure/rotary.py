"""Rotary embeddings of transformers whose frequencies depend on the sequence.

``dynamic`` changes them by the longest sequence that a process has seen, and is refused. ``longrope``
has two sets: one for sequences of at most ``original_max_position_embeddings`` tokens, one for
longer ones. transformers decides by the largest position of a micro-batch, which depends on how
samples are grouped where documents restart. Here the length of the samples decides, the same on
every rank. Rows of one document have the frequencies of transformers.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright_interop.huggingface.restructure.experts import tables_of
from meshwright_interop.huggingface.restructure.library import rotary_parameters

DYNAMIC, LONGROPE = "dynamic", "longrope"


def refuse_dynamic(config: Any, place: str) -> None:
    """Check that no rotary embedding changes by what a process has seen before.

    Raises:
        ModelError: one does.
    """
    if DYNAMIC in _kinds(config):
        raise _changing(
            place, DYNAMIC, "changes the rotary frequencies by the longest sequence seen"
        )


def choose_by_length(model: nn.Module, place: str) -> None:
    """Replace the choice of each ``longrope``, in place: by the length of the samples.

    Raises:
        ModelError: the model's code chooses in another way.
    """
    config: Any = model.config
    if LONGROPE not in _kinds(config):
        return
    rotary = [module for module in model.modules() if _is_choosing(module)]
    if not rotary or any(
        hasattr(module, "inv_freq") for module in model.modules() if module not in rotary
    ):
        raise _changing(place, LONGROPE, "chooses the rotary frequencies in a way of its own")
    for module in rotary:
        _choose(module)


def trim_refusal(config: Any) -> dict[str, str]:
    """Return the reason why rows cannot be trimmed, as ``impossible`` of a model; empty if they can."""
    if LONGROPE not in _kinds(config):
        return {}
    return {"trim": f"{LONGROPE} chooses the rotary frequencies by the length of a row"}


def _kinds(config: Any) -> set[str]:
    tables = tables_of(getattr(config, "rope_parameters", None) or {})
    return {str(table.get("rope_type")) for table in tables}


def _changing(place: str, kind: str, what: str) -> ModelError:
    return ModelError(
        "MW-INTEROP-069",
        f"{place}: rope_type = {kind!r} {what}, which differs between processes: train with a"
        " rope_parameters of another type (linear, llama3, yarn) in model.options",
    )


def _is_choosing(module: Any) -> bool:
    """Return whether a module is a ``longrope`` whose forward is wrapped by transformers' choice."""
    if getattr(module, "rope_type", None) != LONGROPE or not hasattr(module, "original_inv_freq"):
        return False
    found = type(module).forward
    while "longrope_frequency_update" not in found.__code__.co_freevars:
        if (found := getattr(found, "__wrapped__", None)) is None:
            return False
    return True


def _choose(rotary: Any) -> None:
    length = rotary.config.rope_parameters["original_max_position_embeddings"]
    long, _ = rotary_parameters(LONGROPE)(rotary.config, seq_len=length + 1)
    rotary.register_buffer("long_inv_freq", long, persistent=False)
    vars(rotary)["original_length"] = length
    vars(rotary)["forward"] = MethodType(_forward, rotary)


@torch.no_grad()
def _forward(rotary: Any, x: Tensor, position_ids: Tensor) -> Any:
    """Return cos and sin, by the model's own code. position_ids: (B, S), whole samples."""
    is_long = position_ids.shape[-1] > rotary.original_length
    rotary.inv_freq = rotary.long_inv_freq if is_long else rotary.original_inv_freq
    return inspect.unwrap(type(rotary).forward)(rotary, x, position_ids)
