"""muP: factors and initial weights by formula, the model itself against folded weights, training
against torch's AdamW, and the coordinate check of Tensor Programs V on widths 64 to 512.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright
from meshwright.checkpoint import TensorKind, open_checkpoint
from meshwright.config import ParameterGroup, RunConfig
from meshwright.errors import ModelError
from meshwright.model.build import configured_model
from meshwright.optimizer.learning_rate import learning_rate
from meshwright.parameters import ParameterInfo
from meshwright.verify import parse_layout, verify
from meshwright_launch.pool import RankPool
from meshwright_models import decoder, gpt2, llama
from meshwright_models.attention import AttentionCore
from tests.launch.test_python import made, tokens
from tests.support.errors import has_code
from tests.support.marks import long_row

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_sequence_length": 16,
}
OPTIONS = {
    "gpt2": SIZES | {"dropout": 0.0, "tied": False},
    "llama": SIZES | {"num_kv_heads": 2, "ffn_size": 48},
    "decoder": SIZES
    | {"num_kv_heads": 2, "ffn_size": 48, "qk_norm": True, "norm": "layer_norm", "qkv_bias": True},
}
BUILD = {"gpt2": gpt2.build, "llama": llama.build, "decoder": decoder.build}
MUP = {
    "mup_base_size": 8,
    "mup_base_head_dim": 2.0,
    "mup_embedding_multiplier": 3.0,
    "mup_output_multiplier": 1.5,
}
M, HEAD_DIM = 4, 8
MATRICES = (
    "attention.qkv.weight",
    "attention.out.weight",
    "mlp.up.weight",
    "mlp.gate_up.weight",
    "mlp.down.weight",
)
"""Endings of the names of the matrices in blocks."""
FORMS = sorted(BUILD)


def built(form: str, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    model: nn.Sequential = BUILD[form](**OPTIONS[form] | options)
    return model.double()


def random_ids(length: int = 16) -> Tensor:
    return torch.randint(64, (3, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", FORMS)
def test_at_the_base_width_it_is_the_model_without_in_every_bit(form: str) -> None:
    plain, model = built(form), built(form, mup_base_size=32, mup_base_head_dim=HEAD_DIM)
    assert model.parameter_groups == []
    for (name, ours), theirs in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert torch.equal(model(random_ids()), plain(random_ids()))


@pytest.mark.parametrize("form", FORMS)
def test_initial_weights_and_factors_follow_the_table(form: str) -> None:
    """Standard deviation, learning rate and eps of the matrices in blocks alone."""
    model, plain = built(form, **MUP), built(form)
    found = configured_model(config_of(form)).groups
    for name, parameter in plain.named_parameters():
        is_scaled = name.endswith(MATRICES)
        factor = 1 / math.sqrt(M) if is_scaled else 1.0
        torch.testing.assert_close(model.get_parameter(name), parameter * factor, rtol=1e-6, atol=0)
        assert (name in found) is is_scaled
    settings = {
        (group.learning_rate_factor, group.eps_factor, group.weight_decay)
        for group in found.values()
    }
    assert settings == {(1 / M, 1 / M, None)}


@pytest.mark.parametrize("form", FORMS)
def test_adapters_have_no_factor_of_their_matrix(form: str) -> None:
    """Their fan-in or fan-out is the rank; the user's own groups match them."""
    adapter = {"rank": 2, "targets": ["block*.attention.*", "block*.mlp.*"]}
    chosen = [ParameterGroup(names=["block0.mlp.*.lora_b.weight"], learning_rate_factor=16.0)]
    config = config_of(form).replace(adapter=adapter)
    groups = configured_model(config.replace(model={"parameter_groups": chosen})).groups
    ours = {name: group.learning_rate_factor for name, group in groups.items() if "lora" in name}
    assert ours and all(".lora_b." in name and factor == 16.0 for name, factor in ours.items())


def folded(form: str, model: nn.Sequential) -> nn.Sequential:
    """Return the model without muP that computes the same: the multipliers are in its weights."""
    plain = built(form)
    plain.load_state_dict(model.state_dict())
    heads = 4 // OPTIONS[form].get("num_kv_heads", 4)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.startswith("embedding."):
                parameter.mul_(3.0)
            elif name.startswith("norm."):
                parameter.mul_(1.5 / M)
            elif "q_norm" in name or (".qkv." in name and form != "decoder"):
                rows = (
                    parameter
                    if "q_norm" in name
                    else parameter.unflatten(0, (-1, heads + 2, HEAD_DIM))[:, :heads]
                )
                rows.mul_(math.sqrt(2.0) / math.sqrt(HEAD_DIM))
    return plain


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_documents", [False, True])
def test_multipliers_are_those_of_folded_weights(form: str, has_documents: bool) -> None:
    model = built(form, **MUP)
    ids = random_ids()
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[:, [0, 5]] = True
    inputs = {"tokens": ids, "starts": starts} if has_documents else ids
    expected = folded(form, model)(inputs)
    torch.testing.assert_close(model(inputs), expected, rtol=1e-11, atol=1e-14)
    assert not torch.allclose(built(form)(inputs), expected, rtol=1e-2)


