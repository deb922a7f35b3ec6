"""YaRN through ``hf:``: the static frequencies of transformers, in one process and in layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.blueprint import draw_blueprint
from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright.verify import layout_config, parse_layout, verify
from meshwright_launch.pool import RankPool
from tests.interop.huggingface.architectures import directory, run_config
from tests.interop.huggingface.test_restructure import gradients, unmodified
from tests.support.errors import has_code
from tests.support.marks import long_row
from tests.support.plain import plain_layers

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
YARN |= {"rope_theta": 100.0, "beta_fast": 2.0}
WEIGHTED = YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "llama": YARN | {"attention_factor": 0.8},
    "qwen2": YARN,
    "qwen3": YARN | {"truncate": False},
    "deepseek_v3": WEIGHTED,
}


@pytest.mark.parametrize("kind", [*KINDS, long_row("gpt_oss")])
def test_logits_and_gradients_are_those_of_the_unmodified_model(kind: str, tmp_path: Path) -> None:
    path = directory(kind, tmp_path, rope_parameters=KINDS.get(kind, YARN))
    model = build_model(f"hf:{path}", {}, 1)
    layers = plain_layers(model, torch.float32).eval()
    whole = unmodified(path, model, layers).eval()
    ids = torch.randint(3, 67, (2, 12), generator=torch.Generator().manual_seed(0))
    logits, expected = layers(ids), whole(input_ids=ids).logits
    assert torch.equal(logits, expected) or kind in ("deepseek_v3", "gpt_oss")
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    losses = [F.cross_entropy(each.flatten(0, 1), ids.flatten()) for each in (logits, expected)]
    found, wanted = (gradients(*pair) for pair in zip(losses, (layers, whole), strict=True))
    names = model.layers.names_in_transformers
    assert isinstance(names, dict)
    for name, gradient in found.items():
        error = float((gradient - wanted[names[name]]).norm())
        assert error <= 2e-6 * float(gradient.norm()) + 1e-9, name
    plain = build_model(f"hf:{path}", {"rope_parameters": {"rope_type": "default"}}, 1)
    other = plain_layers(plain, torch.float32).eval()(ids)
    assert float((logits - other).detach().abs().max()) > 1e-4, "the scaling has an effect"


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        long_row("qwen3", "cp2,pp2"),
        long_row("llama", "cp2,tp2,sequence"),
        long_row("llama", "dp2,pp2,tp2"),
        long_row("deepseek_v3", "dp2,pp2,tp2"),
        long_row("deepseek_v3", "cp2,tp2"),
    ],
)
def test_a_layout_has_the_numbers_of_one_process(
    kind: str, layout: str, tmp_path: Path, pool: RankPool
) -> None:
    path = directory(kind, tmp_path, rope_parameters=KINDS[kind])
    wanted = [parse_layout(layout)]
    report = verify(run_config(path), wanted, pool, global_batch=4, steps=2, random_tokens=True)
    assert report.passed, report.table()


LONG = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 8.0}
LONG |= {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 2.0, 4.0, 8.0]}


def long_phi3(place: Path) -> Path:
    """Write a phi3 whose first set is for samples of at most 8 tokens, a field beside the table."""
    return directory("phi3", place, rope_parameters=LONG, original_max_position_embeddings=8)


@pytest.mark.parametrize("length", [8, 9])
def test_longrope_is_chosen_by_the_length_of_the_samples(length: int, tmp_path: Path) -> None:
    """Compare both sides of the original length, after longer and shorter samples."""
    path = long_phi3(tmp_path)
    model = build_model(f"hf:{path}", {}, 1)
    layers = plain_layers(model, torch.float32).eval()
    whole = unmodified(path, model, layers).eval()
    ids = torch.randint(3, 67, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for other in (30, 5):
            layers(torch.zeros(1, other, dtype=torch.int64))
            assert torch.equal(layers(ids), whole(input_ids=ids).logits)
    swapped = LONG | {"short_factor": LONG["long_factor"], "long_factor": LONG["short_factor"]}
    layers = plain_layers(build_model(f"hf:{path}", {"rope_parameters": swapped}, 1), torch.float32)
    with torch.no_grad():
        assert float((layers.eval()(ids) - whole(input_ids=ids).logits).abs().max()) > 1e-4


@pytest.mark.parametrize("layout", [*map(long_row, ("cp2,pp2", "dp2,tp2,sequence"))])
def test_longrope_in_a_layout(layout: str, tmp_path: Path, pool: RankPool) -> None:
    """Verify samples of 12 tokens, above the original length; a rank's part of them is not."""
    path, wanted = long_phi3(tmp_path), [parse_layout(layout)]
    report = verify(run_config(path), wanted, pool, global_batch=4, steps=2, random_tokens=True)
    assert report.passed, report.table()


def test_longrope_is_not_trimmed(tmp_path: Path) -> None:
    """Shorter rows would have the other set; those of fixed frequencies are allowed."""
    places = {"longrope": long_phi3(tmp_path / "a"), "fixed": directory("llama", tmp_path / "b")}
    for name, path in places.items():
        config = run_config(path).replace(
            batch={"padding": "trim", "micro_batch_size": 1, "chunks": 4, "global_batch": 4},
            data={"packing": "documents", "sequence_length": 24},
        )
        asked = layout_config(config, parse_layout("pp2"), 4, "float32")
        if name == "fixed":
            assert draw_blueprint(asked).trim_multiple == 8
            continue
        with pytest.raises(ModelError, match="longrope chooses", check=has_code("MW-PIPELINE-059")):
            draw_blueprint(asked)


@pytest.mark.long
def test_trimmed_rows_of_transformers_have_the_numbers_of_whole_ones(
    tmp_path: Path, pool: RankPool
) -> None:
    config = run_config(directory("qwen3", tmp_path)).replace(
        batch={"padding": "trim"}, data={"packing": "documents", "sequence_length": 24}
    )
    report = verify(
        config, [parse_layout("pp2,dp2")], pool, global_batch=4, steps=2, random_tokens=True
    )
    assert report.passed, report.table()


def test_longrope_of_each_layer_type_is_refused(tmp_path: Path) -> None:
    kinds = {"layer_types": ["full_attention"] * 3, "rope_parameters": {"full_attention": LONG}}
    path = directory("gemma3_text", tmp_path)
    with pytest.raises(ModelError, match="longrope", check=has_code("MW-INTEROP-069")):
        build_model(f"hf:{path}", kinds, 1)


def test_kimi_k2_is_the_deepseek_v3_of_transformers(tmp_path: Path) -> None:
    path = directory("deepseek_v3", tmp_path, rope_parameters=WEIGHTED)
    logits = []
    for kind in ("deepseek_v3", "kimi_k2"):
        fields = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(fields | {"model_type": kind}))
        layers = plain_layers(build_model(f"hf:{path}", {}, 1), torch.float32).eval()
        logits.append(layers(torch.arange(3, 15)[None]))
    assert torch.equal(*logits)
