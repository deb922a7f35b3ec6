"""Logits and gradients of our GPT-2 and Llama over context-parallel ranks:
transformers' packed attention in float64.

transformers finds the documents of a packed row where ``position_ids`` restart, in one process,
with its own weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.context_parallel import plan
from meshwright.context_parallel.cut import HeadCut, TokenCut
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.model.build import PlainModel, build_model
from meshwright_launch.pool import RankPool
from meshwright_models.attention import positions_of
from tests.models.test_decoder import ExactRotary
from tests.support.marks import long_row
from tests.support.plain import plain_layers

LENGTH, VOCAB = 24, 67
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_sequence_length": LENGTH,
}
LLAMA = SIZES | {"num_kv_heads": 2, "ffn_size": 44, "norm_eps": 1e-6, "rope_theta": 10_000.0}
THEIRS = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
THEIRS |= {
    "num_key_value_heads": 2,
    "intermediate_size": 44,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-6,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Pair(NamedTuple):
    """One architecture, ours and transformers'."""

    builder: str
    options: dict[str, Any]
    architecture: str
    settings: dict[str, Any]


PAIRS = {
    "gpt2": Pair("gpt2", SIZES | {"dropout": 0.0}, "GPT2", GPT2 | NO_DROPOUT),
    "llama": Pair("llama", LLAMA, "Llama", THEIRS | {"tie_word_embeddings": False}),
    "mistral": Pair(
        "llama", LLAMA | {"sliding_window": 3}, "Mistral", THEIRS | {"sliding_window": 3}
    ),
}


def samples() -> tuple[dict[str, Tensor], Tensor]:
    """Tokens and starts, and labels, (3, S): documents on and off the cuts, of one token,
    and one over all.
    """
    ids = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[:, 0] = True
    starts[0, [5, 6, 7, 12, 23]] = starts[1, 1:] = True
    return {"tokens": ids, "starts": starts}, F.pad(ids[:, 1:], (0, 1), value=-100)


def built(pair: Pair) -> PlainModel:
    return build_model(f"meshwright_models.{pair.builder}:build", pair.options, 5)


def on_a_rank(
    rank: int, cp: int, pair: Pair, exchange: str, order: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's logits at the places of its tokens, zeros elsewhere,
    and its part of each gradient.
    """
    mesh, model = open_mesh(Grid(cp=cp), "cpu"), built(pair)
    inputs, labels = samples()
    cut = TokenCut(mesh.cp, order, labels, model.current)
    heads = HeadCut(mesh.cp) if exchange == "heads" else None
    on_meta = {name: each.to("meta") for name, each in inputs.items()}
    plan.apply("ours", model.layers, model.plan, on_meta, cut, heads)
    model.current.tokens = cut.tokens_of(inputs, torch.device("cpu"))
    layers = plain_layers(model, torch.float64)
    logits = layers(inputs)
    F.cross_entropy(
        logits.flatten(0, 1), cut.take_labels(labels).flatten(), reduction="sum"
    ).backward()
    places = cut.positions(torch.device("cpu")).expand(3, -1)
    whole = torch.zeros(3, LENGTH, VOCAB, dtype=torch.float64)
    whole.scatter_(1, places[..., None].expand_as(logits), logits.detach())
    close_mesh(mesh)
    return whole, {
        name: each.grad for name, each in layers.named_parameters() if each.grad is not None
    }


def compiled(rank: int, cp: int, pair: Pair) -> tuple[float, float]:
    """Difference of the loss of compiled layers from that of plain ones, and of the gradients,
    over their norm.
    """
    mesh, model = open_mesh(Grid(cp=cp), "cpu"), built(pair)
    inputs, labels = samples()
    cut = TokenCut(mesh.cp, "zigzag", labels, model.current)
    plan.apply(
        "ours",
        model.layers,
        model.plan,
        {name: each.to("meta") for name, each in inputs.items()},
        cut,
    )
    layers = plain_layers(model, torch.float64)
    losses, gradients = [], []
    for compile_layer in (lambda layer: layer, partial(torch.compile, backend="eager")):
        layers.zero_grad()
        value: Any = inputs
        for layer in layers:
            value = compile_layer(layer)(value)
        loss = F.cross_entropy(
            value.flatten(0, 1), cut.take_labels(labels).flatten(), reduction="sum"
        )
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(
            torch.cat(
                [each.grad.flatten() for each in layers.parameters() if each.grad is not None]
            )
        )
    close_mesh(mesh)
    return losses[1] - losses[0], float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


def packed(pair: Pair) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of transformers' model, under its names, with our initial weights."""
    pytest.importorskip("meshwright_interop")
    from meshwright_interop.huggingface.restructure.float64 import keep_float64

    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, f"{pair.architecture}Config")(**pair.settings)
    theirs = getattr(
        transformers,
        "GPT2LMHeadModel" if pair.builder == "gpt2" else f"{pair.architecture}ForCausalLM",
    )(theirs).double()
    theirs.set_attn_implementation("sdpa")
    for name, module in list(theirs.named_modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):
            theirs.set_submodule(name, ExactRotary(8, 10_000.0))
    values = their_names(pair, dict(plain_layers(built(pair), torch.float64).named_parameters()))
    with torch.no_grad():
        for name, value in values.items():
            theirs.get_parameter(name).copy_(value)
    inputs, labels = samples()
    with keep_float64(torch.float64):
        logits = theirs(
            input_ids=inputs["tokens"], position_ids=positions_of(inputs["starts"]), use_cache=False
        ).logits
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return logits.detach(), {name: theirs.get_parameter(name).grad for name in values}


