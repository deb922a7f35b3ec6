"""First values that a builder gives: drawn by name, or taken from a seeded run of the builder,
or refused by name.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.errors import ModelError
from meshwright.mesh.comm import Group
from meshwright.model import builder_run
from meshwright.model.build import PlainModel, build_model, materialise
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.initial import initial_problems
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import References, assert_agrees, config_of
from tests.support import arguments, own_values
from tests.support.errors import raises
from tests.support.marks import long_row

OWN = "tests.support.own_values:build"


def model(how: str) -> RunConfig:
    return config_of("tests.support.arguments:build", {"how": how}, 6)


@pytest.mark.parametrize(
    ("how", "code", "values"),
    [
        ("own class", "MW-MODEL-014", ("1.linear.bias", "Own")),
        ("two dtypes", "MW-MODEL-015", ("1.linear.weight is float64", "0.weight is float32")),
        ("old weight norm", "MW-MODEL-017", ("1.linear.weight",)),
        ("spectral norm", "MW-MODEL-017", ("1.linear.weight",)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_parameters_that_no_layout_can_hold(how: str, code: str, values: tuple[str, ...]) -> None:
    with raises(code, *values):
        build_model("tests.support.arguments:build", {"how": how}, 0)


@pytest.mark.parametrize(
    "how", ["drawn again", "orthogonal by reset", "ones", "attention", "encoder", "weight norm"]
)
def test_values_of_resets(how: str) -> None:
    """Drawn by name in the builder's distribution, biases that an outer reset zeroes included."""
    config = model(how)
    found = build_model("tests.support.arguments:build", {"how": how}, 0)
    assert (found.builder_run is None) == (how != "weight norm")
    assert initial_problems(config.model, config.run, found) == []
    if how == "attention":
        assert not found.initial("1.attention.out_proj.bias").any()
    if how == "orthogonal by reset":
        weight = found.initial("1.linear.weight")
        assert (weight @ weight.T - weight.new_ones(8).diag()).abs().max() < 1e-5


@pytest.mark.parametrize(
    "how", [long_row("encoder"), "weight norm", long_row("orthogonal by reset")]
)
def test_layouts_agree(how: str, pool: RankPool, references: References) -> None:
    assert_agrees(model(how), "dp2,pp2,zb_h1", pool, references, global_batch=4, steps=2)


# ----------------------------------------------------------------------------------------- values
# set by the builder

SET_BY_THE_BUILDER = [
    "large parameter in a loop",
    *(
        "nanogpt",
        "vit",
        "masked",
        "copied",
        "from another",
        "pretrained",
        "xavier",
        "orthogonal",
        "data",
        "normalised",
    ),
    *("numpy", "seeded", "parametrized", "filled", "infinite"),
    *(
        "truncated",
        "sparse",
        "identity",
        "dirac",
        "at once",
        "late",
        "cloned",
        "copies of a reset",
        "copies of own",
    ),
]
SET_BY_ARGUMENTS = [
    "another tensor",
    "another tensor, drawn later",
    "pretrained",
    "orthogonal",
    "xavier",
    "scaled",
]
SET_BY_ARGUMENTS += ["not ones", "left out", "parametrized", "orthogonal parametrization"]


def own(how: str, seed: int = 7) -> PlainModel:
    return build_model(OWN, {"how": how}, seed)


