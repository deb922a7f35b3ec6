"""The plain run is the user's own module: nothing of it is lost,
and its dropout masks follow their definition.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.config import RunConfig
from meshwright.current import CurrentMicrobatch
from meshwright.errors import ModelError
from meshwright.model.build import PlainModel, build_model, requirements
from meshwright.pipeline.values import IGNORED_LABEL
from meshwright.seeding import SeededDropout, derive
from meshwright.verify import Layout, layout_config, parse_layout, run_reference, verify
from meshwright.verify import run as verify_run
from meshwright.verify.compare import relative_distances
from meshwright.verify.dropout import KeyedDropout, keep_mask, key_of
from meshwright.verify.initial import difference, initial_problems
from meshwright.verify.rank import open_verify_source
from meshwright.verify.reference import RunNumbers
from meshwright_launch.pool import RankPool
from tests.framework.verify import models
from tests.framework.verify.cases import config_of
from tests.support.errors import raises
from tests.support.layouts import samples
from tests.support.marks import mark_all_rows_but

LENGTH, VOCAB = 6, 13


def config(name: str, **options: Any) -> RunConfig:
    path = f"tests.framework.verify.models:{name}"
    return layout_config(
        config_of(path, {"vocab_size": VOCAB, **options}, LENGTH), Layout(), 4, "float64"
    )


def plain(name: str, steps: int = 2, **options: Any) -> RunNumbers:
    found = config(name, **options)
    return run_reference(found, open_verify_source(found, True), steps, torch.float64)


# ------------------------------------------------------------------------------------------------------------
# dropout


@pytest.mark.parametrize("shape", [(3, 5, 7), (3, 33), (3, 2, 4, 4)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_masks_by_the_published_definition_are_those_of_the_layouts(
    shape: tuple[int, ...], p: float
) -> None:
    samples = torch.tensor([0, 9, 2**40 + 3])
    layouts = SeededDropout(p, 1234, "block0.dropout", CurrentMicrobatch(samples)).mask(
        torch.Size(shape), torch.device("cpu")
    )
    assert torch.equal(keep_mask(p, key_of(1234, "block0.dropout", 0), samples, shape), layouts)


def test_keys_are_those_that_the_layouts_derive() -> None:
    assert key_of(7, "a.b", 0) == derive(7, "dropout", "a.b")
    assert key_of(7, "a.b", 3) == derive(7, "dropout", "a.b", 3)


def test_a_mask_is_known() -> None:
    """Worked out once by hand from the definition, in integers of Python."""
    kept = keep_mask(0.5, key_of(0, "x", 0), torch.tensor([0, 1]), (2, 8))
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    expected = [
        [
            (mix((at * golden + mix(sample * golden & mask ^ key_of(0, "x", 0))) & mask) >> 32)
            % 2**31
            >= 2**30
            for at in range(8)
        ]
        for sample in range(2)
    ]
    assert kept.tolist() == expected


def through(layers: nn.Sequential, x: Tensor) -> Tensor:
    dropout = KeyedDropout(layers, 5)
    with dropout.installed():
        dropout.begin(torch.arange(x.shape[0]))
        found: Tensor = layers(x)
        assert not dropout.has_foreign_draws()
    return found


def test_each_call_of_a_dropout_has_a_mask_of_its_own() -> None:
    twice = nn.Sequential(models.WithDropout(0.5, calls=2))
    twice[0].linear.requires_grad_(False).weight.zero_()
    twice[0].linear.bias.zero_()
    x = torch.ones(2, 5, 8)
    masks = [
        keep_mask(0.5, key_of(5, "0.dropout", call), torch.arange(2), (2, 5, 8)) for call in (0, 1)
    ]
    assert torch.equal(through(twice, x), 4.0 * (masks[0] & masks[1]))
    assert not torch.equal(*masks)


def test_a_dropout_in_two_places_has_two_names() -> None:
    shared = nn.Dropout(0.5)
    x = torch.ones(2, 64)
    masks = [keep_mask(0.5, key_of(5, name, 0), torch.arange(2), (2, 64)) for name in ("0", "2")]
    assert torch.equal(
        through(nn.Sequential(shared, nn.Identity(), shared), x), 4.0 * (masks[0] & masks[1])
    )


def test_a_dropout_in_place_changes_what_it_is_handed() -> None:
    x = torch.ones(2, 64)
    found = through(nn.Sequential(nn.Dropout(0.5, inplace=True)), x)
    assert torch.equal(found, x) and set(x.unique().tolist()) == {0.0, 2.0}


def test_recomputation_inside_the_model_draws_the_same_masks() -> None:
    """torch.utils.checkpoint around two calls of one dropout:
    the numbers of the same model without it.
    """
    ours, theirs = plain("checkpointed"), plain("dropout_twice")
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-13)
    assert all(
        torch.allclose(ours.weights[name], theirs.weights[name], rtol=1e-11)
        for name in theirs.weights
    )


def test_torch_is_afterwards_as_it_was() -> None:
    function, state = nn.functional.dropout, torch.get_rng_state()
    plain("dropout_twice", steps=1)
    assert nn.functional.dropout is function and torch.equal(torch.get_rng_state(), state)


# ----------------------------------------------------------------------------------------------------
# nothing is lost


def test_a_hook_of_a_gradient_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain run would show it; a run refuses the model before that, by name."""
    with raises("MW-MODEL-016", "1.linear.weight"):
        plain("hooked", steps=1)
    monkeypatch.setattr(requirements, "has_hooks", lambda parameter: False)
    hooked = plain("hooked", steps=1).gradients
    monkeypatch.setattr(Tensor, "register_hook", lambda tensor, hook: None)
    without = plain("hooked", steps=1).gradients
    assert torch.allclose(hooked["1.linear.weight"], 0.25 * without["1.linear.weight"], rtol=1e-12)
    assert torch.equal(hooked["1.linear.bias"], without["1.linear.bias"])