def their_names(pair: Pair, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of our parameters, or their gradients, as transformers has them."""
    pytest.importorskip("meshwright_interop")
    from meshwright_interop.huggingface.convert.tables import decoder_rules, gpt2_rules

    rules = gpt2_rules if pair.builder == "gpt2" else decoder_rules
    defaults = {
        "tied": True,
        "qkv_bias": False,
        "qk_norm": False,
        "out_bias": False,
        "mlp_bias": False,
        "mtp_layers": 0,
        "moe": None,
        "mla": None,
    }
    given = {"tied": pair.builder == "gpt2", "head_dim": 8}
    found: dict[str, Tensor] = {}
    for rule in rules(defaults | given | pair.options):
        found |= dict(rule.split(ours[rule.ours].detach()))
    return found


@pytest.mark.parametrize(
    ("name", "cp", "exchange", "order"),
    [
        long_row("gpt2", 4, "keys", "documents"),
        ("llama", 2, "heads", "zigzag"),
        ("mistral", 4, "keys", "zigzag"),
        pytest.param("llama", 4, "keys", "contiguous", marks=pytest.mark.all_layouts),
        pytest.param("gpt2", 2, "heads", "documents", marks=pytest.mark.all_layouts),
        pytest.param("mistral", 2, "heads", "documents", marks=pytest.mark.all_layouts),
    ],
)
def test_logits_and_gradients_are_those_of_packed_rows(
    name: str, cp: int, exchange: str, order: str, pool: RankPool
) -> None:
    pair = PAIRS[name]
    logits, gradients = packed(pair)
    found = pool.run(on_a_rank, cp, pair, exchange, order)
    torch.testing.assert_close(sum(each[0] for each in found), logits, rtol=1e-12, atol=1e-12)
    ours = their_names(pair, {n: sum(each[1][n] for each in found) for n in found[0][1]})
    assert ours.keys() == gradients.keys()
    for parameter, expected in gradients.items():
        assert float((ours[parameter] - expected).norm()) <= 1e-12 * float(expected.norm()), (
            parameter
        )


@pytest.mark.torture
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_compiled_layers_have_the_same_numbers(name: str, pool: RankPool) -> None:
    """``train.compile`` leaves the exchange and the attention of a rank's queries out
    of its graphs.
    """
    for loss, gradients in pool.run(compiled, 2, PAIRS[name], timeout_s=300.0):
        assert abs(loss) < 1e-12 and gradients < 1e-12


def test_another_mask_is_seen() -> None:
    """So that the test above can fail: without documents, and with a window of another length."""
    pair = PAIRS["mistral"]
    expected, _ = packed(pair)
    inputs, _ = samples()
    for other in (pair, pair._replace(options=pair.options | {"sliding_window": 4})):
        layers: nn.Module = plain_layers(built(other), torch.float64)
        given = inputs if other is not pair else inputs["tokens"]
        assert not torch.allclose(layers(given), expected, rtol=1e-6)
    assert torch.allclose(
        plain_layers(built(pair), torch.float64)(inputs), expected, rtol=1e-12, atol=1e-12
    )
