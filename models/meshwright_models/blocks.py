"""Building blocks of the models: embedding, residual block, last norm, initial weights, assembly.

Samples of several documents: the first element takes {"tokens": (B, S), "starts": (B, S) bool, True
where a document begins}. The elements then pass (x, starts). Attention stays within a document, and
positions count from its start. The last norm returns x alone. With multi-token prediction
(``multi_token.py``) elements pass the ids as well.

Shapes: B samples, S tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright_models import multi_token
from meshwright_models.attention import positions_of
from meshwright_models.last_norm import LastNorm
from meshwright_models.multi_token import MtpModule, SharedHead, SideTensors
from meshwright_models.mup import Mup

RESIDUAL_WEIGHTS = (
    "*.attention.out.weight",
    "*.mlp.down.weight",
    "*.mlp.experts.down",
    "*.mlp.shared.down.weight",
)
"""Projections that end a residual branch."""


RESIDUAL_INITS = ("num_layers", "layer_index", "none")


class TrainingOptions(NamedTuple):
    """Options of a decoder besides its architecture: initial weights, loss and parametrization."""

    init_std: float = 0.02
    residual_init: str = "num_layers"
    """Divisor of ``init_std`` for the projections that end a residual branch,
    of L layers and in layer l from 1:

    ``num_layers`` sqrt(2 L), as in GPT-2, Megatron-LM and nanotron; ``layer_index`` sqrt(2 l), as
    torchtitan's ``depth_init``; ``none`` 1.
    """
    label_smoothing: float = 0.0
    """Share of each label that is spread evenly over the vocabulary, as in torch."""
    z_loss: float = 0.0
    """Factor of logsumexp(logits)^2, added to each label's loss (PaLM: 1e-4)."""
    mtp_layers: int = 0
    """Modules of multi-token prediction after the trunk: see ``multi_token.py``."""
    mtp_loss_weight: float = 0.1
    """Weight of the mean of the modules' losses beside the loss of the next token."""

    @property
    def loss_heads(self) -> list[tuple[int, float]]:
        """Shift of the labels and weight of the loss of each depth, the trunk first;
        empty without modules.
        """
        depths = range(1, self.mtp_layers + 1)
        return (
            [(0, 1.0), *((depth, self.mtp_loss_weight / self.mtp_layers) for depth in depths)]
            if depths
            else []
        )

    mup: Mup = Mup(1)
    """Maximal update parametrization; off by default."""

    def check(self) -> None:
        """Raise ValueError for options of the initial weights, or of multi-token prediction,
        that make no sense.
        """
        if self.mtp_layers < 0 or self.mtp_loss_weight < 0:
            raise ValueError(
                f"mtp_layers={self.mtp_layers}, mtp_loss_weight={self.mtp_loss_weight}: at least 0"
            )
        if self.mtp_layers and self.mup != Mup(self.mup.hidden_size):
            raise ValueError(
                f"mtp_layers={self.mtp_layers} with mup_base_size: the modules have no muP; leave"
                " one out"
            )
        if self.init_std <= 0:
            raise ValueError(f"init_std={self.init_std} must be positive")
        if self.residual_init not in RESIDUAL_INITS:
            raise ValueError(
                f"residual_init={self.residual_init!r} must be one of {', '.join(RESIDUAL_INITS)}"
            )

    def initial(self) -> dict[str, Any]:
        """Return the keyword arguments of :func:`initialise`."""
        return {"std": self.init_std, "residual": self.residual_init, "width": self.mup.width}

    def attributes(self) -> dict[str, object]:
        """Return the attributes of the model that the options set."""
        heads = {"loss_heads": self.loss_heads} if self.mtp_layers else {}
        options = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        return {**options, **heads, "parameter_groups": self.mup.groups()}