def in_plain_torch(build: Callable[[], nn.Sequential], seed: int) -> nn.Sequential:
    """Build a model as its author would, with every generator seeded by its own function."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return build()


@pytest.mark.parametrize(
    ("path", "build", "how"),
    [
        *[(OWN, own_values.build, how) for how in SET_BY_THE_BUILDER],
        *[("tests.support.arguments:build", arguments.build, how) for how in SET_BY_ARGUMENTS],
    ],
)
def test_values_are_those_of_plain_torch(
    path: str, build: Callable[[str], nn.Sequential], how: str
) -> None:
    """Parameters and buffers are bit-equal to ``torch.manual_seed(seed); build()``,
    for any seed.
    """
    for seed in (7, 8):
        model, plain = (
            build_model(path, {"how": how}, seed),
            in_plain_torch(partial(build, how), seed),
        )
        for name, parameter in plain.named_parameters(remove_duplicate=False):
            assert torch.equal(
                model.initial(name).nan_to_num(3.0), parameter.detach().nan_to_num(3.0)
            ), name
        for name, buffer in plain.named_buffers():
            assert torch.equal(model.layers.get_buffer(name), buffer), name
        assert model.builder_run is not None
        model.release()


def test_a_parameter_registered_twice_is_a_tie() -> None:
    """It stays one parameter, of which a tie has to be declared, as in plain torch."""
    with raises("MW-MODEL-025", "wte.weight", "head.weight"):
        own("twice registered")


def test_a_builder_leaves_the_generators_as_they_were() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    model = own("numpy")
    model.initial("wte.weight")
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])


def test_initial_weights_do_not_share_memory_with_the_run() -> None:
    """Training one in place changes no other: a stage takes its tensors as they are."""
    model = own("nanogpt")
    model.initial("wte.weight").zero_()
    assert model.initial("wte.weight").any()


@pytest.mark.parametrize("how", ["generator", "time", "urandom"])
def test_values_that_no_seed_repeats(how: str) -> None:
    with raises("MW-MODEL-049", "h0.c_fc.weight"):
        own(how)


def test_the_order_of_draws_is_compared_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two orders, as of a set in two processes,
    give the blueprints of two ranks different digests.
    """
    monkeypatch.setattr(own_values, "ORDER", ["h0", "h1"])
    config = layout_config(
        config_of(OWN, {"how": "in order"}, 6), parse_layout("pp1"), 4, "float32"
    )
    digests = [draw_blueprint(config).digest() for _ in range(2)]
    own_values.ORDER.reverse()
    assert digests[0] == digests[1] != draw_blueprint(config).digest()


