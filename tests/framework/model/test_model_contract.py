"""What a user's model has to be, and what is said when it is not: value, place and next move,
before any rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.config.functions import find_function
from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright.seeding import SeededDropout
from meshwright.verify import layout_config, parse_layout, run_layout, verify
from meshwright_launch.pool import RankPool
from tests.support import builders
from tests.support.errors import raises


def config_of(builder: str, layout: str = "pp1", **options: Any) -> RunConfig:
    """A resolved config for a model of ``tests/support/builders.py``, or one named in full."""
    path = builder if ":" in builder else f"tests.support.builders:{builder}"
    config = RunConfig.model_validate(
        {
            "model": {"builder": path, "options": options},
            "data": {"train": "random", "sequence_length": 6},
        }
    )
    return layout_config(config, parse_layout(layout), 4, "float32")


GPT2, LLAMA = "meshwright_models.gpt2:build", "meshwright_models.llama:build"
SIZES = {
    "vocab_size": 17,
    "hidden_size": 8,
    "num_heads": 2,
    "num_layers": 1,
    "max_sequence_length": 8,
}
HEADS = {"num_heads": 2, "num_kv_heads": 2, "num_layers": 1}

REFUSED: list[tuple[str, str, dict[str, Any], str, tuple[object, ...]]] = [
    # the builder
    ("no_such_package.models:build", "pp1", {}, "MW-CONFIG-008", ("no_such_package.models",)),
    ("plane", "pp1", {}, "MW-CONFIG-010", ("plane", "tests.support.builders:plain?")),
    ("not_callable", "pp1", {}, "MW-CONFIG-010", ("not_callable",)),
    # its options
    ("plain", "pp1", {"widht": 8}, "MW-MODEL-001", ("model.options.widht", "did you mean width?")),
    ("plain", "pp1", {"zzz": 1}, "MW-MODEL-001", ("model.options.zzz", "vocab_size, width, depth")),
    (GPT2, "pp1", {**SIZES, "tied": "no"}, "MW-MODEL-001", ("model.options.tied = 'no'",)),
    (LLAMA, "pp1", {**HEADS, "vocab_size": 17}, "MW-MODEL-001", ("hidden_size", "ffn_size")),
    (
        *(LLAMA, "pp1", {**HEADS, "hiden_size": 8, "ffn_size": 8}),
        *("MW-MODEL-001", ("model.options.hiden_size", "vocab_size", "model.options.hidden_size")),
    ),
    ("needs_much", "pp1", {"vocab_size": 17, "colour": "red"}, "MW-MODEL-003", ("'width'",)),
    ("fails", "pp1", {"vocab_size": 13}, "MW-MODEL-003", ("vocab_size=13 is unlucky",)),
    ("plain", "pp1", {"width": "wide"}, "MW-MODEL-003", ("builders.py", "TypeError")),
    # the model
    ("not_a_sequential", "pp1", {}, "MW-MODEL-004", ("Linear",)),
    ("empty", "pp1", {}, "MW-MODEL-005", ("tests.support.builders:empty",)),
    ("without_parameters", "pp1", {}, "MW-MODEL-006", ()),
    ("undeclared_tie", "pp1", {}, "MW-MODEL-025", ("[('embedding.weight', 'head.weight')]",)),
    ("repeated_linear", "pp1", {}, "MW-MODEL-025", ("1.weight", "2.weight")),
    ("tie_to_nothing", "pp1", {}, "MW-MODEL-023", ("'haed.weight'", "head.weight?")),
    (
        *("overlapping_ties", "pp1", {"ties": [["mid.weight", "head.bias"]]}),
        *("MW-MODEL-024", ("mid.weight is (8, 8)", "head.bias is (8,)")),
    ),
    ("wrong_width", "pp1", {}, "MW-PIPELINE-031", ("middle", "embedding", "(1, 6, 8)")),
    ("wrong_width", "pp2", {}, "MW-PIPELINE-031", ("middle", "embedding", "(1, 6, 8)")),
    ("flat_logits", "pp1", {}, "MW-PIPELINE-035", ("layer 2", "(1, 17)", "(1, 6, classes)")),
    ("flat_logits", "dp2", {}, "MW-PIPELINE-035", ("layer 2", "(1, 17)", "(1, 6, classes)")),
    ("hands_on_a_number", "pp4", {}, "MW-PIPELINE-030", ("layer 1", "int")),
    ("softcap", "tp2", {}, "MW-RUN-003", ("'vocab'",)),
    (
        *(GPT2, "pp1", {**SIZES, "max_sequence_length": 4}),
        *("MW-PIPELINE-031", ("6 tokens", "4 positions", "max_sequence_length")),
    ),
    # options of the loss
    (GPT2, "pp1", {**SIZES, "label_smoothing": 1.0}, "MW-MODEL-027", ("label_smoothing = 1.0",)),
    (GPT2, "pp1", {**SIZES, "z_loss": -1e-4}, "MW-MODEL-027", ("model.z_loss = -0.0001",)),
    (GPT2, "pp1", {**SIZES, "z_loss": "small"}, "MW-MODEL-027", ("model.z_loss = 'small'",)),
    ("own_loss_and_z_loss", "pp1", {}, "MW-MODEL-027", ("model.z_loss = 0.0001", "model.loss")),
]


@pytest.mark.parametrize(("builder", "layout", "options", "code", "values"), REFUSED)
def test_a_model_is_refused(
    builder: str, layout: str, options: dict[str, Any], code: str, values: tuple[object, ...]
) -> None:
    """From the configuration alone, with no process but this one."""
    with raises(code, *values):
        draw_blueprint(config_of(builder, layout, **options))


def test_a_module_that_fails_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was missing is told, not that it is missing itself."""
    (tmp_path / "model_in_need.py").write_text("import package_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with raises("MW-CONFIG-008", "model_in_need", "package_that_nobody_has"):
        draw_blueprint(config_of("model_in_need:build"))


def test_a_model_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_right_here.py").write_text("def build():\n    return 41\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.path", [entry for entry in __import__("sys").path if entry not in ("", ".")]
    )
    assert (
        find_function("model_right_here:build", "model.builder", "a function", ModelError)() == 41
    )