def initialise(
    name: str,
    tensor: Tensor,
    *,
    num_layers: int,
    std: float = 0.02,
    residual: str = "num_layers",
    width: float = 1.0,
) -> None:
    """Initialise one full parameter in place from torch's default generator,
    as a function of its name and shape only.

    Matrices: N(0, std). Projections that end a residual branch: N(0, std / sqrt(2 L)), so that
    the sum over 2 L branches keeps the variance of one (GPT-2 paper, section 2.3), or with another
    divisor by ``residual``. Biases are 0; norm weights, the only other vectors, 1.

    ``width``: muP's width relative to the base; its square root divides the standard deviation of
    the matrices of blocks.
    """
    if name.startswith("block"):
        std /= math.sqrt(width)
    if name.endswith(".bias"):
        nn.init.zeros_(tensor)
    elif tensor.dim() == 1:
        nn.init.ones_(tensor)
    elif any(fnmatchcase(name, pattern) for pattern in RESIDUAL_WEIGHTS):
        nn.init.normal_(tensor, std=std / _residual_divisor(name, num_layers, residual))
    else:
        nn.init.normal_(tensor, std=std)


def _residual_divisor(name: str, num_layers: int, residual: str) -> float:
    """Return the divisor of :class:`TrainingOptions` for a weight of ``block<i>``;
    an ``mtp<i>`` comes after them.
    """
    if residual == "none":
        return 1.0
    if residual == "num_layers":
        return math.sqrt(2 * num_layers)
    block = re.match(r"(block|mtp)(\d+)\.", name)
    assert block is not None, name
    return math.sqrt(2 * (int(block[2]) + 1 + (num_layers if block[1] == "mtp" else 0)))


def assemble(
    layers: dict[str, nn.Module],
    *,
    initialise: Callable[[str, Tensor], None],
    sharding_plan: dict[str, Any],
    divisible: dict[str, int],
    tied_weights: list[tuple[str, ...]],
    selective_recompute: Sequence[str],
    attributes: Mapping[str, object],
) -> nn.Sequential:
    """Build the Sequential with the attributes of ``__init__.py``,
    tie its weights and initialise them.
    """
    model = nn.Sequential(OrderedDict(layers))
    for canonical, *others in tied_weights:
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(canonical))
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            initialise(name, parameter)
    fused = [
        (n, *each)
        for n, module in model.named_modules()
        for each in getattr(module, "fused_rows", {}).items()
    ]
    carried: dict[str, object] = {
        "matrices": {f"{name}.{child}": rows for name, child, rows in fused}
    }
    carried |= {
        "sharding_plan": sharding_plan,
        "divisible": divisible,
        "tied_weights": tied_weights,
    }
    carried |= {"initialise": initialise, "selective_recompute": list(selective_recompute)} | dict(
        attributes
    )
    for attribute, value in carried.items():
        setattr(model, attribute, value)
    return model


Value = Tensor | tuple[Tensor, ...]
"""Activations x (B, S, D), or (x, ...) with those of :class:`SideTensors`: starts (B, S) bool,
ids (B, S) int64.
"""


