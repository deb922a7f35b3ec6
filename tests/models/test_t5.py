"""T5 against an independent plain implementation: loops over queries, keys and heads,
one matrix per head.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_models import t5
from meshwright_models.t5_layers import T5Attention, T5SelfAttention, T5Sizes

SAMPLES = {
    "encoder_ids": torch.tensor(
        [[3, 14, 15, 92, 65, 35, 89, 79, 32], [38, 46, 26, 43, 38, 32, 0, 0, 0]]
    ),
    "decoder_ids": torch.tensor([[0, 31, 41, 59, 26, 53], [0, 27, 18, 28, 18, 28]]),
}
LABELS = torch.tensor([[31, 41, 59, 26, 53, 58], [27, 18, 28, 18, 28, -100]])
HEADS, HEAD_DIM, BUCKETS, FARTHEST = 4, 5, 8, 7


def small(**options: Any) -> nn.Sequential:
    """In float64, with weights large enough that every part of the model is seen in its output,
    norms included.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 24,
        "num_layers": 2,
        "num_heads": HEADS,
        "ffn_size": 36,
    }
    sizes |= {
        "head_dim": HEAD_DIM,
        "num_decoder_layers": 3,
        "num_buckets": BUCKETS,
        "max_distance": FARTHEST,
    }
    model = t5.build(**{**sizes, "dropout": 0.0, **options})
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    return model.double()


def loss_of(model: nn.Sequential) -> Tensor:
    return F.cross_entropy(model(SAMPLES).flatten(0, 1), LABELS.flatten())


# ------------------------------------------------------------------------------------------- the
# plain implementation


