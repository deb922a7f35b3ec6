"""Dense decoder whose norm, positions, activation, biases and residuals are options.

GPT-2 and Llama are two settings of it (``gpt2.py``, ``llama.py``). Others, with the options that
differ from the defaults, which are Llama's:

    GPT-NeoX     norm "layer_norm", mlp "gelu", rotary_share 0.25, parallel_residual, all biases
    StableLM     norm "layer_norm", rotary_share 0.25
    Nemotron     norm "layer_norm", mlp "squared_relu", rotary_share 0.5
    StarCoder2   norm "layer_norm", mlp "gelu_tanh", all biases, sliding_window, tied
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from meshwright_models.attention import Attention, AttentionShape
from meshwright_models.blocks import (
    Block,
    Embedding,
    TrainingOptions,
    assemble_decoder,
)
from meshwright_models.feed_forward import ACTIVATIONS, GatedMlp, Mlp
from meshwright_models.last_norm import LastLayerNorm, LastNorm, LastRMSNorm
from meshwright_models.llama import rotary_of
from meshwright_models.mup import Mup, mup_of
from meshwright_models.rotary import Rotary
from meshwright_models.sizes import check_positive, head_dim_of
from meshwright_models.yarn import yarn_of

NORMS: dict[str, tuple[Callable[..., nn.Module], Callable[..., LastNorm]]] = {
    "layer_norm": (nn.LayerNorm, LastLayerNorm),
    "rms_norm": (nn.RMSNorm, LastRMSNorm),
}
"""Value of ``norm`` -> the norms within the blocks, and the one after the last block."""
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
"""Values of ``mlp`` with a gate -> the gate's activation."""
CHOICES = {
    "norm": tuple(NORMS),
    "positions": ("learned", "rotary", "none"),
    "mlp": (*ACTIVATIONS, *GATED),
}
"""Options that name one of several forms."""


class DecoderOptions(NamedTuple):
    """Options of the decoder, by name."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    num_kv_heads: int | None = None
    """Key-value heads, which divide ``num_heads``. None: one for each query head."""
    head_dim: int | None = None
    """None: hidden_size / num_heads."""
    max_sequence_length: int = 8192
    norm: str = "rms_norm"
    norm_eps: float = 1e-5
    qk_norm: bool = False
    """Norms of the kind of ``norm`` on the queries and keys of each head."""
    positions: str = "rotary"
    rope_theta: float = 10_000.0
    rotary_share: float = 1.0
    """Share of each head's features that are rotated: the first ones."""
    rope_interpolation: float = 1.0
    """Divisor of all positions (Chen et al. 2023)."""
    rope_scaling_factor: float = 1.0
    """Scaling of Llama 3.1, with the next three options."""
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 8192
    rope_yarn: Mapping[str, Any] | None = None
    """Scaling by YaRN: the fields of ``YarnOptions`` in ``yarn.py``. None: off."""
    mlp: str = "swiglu"
    """Activation of the feed-forward network, or the name of a gated one."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    """Biases of the feed-forward projections."""
    parallel_residual: bool = False
    """Attention and feed-forward network start from the same input: x + attention(norm(x))
    + mlp(norm(x)).
    """
    sliding_window: int | None = None
    """Tokens that each token attends to, itself included. None: all before it."""
    tied: bool = False
    """The head uses the token embedding's weight."""
    dropout: float = 0.0
    """Probability after the embedding, and at the end of each branch."""
    attention_dropout: float | None = None
    """Probability in the attention probabilities. None: ``dropout``."""
    init_std: float = 0.02
    residual_init: str = "num_layers"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    mtp_layers: int = 0
    """Modules of multi-token prediction (``multi_token.py``)."""
    mtp_loss_weight: float = 0.1
    mup_base_size: int | None = None
    """Hidden size of the base model of muP, see ``mup.py``. None: off."""
    mup_base_head_dim: float | None = None
    """Size of a head of the base model. None: the same as here."""
    mup_embedding_multiplier: float = 1.0
    mup_output_multiplier: float = 1.0

    def check(self) -> None:
        """Raise ValueError for an unknown form, and for sizes and factors that are not positive."""
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}"
                )
        sizes = (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "ffn_size",
            "num_kv_heads",
            "head_dim",
        )
        others = (
            "max_sequence_length",
            "rope_theta",
            "rope_interpolation",
            "rope_scaling_factor",
            "sliding_window",
            "norm_eps",
        )
        check_positive(**{name: getattr(self, name) for name in (*sizes, *others)})
        if not 0 < self.rotary_share <= 1:
            raise ValueError(f"rotary_share={self.rotary_share} must be above 0 and at most 1")
        if self.positions != "rotary" and yarn_of(self._asdict()) is not None:
            raise ValueError(
                f'rope_yarn with positions="{self.positions}": it scales rotary ones; leave it out'
            )
        if self.mtp_layers and self.positions == "learned":
            raise ValueError(
                f"mtp_layers={self.mtp_layers} needs positions = rotary or none, not learned"
            )

    @property
    def mup(self) -> Mup:
        """Maximal update parametrization. Raise ValueError for numbers without a meaning."""
        return mup_of(self._asdict())

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def rotary(self, head_dim: int) -> Callable[[], Rotary]:
        """Return the builder of the rotary positions of a head.

        Raises:
            ValueError: The number of rotated features is odd or 0.
        """
        rotated = int(head_dim * self.rotary_share)
        if rotated < 2 or rotated % 2:
            raise ValueError(
                f"rotary positions need an even number of features, got {rotated}: "
                f"rotary_share={self.rotary_share} of head_dim={head_dim}"
            )
        return rotary_of(self._asdict(), rotated)


