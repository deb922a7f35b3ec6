"""Folding of muP's multipliers into exported weights: transformers' models have none of them.

embeddings  x multiplier                       token and position embeddings
scores      x sqrt(base head_dim / head_dim)   rows of q, or the norm of q
logits      x multiplier / m                   last norm; divided by the embeddings' multiplier if the head is tied
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.errors import ConfigError
from meshwright_interop.huggingface.convert.family import Options
from meshwright_interop.huggingface.rules import TensorMapping


class Multipliers(NamedTuple):
    """Factors on a model's weights that stand for its multipliers."""

    embeddings: float = 1.0
    query: float = 1.0
    last_norm: float = 1.0


def multipliers_of(options: Options) -> Multipliers:
    """Return the factors of a model with these options, which are complete."""
    if options.get("mup_base_size") is None:
        return Multipliers()
    embeddings, base = options["mup_embedding_multiplier"], options["mup_base_head_dim"]
    head_dim = options.get("head_dim") or options["hidden_size"] // options["num_heads"]
    logits = options["mup_output_multiplier"] * options["mup_base_size"] / options["hidden_size"]
    query = 1.0 if base is None else math.sqrt(base / head_dim)
    return Multipliers(embeddings, query, logits / embeddings if options["tied"] else logits)


def fold_multipliers(
    rules: Sequence[TensorMapping], options: Options
) -> tuple[list[TensorMapping], list[str]]:
    """Return the rules with the factors of each tensor's parts, and notes for the user.
    ``options``: complete.
    """
    found = multipliers_of(options)
    if found == Multipliers():
        return list(rules), []

    def factors_of(name: str) -> tuple[float, ...]:
        if name.startswith("embedding."):
            return (found.embeddings,)
        if name.startswith("norm."):
            return (found.last_norm,)
        is_query = ".q_norm." in name or (".attention.qkv." in name and not options.get("qk_norm"))
        return (found.query,) if is_query else ()

    return [rule._replace(factors=factors_of(rule.ours)) for rule in rules], [
        f"muP's multipliers are in the weights: embeddings x {found.embeddings:g}, q x"
        f" {found.query:g}, last norm x {found.last_norm:g}; muP's learning-rate factors are not"
        " exported: set them again to train elsewhere"
    ]


def refuse_multipliers(options: Options) -> None:
    """Raise ConfigError for multipliers in a model that is imported,
    whose weights were trained without.
    """
    if multipliers_of(options) != Multipliers():
        given = ", ".join(
            f"{n} = {v}"
            for n, v in options.items()
            if n.startswith("mup_") and v not in (None, 1.0)
        )
        raise ConfigError(
            "MW-INTEROP-098",
            f"model.options: {given}: the imported weights were trained without muP's multipliers"
            " and would be another model with them: leave mup_base_size out",
        )
