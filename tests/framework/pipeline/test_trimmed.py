"""``batch.padding = "trim"``: the numbers of whole rows on every layout, with shorter messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, load, parse, resolve
from meshwright.data.trim import trimmed_length
from meshwright.model.metrics import record
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, assert_agrees, model_config, size_for
from tests.framework.verify.test_wire_bytes import Size, measured
from tests.framework.watch.spoiling import Spoil, messages
from tests.support.errors import raises
from tests.support.marks import long_row

S = 32


def trimmed(model: str, size: Size, *, padding: str = "trim", **options: Any) -> RunConfig:
    """Return a model without dropout, on rows with ends that no label counts in."""
    if model == "gpt2":
        options["dropout"] = 0.0
    tree = json.loads(model_config(model, size, **options).model_dump_json())
    tree["data"]["packing"] = "documents"
    tree["batch"]["padding"] = padding
    return parse(json.dumps(tree))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("llama", "dp2,pp2,mbs2"),
        ("gpt2", "pp2,tp2,sequence,zb_v"),
        long_row("gpt2", "dp2,zero3,full,mbs2"),
        long_row("llama", "dp2,pp2,zero3,interleaved_1f1b"),
        long_row("llama", "pp4,gpipe,selective"),
        long_row("gpt2", "pp2,zb_h1,pointwise"),
        long_row("llama", "tp4,sequence,offload"),
        long_row("llama", "dp2,pp2,dualpipe_v,zero2"),
    ],
)
def test_layouts_agree_with_the_plain_model_on_whole_rows(
    model: str, text: str, pool: RankPool
) -> None:
    size = size_for(parse_layout(text))._replace(sequence_length=S)
    config = trimmed(model, size)
    assert_agrees(
        config, text, pool, References(), global_batch=size.global_batch, steps=3, twice=True
    )


@pytest.mark.long
def test_documents_and_offloaded_activations_agree(pool: RankPool) -> None:
    text = "dp2,pp2"
    size = size_for(parse_layout(text))._replace(sequence_length=S)
    config = trimmed("llama", size).replace(
        data={"document_boundaries": True}, pipeline={"offload_activations": ["block*"]}
    )
    assert_agrees(config, text, pool, References(), global_batch=size.global_batch, steps=2)


def test_messages_have_the_length_of_their_micro_batch(pool: RankPool) -> None:
    """Both ways between two stages: of the second step's rows, by their labels."""
    size = Size(heads=4, sequence_length=S, num_blocks=2, global_batch=8)
    text, layout = "pp2,mbs2", parse_layout("pp2,mbs2")
    config = trimmed("llama", size)
    asked = layout_config(config, layout, size.global_batch, "float32")
    source = open_verify_source(asked, True)
    lengths = [trimmed_length(source.read(range(at, at + 2))[1], 8) for at in range(8, 16, 2)]
    assert len(set(lengths)) > 1 and min(lengths) < S
    first, last = measured(config, text, pool)
    whole, _ = measured(trimmed("llama", size, padding="keep"), text, pool)
    expected = sum(lengths) * 2 * 16 * 4
    for found in (first, last):
        assert found.own["pp", "send"] == (4, expected)
    assert whole.own["pp", "send"] == (4, 4 * S * 2 * 16 * 4)


class _Later(nn.Module):
    """Layer in which each position sees the whole sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def both_ways(vocab_size: int = 61) -> nn.Sequential:
    """Build a model that is not causal."""
    return nn.Sequential(
        nn.Embedding(vocab_size, 16), nn.Linear(16, 16), _Later(), nn.Linear(16, vocab_size)
    )


def test_verify_names_a_model_that_sees_later_tokens(pool: RankPool) -> None:
    size = size_for(parse_layout("dp2"))._replace(sequence_length=S)
    config = trimmed("llama", size).replace(
        model={"builder": f"{__name__}:both_ways", "options": {"vocab_size": 61}}
    )
    with pytest.raises(AssertionError, match="loss"):
        assert_agrees(config, "dp2", pool, References(), global_batch=8, steps=1)
    whole = config.replace(batch={"padding": "keep"})
    assert_agrees(whole, "dp2", pool, References(), global_batch=8, steps=1)


def test_dims_follow_the_length_by_tp() -> None:
    size = Size(heads=4, sequence_length=S, num_blocks=2, global_batch=8)
    for text, divisor in (("pp2,tp2", 1), ("pp2,tp2,sequence", 2)):
        asked = layout_config(trimmed("llama", size), parse_layout(text), 8, "float32")
        (spec,) = draw_blueprint(resolve(asked, 4)).boundaries
        assert spec.leaves[0].token_dims == ((1, divisor),)
        assert spec.at(16).leaves[0].shape == (1, 16 // divisor, 16)


class _Fixed(nn.Module):
    """Layer whose output for the next stage has a dim that is not in proportion to the length."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x[:, :3]), 1)