def plain_bucket(
    key_minus_query: int, bidirectional: bool, num_buckets: int, max_distance: int
) -> int:
    """mesh-tensorflow's ``_relative_position_bucket``, one number at a time."""
    offset, distance = 0, -key_minus_query
    if bidirectional:
        num_buckets //= 2
        offset = num_buckets if distance < 0 else 0
        distance = abs(distance)
    else:
        distance = max(distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return offset + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return offset + min(exact + int(share * (num_buckets - exact) + 1e-9), num_buckets - 1)


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def plain_attention(
    queries: Tensor, keys: Tensor, values: Tensor, score_bias: list[list[float | None]]
) -> Tensor:
    """One head of one sample, (S, d) each; no bias: this key is not seen."""
    rows = []
    for i, q in enumerate(queries):
        seen = [j for j in range(len(keys)) if score_bias[i][j] is not None]
        weights = torch.stack([q @ keys[j] + score_bias[i][j] for j in seen]).exp()
        rows.append(sum(w * values[j] for w, j in zip(weights, seen, strict=True)) / weights.sum())
    return torch.stack(rows)


def plain_self_attention(x: Tensor, module: Any, causal: bool, ids: Tensor) -> Tensor:
    rows = list(module.qkv.weight.split(HEAD_DIM))  # q of head 0, its k, its v, q of head 1, ...
    heads = []
    for h in range(HEADS):
        bias: list[list[Any]] = [[None] * len(x) for _ in x]
        for i in range(len(x)):
            for j in range(i + 1 if causal else len(x)):
                if causal or ids[j] != 0:
                    bias[i][j] = module.relative_bias.weight[
                        plain_bucket(j - i, not causal, BUCKETS, FARTHEST), h
                    ]
        heads.append(plain_attention(*(x @ rows[3 * h + part].T for part in range(3)), bias))
    return torch.cat(heads, 1) @ module.out.weight.T


def plain_cross_attention(x: Tensor, memory: Tensor, module: Any, ids: Tensor) -> Tensor:
    q_rows, kv_rows = module.q.weight.split(HEAD_DIM), module.kv.weight.split(HEAD_DIM)
    bias = [[None if token == 0 else 0.0 for token in ids] for _ in x]
    heads = [
        plain_attention(
            x @ q_rows[h].T, memory @ kv_rows[2 * h].T, memory @ kv_rows[2 * h + 1].T, bias
        )
        for h in range(HEADS)
    ]
    return torch.cat(heads, 1) @ module.out.weight.T


def plain_mlp(x: Tensor, mlp: Any) -> Tensor:
    if mlp.block_size is None:
        h = x @ mlp.up.weight.T
        return h.where(h > 0, 0) @ mlp.down.weight.T
    blocks = mlp.up.weight.split(mlp.block_size)
    gate, up = x @ torch.cat(blocks[0::2]).T, x @ torch.cat(blocks[1::2]).T
    gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (gelu * up) @ mlp.down.weight.T


def plain_t5(model: Any, encoder_ids: Tensor, decoder_ids: Tensor, tied: bool) -> Tensor:
    """One sample, (Se,) and (Sd,) -> (Sd, V)."""
    table = model.encoder_embedding.tokens.weight
    x = table[encoder_ids]
    for n in range(2):
        block = model.get_submodule(f"encoder{n}")
        x = x + plain_self_attention(
            rms_norm(x, block.attention_norm), block.attention, False, encoder_ids
        )
        x = x + plain_mlp(rms_norm(x, block.mlp_norm), block.mlp)
    memory = rms_norm(x, model.encoder_norm.norm)
    x = table[decoder_ids]
    for n in range(3):
        block = model.get_submodule(f"decoder{n}")
        x = x + plain_self_attention(
            rms_norm(x, block.attention_norm), block.attention, True, decoder_ids
        )
        h = rms_norm(x, block.cross_attention_norm)
        x = x + plain_cross_attention(h, memory, block.cross_attention, encoder_ids)
        x = x + plain_mlp(rms_norm(x, block.mlp_norm), block.mlp)
    x = rms_norm(x, model.decoder_norm.norm)
    return x / math.sqrt(24) @ table.T if tied else x @ model.head.weight.T


@torch.no_grad()
@pytest.mark.parametrize(("tied", "gated"), [(True, False), (False, True)])
def test_t5_equals_the_plain_implementation(tied: bool, gated: bool) -> None:
    model = small(tied=tied, gated=gated)
    found = model(SAMPLES)
    expected = torch.stack(
        [plain_t5(model, *ids, tied) for ids in zip(*SAMPLES.values(), strict=True)]
    )
    assert found.shape == expected.shape
    assert (found - expected).norm() / expected.norm() < 1e-12


# ------------------------------------------------------------------------------------------------------
# its parts


@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (32, 64), (8, 7), (6, 40), (4, 3)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_those_of_mesh_tensorflow(
    num_buckets: int, max_distance: int, causal: bool
) -> None:
    sizes = T5Sizes(4, 1, 4, 8, None, num_buckets, max_distance, dropout=0.0, norm_eps=1e-6)
    attention = T5SelfAttention(sizes, causal=causal)
    length = max_distance + 5
    with torch.no_grad():
        attention.relative_bias.weight.copy_(torch.arange(num_buckets)[:, None])
        bias = attention.bias(length, torch.device("cpu"))[0]
    for query in range(length):
        for key in range(query + 1 if causal else length):
            assert bias[query, key] == plain_bucket(
                key - query, not causal, num_buckets, max_distance
            ), (query, key)


@torch.no_grad()
def test_padding_at_the_end_of_the_encoder_changes_nothing() -> None:
    model = small()
    longer = SAMPLES | {"encoder_ids": F.pad(SAMPLES["encoder_ids"], (0, 4))}
    assert (model(longer) - model(SAMPLES)).abs().max() < 1e-12
    seen = small(padding_id=-1)
    assert (seen(longer) - seen(SAMPLES)).abs().max() > 1e-3, (
        "without a padding id all tokens count"
    )


def test_a_sample_of_nothing_but_padding_is_finite() -> None:
    model = small()
    samples = SAMPLES | {"encoder_ids": torch.zeros(2, 9, dtype=torch.int64)}
    logits = model(samples)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_decoder_sees_no_later_token_and_the_encoder_all(dropout: float) -> None:
    model = small(dropout=dropout)

    def logits(samples: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(1)  # the same masks
        return model(samples).detach()

    before = logits(SAMPLES)
    changed = {name: ids.clone() for name, ids in SAMPLES.items()}
    changed["decoder_ids"][:, 4:] = 1
    assert torch.equal(before[:, :4], logits(changed)[:, :4])
    assert not torch.equal(before[:, 4:], logits(changed)[:, 4:])
    changed = {name: ids.clone() for name, ids in SAMPLES.items()}
    changed["encoder_ids"][:, 5] = 1
    assert (before != logits(changed)).any(-1).all()


@pytest.mark.parametrize("gated", [False, True])
def test_the_kernel_and_the_explicit_softmax_agree(gated: bool) -> None:
    """Dropout of 0 % in the explicit path: same loss, same gradients as the fused kernel."""
    model = small(gated=gated)
    results = []
    for drops in (False, True):
        for module in model.modules():
            if isinstance(module, T5Attention):
                module.drops = drops
        model.zero_grad()
        loss = loss_of(model.train())
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for fused, explicit in zip(*results, strict=True):
        assert (fused - explicit).norm() <= 1e-11 * explicit.norm()


def test_dropout_acts_in_training_alone_and_everywhere_it_should() -> None:
    model = small(dropout=0.5)
    assert torch.equal(model.eval()(SAMPLES), small(dropout=0.0)(SAMPLES))
    model.train()
    dropouts = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Dropout)
    }
    in_block = ["attention.dropout", "after_attention", "mlp.dropout", "after_mlp"]
    places = [
        f"{stack}_{at}.dropout" for stack in ("encoder", "decoder") for at in ("embedding", "norm")
    ]
    places += [f"encoder{i}.{at}" for i in range(2) for at in in_block]
    places += [
        f"decoder{i}.{at}"
        for i in range(3)
        for at in [*in_block, "cross_attention.dropout", "after_cross_attention"]
    ]
    assert sorted(dropouts) == sorted(places)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in dropouts.items():
        module.register_forward_hook(
            lambda _, inputs, __, name=name: shapes.update({name: tuple(inputs[0].shape)})
        )
    assert not torch.equal(model(SAMPLES), model(SAMPLES))
    assert sorted(shapes) == sorted(places), "a dropout module that nobody calls"
    assert shapes["encoder0.attention.dropout"] == (2, HEADS, 9, 9), "heads must be in dim 1"
    assert shapes["decoder0.cross_attention.dropout"] == (2, HEADS, 6, 9)
    assert shapes["decoder0.mlp.dropout"] == (2, 6, 36)