def test_a_parameter_without_a_reset() -> None:
    """Its value is that of a seeded run of the builder, or of ``initialise``."""
    torch.manual_seed(3)
    built = builders.without_reset().get_parameter("1.factor")
    assert torch.equal(
        build_model("tests.support.builders:without_reset", {}, 3).initial("1.factor"), built
    )
    drawn = build_model("tests.support.builders:with_initialise", {}, 0).initial("1.factor")
    assert drawn.shape == (8,) and float(drawn.min()) >= 0.5


def test_parameters_are_on_meta_and_buffers_are_real() -> None:
    options = {
        "vocab_size": 17,
        "hidden_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_size": 16,
    }
    model = build_model("meshwright_models.llama:build", options, 0)
    assert all(parameter.is_meta for parameter in model.layers.parameters())
    buffers = dict(model.layers.named_buffers())
    assert buffers and not any(buffer.is_meta for buffer in buffers.values())
    assert not nn.Linear(2, 2).weight.is_meta, "modules made afterwards are as ever"


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    """Not on what was drawn before, nor on torch's generator; weights of equal shape differ."""
    first = build_model("tests.support.builders:plain", {}, 3)
    torch.manual_seed(99)
    second = build_model("tests.support.builders:plain", {}, 3)
    second.initial("3.bias")
    assert torch.equal(first.initial("1.weight"), second.initial("1.weight"))
    assert not torch.equal(first.initial("1.weight"), first.initial("3.weight"))
    assert not torch.equal(
        first.initial("1.weight"),
        build_model("tests.support.builders:plain", {}, 4).initial("1.weight"),
    )


def test_a_linear_s_weights_are_torch_s_own() -> None:
    """``reset_parameters`` of the module, not a scheme of ours: within U(-1/sqrt(I), 1/sqrt(I))."""
    drawn = build_model("tests.support.builders:plain", {"width": 64}, 0).initial("1.weight")
    assert 0.9 / 8 < float(drawn.abs().max()) <= 1 / 8
    bias = build_model("tests.support.builders:plain", {"width": 64}, 0).initial("1.bias")
    assert 0 < float(bias.abs().max()) <= 1 / 8


