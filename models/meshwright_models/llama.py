"""Llama 3: RMSNorm before each branch, rotary positions, grouped-query attention, SwiGLU,
no biases.

Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv:2407.21783), Table 3; 128,256 token
vocabulary (layers, hidden, ffn, heads, kv heads -> parameters):

    8B     32   4096  14336   32  8 ->   8,030,261,248
    70B    80   8192  28672   64  8 ->  70,553,706,496
    405B  126  16384  53248  128  8 -> 405,853,388,800

Related models are options of this one: Mistral (``sliding_window``, ``head_dim``), Qwen2
(``qkv_bias``), Qwen3 (``qk_norm``, ``head_dim``), their mixtures of experts (``moe``), and the
latent attention of DeepSeek-V3 (``mla``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from meshwright_models.attention import Attention, AttentionCore, AttentionShape
from meshwright_models.blocks import (
    Block,
    Embedding,
    TrainingOptions,
    assemble_decoder,
)
from meshwright_models.last_norm import LastRMSNorm
from meshwright_models.mla import LATENT_PLAN, LatentAttention, latent_of, split_heads
from meshwright_models.moe_options import feed_forwards_of
from meshwright_models.mup import mup_of
from meshwright_models.rotary import Rotary
from meshwright_models.sizes import check_positive, head_dim_of
from meshwright_models.yarn import yarn_of

HEADS = {
    "block*.attention.qkv": "column",
    "block*.attention.rotary": "positions",
    "block*.attention.core": "context",
    "block*.attention.dropout": "heads",
    "block*.attention.out": "row",
}
"""Sharding plan of an attention: each tp rank has some of the heads."""
WHOLE = {"block*.attention.qkv": "column_whole", "block*.attention.out": "row_whole"}
WHOLE |= {"block*.attention.[qk]_norm": "uncut", "block*.attention.dropout": "uncut"}
"""Entries that replace those of HEADS with a norm over all heads:
every rank attends with all heads.
"""

POSITIVE = (
    *(
        "vocab_size",
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "ffn_size",
        "max_sequence_length",
    ),
    *("rope_theta", "rope_scaling_factor", "head_dim", "sliding_window", "norm_eps"),
    *("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_length"),
)
"""Options that must be positive."""


class RopeScaling(NamedTuple):
    """RoPE scaling of Llama 3.1, for a model pre-trained on ``original_length`` tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


UNSCALED = RopeScaling(1.0, 1.0, 4.0, 8192)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling = UNSCALED) -> list[float]:
    """Return radians per token for the head_dim / 2 pairs: theta^(-2 i / head_dim),
    fastest first (Su et al. 2021).

    Llama 3.1's scaling depends on a pair's turns within the original length. Pairs with at least
    ``high_freq_factor`` turns stay unchanged. Pairs with at most ``low_freq_factor`` turns are
    slowed by ``factor``. Between the two it interpolates linearly in the number of turns.

    Raises:
        ValueError: The two numbers of turns are not in this order.
    """
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError(
            f"rope_low_freq_factor={scaling.low_freq_factor} must be below "
            f"rope_high_freq_factor={scaling.high_freq_factor}"
        )
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling.factor == 1:
        return frequencies
    scaled = []
    for frequency in frequencies:
        turns = scaling.original_length * frequency / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        kept_share = min(max(kept, 0.0), 1.0)
        scaled.append(frequency * (kept_share + (1 - kept_share) / scaling.factor))
    return scaled


def rotary_of(options: Mapping[str, Any], features: int) -> Callable[[], Rotary]:
    """Return the builder of the rotary positions of so many features of a head.

    ``options``: ``rope_theta``, the four of Llama 3.1's scaling, ``rope_yarn``, and
    ``rope_interpolation`` of a builder that has it.
    """
    yarn, theta = yarn_of(options), options["rope_theta"]
    if yarn is not None:
        return partial(Rotary, yarn.frequencies(features, theta), yarn.rotation_scale)
    names = ("scaling_factor", "low_freq_factor", "high_freq_factor", "original_length")
    scaling = RopeScaling._make(options[f"rope_{name}"] for name in names)
    divisor = options.get("rope_interpolation", 1.0)
    frequencies = rope_frequencies(features, theta, scaling)
    return partial(Rotary, [frequency / divisor for frequency in frequencies])


class Attentions(NamedTuple):
    """Attentions of the blocks: their builder, sharding plan and indivisible units."""

    build: Callable[[], nn.Module]
    plan: dict[str, Any]
    units: dict[str, int]


def _attention_shape(options: Mapping[str, Any]) -> AttentionShape:
    hidden_size, head_dim = options["hidden_size"], options["head_dim"]
    num_heads, num_kv_heads = options["num_heads"], options["num_kv_heads"]
    size = head_dim_of(hidden_size, num_heads, num_kv_heads, head_dim)
    if size % 2:
        text = (
            f"{hidden_size} / {num_heads} = {size}" if head_dim is None else f"head_dim={head_dim}"
        )
        raise ValueError(f"rotary positions need an even head_dim, got {text}")
    return AttentionShape(
        hidden_size,
        num_heads,
        num_kv_heads,
        size,
        options["sliding_window"],
        mup_of(options).score_divisor(size),
    )


