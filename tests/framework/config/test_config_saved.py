"""A configuration written down reads back as an equal object, as JSON and as TOML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.config import (
    Batch,
    Data,
    Model,
    Optimizer,
    Parallel,
    Pipeline,
    Run,
    RunConfig,
    dump,
    load,
    parse,
    resolve,
    to_toml,
)
from meshwright.config.sources import find_secrets
from tests.support.errors import raises

# NUL: MW-CONFIG-019
words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=10)
finite = st.floats(allow_nan=False, allow_infinity=False)
options: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    words,
    st.recursive(
        st.booleans() | st.integers() | finite | words,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=4,
).filter(
    lambda found: not list(find_secrets(found, ("model", "options")))
)  # hypothesis takes words from the source too
configs = st.builds(
    RunConfig,
    run=st.builds(
        Run,
        name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
        seed=st.integers(0, 2**63 - 1),
    ),
    model=st.builds(Model, options=options),
    data=st.builds(Data, train=words.filter(bool), tokenizer=st.none() | words),
    batch=st.builds(
        Batch, micro_batch_size=st.integers(1, 8), chunks=st.integers(1, 8), global_batch=st.none()
    ),
    parallel=st.builds(
        Parallel,
        dp=st.sampled_from(["auto", -1]),
        pp=st.integers(2, 2),
        zero=st.sampled_from([0, 1]),
    ),
    pipeline=st.builds(Pipeline, balance=st.sampled_from(["time", "layers", [1, 2]])),
    optimizer=st.builds(
        Optimizer,
        learning_rate=st.floats(1e-300, 1e300),
        betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    ),
)
quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.long
@given(configs)
@quick
def test_json_there_and_back(config: RunConfig) -> None:
    assert parse(dump(config)) == config
    resolved = resolve(config, 4)
    assert parse(dump(resolved)) == resolved


@pytest.mark.long
@given(configs)
@quick
def test_toml_there_and_back(tmp_path: Path, config: RunConfig) -> None:
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config), newline="")
    assert load(path) == config


def test_a_resolved_configuration_is_a_file_too(tmp_path: Path) -> None:
    config = RunConfig(
        data=Data(train="x"), batch=Batch(micro_batch_size=4, chunks=2), parallel=Parallel(tp=2)
    )
    resolved = resolve(config, 8)
    (tmp_path / "run.toml").write_text(to_toml(resolved))
    assert load(tmp_path / "run.toml") == resolved


def test_json_holds_every_key() -> None:
    document = json.loads(dump(RunConfig(data=Data(train="x"))))
    for name, field in RunConfig.model_fields.items():
        assert set(document[name]) == set(field.annotation.model_fields)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "code", "value"),
    [
        ("{", "MW-CONFIG-024", "resolved.json"),
        ("[]", "MW-CONFIG-025", "[]"),
        ('{"data": {"train": "x"}, "parallel": {"tp": "2"}}', "MW-CONFIG-020", 'parallel.tp = "2"'),
        ('{"data": {"train": "x", "shape": 1}}', "MW-CONFIG-013", "data.shape = 1"),
        ('{"data": 3}', "MW-CONFIG-012", "data = 3"),
        ('{"data": {"train": "x"}, "train": {"steps": null}}', "MW-CONFIG-020", "train.steps"),
    ],
)
def test_damaged_json(text: str, code: str, value: str) -> None:
    with raises(code, "resolved.json", value):
        parse(text, "resolved.json")


@pytest.mark.parametrize("value", [[1, None], [[None]], {"inner": [{"deep": [None]}]}])
def test_a_null_inside_a_list_of_options_is_refused(value: object) -> None:
    """TOML has no null, so config.toml could not be read back."""
    config = RunConfig(data=Data(train="x"), model=Model(options={"sizes": value}))
    for read_back in (to_toml, lambda each: parse(dump(each))):
        with raises("MW-CONFIG-056", "model.options.sizes"):
            read_back(config)


def test_an_unset_option_is_left_out_of_toml(tmp_path: Path) -> None:
    config = RunConfig(
        data=Data(train="x"),
        batch=Batch(micro_batch_size=1, chunks=1),
        model=Model(options={"a": None, "b": {"c": None, "d": 1}, "e": [{"f": None}]}),
    )
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert load(tmp_path / "run.toml").model.options == {"b": {"d": 1}, "e": [{}]}
