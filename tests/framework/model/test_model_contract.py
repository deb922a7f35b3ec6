"""What a user's model has to be, and what is said when it is not: value, place and next move, before any rank."""

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
from meshwright_launch.pool import RankError, RankPool
from tests.support import builders
from tests.support.errors import has_code


def config_of(builder: str, layout: str = "pp1", **options: Any) -> RunConfig:
    """A resolved config for a model of ``tests/support/builders.py``, or one named in full."""
    path = builder if ":" in builder else f"tests.support.builders:{builder}"
    config = RunConfig.model_validate(
        {"model": {"builder": path, "options": options}, "data": {"train": "random", "sequence_length": 6}}
    )
    return layout_config(config, parse_layout(layout), 4, "float32")


def said(builder: str, layout: str = "pp1", **options: Any) -> str:
    """The one message with which a model is refused, from config alone, with no process but this one."""
    with pytest.raises(ModelError) as raised:
        draw_blueprint(config_of(builder, layout, **options))
    assert raised.value.exit_code == 2
    return str(raised.value)


# --------------------------------------------------------------------------------------------------------- the builder


def test_no_such_module() -> None:
    message = said("no_such_package.models:build")
    assert "model.builder = 'no_such_package.models:build': cannot import no_such_package.models" in message
    assert "Run from the directory that holds it, or install it" in message


