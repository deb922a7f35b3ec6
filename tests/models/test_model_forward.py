"""The models against an independent plain implementation: loops over heads, one matrix per head,
complex rotations.
"""

from __future__ import annotations

import cmath
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_models import gpt2, llama

IDS = torch.tensor([[3, 14, 15, 92, 65, 35, 89], [79, 32, 38, 46, 26, 43, 38]])


def small_gpt2(**options) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 24, "num_layers": 2, "num_heads": 4, "dropout": 0.0}
    return randomised(gpt2.build(**{**sizes, **options}))


def small_llama(**options) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 44,
    }
    return randomised(llama.build(**{**sizes, **options}))


def randomised(model: nn.Sequential) -> nn.Sequential:
    """Return weights large enough that every part of the model is seen in its output,
    biases and norms included.
    """
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    return model.double()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head of one sample, token by token: (S, d) each."""
    rows = []
    for i in range(len(q)):
        weights = torch.stack([q[i] @ k[j] / math.sqrt(q.shape[1]) for j in range(i + 1)]).exp()
        rows.append(sum(w * v[j] for j, w in enumerate(weights)) / weights.sum())
    return torch.stack(rows)


def turn(x: Tensor, frequencies: list[float]) -> Tensor:
    """(S, d): each pair (i, i + d/2) as a complex number, times exp(i position frequency)."""
    half = x.shape[1] // 2
    out = x.clone()
    for position in range(len(x)):
        for i, frequency in enumerate(frequencies):
            turned = complex(x[position, i], x[position, i + half]) * cmath.exp(
                1j * position * frequency
            )
            out[position, i], out[position, i + half] = turned.real, turned.imag
    return out


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight


def plain_gpt2(
    weights: dict[str, Tensor], model: nn.Sequential, ids: Tensor, num_heads: int
) -> Tensor:
    """One sample, (S,) -> (S, V). The rows of a head are its q, its k, its v, head_dim each."""
    x = (
        torch.stack([weights["embedding.tokens.weight"][t] for t in ids])
        + weights["embedding.positions.weight"][: len(ids)]
    )
    head_dim = x.shape[1] // num_heads
    for n in range(2):
        block = model.get_submodule(f"block{n}")
        h = layer_norm(x, block.attention_norm)
        heads = []
        for i in range(num_heads):
            rows = [
                slice((3 * i + part) * head_dim, (3 * i + part + 1) * head_dim) for part in range(3)
            ]
            q, k, v = (
                h @ block.attention.qkv.weight[r].T + block.attention.qkv.bias[r] for r in rows
            )
            heads.append(attend(q, k, v))
        x = x + torch.cat(heads, 1) @ block.attention.out.weight.T + block.attention.out.bias
        h = layer_norm(x, block.mlp_norm) @ block.mlp.up.weight.T + block.mlp.up.bias
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + h @ block.mlp.down.weight.T + block.mlp.down.bias
    return layer_norm(x, model.norm) @ weights["head.weight"].T


def plain_llama(
    model: nn.Sequential, ids: Tensor, num_heads: int, num_kv_heads: int, frequencies: list[float]
) -> Tensor:
    """One sample, (S,) -> (S, V), query head by query head, gate and up as two matrices."""
    x = model.embedding.tokens.weight[ids]
    head_dim, per_group = x.shape[1] // num_heads, num_heads // num_kv_heads
    for n in range(2):
        block = model.get_submodule(f"block{n}")
        h = rms_norm(x, block.attention_norm)
        # one entry per head: q .. q k v of a group, next group
        rows = list(block.attention.qkv.weight.split(head_dim))
        heads = []
        for i in range(num_heads):
            group, within = divmod(i, per_group)
            first = group * (per_group + 2)
            q, k, v = (h @ rows[first + at].T for at in (within, per_group, per_group + 1))
            heads.append(attend(turn(q, frequencies), turn(k, frequencies), v))
        x = x + torch.cat(heads, 1) @ block.attention.out.weight.T
        blocks = block.mlp.gate_up.weight.split(block.mlp.block_size)
        gate, up = torch.cat(blocks[0::2]), torch.cat(blocks[1::2])
        h = rms_norm(x, block.mlp_norm)
        gated = h @ gate.T
        x = x + (gated / (1 + torch.exp(-gated)) * (h @ up.T)) @ block.mlp.down.weight.T
    return rms_norm(x, model.norm) @ model.head.weight.T


def assert_same(found: Tensor, expected: Tensor, bar: float = 1e-12) -> None:
    assert found.shape == expected.shape
    difference = ((found - expected).norm() / expected.norm()).item()
    assert difference < bar, f"relative difference {difference:.3e}"


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_equals_the_plain_implementation(tied: bool) -> None:
    model = small_gpt2(tied=tied)
    weights = dict(model.named_parameters(remove_duplicate=False))
    expected = torch.stack([plain_gpt2(weights, model, ids, num_heads=4) for ids in IDS])
    assert_same(model(IDS), expected)


@torch.no_grad()
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_llama_equals_the_plain_implementation(num_heads: int, num_kv_heads: int) -> None:
    model = small_llama(num_heads=num_heads, num_kv_heads=num_kv_heads)
    frequencies = [500_000.0 ** (-2 * i / 8) for i in range(4)]
    expected = torch.stack(
        [plain_llama(model, ids, num_heads, num_kv_heads, frequencies) for ids in IDS]
    )
    assert_same(model(IDS), expected)


def plainly_scaled(frequency: float) -> float:
    """Llama 3.1's rule as Meta states it: by wavelength, factor 8, low 1, high 4,
    original length 8,192.
    """
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4:
        return frequency
    if wavelength > 8192 / 1:
        return frequency / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


def test_rope_scaling_is_that_of_llama_31() -> None:
    plain = llama.rope_frequencies(128, 500_000.0)
    scaled = llama.rope_frequencies(128, 500_000.0, llama.RopeScaling(8.0, 1.0, 4.0, 8192))
    assert scaled == pytest.approx([plainly_scaled(f) for f in plain], rel=1e-14)
    ratios = [s / p for s, p in zip(scaled, plain, strict=True)]
    assert ratios[0] == 1 and ratios[-1] == 1 / 8
    assert any(1 / 8 < ratio < 1 for ratio in ratios), "the blended zone is empty"


@torch.no_grad()
def test_rope_scaling_reaches_the_model() -> None:
    scaled = small_llama(rope_scaling_factor=8.0, rope_original_length=64)
    frequencies = llama.rope_frequencies(8, 500_000.0, llama.RopeScaling(8.0, 1.0, 4.0, 64))
    expected = torch.stack([plain_llama(scaled, ids, 4, 2, frequencies) for ids in IDS])
    assert_same(scaled(IDS), expected)
    assert (scaled(IDS) - small_llama()(IDS)).abs().max() > 1e-3


def test_rotary_angles_survive_casts_and_the_meta_device() -> None:
    with torch.device("meta"):
        model = llama.build(97, 32, 1, 4, 2, 48)
    rotary = model.block0.attention.rotary
    assert rotary.frequencies.device.type == "cpu", (
        "buffers stay real when the parameters are on meta"
    )
    expected = [500_000.0 ** (-2 * i / 8) for i in range(4)]
    for moved in (model.bfloat16(), model.to("meta").to_empty(device="cpu"), model.half().double()):
        kept = moved.block0.attention.rotary.frequencies
        assert kept.dtype == torch.float64 and kept.tolist() == expected
    assert "block0.attention.rotary.frequencies" not in model.state_dict()


def test_rotary_angles_are_as_exact_as_the_activations() -> None:
    rotary = llama.Rotary([1.0, 0.7])
    cos, sin = rotary(torch.zeros(1, 5000, 4, dtype=torch.float64))
    assert cos.dtype == torch.float64
    assert cos[4999, 1].item() == pytest.approx(math.cos(4999 * 0.7), abs=1e-15)
    assert sin[4999, 1].item() == pytest.approx(math.sin(4999 * 0.7), abs=1e-15)
    assert rotary(torch.zeros(1, 8, 4, dtype=torch.bfloat16))[0].dtype == torch.float32


@pytest.mark.parametrize("small", [small_gpt2, small_llama])
def test_the_kernel_and_the_explicit_softmax_agree(small) -> None:
    """Dropout of 0 % in the explicit path: same output, same gradients as the fused kernel."""
    model = small()
    results = []
    for drops in (False, True):
        for module in model.modules():
            if hasattr(module, "drops"):
                module.drops = drops
        model.zero_grad()
        logits = model.train()(IDS)
        F.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for fused, explicit in zip(*results, strict=True):
        assert_same(fused, explicit, bar=1e-11)


@pytest.mark.parametrize("small", [small_gpt2, small_llama])
def test_a_token_sees_no_later_token(small) -> None:
    changed = IDS.clone()
    changed[:, 4:] = 1
    for model in (small(dropout=0.0), small(dropout=0.3)):
        torch.manual_seed(1)
        before = model(IDS)
        torch.manual_seed(1)  # the same masks
        after = model(changed)
        assert torch.equal(before[:, :4], after[:, :4])
        assert not torch.equal(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("small", [small_gpt2, small_llama])
def test_dropout_acts_in_training_alone_and_everywhere_it_should(small) -> None:
    model = small(dropout=0.5)
    assert torch.equal(model.eval()(IDS), small(dropout=0.0)(IDS))
    model.train()
    dropouts = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Dropout)
    }
    places = ["embedding.dropout"]
    places += [
        f"block{i}.{at}"
        for i in range(2)
        for at in ("attention.dropout", "after_attention", "after_mlp")
    ]
    assert sorted(dropouts) == sorted(places)
    seen: dict[str, tuple[int, ...]] = {}
    for name, module in dropouts.items():
        module.register_forward_hook(
            lambda _, inputs, __, name=name: seen.update({name: tuple(inputs[0].shape)})
        )
    assert not torch.equal(model(IDS), model(IDS))
    assert sorted(seen) == sorted(places), "a dropout module that nobody calls"
    assert seen["block0.attention.dropout"] == (2, 4, 7, 7), "heads must be in dim 1"


@pytest.mark.parametrize(
    "build", [lambda: gpt2.build(500, 64, 8, 4), lambda: llama.build(500, 64, 8, 4, 2, 96)]
)
def test_initial_weights_by_name(build) -> None:
    model = build()
    drawn = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, value in drawn.items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif value.dim() == 1:
            assert (value == 1).all(), name
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / 4 if residual else 0.02  # 1 / sqrt(2 L) = 1/4 for L = 8
            assert value.std().item() == pytest.approx(std, rel=0.1), name
            assert abs(value.mean().item()) < 0.1 * std, name
    filled = torch.empty_like(drawn["block3.attention.qkv.weight"])
    torch.manual_seed(5)
    model.initialise("block3.attention.qkv.weight", filled)
    torch.manual_seed(5)
    assert torch.equal(filled, torch.empty_like(filled).normal_(std=0.02)), (
        "draws from the default generator only"
    )


@torch.no_grad()
@pytest.mark.parametrize(
    "build", [lambda: gpt2.build(500, 64, 2, 4), lambda: llama.build(500, 64, 2, 4, 2, 96)]
)
def test_an_untrained_model_knows_nothing(build) -> None:
    """Its loss is that of guessing, ln V, give or take the variance of the logits."""
    torch.manual_seed(0)
    ids = torch.randint(500, (4, 33))
    loss = F.cross_entropy(build().eval()(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item()
    assert loss == pytest.approx(math.log(500), abs=0.1)


@pytest.mark.parametrize(
    "build", [lambda: gpt2.build(64, 32, 2, 4), lambda: llama.build(64, 32, 2, 4, 2, 48)]
)
def test_a_plain_loop_learns_a_sequence_by_heart(build) -> None:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(64, (2, 17))
    for _ in range(60):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    assert (model(ids[:, :-1]).argmax(-1) == ids[:, 1:]).float().mean() > 0.9