class _Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :-3]


def longer() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(61, 16), _Fixed(), _Cut(), nn.Linear(16, 61))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model": {"options": {"dropout": 0.1}}}, "MW-PIPELINE-054"),
        ({"data": {"sequence_length": 8}}, "MW-PIPELINE-057"),
        ({"model": {"builder": f"{__name__}:longer", "options": {}}}, "MW-PIPELINE-058"),
    ],
)
def test_what_cannot_be_trimmed_is_refused(changes: dict[str, Any], code: str) -> None:
    size = Size(heads=4, sequence_length=S, num_blocks=2, global_batch=8)
    config = trimmed("gpt2", size)
    if "dropout" in changes.get("model", {}).get("options", {}):
        changes = {"model": {"options": config.model.options | {"dropout": 0.1}}}
    config = config.replace(**changes).replace(pipeline={"balance": "layers"})
    asked = layout_config(config, parse_layout("pp2"), 8, "float32")
    with raises(code, "batch.padding"):
        draw_blueprint(resolve(asked, 2))


class _Recording(nn.Module):
    """Layer that records a mean over all positions."""

    def forward(self, x: Tensor) -> Tensor:
        record("mean", x.detach().sum(), torch.tensor(x.numel()))
        return x


class _Normed(nn.Module):
    """Layer that normalises by the positions of its micro-batch, without running statistics."""

    def __init__(self, synchronised: bool) -> None:
        super().__init__()
        kind = nn.SyncBatchNorm if synchronised else nn.BatchNorm1d
        self.norm = kind(16, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def normed(synchronised: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(61, 16), _Normed(synchronised), nn.Linear(16, 61))


def recording() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(61, 16), _Recording(), nn.Linear(16, 61))


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ({"options": {"moe": {"num_experts": 4, "top_k": 2, "count_tokens": True}}}, "055"),
        ({"builder": f"{__name__}:recording", "options": {}}, "056"),
        ({"builder": f"{__name__}:normed", "options": {}}, "060"),
        ({"builder": f"{__name__}:normed", "options": {"synchronised": True}}, "060"),
    ],
)
def test_layers_that_may_count_positions_are_refused(model: dict[str, Any], code: str) -> None:
    size = Size(heads=4, sequence_length=S, num_blocks=2, global_batch=8)
    config = trimmed("llama", size)
    options = config.model.options if "builder" not in model else {}
    config = config.replace(model=model | {"options": options | model["options"]})
    asked = layout_config(config, parse_layout("dp2"), 8, "float32")
    with raises(f"MW-PIPELINE-{code}", "count positions"):
        draw_blueprint(resolve(asked, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--data.packing=stream"], "has no effect"),
        (["--data.task=span_corruption", "--data.packing=stream"], "both directions"),
    ],
)
def test_data_without_padding_is_refused(given: list[str], words: str) -> None:
    with raises("MW-CONFIG-109", words):
        load("configs/demo.toml", ["--batch.padding=trim", *given])


def test_a_loss_of_nan_is_traced_in_trimmed_rows(pool: RankPool) -> None:
    """The replay of a step runs its stages on the same rows, and sends messages of their length."""
    text = "dp2,pp2,mbs2"
    size = size_for(parse_layout(text))._replace(sequence_length=S)
    config = layout_config(trimmed("gpt2", size), parse_layout(text), 8, "float32")
    (message,) = messages(pool, config, [Spoil("weight", 1, "block0.mlp.up.weight")])
    assert "block0.mlp.up.weight" in message and "not taken on any rank" in message