def test_a_module_that_fails_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was missing is told, not that it is missing itself."""
    (tmp_path / "model_in_need.py").write_text("import package_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = said("model_in_need:build")
    assert "cannot import model_in_need" in message and "package_that_nobody_has" in message


def test_a_model_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_right_here.py").write_text("def build():\n    return 41\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry not in ("", ".")])
    assert find_function("model_right_here:build", "model.builder", "a function", ModelError)() == 41


def test_no_such_function() -> None:
    message = said("plane")
    assert "model.builder = 'tests.support.builders:plane': tests.support.builders has no function plane" in message
    assert "did you mean tests.support.builders:plain?" in message


def test_something_that_is_no_function() -> None:
    assert "tests.support.builders has no function not_callable" in said("not_callable")


def test_an_unknown_option() -> None:
    message = said("plain", widht=8)
    assert "model.options.widht: tests.support.builders:plain does not take it; did you mean width?" in message


def test_text_for_a_flag_is_refused() -> None:
    """``--model.options.tied=no`` is text, which Python takes for true."""
    options = {"vocab_size": 17, "hidden_size": 8, "num_heads": 2, "num_layers": 1, "max_sequence_length": 8}
    assert "model.options.tied = 'no': give true or false" in said("meshwright_models.gpt2:build", **options, tied="no")


def test_an_option_like_no_other() -> None:
    assert (
        "model.options.zzz: tests.support.builders:plain does not take it; it takes vocab_size, width, depth"
        in said("plain", zzz=1)
    )


def test_a_missing_option() -> None:
    message = said("meshwright_models.llama:build", vocab_size=17, num_heads=2, num_kv_heads=2, num_layers=1)
    assert "model.options.hidden_size is missing: meshwright_models.llama:build needs it" in message
    assert "model.options.ffn_size is missing" in message, "all problems at once"


def test_missing_options_are_told_beside_unknown_ones() -> None:
    message = said("meshwright_models.llama:build", hiden_size=8, ffn_size=8, num_heads=2, num_kv_heads=2, num_layers=1)
    assert "model.options.hiden_size" in message and "did you mean hidden_size?" in message
    assert "model.options.vocab_size is missing" in message and "model.options.hidden_size is missing" in message


def test_a_missing_option_of_a_builder_that_takes_any() -> None:
    """``**more`` takes what we do not know, but what it lacks it lacks."""
    message = said("needs_much", vocab_size=17, colour="red")
    assert "width" in message and "tests.support.builders:needs_much" in message


def test_a_builder_that_refuses_its_options() -> None:
    message = said("fails", vocab_size=13)
    assert "tests.support.builders:fails with model.options {'vocab_size': 13} failed" in message
    assert "ValueError: vocab_size=13 is unlucky" in message


def test_an_option_of_the_wrong_kind() -> None:
    message = said("plain", width="wide")
    assert "tests.support.builders:plain with model.options {'width': 'wide'} failed at " in message
    assert "builders.py:" in message and ": TypeError: " in message


# ------------------------------------------------------------------------------------------------------------ the model


def test_no_sequential() -> None:
    message = said("not_a_sequential")
    assert "tests.support.builders:not_a_sequential returned a Linear" in message
    assert "Return nn.Sequential(embedding, block, ..., head)" in message


def test_an_empty_one() -> None:
    assert "tests.support.builders:empty returned an empty nn.Sequential: there is nothing to train" in said("empty")


def test_one_without_parameters() -> None:
    assert "tests.support.builders:without_parameters returned a model without parameters" in said("without_parameters")


def test_an_undeclared_tie() -> None:
    message = said("undeclared_tie")
    assert "embedding.weight and head.weight are one parameter, but tied_weights does not say so" in message
    assert "Set model.tied_weights = [('embedding.weight', 'head.weight')]" in message


def test_a_tie_to_no_parameter() -> None:
    message = said("tie_to_nothing")
    assert "tied_weights names 'haed.weight', which is no parameter of the model; did you mean head.weight?" in message


def test_a_parameter_without_a_reset() -> None:
    """Its value is that of a seeded run of the builder, or of ``initialise``."""
    torch.manual_seed(3)
    built = builders.without_reset().get_parameter("1.factor")
    assert torch.equal(build_model("tests.support.builders:without_reset", {}, 3).initial("1.factor"), built)
    drawn = build_model("tests.support.builders:with_initialise", {}, 0).initial("1.factor")
    assert drawn.shape == (8,) and float(drawn.min()) >= 0.5


@pytest.mark.parametrize("layout", ["pp1", "pp2"])
def test_a_layer_that_does_not_take_what_the_one_before_hands_on(layout: str) -> None:
    message = said("wrong_width", layout)
    assert "for one micro-batch" in message
    assert "middle" in message and "embedding" in message, "the two layers are named"


@pytest.mark.parametrize("layout", ["pp1", "dp2"])
def test_logits_of_the_wrong_shape(layout: str) -> None:
    message = said("flat_logits", layout)
    assert "layer 2 is the last and returns (1, 17) for labels of shape (1, 6)" in message
    assert "it must return logits of shape (1, 6, classes)" in message


@pytest.mark.parametrize("option", [{"label_smoothing": 1.0}, {"z_loss": -1e-4}, {"z_loss": "small"}])
def test_options_of_the_loss_that_mean_nothing(option: dict[str, Any]) -> None:
    sizes = {"vocab_size": 17, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "max_sequence_length": 6}
    message = said("meshwright_models.gpt2:build", **sizes, **option)
    ((name, value),) = option.items()
    assert f"model.{name} = {value!r}: it is a number, at least 0" in message


def test_options_of_the_loss_beside_a_loss_of_its_own() -> None:
    message = said("own_loss_and_z_loss")
    assert "model.z_loss = 0.0001" in message and "a model with its own model.loss adds it there" in message


def test_a_value_that_is_no_tensor() -> None:
    message = said("hands_on_a_number", "pp4")
    assert "returns a int: layers pass tensors, or tuples and dicts of tensors" in message


def test_more_tokens_than_positions() -> None:
    message = said(
        "meshwright_models.gpt2:build", vocab_size=17, hidden_size=8, num_layers=1, num_heads=2, max_sequence_length=4
    )
    assert "6 tokens" in message and "4 positions" in message and "max_sequence_length" in message


# ------------------------------------------------------------------------------------------------------ what is built


def test_parameters_are_on_meta_and_buffers_are_real() -> None:
    options = {"vocab_size": 17, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 16}
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
        first.initial("1.weight"), build_model("tests.support.builders:plain", {}, 4).initial("1.weight")
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
    dropouts = {name: m for name, m in model.layers.named_modules() if "dropout" in type(m).__name__.lower()}
    assert len(dropouts) == 7 and all(type(m) is SeededDropout for m in dropouts.values())
    assert all(m.name == name for name, m in dropouts.items() if isinstance(m, SeededDropout))


# ------------------------------------------------------------------------------------------------------------- it works


def test_a_plain_sequential_that_knows_nothing_of_us(pool: RankPool) -> None:
    """Trained by replicas and in a pipeline, through the door that ``meshwright verify`` uses."""
    layouts = [parse_layout(text) for text in ("dp2", "pp2", "dp2,pp3,gpipe")]
    config = config_of("plain")
    report = verify(config, layouts, pool, global_batch=4, steps=3, random_tokens=True)
    assert report.passed, report.table()
    assert "all 3 layouts agree" in report.table() and "tests.support.builders:plain, 433 parameters" in report.title


# ------------------------------------------------------------------------------- what would go wrong without a word


def test_a_layer_in_two_places_stands_in_both() -> None:
    model = build_model("tests.support.builders:repeated", {}, 0)
    assert list(dict(model.layers.named_children())) == ["embedding", "act", "hidden", "act_again", "head"]
    assert "1.weight and 2.weight are one parameter, but tied_weights does not say so" in said("repeated_linear")
    tied = build_model("tests.support.builders:repeated_linear", {"declared": True}, 0).layers
    assert len(list(tied.named_children())) == 4 and tied[1].weight is tied[2].weight


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
    assert {model.canonical(name) for name in ("emb.weight", "mid.weight", "head.weight")} == {"emb.weight"}
    message = said("overlapping_ties", ties=[["mid.weight", "head.bias"]])
    assert "tied weights are one weight and have one shape, but mid.weight is (8, 8), head.bias is (8,)" in message


@pytest.mark.parametrize("builder", ["zeroed_head", "values_by_data", "buffer_of_parameter"])
def test_values_that_the_builder_sets(builder: str) -> None:
    """Those of parameters, and of a buffer made out of one, are the builder's under ``torch.manual_seed(run.seed)``."""
    torch.manual_seed(3)
    plain: nn.Sequential = getattr(builders, builder)()
    model = build_model(f"tests.support.builders:{builder}", {}, 3)
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.initial(name), parameter), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.layers.get_buffer(name), buffer), name