# ------------------------------------------------------------------------------------------------------
# the whole model

PUBLISHED: list[tuple[dict[str, Any], int]] = [
    ({}, 60_506_624),
    (
        {
            "hidden_size": 1024,
            "num_layers": 24,
            "num_heads": 32,
            "head_dim": 128,
            "ffn_size": 16384,
        },
        2_851_598_336,
    ),
    (
        {
            "num_layers": 8,
            "num_heads": 6,
            "head_dim": 64,
            "ffn_size": 1024,
            "gated": True,
            "tied": False,
        },
        76_961_152,
    ),
]


@pytest.mark.parametrize(("options", "published"), PUBLISHED)
def test_t5_has_the_published_number_of_parameters(options: dict[str, Any], published: int) -> None:
    with torch.device("meta"):
        model = t5.build(**options)
    assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_what_is_one_weight_is_declared_and_is_one_parameter() -> None:
    model = small()
    assert model.tied_weights == [
        ("encoder_embedding.tokens.weight", "decoder_embedding.tokens.weight", "head.weight"),
        tuple(f"encoder{i}.attention.relative_bias.weight" for i in range(2)),
        tuple(f"decoder{i}.attention.relative_bias.weight" for i in range(3)),
    ]
    for names in model.tied_weights:
        assert len({id(model.get_parameter(name)) for name in names}) == 1
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(names) - len(dict(model.named_parameters())) == 2 + 1 + 2, "nothing else is shared"
    alone = small(tied=False, num_layers=1, num_decoder_layers=1)
    assert alone.tied_weights == [
        ("encoder_embedding.tokens.weight", "decoder_embedding.tokens.weight")
    ]


