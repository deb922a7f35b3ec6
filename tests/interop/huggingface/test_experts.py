"""Mixtures of experts of transformers as layers: the numbers of the unmodified model,
in one process and in layouts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from meshwright.errors import ModelError
from meshwright.expert_parallel.routing import RoutingPlan
from meshwright.model.build import build_model, configured_model
from meshwright.verify import Verification, parse_layout, verify
from meshwright.verify.reference import run_reference
from meshwright.verify.routes import validation_key
from meshwright_interop.huggingface.restructure.experts import is_experts
from meshwright_launch.pool import RankPool
from tests.interop.huggingface.architectures import directory, run_config
from tests.interop.huggingface.test_restructure import gradients, unmodified
from tests.support.errors import has_code
from tests.support.marks import long_row, marked_rows
from tests.support.plain import plain_layers

LATER = partial(pytest.param, marks=pytest.mark.all_layouts)
KINDS = (
    "olmoe",
    "qwen3_moe",
    "deepseek_v2",
    "granitemoe",
    "exaone_moe",
    "hunyuan_v1_moe",
    "ernie4_5_moe",
    "jamba",
)
LAYOUTS = ("dp2,zero3", "pp2", "tp2", "pp2,tp2,sequence", "dp2,pp2,full", "pp2,zb_h1")
LAYOUTS += ("dp2,ep2", "dp4,ep2,zero3", "dp2,pp2,ep2", "tp2,ep2,sequence", "tp2,ep2")
OPEN_TO_TP = ("gpt_oss", "deepseek_v3", "glm4_moe", "qwen2_moe")


PLANS_DO_NOT_FIT = ("glm_moe_dsa", "deepseek_v4")
"""Blocks that return tuples, and weights that the plan for a pipeline leaves out."""


@pytest.mark.parametrize(
    "kind",
    ["mixtral", "qwen2_moe", "gpt_oss", *PLANS_DO_NOT_FIT, "gemma4_text", *map(LATER, KINDS)],
)
def test_logits_loss_and_gradients_are_those_of_the_unmodified_model(
    kind: str, tmp_path: Path
) -> None:
    path = directory(kind, tmp_path)
    model = build_model(f"hf:{path}", {}, 1)
    layers = plain_layers(model, torch.float32).eval()
    whole = unmodified(path, model, layers).eval()
    whole.set_experts_implementation("eager")
    ids = torch.randint(3, 67, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    logits, theirs = layers(ids), whole(input_ids=ids, use_cache=False)
    assert (logits - theirs.logits).norm() < 1e-6 * logits.norm()
    loss, expected_loss = (
        F.cross_entropy(each.flatten(0, 1), labels.flatten()) for each in (logits, theirs.logits)
    )
    ours, expected = gradients(loss, layers), gradients(expected_loss, whole)
    names = model.layers.names_in_transformers
    assert isinstance(names, dict)
    for name, gradient in ours.items():
        # of a block's experts that no token reaches
        other = expected.get(names[name], torch.zeros(()))
        assert float((gradient - other).norm()) <= 2e-5 * float(gradient.norm()) + 1e-8, name


@pytest.mark.parametrize(
    ("kind", "options", "code"),
    [
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"]}, "MW-INTEROP-075"),
        ("deepseek_v4", {"mlp_layer_types": ["hash_moe", "moe", "moe"]}, "MW-INTEROP-074"),
        ("gemma4_text", {"hidden_size_per_layer_input": 8}, "MW-INTEROP-074"),
    ],
)
def test_more_than_one_tensor_between_blocks_is_refused(
    kind: str, options: dict[str, Any], code: str, tmp_path: Path
) -> None:
    """Refuse indices of another layer, token ids for a hash, and inputs for each layer."""
    path = directory(kind, tmp_path, **options)
    with pytest.raises(ModelError, check=has_code(code)):
        build_model(f"hf:{path}", {}, 1)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_rank_without_rows(kind: str, tmp_path: Path) -> None:
    """No token chose its experts: no rows come out, and every weight has a gradient of zeros."""
    layers = plain_layers(build_model(f"hf:{directory(kind, tmp_path)}", {}, 1), torch.float32)
    experts = next(module for module in layers.modules() if is_experts(module))
    x = torch.zeros(0, next(layers.parameters()).shape[1], requires_grad=True)
    y = experts(x, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert y.shape == x.shape
    y.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in experts.parameters())


@marked_rows("long", "mixtral-layouts0")
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("mixtral", ("pp2,tp2,sequence",)),
        LATER("gpt_oss", ("dp2,ep2",)),
        LATER("ernie4_5_moe", ("dp2,tp2",)),
        *[LATER(kind, ("tp2,ep2", "dp2,tp2,ep4", "pp2,tp2,ep2")) for kind in OPEN_TO_TP],
        *[LATER(kind, LAYOUTS) for kind in ("mixtral", "gpt_oss", "qwen2_moe", *KINDS)],
    ],
)
def test_every_layout_gives_the_numbers_of_one_process(
    kind: str, layouts: tuple[str, ...], tmp_path: Path, pool: RankPool
) -> None:
    path = directory(kind, tmp_path)
    wanted = [parse_layout(text) for text in layouts]
    impossible = build_model(f"hf:{path}", {}, 1).impossible
    possible = [each for each in wanted if not (each.sequence and "sequence" in impossible)]
    possible = [each for each in possible if not (each.tp > 1 and "tp" in impossible)]
    report = verify(run_config(path), possible, pool, global_batch=4, steps=2, random_tokens=True)
    assert report.passed, report.table()


WITH_SHARED = ("tp2,sequence", "tp2,ep2,sequence", "pp2,tp2,sequence", "pp2,tp2,ep2,sequence")
"""Layouts that gather the tokens of shared experts."""
ONE_DIM = ("ernie4_5_moe", "hy_v3")
"""Models whose shared experts take samples and tokens in one dim."""
TWO_DIMS = ("deepseek_v3", "glm4_moe", "dots1", "axk1", "aria_text", "kolibri1")


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        long_row("deepseek_v3", WITH_SHARED),
        long_row("ernie4_5_moe", WITH_SHARED),
        *[LATER(kind, WITH_SHARED) for kind in ("hy_v3", *TWO_DIMS[1:])],
        *[LATER(kind, ("dp2,tp2,ep4,sequence,zero3", "tp2,sequence,full")) for kind in ONE_DIM[:2]],
    ],
)
def test_tokens_of_shared_experts_are_gathered(
    kind: str, layouts: tuple[str, ...], tmp_path: Path, pool: RankPool
) -> None:
    """Micro-batches of two samples: the ranks' rows are not those of one sequence."""
    path = directory(kind, tmp_path)
    model = build_model(f"hf:{path}", {}, 1)
    assert "sequence" not in model.impossible
    gathered = [name for name, form in model.plan.items() if form == "gather"]
    assert any("shared_expert" in name for name in gathered), gathered
    config = run_config(path, batch={"micro_batch_size": 2, "global_batch": 4})
    wanted = [parse_layout(text) for text in layouts]
    report = verify(config, wanted, pool, global_batch=4, steps=2, random_tokens=True)
    assert report.passed, report.table()
    worst = max(row.gradient for row in report.rows)
    assert 0 < worst < 1e-10, report.table()