def _attention(options: DecoderOptions) -> Callable[[], Attention]:
    head_dim = head_dim_of(
        options.hidden_size, options.num_heads, options.kv_heads, options.head_dim
    )
    sizes = options.hidden_size, options.num_heads, options.kv_heads, head_dim
    shape = AttentionShape(*sizes, options.sliding_window, options.mup.score_divisor(head_dim))
    rotary = options.rotary(head_dim) if options.positions == "rotary" else None
    norm = partial(NORMS[options.norm][0], eps=options.norm_eps)

    def build_attention() -> Attention:
        return Attention(
            shape,
            bias=options.qkv_bias,
            out_bias=options.out_bias,
            dropout=options.dropout
            if options.attention_dropout is None
            else options.attention_dropout,
            rotary=None if rotary is None else rotary(),
            qk_norm=norm if options.qk_norm else None,
        )

    return build_attention


def _mlp(options: DecoderOptions) -> tuple[Callable[[], nn.Module], str, int]:
    """Return the builder of a feed-forward network, the name of its first projection,
    and its indivisible units.
    """
    sizes, bias = (options.hidden_size, options.ffn_size), options.mlp_bias
    if options.mlp in GATED:
        # a larger tp shares blocks, as it shares kv heads
        num_blocks = math.gcd(options.ffn_size, options.kv_heads)
        activation = ACTIVATIONS[GATED[options.mlp]]
        return (
            partial(GatedMlp, *sizes, num_blocks, activation=activation, bias=bias),
            "gate_up",
            num_blocks,
        )
    return (
        partial(Mlp, *sizes, activation=ACTIVATIONS[options.mlp], bias=bias),
        "up",
        options.ffn_size,
    )


def _sharding_plan(options: DecoderOptions, first: str) -> dict[str, str]:
    """Return the sharding plan. ``first``: name of the feed-forward network's first projection."""
    plan = {"embedding.tokens": "vocab"}
    if options.positions == "learned":
        plan["embedding.positions"] = "sequence"
    plan |= {
        "block*.attention.qkv": "column",
        "block*.attention.dropout": "heads",
        "block*.attention.out": "row",
    }
    plan["block*.attention.core"] = "context"
    if options.positions == "rotary":
        plan["block*.attention.rotary"] = "positions"
    if options.qk_norm:
        plan["block*.attention.[qk]_norm"] = "heads"
    return plan | {f"block*.mlp.{first}": "column", "block*.mlp.down": "row", "head": "vocab"}


def build(**options: Any) -> nn.Sequential:
    """Build ``embedding``, ``block0`` .., ``norm``, ``head``: token ids (B, S) int64 -> logits (B,
    S, V).

    Takes the fields of :class:`DecoderOptions`. tp divides ``num_kv_heads``, or is a multiple of
    it. Raises ValueError if the sizes do not fit each other.
    """
    chosen = DecoderOptions(**options)
    chosen.check()
    inner, last = NORMS[chosen.norm]
    norm = partial(inner, chosen.hidden_size, eps=chosen.norm_eps)
    attention, (mlp, first, mlp_units) = _attention(chosen), _mlp(chosen)
    block = partial(Block, dropout=chosen.dropout, parallel=chosen.parallel_residual)
    learned = chosen.positions == "learned"
    return assemble_decoder(
        Embedding(
            chosen.vocab_size,
            chosen.hidden_size,
            chosen.max_sequence_length,
            learned_positions=learned,
            dropout=chosen.dropout,
        ),
        [
            block(norm(), attention(), norm(), mlp())
            for _ in range(chosen.num_layers + chosen.mtp_layers)
        ],
        last(chosen.hidden_size, eps=chosen.norm_eps),
        tied=chosen.tied,
        sharding_plan=_sharding_plan(chosen, first),
        units={"attention.qkv": chosen.kv_heads, "attention.out": chosen.num_heads}
        | {f"mlp.{first}": mlp_units, "mlp.down": chosen.ffn_size},
        training=TrainingOptions(
            **{name: getattr(chosen, name) for name in TrainingOptions._fields}
        ),
    )


# model.options are checked against this signature: the fields of DecoderOptions
build.__signature__ = inspect.signature(DecoderOptions)  # type: ignore[attr-defined]
