"""The configurations of released models are read without a word of doubt, and give models of their very size."""

from __future__ import annotations

import pytest

from framework.config import RunConfig
from framework.huggingface.families import complete, family_of_model, family_of_type
from framework.huggingface.settings import Settings
from framework.model import build_model
from tests.huggingface.released import RELEASED


@pytest.mark.parametrize("name", RELEASED)
def test_they_are_read_whole_and_have_the_parameters_that_are_published(name: str) -> None:
    fields, parameters, expected = RELEASED[name]
    family = family_of_type(fields["model_type"], name)
    settings = Settings(dict(fields), name)
    options = family.read(settings)
    settings.end()
    assert settings.notes == []
    assert expected.items() <= options.items()
    model = build_model(family.builder, options, 0)
    shapes = {n: p.shape for n, p in model.layers.named_parameters() if model.canonical(n) == n}
    assert sum(shape.numel() for shape in shapes.values()) == parameters

    # each tensor has its names over there, and what is written says the same of the model
    rules = family.rules(complete(family.builder, options))
    assert {rule.ours for rule in rules} == shapes.keys()
    names = [theirs for rule in rules for theirs in rule.theirs]
    assert len(set(names)) == len(names)
    written = family.write(complete(family.builder, options))
    again = Settings(written, name)
    assert family.read(again) == options
    again.end()
    assert again.notes == []
    for field, value in written.items():
        if fields.get(field) is not None and field not in ("max_window_layers", "sliding_window"):
            assert fields[field] == value, field
    config = RunConfig.model_validate({"model": {"builder": family.builder, "options": options}})
    assert family_of_model(config, family.model_type) is family