def test_attention_with_dropout_has_the_same_scale() -> None:
    q, k, v = torch.randn(
        3, 2, 4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    core = AttentionCore(score_divisor=5.0)
    expected = (q @ k.mT / 5).masked_fill(torch.ones(6, 6).triu(1) > 0, -math.inf).softmax(-1) @ v
    for dropout in (None, nn.Dropout(0.0)):
        torch.testing.assert_close(core(q, k, v, dropout), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("form", [long_row("llama"), "decoder"])
def test_coordinate_check(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change of each layer's output by three AdamW steps: flat over the width with muP,
    and growing without.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import mup

    def exponents(**options: Any) -> dict[str, float]:
        rows = [mup.changes(form, width, seeds=1, **options) for width in mup.WIDTHS]
        return {name: mup.growth([row[name] for row in rows], mup.WIDTHS) for name in rows[0]}

    flat, growing = exponents(mup_base_size=64), exponents()
    assert set(flat) == {"embedding", "block0", "block1", "norm", "head"}
    assert all(-0.5 < exponent < 0.2 for exponent in flat.values()), flat
    assert growing["block0"] > 1 and growing["block1"] > 1 and growing["head"] > 0.6, growing


def config_of(
    form: str, directory: Path = Path("unused"), **sections: Mapping[str, Any]
) -> RunConfig:
    """Return a run with all 64 samples in each step and an eps as large as the gradients, so that
    its factor counts.
    """
    model = {"builder": f"meshwright_models.{form}:build", "options": OPTIONS[form] | MUP}
    tree: dict[str, Any] = {
        "model": model,
        "batch": {"micro_batch_size": 8, "chunks": 8},
        "optimizer": {
            "learning_rate": 0.02,
            "eps": 1e-3,
            "weight_decay": 0.3,
            "clip_norm": 0.1,
            "warmup_steps": 2,
        },
    }
    for section, keys in sections.items():
        tree[section] = tree.get(section, {}) | dict(keys)
    return made(directory, **tree)


@pytest.mark.parametrize("form", FORMS)
def test_a_run_trains_as_torchs_adamw_with_groups_made_by_hand(form: str, tmp_path: Path) -> None:
    """The configuration's factors multiply with the model's; its weight decay stays its own."""
    own = {"names": ["block1.mlp.*", "head.*"], "learning_rate_factor": 0.5, "weight_decay": 0.7}
    config = config_of(form, tmp_path)
    config = config_of(
        form, tmp_path, model={**config.model.model_dump(), "parameter_groups": [own]}
    )
    model, drawn = built(form, **MUP), configured_model(config)
    groups = []
    for name, parameter in model.named_parameters():
        parameter.data.copy_(drawn.initial(name))
        is_own, is_matrix = name.startswith(("block1.mlp.", "head.")), parameter.dim() > 1
        factor = 1 / M if name.endswith(MATRICES) else 1.0
        decay = 0.7 if is_own else 0.3 if is_matrix else 0.0
        rate = 0.02 * factor * (0.5 if is_own else 1)
        groups.append(
            {
                "params": [parameter],
                "lr": rate,
                "peak": rate,
                "eps": 1e-3 * factor,
                "weight_decay": decay,
            }
        )
    optimizer = torch.optim.AdamW(groups, betas=config.optimizer.betas)
    data = tokens("train")
    assert data is not None
    ids, labels = (torch.stack(rows) for rows in zip(*data, strict=True))
    losses = []
    for step in range(config.train.steps):
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for group in optimizer.param_groups:
            group["lr"] = (
                group["peak"] * learning_rate(config.optimizer, step, config.train.steps) / 0.02
            )
        optimizer.step()
        losses.append(loss.item())
    with meshwright.open_run(config) as run:
        assert [run.take_step().loss for _ in range(config.train.steps)] == pytest.approx(
            losses, rel=1e-12
        )
        saved = open_checkpoint(run.save())
    for name, parameter in model.named_parameters():
        ours = saved.read(TensorKind.WEIGHTS, ParameterInfo(name, tuple(parameter.shape)))
        torch.testing.assert_close(ours, parameter.detach(), rtol=1e-9, atol=1e-12)


WRONG = [
    ({"mup_output_multiplier": 2.0}, {}, "mup_output_multiplier=2.0 without mup_base_size"),
    ({"mup_base_size": 0}, {}, "mup_base_size=0"),
    ({"mup_base_size": 8, "mup_base_head_dim": -1.0}, {}, "mup_base_head_dim=-1.0"),
    ({"mup_base_size": 8}, {"name": "sgd"}, 'but optimizer.name = "sgd"'),
]


@pytest.mark.parametrize(("options", "optimizer", "said"), WRONG)
@pytest.mark.parametrize("form", FORMS)
def test_what_has_no_meaning_is_refused(form: str, options: Any, optimizer: Any, said: str) -> None:
    model = {"builder": f"meshwright_models.{form}:build", "options": OPTIONS[form] | options}
    with pytest.raises(ModelError, check=has_code("MW-MODEL-003", "MW-MODEL-036")) as caught:
        configured_model(made(Path("unused"), model=model, optimizer=optimizer))
    assert said in caught.value.message


@pytest.mark.parametrize("form", ["decoder", "llama"])
def test_modules_of_multi_token_prediction_have_no_mup(form: str) -> None:
    with pytest.raises(ValueError, match="mtp_layers=1 with mup_base_size"):
        built(form, **MUP, mtp_layers=1)


def mistaken(groups: Any, **options: Any) -> nn.Sequential:
    model = gpt2.build(**options)
    model.parameter_groups = groups
    return model


@pytest.mark.parametrize(
    ("groups", "code", "said"),
    [
        (["head.*"], "MW-MODEL-035", "is no list of groups"),
        ([{"names": ["head.*"], "lr": 3}], "MW-MODEL-035", "lr"),
        (7, "MW-MODEL-035", "= 7 is no list"),
        (
            [{"names": ["heat.*"]}],
            "MW-PLACEMENT-001",
            "the model's attribute parameter_groups: 'heat.*' matches no",
        ),
    ],
)
def test_an_attribute_of_another_form_is_refused(groups: Any, code: str, said: str) -> None:
    model = {"builder": "tests.models.test_mup:mistaken", "options": SIZES | {"groups": groups}}
    with pytest.raises(ModelError, check=has_code("MW-PLACEMENT-001", "MW-MODEL-035")) as caught:
        configured_model(made(Path("unused"), model=model))
    assert caught.value.code == code and said in caught.value.message


LAYOUTS = {
    "gpt2": ("dp2,pp2,tp2,zero2,zb_v", "dp2,tp2,zero3,sequence", "dp4,zero1,offload"),
    "llama": ("dp1,pp2,tp2,zero1,sequence,selective", "dp2,pp2,interleave2,interleaved_1f1b,zero2"),
    "decoder": ("dp2,tp2,zero3", "dp1,pp4,tp2,zero1"),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_layouts_agree_with_the_untouched_model(form: str, pool: RankPool) -> None:
    own = [
        {"names": ["embedding.*"], "learning_rate_factor": 0.5},
        {"names": ["block0.mlp.*"], "eps_factor": 2.0},
    ]
    dropout = {"dropout": 0.1} if form == "gpt2" else {}
    options = OPTIONS[form] | MUP | dropout | {"tied": form == "llama"}
    config = config_of(
        form,
        model={**config_of(form).model.model_dump(), "options": options, "parameter_groups": own},
    )
    report = verify(
        config, [parse_layout(text) for text in LAYOUTS[form]], pool, global_batch=8, steps=2
    )
    assert report.passed, report.table()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("adamw8bit", "float32"), ("adamw", "float16"), ("adamw", "bfloat16")]
)
def test_layouts_agree_in_other_precisions(name: str, dtype: str, pool: RankPool) -> None:
    optimizer = {"name": name, **({"block_size": 8} if name == "adamw8bit" else {})}
    config = config_of(
        "llama", optimizer={**config_of("llama").optimizer.model_dump(), **optimizer}
    )
    layouts = [parse_layout(text) for text in ("dp2,tp2,zero2", "dp1,pp2,tp2,zero1")]
    report = verify(config, layouts, pool, global_batch=8, steps=2, dtype=dtype)
    assert report.passed, report.table()


@pytest.mark.slow
def test_evaluation_has_the_multipliers(tmp_path: Path) -> None:
    config = config_of("llama", tmp_path)
    with meshwright.open_run(config) as run:
        run.take_step()
        expected = run.validate()
        run.save()
    found = meshwright.evaluate(tmp_path / "own", batches=1, trust_code=True)
    assert found.loss == pytest.approx(expected, rel=1e-9)
