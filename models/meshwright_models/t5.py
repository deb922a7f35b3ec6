"""T5: encoder and decoder in one Sequential, RMSNorm before each branch, relative position bias,
no biases in linears.

Raffel et al. 2019, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (arXiv:1910.10683). 32,128 token vocabulary (layers of each stack, hidden, heads x
head_dim, ffn -> parameters):

    v1.0, ReLU, head tied           small   6   512    8 x 64    2048 ->     60,506,624
                                    base   12   768   12 x 64    3072 ->    222,903,552
                                    large  24  1024   16 x 64    4096 ->    737,668,096
                                    3B     24  1024   32 x 128  16384 ->  2,851,598,336
    v1.1, gated GELU, own head      small   8   512    6 x 64    1024 ->     76,961,152
                                    base   12   768   12 x 64    2048 ->    247,577,856

Values passed between the layers. They are dicts, so that a cut between any two layers gives two
stages:

    samples             {encoder_ids (B, Se), decoder_ids (B, Sd)}                 int64
    encoder_embedding   {encoder (B, Se, D), encoder_seen (B, Se), decoder_ids}    seen: bool, False for padding
    encoder0 ..         the same
    encoder_norm        the same; its encoder is the memory of the cross-attention
    decoder_embedding   {decoder (B, Sd, D), encoder, encoder_seen}
    decoder0 ..         the same, the last only {decoder}
    decoder_norm        (B, Sd, D)
    head                logits (B, Sd, V)

Shapes: B samples, Se and Sd tokens of encoder and decoder, D hidden. The layers themselves are in
``t5_layers.py``.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from meshwright_models.blocks import assemble
from meshwright_models.sizes import check_positive, head_dim_of
from meshwright_models.t5_layers import (
    DecoderBlock,
    DecoderEmbedding,
    DecoderNorm,
    EncoderBlock,
    EncoderEmbedding,
    EncoderNorm,
    T5Sizes,
)

SHARDING_PLAN = {
    "*coder_embedding.tokens": "vocab",
    "*.attention.qkv": "column",
    "*.attention.relative_bias": "column",
    "*.cross_attention.q": "column",
    "*.cross_attention.kv": "column",
    "*attention.dropout": "heads",
    "*attention.out": "row",
    "*.mlp.up": "column",
    "*.mlp.dropout": "features",
    "*.mlp.down": "row",
    "head": "vocab",
}


@torch.no_grad()
def initialise(name: str, tensor: Tensor, *, hidden_size: int, head_dim: int) -> None:
    """Initialise one full parameter in place from torch's default generator,
    as a function of its name and shape only.

    Embeddings N(0, 1), linears N(0, 1 / sqrt(inputs)), bias tables N(0, 1 / sqrt(D)), norms 1, as
    in mesh-tensorflow. Queries are smaller by sqrt(d), which replaces the attention's division of
    scores. An untied head is initialised like any linear: its logits start with variance 1, as
    those of a tied head do.
    """
    if tensor.dim() == 1:
        nn.init.ones_(tensor)
    elif name.endswith(".tokens.weight"):
        nn.init.normal_(tensor)
    elif name.endswith(".relative_bias.weight"):
        nn.init.normal_(tensor, std=hidden_size**-0.5)
    else:
        nn.init.normal_(tensor, std=tensor.shape[1] ** -0.5)
    if name.endswith(".attention.qkv.weight"):
        rearrange(tensor, "(h three d) i -> three h d i", three=3, d=head_dim)[0].mul_(
            head_dim**-0.5
        )
    elif name.endswith(".cross_attention.q.weight"):
        tensor.mul_(head_dim**-0.5)


def build(
    vocab_size: int = 32128,
    hidden_size: int = 512,
    num_layers: int = 6,
    num_heads: int = 8,
    head_dim: int | None = None,  # None: hidden_size / num_heads
    ffn_size: int | None = None,  # None: 4 x hidden_size
    num_decoder_layers: int | None = None,  # None: num_layers
    gated: bool = False,
    tied: bool = True,  # the head uses the embeddings' weight
    # one probability for embeddings, attention, feed-forward, ends of branches and final norms
    dropout: float = 0.1,
    num_buckets: int = 32,
    max_distance: int = 128,
    padding_id: int = 0,  # encoder token that receives no attention; -1: none
    norm_eps: float = 1e-6,
    # multiply the head's input by 1 / sqrt(hidden_size); None: the value of tied
    scaled: bool | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,  # 1e-4 in the paper's code
) -> nn.Sequential:
    """Build the layers named above: {encoder_ids (B, Se), decoder_ids (B, Sd)} int64 -> logits (B,
    Sd, V).

    ``gated=False, tied=True`` is T5 v1.0, ``gated=True, tied=False`` v1.1. In both the two
    embeddings are one weight, and so is the relative bias of a stack. Raises ValueError if the
    sizes do not fit each other.
    """
    ffn_size = 4 * hidden_size if ffn_size is None else ffn_size
    num_decoder_layers = num_layers if num_decoder_layers is None else num_decoder_layers
    check_positive(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_decoder_layers=num_decoder_layers,
        num_heads=num_heads,
        ffn_size=ffn_size,
        head_dim=head_dim,
        norm_eps=norm_eps,
    )
    _check_buckets(num_buckets, max_distance)
    head_dim = head_dim_of(hidden_size, num_heads, num_heads) if head_dim is None else head_dim
    num_blocks = math.gcd(ffn_size, num_heads) if gated else None  # tp divides num_heads
    sizes = T5Sizes(
        hidden_size,
        num_heads,
        head_dim,
        ffn_size,
        num_blocks,
        num_buckets,
        max_distance,
        dropout,
        norm_eps,
    )
    scale = hidden_size**-0.5 if (tied if scaled is None else scaled) else 1.0
    layers = {
        "encoder_embedding": EncoderEmbedding(vocab_size, hidden_size, dropout, padding_id),
        **{f"encoder{i}": EncoderBlock(sizes) for i in range(num_layers)},
        "encoder_norm": EncoderNorm(sizes),
        "decoder_embedding": DecoderEmbedding(vocab_size, hidden_size, dropout),
        **{
            f"decoder{i}": DecoderBlock(sizes, last=i == num_decoder_layers - 1)
            for i in range(num_decoder_layers)
        },
        "decoder_norm": DecoderNorm(sizes, scale),
        "head": nn.Linear(hidden_size, vocab_size, bias=False),
    }
    return _assemble(layers, sizes, tied, {"label_smoothing": label_smoothing, "z_loss": z_loss})


def _check_buckets(num_buckets: int, max_distance: int) -> None:
    if num_buckets < 4 or num_buckets % 2 or max_distance <= num_buckets // 2:
        raise ValueError(
            f"num_buckets={num_buckets} must be even, for two directions, and at least 4, and"
            f" max_distance={max_distance} beyond the half of them that hold one distance each,"
            f" {num_buckets // 2}"
        )


def _assemble(
    layers: dict[str, nn.Module], sizes: T5Sizes, tied: bool, loss_options: dict[str, float]
) -> nn.Sequential:
    ties = [
        (
            "encoder_embedding.tokens.weight",
            "decoder_embedding.tokens.weight",
            *(["head.weight"] if tied else []),
        )
    ]
    for stack in ("encoder", "decoder"):
        biases = [
            f"{name}.attention.relative_bias.weight"
            for name in layers
            if name.removeprefix(stack).isdigit()
        ]
        ties += [tuple(biases)] if len(biases) > 1 else []
    ffn_units = sizes.ffn_size if sizes.num_blocks is None else sizes.num_blocks
    matrices = {
        "*.attention.qkv": (sizes.head_dim,) * 3,
        "*.cross_attention.kv": (sizes.head_dim,) * 2,
    }
    if sizes.num_blocks is not None:
        matrices["*.mlp.up"] = (sizes.ffn_size // sizes.num_blocks,) * 2
    return assemble(
        layers,
        initialise=partial(initialise, hidden_size=sizes.hidden_size, head_dim=sizes.head_dim),
        sharding_plan=dict(SHARDING_PLAN),
        divisible={
            "*.attention.qkv": sizes.num_heads,
            "*.cross_attention.q": sizes.num_heads,
            "*.cross_attention.kv": sizes.num_heads,
            "*attention.out": sizes.num_heads,
            "*.mlp.up": ffn_units,
            "*.mlp.down": ffn_units,
        },
        tied_weights=ties,
        selective_recompute=["*attention.core"],
        attributes=loss_options | {"matrices": matrices},
    )