def test_a_declared_tie_is_one_parameter() -> None:
    found = plain("undeclared_sharing", steps=1)
    assert "2.weight" not in found.weights and "0.weight" in found.weights
    apart = plain("quiet_dropout", steps=1)
    assert "0.weight" in apart.weights and "3.weight" in apart.weights


def test_only_labels_that_count_are_in_the_loss() -> None:
    """Of an own loss that is not zero at the others, too."""
    config_ = config("own_loss")
    labels = samples(open_verify_source(config_, True), 1, 1).labels
    assert (labels == IGNORED_LABEL).any()
    model = models.around(VOCAB, models.Body())
    assert not hasattr(model, "loss")
    ours, theirs = plain("own_loss", steps=1), plain_of_cross_entropy()
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-13)


def plain_of_cross_entropy() -> RunNumbers:
    """Return the same model without a loss of its own."""
    config_ = config("own_loss")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            models, "own_loss", lambda vocab_size: models.around(vocab_size, models.Body())
        )
        return run_reference(config_, open_verify_source(config_, True), 1, torch.float64)


def test_a_model_that_does_not_run_plainly_says_so_in_one_message() -> None:
    with raises("MW-VERIFY-009", "tests.framework.verify.models:own_loss", "no such label"):
        plain("own_loss", breaks=True)


# ------------------------------------------------------------------------------------------------------
# initial values


def draws(make: Any, count: int = 5) -> list[Tensor]:
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        found.append(make())
    return found