def test_what_the_layers_hand_on() -> None:
    with torch.device("meta"):
        value: Any = {
            "encoder_ids": torch.zeros(2, 9).long(),
            "decoder_ids": torch.zeros(2, 6).long(),
        }
        model = t5.build(101, 32, 2, 4)
    handed = {}
    for name, layer in model.named_children():
        value = layer(value)
        handed[name] = (
            {key: tuple(leaf.shape) for key, leaf in value.items()}
            if isinstance(value, dict)
            else value
        )
    in_encoder = {"encoder": (2, 9, 32), "encoder_seen": (2, 9), "decoder_ids": (2, 6)}
    in_decoder = {"decoder": (2, 6, 32), "encoder": (2, 9, 32), "encoder_seen": (2, 9)}
    for name in ("encoder_embedding", "encoder0", "encoder1", "encoder_norm"):
        assert handed.pop(name) == in_encoder
    for name in ("decoder_embedding", "decoder0"):
        assert handed.pop(name) == in_decoder
    assert handed.pop("decoder1") == {"decoder": (2, 6, 32)}
    assert {name: tuple(out.shape) for name, out in handed.items()} == {
        "decoder_norm": (2, 6, 32),
        "head": (2, 6, 101),
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_size": 32, "num_heads": 5}, ["hidden_size=32", "num_heads=5", "4 or 8"]),
        ({"num_layers": 0, "head_dim": -1}, ["num_layers=0", "head_dim=-1"]),
        ({"num_buckets": 7}, ["num_buckets=7", "even"]),
        ({"num_buckets": 32, "max_distance": 16}, ["max_distance=16", "16"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_values(
    options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        t5.build(**options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_by_name(tied: bool) -> None:
    torch.manual_seed(0)
    model = t5.build(
        500, 64, 2, 4, gated=True, ffn_size=100, num_buckets=256, max_distance=512, tied=tied
    )
    std = {
        "tokens": 1.0,
        "relative_bias": 1 / 8,
        "qkv": 1 / 8,
        "q": 1 / 32,
        "kv": 1 / 8,
        "out": 1 / 8,
    }
    std |= {"up": 1 / 8, "down": 1 / 10, "head": 1 / 8}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if value.dim() == 1:
            assert (value == 1).all(), name
            continue
        module = name.split(".")[-2]
        if module == "qkv":
            q, k, v = value.view(4, 3, 16, 64).unbind(1)
            assert q.std().item() == pytest.approx(1 / 32, rel=0.1), name
            value = torch.stack([k, v])
        assert value.std().item() == pytest.approx(std[module], rel=0.1), name
    torch.manual_seed(5)
    filled = torch.empty(500, 64)
    model.initialise("encoder_embedding.tokens.weight", filled)
    torch.manual_seed(5)
    assert torch.equal(filled, torch.empty_like(filled).normal_()), (
        "draws from the default generator only"
    )


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_an_untrained_model_knows_nothing(tied: bool) -> None:
    """Its loss is that of guessing, ln V, and half the variance of the logits, which is 1."""
    torch.manual_seed(0)
    model = t5.build(500, 64, 2, 4, tied=tied).eval()
    samples = {
        "encoder_ids": torch.randint(500, (8, 33)),
        "decoder_ids": torch.randint(500, (8, 32)),
    }
    loss = F.cross_entropy(model(samples).flatten(0, 1), torch.randint(500, (8 * 32,))).item()
    assert loss == pytest.approx(math.log(500) + 0.5, abs=0.2)


def test_a_plain_loop_learns_what_only_the_encoder_tells() -> None:
    torch.manual_seed(0)
    model = t5.build(32, 32, 1, 4, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    encoder_ids = torch.randint(1, 32, (4, 8))
    samples = {"encoder_ids": encoder_ids, "decoder_ids": torch.arange(8).expand(4, 8)}
    for _ in range(100):  # without the encoder all samples are the same: the loss would stay at 1.2
        loss = F.cross_entropy(model(samples).flatten(0, 1), encoder_ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5