def test_a_layer_with_a_state_of_its_own(pool: RankPool) -> None:
    """Kept where meta tensors do not show it: verify's probe sees it, and a run does in its first step."""
    config = config_of("with_layer", kind="running_mean")
    with pytest.raises(
        ModelError,
        match=r"layer 1 \(RunningMean\) returns other numbers for the same samples",
        check=has_code("MW-VERIFY-008"),
    ):
        verify(config, [parse_layout("pp1")], pool, global_batch=4, steps=1, dtype="float32", random_tokens=True)
    text = layout_config(config, parse_layout("pp1"), 4, "float32").model_dump_json()
    with pytest.raises(RankError, match="layer 1 changes its buffer mean"):
        pool.run(run_layout, 1, text, 1, True)


def test_a_layer_that_draws() -> None:
    with pytest.raises(
        ModelError,
        match=r"layer 1 .* draws from torch's random generator \(bernoulli_\) in forward",
        check=has_code("MW-PIPELINE-024"),
    ):
        draw_blueprint(config_of("with_layer", kind="dropout"))


def test_a_layer_behind_the_split_vocabulary() -> None:
    draw_blueprint(config_of("softcap"))
    assert "it comes after the linear sharded as 'vocab' and sees a part of the vocabulary" in said("softcap", "tp2")


@pytest.mark.parametrize("attribute", ["sharding_plan", "tied_weights"])
def test_an_attribute_of_the_wrong_type(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Sequential, attribute, "x", raising=False)
    assert f"model.{attribute} is a str; write it as " in said("plain")