KINDS: dict[str, Any] = {
    "normal": lambda n: torch.randn(n) * 0.02,
    "uniform": lambda n: torch.rand(n) - 0.5,
    "heavy": lambda n: torch.randn(n).exp(),
    "zeros": torch.zeros,
    "signs": lambda n: torch.randint(2, (n,)) * 2.0 - 1.0,
    "one number": lambda n: torch.randn(1).expand(n).clone(),
    "padding row": lambda n: torch.cat([torch.zeros(n // 4), torch.randn(n - n // 4)]),
    "orthogonal": lambda n: nn.init.orthogonal_(torch.empty(n, n)),
}


@mark_all_rows_but("all_layouts", "padding row")
@pytest.mark.parametrize("kind", KINDS)
def test_no_false_alarm(kind: str) -> None:
    """Among 600 parameters of all sizes."""
    for seed in range(100, 250):
        for size in (1, 3, 16, 200) if kind != "orthogonal" else (4, 16):
            torch.manual_seed(seed)
            found = KINDS[kind](size)
            torch.manual_seed(seed + 1000)
            wanted = [KINDS[kind](size) for _ in range(20 if kind == "signs" else 5)]
            assert difference(found, wanted) == "", (kind, size, seed)


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        (lambda: torch.randn(8, 8) * 0.143, lambda: torch.randn(8, 8) * 0.02, "std 0.1"),
        (lambda: torch.randn(200) + 1.0, lambda: torch.randn(200), "mean"),
        (lambda: torch.zeros(64), lambda: torch.randn(64) * 0.02, "std 0"),
        (
            lambda: torch.full((3,), 0.99),
            lambda: torch.ones(3),
            "3 of 3 elements that the builder makes constant",
        ),
        (
            lambda: torch.randn(320),
            lambda: torch.cat([torch.zeros(8), torch.randn(312)]),
            "8 of 320 elements",
        ),
        (lambda: torch.randn(3, 8), lambda: torch.randn(8, 3), "has shape"),
    ],
)
def test_other_values_are_seen(found: Any, wanted: Any, said: str) -> None:
    torch.manual_seed(99)
    assert said in difference(found(), draws(wanted))


def test_a_value_that_the_rebuild_loses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config_ = config("quiet_dropout")
    model = build_model(config_.model.builder, config_.model.options, config_.run.seed)
    assert initial_problems(config_.model, config_.run, model) == []
    initial = PlainModel.initial
    monkeypatch.setattr(
        PlainModel,
        "initial",
        lambda model, name: initial(model, name) * (7.0 if name == "1.linear.weight" else 1.0),
    )
    (problem,) = initial_problems(config_.model, config_.run, model)
    assert (
        "initial value of 1.linear.weight: drawn with mean" in problem
        and "untouched module" in problem
    )


def test_values_written_by_data_are_right_or_named(pool: RankPool) -> None:
    config_ = config("written_by_data")
    try:
        report = verify(
            config_, [parse_layout("pp1")], pool, global_batch=4, steps=1, random_tokens=True
        )
    except ModelError as error:
        assert "1.linear.weight" in str(error) or "3.weight" in str(error)
        return
    model = build_model(config_.model.builder, config_.model.options, config_.run.seed)
    is_right = float(model.initial("1.linear.weight").std()) < 0.03
    assert report.passed == is_right
    assert is_right or any(
        "initial value of 1.linear.weight" in problem for problem in report.problems
    )


# -------------------------------------------------------------------------------------------------
# rows without numbers


@pytest.mark.long
def test_a_layout_that_fails_is_a_row_and_the_others_are_run(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raising, refused, dead and silent ranks; the pool lives on."""
    monkeypatch.setattr(verify_run, "MIN_TIMEOUT_S", 4.0)
    layouts = [
        parse_layout(text)
        for text in ("pp1", "dp2", "tp2", "dp3", "dp4", "pp5", "dp12", "pp1,mbs2")
    ]
    verification = verify_run.Verification(
        config("failing"), global_batch=12, steps=1, random_tokens=True
    )
    rows = [verification.compare_layout(layout, pool, is_repeated=False) for layout in layouts]
    report = verification.report(rows)
    said = [row.failure for row in report.rows]
    assert said[0] == said[7] == "" and report.rows[0].passed and report.rows[7].passed
    assert (
        said[1].startswith("cannot run: rank ") and "RuntimeError: two are too many (at " in said[1]
    )
    assert "models.py:" in said[1]
    assert said[2].startswith("refused: ") and "sharding_plan" in said[2]
    assert said[3].startswith("cannot run: rank ") and "died of SIGKILL" in said[3]
    # 4 s, or more on a slow machine
    assert re.match(r"cannot run: after [\d.]+ s no result from ranks", said[4])
    assert said[5].startswith("refused: ") and "5 stages" in said[5]
    table = report.table()
    assert (
        not report.passed
        and "6 of 8 layouts could not be run" in table
        and table.count("same numbers") == 2
    )


def test_distances_of_nothing() -> None:
    """Parameters without elements, and gradients of zeros, are as far as they differ."""
    empty, zeros, ones = torch.empty(0, 3), torch.zeros(2), torch.ones(2)
    assert relative_distances({"a": empty, "b": ones}, {"a": empty, "b": ones}) == {
        "a": 0.0,
        "b": 0.0,
    }
    assert relative_distances({"a": empty}, {"a": empty}) == {"a": 0.0}
    assert relative_distances({"a": zeros}, {"a": zeros}) == {"a": 0.0}
    assert relative_distances({"a": ones}, {"a": zeros}) == {"a": math.inf}
