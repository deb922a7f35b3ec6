"""Maximal update parametrization (muP): learning rate and initial scale chosen
at a base width hold at any width.

Yang et al. 2022, "Tensor Programs V" (arXiv:2203.03466), Table 8 for AdamW, with Megatron-LM's
(``--use-mup``) choices where the paper leaves them open. With m = hidden_size / base width:

    weight                                  initial std        learning rate    AdamW's eps
    matrices of the blocks                  init_std/sqrt(m)   1/m              1/m          times the usual one
    embeddings, head, norms, biases         init_std           1                1            times the usual one

    logits            x output multiplier / m
    embeddings        x embedding multiplier
    attention scores  q k sqrt(base head_dim) / head_dim, instead of q k / sqrt(head_dim)

All of it follows from names and global sizes. With m = 1, multipliers of 1 and the base's head_dim,
the model is the one without muP, in every bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

MATRICES = ("block*.attention.qkv.weight", "block*.attention.out.weight", "block*.mlp.*.weight")
"""Matrices of the blocks: fan-in and fan-out both grow with the width."""


class Mup(NamedTuple):
    """muP of one model. ``base_size`` None: off."""

    hidden_size: int
    base_size: int | None = None
    """Hidden size of the model that the learning rate was chosen for."""
    base_head_dim: float | None = None
    """Size of a head of that model. None: the same as here,
    so that the scores stay q k / sqrt(head_dim).
    """
    embedding_multiplier: float = 1.0
    output_multiplier: float = 1.0

    @property
    def width(self) -> float:
        """The width relative to the base, m. 1 without muP."""
        return 1.0 if self.base_size is None else self.hidden_size / self.base_size

    @property
    def output_factor(self) -> float:
        """Factor on the logits."""
        return self.output_multiplier / self.width

    def score_divisor(self, head_dim: int) -> float | None:
        """Return the divisor of the attention scores; None for sqrt(head_dim)."""
        if self.base_head_dim is None or self.base_head_dim == head_dim:
            return None
        return head_dim / math.sqrt(self.base_head_dim)

    def groups(self) -> list[dict[str, object]]:
        """Return the ``parameter_groups`` of the model: factors for AdamW by name pattern."""
        factor = 1 / self.width
        return (
            [{"names": list(MATRICES), "learning_rate_factor": factor, "eps_factor": factor}]
            if factor != 1
            else []
        )


def mup_of(options: Mapping[str, Any]) -> Mup:
    """Return the muP that a builder's options ``hidden_size`` and ``mup_*`` describe.

    Raises:
        ValueError: A number is not positive, or is given without ``mup_base_size``.
    """
    usual = {f"mup_{name}": value for name, value in Mup._field_defaults.items()}
    given = {name: options[name] for name in usual}
    wrong = [
        f"{name}={value}"
        for name, value in given.items()
        if value is not None and not 0 < value < math.inf
    ]
    if wrong:
        raise ValueError(f"model options must be positive: {', '.join(wrong)}")
    changed = [f"{name}={value}" for name, value in given.items() if value != usual[name]]
    if changed and given["mup_base_size"] is None:
        raise ValueError(
            f"{', '.join(changed)} without mup_base_size, the hidden size of the base model: set it"
        )
    return Mup(options["hidden_size"], *given.values())