def _attentions(options: Mapping[str, Any], norm: Callable[[int], nn.Module]) -> Attentions:
    """Return the attentions of the blocks. ``norm``: builds a norm over so many features."""
    latent, qk_norm, dropout = latent_of(options), options["qk_norm"], options["dropout"]
    if qk_norm not in (True, False, "whole"):
        raise ValueError(f'qk_norm={qk_norm!r} must be true, false or "whole"')
    if qk_norm == "whole" and dropout:
        raise ValueError(
            f'qk_norm="whole" with dropout={dropout}: its masks are not drawn by head; leave'
            " one out"
        )
    if latent is not None:
        rotary, yarn = rotary_of(options, latent.rope_dim), yarn_of(options)
        sizes = options["hidden_size"], options["num_heads"], latent
        norm = norm if latent.norm_eps is None else partial(nn.RMSNorm, eps=latent.norm_eps)
        divisor = latent.score_divisor(1.0 if yarn is None else yarn.score_scale)
        core = partial(AttentionCore, options["sliding_window"], divisor)
        plan: dict[str, Any] = {"block*.attention": split_heads} | LATENT_PLAN
        last = {"norm": norm, "dropout": dropout}
        return Attentions(
            lambda: LatentAttention(*sizes, rotary=rotary(), core=core(), **last), plan, {}
        )
    shape = _attention_shape(options)
    rotary = rotary_of(options, shape.head_dim)
    given = {"bias": options["qkv_bias"], "out_bias": options["out_bias"], "dropout": dropout}
    given |= {"qk_norm": norm if qk_norm else None, "norm_is_whole": qk_norm == "whole"}
    plan = HEADS | (
        WHOLE if qk_norm == "whole" else {"block*.attention.[qk]_norm": "heads"} if qk_norm else {}
    )
    units = {"attention.qkv": shape.num_kv_heads, "attention.out": shape.num_heads}
    return Attentions(lambda: Attention(shape, rotary=rotary(), **given), plan, units)


def build(
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_size: int,
    max_sequence_length: int = 8192,
    rope_theta: float = 500_000.0,
    norm_eps: float = 1e-5,
    # 1: Llama 3, pre-trained on 8,192 tokens; 8: the long context of Llama 3.1
    rope_scaling_factor: float = 1.0,
    rope_low_freq_factor: float = 1.0,
    rope_high_freq_factor: float = 4.0,
    rope_original_length: int = 8192,
    # YaRN, in place of that: the fields of YarnOptions in yarn.py
    rope_yarn: Mapping[str, Any] | None = None,
    tied: bool = False,  # the head uses the token embedding's weight
    # one probability for embedding, attention probabilities and end of a branch
    dropout: float = 0.0,
    head_dim: int | None = None,  # None: hidden_size / num_heads
    qkv_bias: bool = False,  # of the query, key and value projection
    out_bias: bool = False,  # of the attention's output projection
    mlp_bias: bool = False,  # of both feed-forward projections
    # an RMSNorm on the queries and keys of each head; "whole": over all heads
    qk_norm: bool | str = False,
    # tokens that each token attends to, itself included; None: all before it
    sliding_window: int | None = None,
    init_std: float = 0.02,
    residual_init: str = "num_layers",  # "layer_index" or "none": see TrainingOptions in blocks.py
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    mtp_layers: int = 0,  # modules of multi-token prediction: see multi_token.py
    mtp_loss_weight: float = 0.1,
    mup_base_size: int | None = None,  # muP: hidden size of the base model; None: off. See mup.py
    mup_base_head_dim: float | None = None,  # None: head_dim
    mup_embedding_multiplier: float = 1.0,
    mup_output_multiplier: float = 1.0,
    # mixture of experts: the fields of MoeOptions in moe_options.py
    moe: Mapping[str, Any] | None = None,
    mla: Mapping[str, Any] | None = None,  # latent attention: the fields of LatentOptions in mla.py
) -> nn.Sequential:
    """Build ``embedding``, ``block0`` .., ``norm``, ``head``: token ids (B, S) int64 -> logits (B,
    S, V).

    tp divides ``num_kv_heads``, or is a multiple of it. Raises ValueError if the sizes do not fit
    each other.
    """
    options = dict(locals())
    check_positive(**{name: options[name] for name in POSITIVE})
    mlps, attentions = (
        feed_forwards_of(options),
        _attentions(options, partial(nn.RMSNorm, eps=norm_eps)),
    )
    norm = partial(nn.RMSNorm, hidden_size, eps=norm_eps)
    blocks = [
        Block(norm(), attentions.build(), norm(), mlps.build(i), dropout=dropout)
        for i in range(num_layers + mtp_layers)
    ]
    loss = label_smoothing, z_loss, mtp_layers, mtp_loss_weight
    return assemble_decoder(
        Embedding(
            vocab_size, hidden_size, max_sequence_length, learned_positions=False, dropout=dropout
        ),
        blocks,
        LastRMSNorm(hidden_size, eps=norm_eps),
        tied=tied,
        sharding_plan={"embedding.tokens": "vocab"}
        | attentions.plan
        | mlps.sharding_plan()
        | {"head": "vocab"},
        units=attentions.units | mlps.units(),
        training=TrainingOptions(init_std, residual_init, *loss, mup_of(options)),
    )