def test_dropouts_are_seeded_by_name() -> None:
    options = {"vocab_size": 17, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
    model = build_model("meshwright_models.gpt2:build", options, 0)
    dropouts = {
        name: m for name, m in model.layers.named_modules() if "dropout" in type(m).__name__.lower()
    }
    assert len(dropouts) == 7 and all(type(m) is SeededDropout for m in dropouts.values())
    assert all(m.name == name for name, m in dropouts.items() if isinstance(m, SeededDropout))


@pytest.mark.long
def test_a_plain_sequential_that_knows_nothing_of_us(pool: RankPool) -> None:
    """Trained by replicas and in a pipeline, through the door that ``meshwright verify`` uses."""
    layouts = [parse_layout(text) for text in ("dp2", "pp2", "dp2,pp3,gpipe")]
    config = config_of("plain")
    report = verify(config, layouts, pool, global_batch=4, steps=3, random_tokens=True)
    assert report.passed, report.table()
    assert (
        "all 3 layouts agree" in report.table()
        and "tests.support.builders:plain, 433 parameters" in report.title
    )


def test_a_layer_in_two_places_stands_in_both() -> None:
    model = build_model("tests.support.builders:repeated", {}, 0)
    assert list(dict(model.layers.named_children())) == [
        "embedding",
        "act",
        "hidden",
        "act_again",
        "head",
    ]
    tied = build_model("tests.support.builders:repeated_linear", {"declared": True}, 0).layers
    assert len(list(tied.named_children())) == 4 and tied[1].weight is tied[2].weight


@pytest.mark.long
def test_a_layer_in_two_places_is_right_in_every_layout(pool: RankPool) -> None:
    config = config_of("repeated_linear", declared=True)
    layouts = [parse_layout(text) for text in ("pp1", "pp2", "pp4", "dp2")]
    report = verify(config, layouts, pool, global_batch=4, steps=3, random_tokens=True)
    assert report.passed, report.table()


def test_a_dropout_in_two_places_is_drawn_for_each() -> None:
    layers = build_model("tests.support.builders:repeated", {"dropout": 0.5}, 0).layers
    assert (layers.act.name, layers.act_again.name) == ("act", "act_again")


def test_ties_that_share_a_name_are_one() -> None:
    ties = [["mid.weight", "emb.weight"], ["head.weight", "emb.weight"]]
    model = build_model("tests.support.builders:overlapping_ties", {"ties": ties}, 0)
    assert {model.canonical(name) for name in ("emb.weight", "mid.weight", "head.weight")} == {
        "emb.weight"
    }


@pytest.mark.parametrize("builder", ["zeroed_head", "values_by_data", "buffer_of_parameter"])
def test_values_that_the_builder_sets(builder: str) -> None:
    """Those of parameters, and of a buffer made out of one,
    are the builder's under ``torch.manual_seed(run.seed)``.
    """
    torch.manual_seed(3)
    plain: nn.Sequential = getattr(builders, builder)()
    model = build_model(f"tests.support.builders:{builder}", {}, 3)
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.initial(name), parameter), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.layers.get_buffer(name), buffer), name


def test_a_layer_with_a_state_of_its_own(pool: RankPool) -> None:
    """Kept where meta tensors do not show it: verify's probe sees it,
    and a run does in its first step.
    """
    config = config_of("with_layer", kind="running_mean")
    with raises("MW-VERIFY-008", "layer 1 (RunningMean)"):
        verify(
            config,
            [parse_layout("pp1")],
            pool,
            global_batch=4,
            steps=1,
            dtype="float32",
            random_tokens=True,
        )
    text = layout_config(config, parse_layout("pp1"), 4, "float32").model_dump_json()
    with raises("MW-PIPELINE-019", "layer 1", "mean"):
        pool.run(run_layout, 1, text, 1, True)


def test_a_layer_that_draws() -> None:
    with raises("MW-PIPELINE-024", "layer 1", "bernoulli_"):
        draw_blueprint(config_of("with_layer", kind="noise"))


@pytest.mark.parametrize("attribute", ["sharding_plan", "tied_weights"])
def test_an_attribute_of_the_wrong_type(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Sequential, attribute, "x", raising=False)
    with raises("MW-MODEL-019", f"model.{attribute}", "str"):
        draw_blueprint(config_of("plain"))