@marked_rows("long", "mixtral")
@pytest.mark.parametrize(
    "kind",
    ["mixtral", *map(LATER, ("deepseek_v2", "gpt_oss", "qwen2_moe", *KINDS[:2], *KINDS[3:]))],
)
def test_a_replay_takes_other_experts_with_the_routers_own_weights(
    kind: str, tmp_path: Path
) -> None:
    config = run_config(directory(kind, tmp_path))
    free = Verification(
        config, global_batch=4, steps=1, random_tokens=True, routing=("record", tmp_path / "free")
    )
    losses = [free._reference(1).findings.losses[0]]
    recorded = tmp_path / "free" / "step-00000001.safetensors"
    ids = {name: table.to(torch.int64) for name, table in load_file(recorded).items()}
    assert ids and all(
        name.startswith("block") and table.shape[0] == 4 for name, table in ids.items()
    )
    other = {name: (table + 1) % (table.max() + 1) for name, table in ids.items()}
    (tmp_path / "own").mkdir()
    for name, tables in ((recorded.name, other), (f"{validation_key(1, 1)}.safetensors", other)):
        save_file(tables, tmp_path / "own" / name)
    for place in ("own", "free"):
        plan = RoutingPlan(tmp_path / "again" / place, tmp_path / place)
        found = run_reference(free.plain, free.source, 1, torch.float64, routing=plan)
        losses.append(found.losses[0])
        taken = load_file(tmp_path / "again" / place / recorded.name)
        expected = other if place == "own" else ids
        assert all(torch.equal(taken[name].to(torch.int64), expected[name]) for name in expected)
        gates = [
            gradient
            for name, gradient in found.gradients.items()
            if ".gate." in name or ".router." in name
        ]
        assert gates and all(gate.isfinite().all() and gate.abs().max() > 0 for gate in gates), (
            "never detached"
        )
    assert losses[2] == losses[0] != losses[1]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        LATER("mixtral", "tp2,sequence"),
        LATER("deepseek_v2", "dp2,ep2"),
        LATER("mixtral", "cp2,ep2,full"),
    ],
)
def test_a_routing_is_the_same_on_every_layout(
    kind: str, layout: str, tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(directory(kind, tmp_path))
    for mode in ("record", "replay"):
        of_mode = Verification(
            config, global_batch=4, steps=1, random_tokens=True, routing=(mode, None)
        )
        row = of_mode.compare_layout(parse_layout(layout), pool, is_repeated=False)
        assert row.passed, (row.problems, row.failure)


@pytest.mark.parametrize(
    "layout",
    [long_row("dp2,zero2"), LATER("dp2,ep2"), LATER("dp2,pp2,zero3"), LATER("dp4,ep2,zero1,step")],
)
def test_muon_steps_transposed_experts(layout: str, tmp_path: Path, pool: RankPool) -> None:
    """GPT-OSS has weights (inputs, outputs), gate and up in alternate columns."""
    own = {"name": "muon", "learning_rate": 1e-2, "scale": "spectral"}
    config = run_config(directory("gpt_oss", tmp_path)).replace(optimizer=own)
    report = verify(
        config, [parse_layout(layout)], pool, global_batch=4, steps=3, random_tokens=True
    )
    assert report.passed, report.table()


def test_experts_are_in_the_plan_and_their_inner_entries_are_not(tmp_path: Path) -> None:
    model = build_model(f"hf:{directory('qwen3_moe', tmp_path)}", {}, 1)
    assert model.plan["block*.layer.mlp.experts"] == "experts" and not model.impossible
    assert not [name for name in model.plan if name.startswith("block*.layer.mlp.experts.")]


@pytest.mark.parametrize(
    ("kind", "rows", "down"),
    [("mixtral", (64, 64), ()), ("gpt_oss", (-1, -1), (-32,)), LATER("deepseek_v2", (24, 24), ())],
)
def test_experts_of_muon_are_batches(
    kind: str, rows: tuple[int, int], down: tuple[int, ...], tmp_path: Path
) -> None:
    """Gate and up of an expert are two matrices, of columns where it is transposed.
    The plan names experts always.
    """
    config = run_config(directory(kind, tmp_path)).replace(optimizer={"name": "muon"})
    model = configured_model(config)
    name = next(
        name for name, _ in model.layers.named_parameters() if name.endswith("experts.gate_up_proj")
    )
    assert model.matrices.get(name) == rows
    assert model.matrices.get(name.replace("gate_up_proj", "down_proj")) == down
    assert "experts" in model.plan.values() and not [
        each for each in model.matrices if each.endswith("_bias")
    ]
