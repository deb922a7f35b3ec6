"""Multi-token prediction of DeepSeek-V3 (arXiv:2412.19437, section 2.2): modules that look ahead,
after the trunk.

    ids --------------.-----------------------------.---------------------------.
    embedding         | embedding of token t + 1    | embedding of token t + 2  |
       |              |          |                  |          |                |
    trunk, norm -- h0 --------> mtp0 ---- h1 ----------------> mtp1 ---- h2 ----'   head: logits of h0, h1, h2
                                                                                    for token t + 1,
                                                                                    t + 2, t + 3

A module's sequence at position t is norm(embedding of token t + depth) beside norm(h of the module
before), projected to D features, then one block and a last norm, as in Megatron-LM
(``--mtp-num-layers``) and DeepSeek's checkpoints. The embedding and the head are those of the
trunk. The ids travel with the activations, because a stage with a module has its own copy of the
embedding, tied by declaration.

Shapes: B samples, S tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SideTensors:
    """Tensors that travel beside x (B, S, D), distinguished by their dtypes.

    Args:
        value: x, or (x, document starts (B, S) bool, token ids (B, S) int64, earlier h (B, S, D)
            ...), the two in the middle where the model has them.
    """

    starts: Tensor | None = None
    ids: Tensor | None = None

    def __init__(self, value: Tensor | Sequence[Tensor]) -> None:
        self.x, *self.others = (value,) if isinstance(value, Tensor) else value
        for other in self.others:
            if other.dtype == torch.bool:
                self.starts = other
            elif other.dtype == torch.int64:
                self.ids = other

    def beside(self, x: Tensor, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return a new x (B, S, D) with all that travels beside it, and with ``more``."""
        return (x, *self.others, *more) if self.others or more else x


class MtpModule(nn.Module):
    """Module of depth k from 1: (h of depth k - 1, ids, ...) -> (h of depth k, ids, ...,
    h of depth k - 1).
    """

    def __init__(
        self, depth: int, embedding: nn.Embedding, norm: nn.Module, block: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        vocab_size, hidden_size = embedding.num_embeddings, embedding.embedding_dim
        self.depth = depth
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.embedding_norm, self.hidden_norm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.project = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = block

    def forward(self, value: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Look one token further ahead. The last ``depth`` positions see token 0,
        and no label counts there.
        """
        carried = SideTensors(value)
        assert carried.ids is not None
        # (B, S, D)
        ahead = self.dropout(self.tokens(F.pad(carried.ids[:, self.depth :], (0, self.depth))))
        x = self.project(
            torch.cat((self.embedding_norm(ahead), self.hidden_norm(carried.x)), dim=-1)
        )
        x = self.norm(self.block(x if carried.starts is None else (x, carried.starts)))
        return carried.beside(x, carried.x)


class SharedHead(nn.Module):
    """One linear to the vocabulary for every depth: (h of the last depth, ..., h0, h1, ...)
    -> (logits 0, 1, ...).
    """

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return logits (B, S, V) of each h (B, S, D), that of the trunk first."""
        last, *first = (each for each in value if each.is_floating_point())
        return tuple(self.linear(h) for h in (*first, last))


def sharding_plan(plan: dict[str, Any], block: nn.Module) -> dict[str, Any]:
    """Return a decoder's sharding plan extended by the modules' blocks,
    their embedding and the shared head.

    ``block``: one of those blocks. Patterns that name none of its modules are for other blocks of
        the trunk.
    """
    inner = {
        name.partition(".")[2]: kind for name, kind in plan.items() if name.startswith("block")
    }
    names = [name for name, _ in block.named_modules()]
    blocks = {
        f"mtp*.block.{each}": kind for each, kind in inner.items() if fnmatch.filter(names, each)
    }
    return (
        {name: kind for name, kind in plan.items() if name != "head"}
        | blocks
        | {
            "mtp*.tokens": "vocab",
            "head.linear": "vocab",
        }
    )
