"""First values that a builder gives: drawn anew in each process as the builder wants them, or refused by name."""

from __future__ import annotations

import pytest

from meshwright.config import RunConfig
from meshwright.errors import ModelError
from meshwright.launch.pool import RankPool
from meshwright.model.build import build_model
from meshwright.tools.verify import parse_layout
from meshwright.tools.verify.initial import initial_problems
from tests.tools.verify.cases import References, config_of, prove

SET_ELSEWHERE = r"the value of parameter {} is set outside of {}\.reset_parameters\(\), and would be lost"


def model(how: str) -> RunConfig:
    return config_of("tests.support.arguments:build", {"how": how}, 6)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("another tensor", SET_ELSEWHERE.format("1.linear.weight", "Linear")),
        ("another tensor, drawn later", SET_ELSEWHERE.format("1.linear.weight", "Linear")),
        ("pretrained", SET_ELSEWHERE.format("0.weight", "Embedding")),
        ("orthogonal", SET_ELSEWHERE.format("1.linear.weight", "Linear")),
        ("xavier", SET_ELSEWHERE.format("1.linear.weight", "Linear")),
        ("scaled", SET_ELSEWHERE.format("1.linear.weight", "Linear")),
        ("not ones", SET_ELSEWHERE.format("1.weight", "Scale")),
        ("left out", r"Scaled\.reset_parameters\(\) gives parameter 1.scale no value"),
        ("own class", "parameter 1.linear.bias is a Own, a class of its own"),
        ("two dtypes", "parameter 1.linear.weight is float64, and 0.weight is float32"),
        ("parametrized", "1.linear.weight is parametrized .* initialise"),
        ("orthogonal parametrization", "torch.nn.utils looks at the values of a weight"),
        ("old weight norm", "1.linear.weight is computed from parameters while the model is built"),
        ("spectral norm", "buffer 1.linear.weight_u is made out of a parameter"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_values_that_would_be_lost(how: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model("tests.support.arguments:build", {"how": how}, 0)


@pytest.mark.parametrize("how", ["drawn again", "orthogonal by reset", "ones", "attention", "encoder", "weight norm"])
def test_values_of_the_builder(how: str) -> None:
    """Drawn by name in the builder's distribution, biases that an outer reset zeroes included."""
    config = model(how)
    found = build_model("tests.support.arguments:build", {"how": how}, 0)
    assert initial_problems(config, found) == []
    if how == "attention":
        assert not found.initial("1.attention.out_proj.bias").any()
    if how == "orthogonal by reset":
        weight = found.initial("1.linear.weight")
        assert (weight @ weight.T - weight.new_ones(8).diag()).abs().max() < 1e-5


@pytest.fixture(scope="module")
def references() -> References:
    return References()


@pytest.mark.parametrize("how", ["encoder", "weight norm", "orthogonal by reset"])
def test_layouts_agree(how: str, pool: RankPool, references: References) -> None:
    row = prove(model(how), parse_layout("dp2,pp2,zb_h1"), pool, references, global_batch=4, steps=2, twice=False)
    assert row.passed, "\n".join(row.problems)