def test_a_model_too_large_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Described without its values; their run is refused with a way out.
    Values by name have no limit.
    """
    monkeypatch.setattr(builder_run, "MAX_NUMEL", 1000)
    model = own("nanogpt")
    with raises("MW-MODEL-050"):
        model.initial("wte.weight")
    assert own("buffer").initial("wte.weight").any()


def test_a_model_initialised_on_meta() -> None:
    with raises("MW-MODEL-010", "h0.c_fc.weight"):
        own("meta")


@pytest.mark.parametrize("tp", [1, 2])
def test_slices_are_of_the_whole_values(tp: int) -> None:
    """A stage of a tp rank holds its part of what plain torch has."""
    plain = in_plain_torch(own_values.nanogpt, 0).get_parameter("h0.c_fc.weight").detach()
    for rank in range(tp):
        config = config_of(OWN, {"how": "nanogpt"}, 6).replace(run={"seed": 0})
        config = layout_config(config, parse_layout(f"tp{tp}"), 4, "float32")
        blueprint = draw_blueprint(config, Group("tp", tuple(range(tp)), rank))
        arguments = blueprint.stage_layers(0), blueprint.model, blueprint.infos, torch.float32
        stage = materialise(*arguments, torch.device("cpu"))
        rows = slice(rank * len(plain) // tp, (rank + 1) * len(plain) // tp)
        assert torch.equal(stage.get_parameter("h0.c_fc.weight"), plain[rows])


@pytest.mark.parametrize("how", ["nanogpt", "vit", "masked", "data", "copied", "rest of own"])
def test_layouts_agree_on_the_builder_s_values(
    how: str, pool: RankPool, references: References
) -> None:
    config = config_of(OWN, {"how": how}, 6)
    assert (
        initial_problems(config.model, config.run, build_model(OWN, {"how": how}, config.run.seed))
        == []
    )
    assert_agrees(config, "dp2,pp2,zb_h1", pool, references, global_batch=4, steps=2)


@pytest.mark.parametrize(
    "layout", ["tp2,sequence", "dp2,zero3", "tp2,dp2,zero3", "pp2,interleaved_1f1b"]
)
def test_every_axis_takes_its_part_of_the_builder_s_values(
    layout: str, pool: RankPool, references: References
) -> None:
    config = config_of(OWN, {"how": "nanogpt"}, 6)
    assert_agrees(config, layout, pool, references, global_batch=4, steps=2)


def test_all_problems_of_a_model_in_one_start() -> None:
    """First values, undeclared ties and draws in forward, each draw with its file,
    line and call.
    """
    config = layout_config(
        config_of(OWN, {"how": "many problems"}, 6), parse_layout("pp1"), 4, "float32"
    )
    with pytest.raises(ModelError) as caught:
        draw_blueprint(config)
    text = str(caught.value)
    assert [problem.code for problem in caught.value.problems] == [
        *("MW-MODEL-025", "MW-MODEL-048"),
        *["MW-PIPELINE-024"] * 4,
    ]
    assert "nothing gives parameters h0.gain, h1.gain, h2.gain" in text
    for call in (
        "x = F.rrelu(x * self.gain, training=True)",
        "x = x * torch.bernoulli(",
        "noise = torch.rand_like(x)",
    ):
        assert re.search(
            rf"layer h0 \(Drawing\) draws .*own_values\.py:\d+, `{re.escape(call)}`.*layers h1, h2",
            text,
        )
    assert re.search(r"layer h3 \(RReLU\) draws .*torch/nn/.*\.py:\d+, `", text)


# -------------------------------------------------------------------------------- model.initialise
# that fills a part


def test_initialise_that_fills_matrices_only() -> None:
    """Other tensors have what their modules' resets give, by name;
    drawn as without the function.
    """
    model, plain = own("rest"), own("buffer")
    for name in ("h1.c_fc.bias", "h1.c_proj.bias", "h1.ln.weight", "h1.ln.bias"):
        assert torch.equal(model.initial(name), plain.initial(name)), name
    assert float(model.initial("h1.c_fc.weight").std()) == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize(
    ("how", "name"), [("rest of own", "h0.c_fc.bias"), ("rest of raw", "h0.gain")]
)
def test_initialise_leaves_what_the_builder_has_set(how: str, name: str) -> None:
    value = own(how).initial(name)
    assert torch.equal(
        value, torch.zeros_like(value) if name.endswith("bias") else torch.full_like(value, 2.0)
    )


def test_initialise_may_change_a_value_in_place() -> None:
    """It reads what torch would hold there, and draws the same numbers as on an empty tensor."""
    model, plain = own("halved"), own("buffer")
    for name in ("h1.c_fc.weight", "h1.ln.weight"):
        assert torch.equal(model.initial(name), plain.initial(name) / 2), name


def test_initialise_may_write_through_numpy() -> None:
    assert torch.equal(own("by array").initial("h0.gain"), torch.full((own_values.D,), 0.25))


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("empty", "parameters h0.gain, h1.gain"),
        ("rest of empty", "parameters h0.gain, h1.gain"),
        ("partly empty", "parameter h0.gain"),
        ("empty buffer", "buffers h0.shift, h1.shift"),
        ("partly empty buffer", "buffer h0.shift"),
        ("partly reset", "parameter h0.gain"),
        ("large parameter", "parameter h0.gain"),
        ("large parameter, read", "parameter h0.gain"),
        ("resized parameter", "parameter h0.gain"),
        ("empty, read", "parameters h0.gain, h1.gain"),
        ("rest of empty, read", "parameters h0.gain, h1.gain"),
        ("partly empty buffer, read", "buffer h0.shift"),
        ("rest of empty buffer, read", "buffer h0.shift"),
    ],
)
def test_uninitialised_memory_is_refused(how: str, value: str) -> None:
    """All tensors are named, before any rank starts where that takes no values."""
    with raises("MW-MODEL-048", value):
        own(how).initial("h0.gain")


@pytest.mark.parametrize("read", ["", ", read"])
@pytest.mark.parametrize("how", own_values.UNWRITTEN)
def test_buffers_that_nothing_writes_are_refused(how: str, read: str) -> None:
    """Of any dtype and size, and what is computed from them;
    in a second model of a process as well.
    """
    for _ in range(2):
        with raises("MW-MODEL-048", "h0.table, h1.table"):
            own(f"unwritten {how}{read}")


def test_a_parameter_at_the_address_of_freed_memory_does_not_hide_what_came_of_it() -> None:
    for _ in range(3):
        with raises("MW-MODEL-048", "h0.table"):
            own("large memory that is freed")


@pytest.mark.parametrize("read", ["", ", read"])
@pytest.mark.parametrize("how", own_values.WRITTEN)
def test_buffers_that_are_written_in_any_way_are_those_of_plain_torch(how: str, read: str) -> None:
    model, make = own(f"written {how}{read}"), own_values.WRITTEN[how]
    found = model.layers.get_buffer("h0.table")
    if "drawn" not in how:
        assert torch.equal(found.nan_to_num(3.0), make().nan_to_num(3.0))
    assert found.dtype == make().dtype and found.shape == make().shape


@pytest.mark.parametrize(
    ("how", "runs"),
    [
        *[
            ("resets", 1),
            ("buffer", 2),
            ("rest of raw", 2),
            ("written bool by rows", 2),
            ("written loop", 2),
        ],
        *[("written mask of zeros", 2), ("written large by numpy", 3)],
    ],
)
def test_the_builder_runs_again_only_for_constants_and_large_tensors(
    how: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once to compare constants, with another pattern;
    once more if large ones are written piece by piece.
    """
    calls = []
    build_once = own_values.BUILDERS[how]
    monkeypatch.setitem(own_values.BUILDERS, how, lambda: calls.append(how) or build_once())
    own(how)
    assert len(calls) == runs


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(np.random.default_rng().random(16)),
        lambda: torch.tensor(list(os.urandom(16)), dtype=torch.uint8),
        lambda: torch.tensor([time.perf_counter_ns()] * 2),
    ],
    ids=["numpy", "os", "time"],
)
def test_a_constant_that_no_seed_repeats_is_refused(
    make: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing else asks for a second run; each rank would have another constant."""
    monkeypatch.setitem(own_values.BUILDERS, "uneven", partial(own_values.of_constant, make))
    with raises("MW-MODEL-049", "h0.table, h1.table"):
        own("uneven")


@pytest.mark.parametrize("read", ["", ", read"])
def test_a_buffer_that_no_seed_repeats_is_no_unwritten_one(
    read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits that differ between runs by chance are told from those of uninitialised memory."""

    def make() -> Tensor:
        mask = torch.empty(64, dtype=torch.bool)
        for i, drawn in enumerate(np.random.default_rng().random(64)):
            mask[i] = bool(drawn > 0.5)
        return mask

    monkeypatch.setitem(
        own_values.BUILDERS, "uneven", partial(own_values.of_constant, make, is_read=bool(read))
    )
    with raises("MW-MODEL-049", "h0.table, h1.table"):
        own("uneven")


def test_initialise_fills_what_a_builder_that_reads_values_leaves_out() -> None:
    """Only the asked tensor counts, once all of it was filled;
    others have what the builder has set.
    """
    model = own("in pieces, read")
    assert model.initial("h0.gain").tolist() == list(range(own_values.D))
    plain = in_plain_torch(partial(own_values.build, "in pieces, read"), 7)
    for name in ("h1.c_fc.weight", "wte.weight"):
        assert torch.equal(model.initial(name), plain.get_parameter(name).float()), name
    assert torch.equal(own("array, read").initial("h0.gain"), torch.full((own_values.D,), 0.25))


def test_initialise_replaces_values_that_no_seed_repeats_or_they_are_refused() -> None:
    assert float(own("rest of unequal").initial("h0.c_fc.weight").std()) == pytest.approx(
        0.05, rel=0.2
    )
    with raises("MW-MODEL-049", "h0.c_fc.bias"):
        own("rest without unequal")


def test_functions_that_a_builder_imports_while_it_runs_are_torch_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules imported within a builder hold no function of its record afterwards,
    under any name.
    """
    lines = (
        "from torch.nn.init import dirac_ as other, orthogonal_\nTABLE = {'orthogonal':"
        " orthogonal_}\n"
    )
    (tmp_path / "imported_late.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)

    def build() -> nn.Sequential:
        late = importlib.import_module("imported_late")
        return own_values.of_linear(lambda linear: late.TABLE["orthogonal"](linear.weight))

    monkeypatch.setitem(own_values.BUILDERS, "imports late", build)
    try:
        models = [own("imports late") for _ in range(2)]
        late = importlib.import_module("imported_late")
        assert late.orthogonal_ is nn.init.orthogonal_ and late.other is nn.init.dirac_
    finally:
        sys.modules.pop("imported_late", None)
    weight = in_plain_torch(build, 7).get_parameter("h0.c_fc.weight")
    sys.modules.pop("imported_late", None)
    for model in models:
        assert torch.equal(model.initial("h0.c_fc.weight"), weight)


@pytest.mark.parametrize("how", ["sparse buffer", "sparse buffer, read"])
def test_buffers_without_strides_are_refused(how: str) -> None:
    with raises("MW-MODEL-057", "h0.mixing", "sparse_coo"):
        own(how)


def test_numbers_of_a_full_initialise_do_not_depend_on_resets() -> None:
    """The function draws from the seed of the parameter's name,
    whether its tensor had values before or not.
    """
    drawn = own("rest").initial("h1.c_fc.weight")
    assert torch.equal(drawn, own("rest of raw").initial("h1.c_fc.weight"))