class Embedding(nn.Module):
    """Token embedding, learned positions if the model has them, dropout: token ids (B, S)
    int64 -> (B, S, D).

    ``multiplier``: factor on the sum of both, before the dropout.
    {"tokens": ids, "starts": (B, S) bool} -> (x, starts).
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        max_sequence_length: int,
        *,
        learned_positions: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.multiplier = 1.0
        self.max_sequence_length = max_sequence_length
        self.returns_ids = False
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = (
            nn.Embedding(max_sequence_length, hidden_size) if learned_positions else None
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor | dict[str, Tensor]) -> Value:
        """Embed ids (B, S) int64, or {"tokens", "starts"}. Return x (B, S, D), or (x, starts);
        then ids if returns_ids.

        Raises:
            ValueError: There are more than ``max_sequence_length`` tokens.
        """
        starts = None
        if isinstance(ids, dict):
            starts, ids = ids["starts"], ids["tokens"]
        length = ids.shape[1]
        if length > self.max_sequence_length:
            raise ValueError(
                f"a sequence of {length} tokens, but the model has {self.max_sequence_length}"
                " positions: shorten the sequence (data.sequence_length) or raise"
                " model.options.max_sequence_length"
            )
        x = self.tokens(ids)  # (B, S, D)
        if self.positions is not None:
            places = (
                torch.arange(length, device=ids.device)[None]
                if starts is None
                else positions_of(starts)
            )
            x = x + self.positions(places)  # (1, S, D), or (B, S, D)
        x = self.dropout(x if self.multiplier == 1 else x * self.multiplier)
        others = ([] if starts is None else [starts]) + ([ids] if self.returns_ids else [])
        return (x, *others) if others else x


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x)). (B, S, D) -> (B, S,
    D).

    With ``parallel`` both branches start from the block's input: x + attention(norm(x)) +
    mlp(norm(x)), as in GPT-NeoX. (x, starts) -> (x, starts).
    """

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        *,
        dropout: float,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.attention_norm = attention_norm
        self.attention = attention
        self.after_attention = nn.Dropout(dropout)
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.after_mlp = nn.Dropout(dropout)

    def forward(self, value: Value) -> Value:
        """Apply both branches. value: x (B, S, D), or (x, starts) with starts (B, S) bool.
        Return the same type.
        """
        carried = SideTensors(value)
        x = carried.x
        attended = x + self.after_attention(self.attention(self.attention_norm(x), carried.starts))
        return carried.beside(
            attended + self.after_mlp(self.mlp(self.mlp_norm(x if self.parallel else attended)))
        )


def assemble_decoder(
    embedding: Embedding,
    blocks: Sequence[nn.Module],
    norm: LastNorm,
    *,
    tied: bool,
    sharding_plan: dict[str, Any],
    units: Mapping[str, int],
    training: TrainingOptions,
) -> nn.Sequential:
    """Build ``embedding``, ``block0`` .., ``norm``, ``head``: token ids (B, S) int64 -> logits (B,
    S, V).

    ``blocks``: the last ``mtp_layers`` of them go into the modules ``mtp0`` .., which stand between
    norm and head; the logits are then a tuple. ``units``: name in a block of each split linear ->
    its indivisible units, see ``__init__.py``.
    """
    training.check()
    embedding.multiplier, norm.multiplier = (
        training.mup.embedding_multiplier,
        training.mup.output_factor,
    )
    vocab_size, hidden_size = embedding.tokens.num_embeddings, embedding.tokens.embedding_dim
    trunk = blocks[: len(blocks) - training.mtp_layers]
    layers = {
        "embedding": embedding,
        **{f"block{i}": block for i, block in enumerate(trunk)},
        "norm": norm,
    }
    shared, recomputed, head = ["embedding.tokens.weight"], ["block*.attention.core"], "head.weight"
    if training.mtp_layers:
        embedding.returns_ids, head = True, "head.linear.weight"
        sharding_plan = multi_token.sharding_plan(sharding_plan, blocks[-1])
        for i, block in enumerate(blocks[len(trunk) :]):
            layers[f"mtp{i}"] = MtpModule(i + 1, embedding.tokens, norm, block, embedding.dropout.p)
            shared.append(f"mtp{i}.tokens.weight")
        recomputed.append("mtp*.block.attention.core")
        layers["head"] = SharedHead(hidden_size, vocab_size)
    else:
        layers["head"] = nn.Linear(hidden_size, vocab_size, bias=False)
    shared += [head] if tied else []
    column_or_row = [name for name, kind in sharding_plan.items() if kind in ("column", "row")]
    split = {name: re.sub(r"^(block\*|mtp\*\.block)\.", "", name) for name in column_or_row}
    parts = [part for block in blocks for part in block.named_modules()]
    shares = {
        f"{n}.{child}": e
        for n, part in parts
        for child, e in getattr(part, "shared_units", {}).items()
    }
    return assemble(
        layers,
        initialise=partial(initialise, num_layers=len(trunk), **training.initial()),
        sharding_plan=sharding_plan,
        divisible={pattern: units[child] for pattern, child in split.items()},
        tied_weights=[tuple(shared)] if len(shared) > 1 else [],
        selective_recompute=recomputed,
        attributes=training.attributes()
        | {"shared_units": {p: shares[c] for p, c in split.items() if c in shares}},
    )
