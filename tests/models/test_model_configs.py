"""Every config that is shipped: it loads, its model is the published one,
its layout fits the model and the batch.
"""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, load, resolve
from meshwright.data.span_corruption import lengths
from tests.support.sources import files

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
NAMED = {  # name -> ranks, parameters, chunks, tokens of one step (of the encoder)
    "demo": (8, None, 4, 32 * 128),
    "moe-demo": (8, None, 4, 32 * 128),
    "t5-demo": (8, None, 4, 32 * 128),
    "gpt2-124m": (8, 124_439_808, 8, 512 * 1024),
    "llama3-8b": (64, 8_030_261_248, 16, 512 * 8192),
    "llama3-70b": (512, 70_553_706_496, 64, 1024 * 8192),
    "llama3-405b": (16_384, 405_853_388_800, 16, 2048 * 8192),
    "mixtral-8x7b": (64, 46_702_792_704, 16, 1024 * 4096),
    "olmoe-1b-7b": (64, 6_919_161_856, 2, 1024 * 4096),
    "qwen3-30b-a3b": (128, 30_532_122_624, 8, 1024 * 4096),
    # the second: multi-token prediction
    "deepseek-v3": (2048, 671_026_404_352 + 11_610_067_968, 120, 15_360 * 4096),
}


def build_on_meta(config: RunConfig) -> nn.Sequential:
    module, _, function = config.model.builder.partition(":")
    with torch.device("meta"):
        model = getattr(importlib.import_module(module), function)(**config.model.options)
    assert isinstance(model, nn.Sequential)
    return model


def test_every_shipped_config_is_tested_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_config_loads_and_says_how_to_start_it(name: str) -> None:
    path = CONFIGS / f"{name}.toml"
    assert load(path).run.name == name
    comment = path.read_text().split("\n[", 1)[0]
    assert all(line.startswith("#") or not line for line in comment.splitlines())
    assert f"meshwright train configs/{name}.toml" in comment


@pytest.mark.parametrize("name", NAMED)
def test_batch_and_layout_come_out_as_documented(name: str) -> None:
    ranks, _, chunks, tokens_per_step = NAMED[name]
    config = resolve(load(CONFIGS / f"{name}.toml"), ranks)
    assert config.batch.chunks == chunks
    assert config.batch.global_batch * config.data.sequence_length == tokens_per_step
    assert config.batch.chunks >= config.parallel.pp, (
        "a pipeline with fewer micro-batches than ranks mostly waits"
    )


@pytest.mark.parametrize("name", NAMED)
def test_model_is_the_published_one_and_fits_the_layout(name: str) -> None:
    _, published, _, _ = NAMED[name]
    config = load(CONFIGS / f"{name}.toml")
    model = build_on_meta(config)
    if published is not None:
        assert sum(parameter.numel() for parameter in model.parameters()) == published
    assert all(units % config.parallel.tp == 0 for units in model.divisible.values())
    assert config.data.sequence_length <= config.model.options.get("max_sequence_length", math.inf)
    assert len(model) >= config.parallel.pp


def test_deepseek_v3_without_multi_token_prediction_has_the_published_parameters() -> None:
    """671,026,419,200 in its published weights,
    which count the biases of 58 routers of 256 experts too.
    """
    model = build_on_meta(load(CONFIGS / "deepseek-v3.toml", ["--model.options.mtp_layers=0"]))
    biases = [
        buffer.numel() for name, buffer in model.named_buffers() if name.endswith("router.bias")
    ]
    assert (
        sum(parameter.numel() for parameter in model.parameters()) + sum(biases) == 671_026_419_200
    )


@pytest.mark.parametrize("layout", [(8, 1, 1), (1, 1, 4), (1, 4, 2), (2, 1, 4), (4, 2, 1)])
def test_the_demo_keeps_its_batch_in_other_layouts(layout: tuple[int, int, int]) -> None:
    dp, pp, tp = layout
    overrides = [f"--parallel.dp={dp}", f"--parallel.pp={pp}", f"--parallel.tp={tp}"]
    config = resolve(load(CONFIGS / "demo.toml", overrides), dp * pp * tp)
    assert config.batch.global_batch == 32
    assert all(units % tp == 0 for units in build_on_meta(config).divisible.values())


def test_the_moe_demo_and_its_dense_model_have_the_same_flops() -> None:
    """The words are those of docs/mixture-of-experts.md; the layers' FLOPs are measured,
    routers included.
    """
    one = [
        "--parallel.dp=1",
        "--parallel.pp=1",
        "--parallel.tp=1",
        "--parallel.ep=1",
        "--parallel.sequence=false",
    ]
    dense = ["--model.options.moe=none", "--model.options.ffn_size=260"]
    page = (ROOT / "docs" / "mixture-of-experts.md").read_text()
    assert f"train configs/moe-demo.toml --run.name=dense {' '.join(dense)} --parallel.ep=1" in page
    found = [
        draw_blueprint(resolve(load(CONFIGS / "moe-demo.toml", one + words), 1)).flops_per_step
        for words in ([], dense)
    ]
    assert found[0] == found[1] > 0


def test_the_t5_demo_has_room_for_just_its_sentinels() -> None:
    config = load(CONFIGS / "t5-demo.toml")
    assert (
        config.model.options["vocab_size"] == 4096 + lengths(config.data.sequence_length).sentinels
    )
    assert lengths(config.data.sequence_length).decoder % config.parallel.tp == 0


def documented(first_column: str) -> dict[str, list[str]]:
    """Return a table of docs/models.md, without backticks: first cell -> the other cells."""
    lines = (ROOT / "docs" / "models.md").read_text().splitlines()
    start = next(
        number for number, line in enumerate(lines) if line.startswith(f"| {first_column} |")
    )
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    cells = [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]
    return {first: others for first, *others in cells}


def test_the_documentation_lists_each_builder_with_the_models_it_converts() -> None:
    pytest.importorskip("meshwright_interop")
    from meshwright_interop.huggingface.convert.families import FAMILIES

    modules = [path for path in files("meshwright_models") if "\ndef build(" in path.read_text()]
    table = documented("builder")
    assert table.keys() == {f"meshwright_models.{path.stem}:build" for path in modules}
    for builder, cells in table.items():
        assert cells[-1] == ", ".join(
            family.model_type for family in FAMILIES if family.builder == builder
        )


def test_the_documentation_lists_each_config_with_its_sizes() -> None:
    table = documented("configuration")
    assert table.keys() == {path.stem for path in CONFIGS.glob("*.toml")}
    for name, (builder, layers, hidden_size, heads, parameters) in table.items():
        config = load(CONFIGS / f"{name}.toml")
        options = config.model.options
        assert builder == config.model.builder
        assert [int(layers.split()[0]), int(hidden_size), int(heads)] == [
            options[option] for option in ("num_layers", "hidden_size", "num_heads")
        ]
        model = build_on_meta(config)
        assert parameters == f"{sum(parameter.numel() for parameter in model.parameters()):,}"
