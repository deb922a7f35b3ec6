"""GPT-2: learned positions, LayerNorm before each branch, GELU, biases,
head tied to the token embedding.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Sizes of the released
models (layers, hidden, heads -> parameters):

    small  12   768  12 ->   124,439,808        large  36  1280  20 ->   774,030,080
    medium 24  1024  16 ->   354,823,168        xl     48  1600  25 -> 1,557,611,200
"""

from __future__ import annotations

from torch import nn

from meshwright_models.attention import Attention, AttentionShape
from meshwright_models.blocks import (
    Block,
    Embedding,
    TrainingOptions,
    assemble_decoder,
)
from meshwright_models.feed_forward import Mlp, gelu_tanh
from meshwright_models.last_norm import LastLayerNorm
from meshwright_models.mup import mup_of
from meshwright_models.sizes import check_positive, head_dim_of

SHARDING_PLAN = {
    "embedding.tokens": "vocab",
    "embedding.positions": "sequence",
    "block*.attention.qkv": "column",
    "block*.attention.dropout": "heads",
    "block*.attention.core": "context",
    "block*.attention.out": "row",
    "block*.mlp.up": "column",
    "block*.mlp.down": "row",
    "head": "vocab",
}


def build(
    vocab_size: int = 50257,
    hidden_size: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    max_sequence_length: int = 1024,
    dropout: float = 0.1,
    tied: bool = True,
    ffn_size: int | None = None,
    norm_eps: float = 1e-5,
    init_std: float = 0.02,
    residual_init: str = "num_layers",  # "layer_index" or "none": see TrainingOptions in blocks.py
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    mup_base_size: int | None = None,  # muP: hidden size of the base model; None: off. See mup.py
    mup_base_head_dim: float | None = None,  # None: head_dim
    mup_embedding_multiplier: float = 1.0,
    mup_output_multiplier: float = 1.0,
) -> nn.Sequential:
    """Build ``embedding``, ``block0`` .., ``norm``, ``head``: token ids (B, S) int64 -> logits (B,
    S, V).

    Also takes {"tokens": ids, "starts": (B, S) bool}: attention within each document, see
    ``blocks.py``.

    ``dropout`` is one probability for all three places: embedding, attention probabilities, end of
    a branch. With ``dropout=0`` training runs the fused attention kernel. ``ffn_size=None`` means 4
    x hidden_size.

    Raises:
        ValueError: The sizes do not fit each other.
    """
    mup = mup_of(locals())
    ffn_size = 4 * hidden_size if ffn_size is None else ffn_size
    check_positive(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        max_sequence_length=max_sequence_length,
        ffn_size=ffn_size,
        norm_eps=norm_eps,
    )
    head_dim = head_dim_of(hidden_size, num_heads, num_heads)
    shape = AttentionShape(
        hidden_size, num_heads, num_heads, head_dim, score_divisor=mup.score_divisor(head_dim)
    )

    def block() -> Block:
        attention_norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        attention = Attention(shape, bias=True, out_bias=True, dropout=dropout)
        mlp_norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        mlp = Mlp(hidden_size, ffn_size, activation=gelu_tanh, bias=True)
        return Block(attention_norm, attention, mlp_norm, mlp, dropout=dropout)

    return assemble_decoder(
        Embedding(
            vocab_size, hidden_size, max_sequence_length, learned_positions=True, dropout=dropout
        ),
        [block() for _ in range(num_layers)],
        LastLayerNorm(hidden_size, eps=norm_eps),
        tied=tied,
        sharding_plan=dict(SHARDING_PLAN),
        units={
            "attention.qkv": num_heads,
            "attention.out": num_heads,
            "mlp.up": ffn_size,
            "mlp.down": ffn_size,
        },
        training=TrainingOptions(init_std, residual_init, label_smoothing, z_loss, mup=mup),
    )
