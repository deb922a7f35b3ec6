"""Losses beside that of the tokens: the balance of transformers' routers, and the size of the
logits.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright.verify import parse_layout, verify
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_interop.huggingface.restructure.losses import RouterBalance
from meshwright_launch.pool import RankPool
from tests.end_to_end import driving
from tests.interop.huggingface import theirs
from tests.interop.huggingface.architectures import directory, run_config
from tests.interop.huggingface.test_restructure import gradients, unmodified
from tests.support.errors import has_code
from tests.support.marks import long_row
from tests.support.plain import plain_layers

LATER = partial(pytest.param, marks=pytest.mark.all_layouts)
ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
OTHERS = ("olmoe", "qwen2_moe", "minimax_m2", "granitemoe", "ernie4_5_moe", "jamba", "qwen3_next")
IDS = torch.randint(3, 67, (2, 12), generator=torch.Generator().manual_seed(0))


def balances(layers: nn.Module) -> list[RouterBalance]:
    return [module for module in layers.modules() if isinstance(module, RouterBalance)]


def asked(kind: str, place: Path, **more: Any) -> Path:
    """Write a configuration with the balance loss, and without dropout."""
    path = directory(kind, place, **more)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | ASKED))
    return path


def assert_gradients(loss: Tensor, layers: nn.Module, expected: Tensor, whole: nn.Module) -> None:
    """Compare the gradients of the layers with those of the unmodified model."""
    ours, others = gradients(loss, layers), gradients(expected, whole)
    names: Any = layers.names_in_transformers
    for name, gradient in ours.items():
        other = others.get(names[name], torch.zeros(()))  # of experts that no token reaches
        assert float((gradient - other).norm()) <= 2e-5 * float(gradient.norm()) + 1e-8, name


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", *map(LATER, OTHERS)])
def test_each_layer_has_the_loss_of_transformers(kind: str, tmp_path: Path) -> None:
    """Compare with its function, applied to the logits that the unmodified model records."""
    path = asked(kind, tmp_path)
    model = build_model(f"hf:{path}", {}, 1)
    layers = plain_layers(model, torch.float32).train()
    whole = unmodified(path, model, layers).train()
    whole.set_experts_implementation("eager")
    output = whole(input_ids=IDS, use_cache=False, output_router_logits=True)
    routers, code = balances(layers), import_transformers().models.mixtral.modeling_mixtral
    assert len(routers) == len(output.router_logits) >= 1
    losses = [
        code.load_balancing_loss_func((logits,), logits.shape[-1], routers[0].top_k)
        for logits in output.router_logits
    ]
    expected = F.cross_entropy(output.logits.flatten(0, 1), IDS.flatten())
    expected = expected + ASKED["router_aux_loss_coef"] * sum(losses) / len(losses)
    for router in routers:
        router.gradient_scale = 1 / IDS.numel()
    loss = F.cross_entropy(layers(IDS).flatten(0, 1), IDS.flatten())
    assert_gradients(loss, layers, expected, whole)
    assert all(int(router.counts.sum()) == IDS.numel() * router.top_k for router in routers)


@pytest.mark.parametrize("kind", ["mixtral", LATER("qwen3_moe"), LATER("gpt_oss")])
def test_with_one_layer_it_is_the_loss_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    path = asked(kind, tmp_path, num_hidden_layers=1, layer_types=None)
    model = build_model(f"hf:{path}", {}, 1)
    layers = plain_layers(model, torch.float32).train()
    whole = unmodified(path, model, layers).train()
    whole.set_experts_implementation("eager")
    output = whole(input_ids=IDS, labels=IDS, output_router_logits=True)
    assert output.aux_loss.item() > 0
    (router,) = balances(layers)
    router.gradient_scale = 1 / IDS.numel()
    labels = F.pad(IDS[:, 1:], (0, 1), value=-100)
    loss = F.cross_entropy(layers(IDS).flatten(0, 1), labels.flatten())
    assert loss.item() + 0.3 * output.aux_loss.item() == pytest.approx(output.loss.item(), rel=1e-6)
    assert_gradients(loss, layers, output.loss, whole)


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("mixtral", ("tp2,sequence",)),
        long_row("mixtral", ("dp2,pp2,ep2", "cp2,pp2", "dp2,zero3", "dp2,mbs2", "pp2,zb_h1")),
        long_row("gpt_oss", ("dp2,pp2,full", "dp2,ep2")),
        LATER("qwen3_moe", ("tp2", "cp2,tp2,sequence", "dp2,zero3,full", "dp4,ep2,zero3")),
        LATER("olmoe", ("dp2,pp2", "tp2,ep2,sequence")),
        LATER("minimax_m2", ("dp2,pp2", "cp2")),
    ],
)
def test_a_layout_has_the_numbers_of_one_process(
    kind: str, layouts: tuple[str, ...], tmp_path: Path, pool: RankPool
) -> None:
    """Verify losses, gradients and the counts of every step, with three micro-batches or more."""
    config = run_config(asked(kind, tmp_path))
    wanted = [parse_layout(text) for text in layouts]
    report = verify(config, wanted, pool, global_batch=8, steps=2, random_tokens=True)
    assert report.passed, report.table()


@pytest.mark.parametrize("layout", [None, long_row("dp2,pp2")])
def test_the_logits_of_bamba_have_the_loss_of_transformers(
    layout: str | None, tmp_path: Path, pool: RankPool
) -> None:
    """Compare the mean over tokens that all have a label."""
    path = directory("bamba", tmp_path)
    changed = {"z_loss_coefficient": 0.01}
    if layout is not None:
        config = run_config(path, model={"options": changed})
        wanted = [parse_layout(layout)]
        report = verify(config, wanted, pool, global_batch=4, steps=2, random_tokens=True)
        assert report.passed, report.table()
        return
    model = build_model(f"hf:{path}", changed, 1)
    assert model.loss_options == {"z_loss": 0.01}
    layers = plain_layers(model, torch.float32).train()
    whole = unmodified(path, model, layers).train()
    whole.z_loss_coefficient = 0.01
    labels = F.pad(IDS[:, 1:], (0, 1), value=5)
    output = whole(input_ids=IDS, labels=IDS, shift_labels=labels, use_cache=False)
    logits = layers(IDS)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss = loss + 0.01 * logits.logsumexp(-1).square().mean()
    assert_gradients(loss, layers, output.loss, whole)


@pytest.mark.parametrize(
    ("kind", "options", "said", "code"),
    [
        ("jetmoe", {"output_router_logits": True}, "routers of this form", "MW-INTEROP-148"),
        (
            "mixtral",
            ASKED | {"router_aux_loss_coef": -0.1},
            "= -0.1 would reward",
            "MW-INTEROP-154",
        ),
        ("bamba", {"z_loss_coefficient": -1.0}, "= -1.0 would reward", "MW-INTEROP-154"),
        ("mixtral", ASKED | {"router_aux_loss_coef": float("nan")}, "a finite", "MW-INTEROP-055"),
    ],
)
def test_a_loss_without_a_meaning_is_refused(
    kind: str, options: dict[str, Any], said: str, code: str, tmp_path: Path
) -> None:
    path = directory(kind, tmp_path)
    with pytest.raises(ModelError, check=has_code(code)) as caught:
        build_model(f"hf:{path}", options, 1)
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_without_a_factor_no_router_counts(tmp_path: Path) -> None:
    path = asked("mixtral", tmp_path)
    for options in ({"output_router_logits": False}, {"router_aux_loss_coef": 0.0}):
        assert not balances(build_model(f"hf:{path}", options, 1).layers)
    assert len(balances(build_model(f"hf:{path}", {}, 1).layers)) == 3


@pytest.mark.parametrize("layout", ["dp2,ep2", long_row("cp2,pp2")])
def test_a_run_records_the_load_of_every_layout(
    layout: str, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """Compare the metrics of two steps with those of one process."""
    path = asked("mixtral", tmp_path, vocab_size=theirs.VOCAB)
    found = []
    for name, text in (("one", ""), ("many", layout)):
        config = run_config(
            path,
            run={"name": name, "directory": str(tmp_path)},
            data={"train": str(corpus / "train"), "validation": str(corpus / "validation")},
            parallel=driving.layout(text),
            train={"steps": 2, "dtype": "float32"},
            tracking={"log_every": 1},
        )
        driving.train(pool, config)
        found.append(driving.lines(config))
    names = [f"experts/{each}" for each in ("skew", "entropy", "idle_share", "token_entropy")]
    for one, many in zip(*found, strict=True):
        for name in ("train/loss", *names):
            assert many[name] == pytest.approx(one[name], rel=1e-5), name
    assert found[0][0]["experts/skew"] > 1
