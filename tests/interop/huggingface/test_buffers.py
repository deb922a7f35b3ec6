"""Persistent buffers of transformers models: constants that are loaded, computed with and saved,
and never trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.checkpoint import find
from meshwright.config import RunConfig
from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright.run.directory import run_directory
from meshwright.verify import parse_layout, verify
from meshwright_interop.huggingface.restructure.export import export
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_launch.pool import RankPool
from meshwright_launch.work import work
from tests.interop.huggingface.architectures import configuration, directory, run_config
from tests.support.errors import has_code
from tests.support.marks import long_row
from tests.support.plain import plain_layers

pytest.importorskip("transformers")
IDS = torch.randint(3, 67, (2, 12), generator=torch.Generator().manual_seed(0))
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 with weights, whose routers have a bias that some trainer has balanced."""
    path = tmp_path_factory.mktemp("biased") / "deepseek_v3"
    torch.manual_seed(3)
    model = import_transformers().AutoModelForCausalLM.from_config(
        configuration("deepseek_v3"), dtype=torch.float32
    )
    model.save_pretrained(path, save_original_format=False)
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = torch.linspace(-0.3, 0.4, 8)[torch.randperm(8)]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def logits_of(path: Path) -> Tensor:
    with torch.no_grad():
        model = import_transformers().AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32
        )
        return model.eval()(input_ids=IDS).logits  # type: ignore[no-any-return]


def test_the_bias_of_a_router_is_that_of_the_files(biased: Path) -> None:
    model = build_model(f"hf:{biased}", {}, 1)
    layers = plain_layers(model, torch.float32).eval()
    frozen = [name for name, each in layers.named_parameters() if not each.requires_grad]
    assert frozen == [f"block{n}.layer.mlp.gate.e_score_correction_bias" for n in (1, 2)]
    logits = layers(IDS)
    assert (logits - logits_of(biased)).norm() < 1e-6 * logits.norm()
    layers.get_parameter(frozen[0]).data.zero_()
    assert (layers(IDS) - logits).norm() > 1e-3 * logits.norm()


@pytest.mark.parametrize(
    "layout", [long_row("dp2,zero3"), pytest.param("pp2,tp2", marks=pytest.mark.all_layouts)]
)
def test_layouts_give_the_numbers_of_one_process(layout: str, biased: Path, pool: RankPool) -> None:
    report = verify(
        run_config(biased),
        [parse_layout(layout)],
        pool,
        global_batch=4,
        steps=2,
        random_tokens=True,
    )
    assert report.passed, report.table()


def train_rank(rank: int, world_size: int, config: Any) -> None:
    work(config)


class Rows:
    """Rows of IDS as samples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return IDS[index % 2], IDS[index % 2].roll(-1)


def rows(split: str) -> Rows:
    """Build the samples."""
    return Rows()


@pytest.mark.long
def test_training_leaves_it_and_the_export_has_it(
    biased: Path, tmp_path: Path, pool: RankPool
) -> None:
    run = {"name": "run", "directory": str(tmp_path)}
    tree = run_config(biased, run=run, parallel={"dp": 2, "zero": 1}).model_dump(
        exclude_defaults=True
    )
    data = {"builder": "tests.interop.huggingface.test_buffers:rows"}
    config = RunConfig.model_validate(tree | {"data": data})
    pool.run(train_rank, 2, config)
    export(find(run_directory(config.run))[0].path, tmp_path / "out")
    before, after = (
        load_file(biased / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    assert torch.equal(after[BIAS], before[BIAS]) and before[BIAS].any()
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_fresh_values_are_those_of_the_untouched_model(tmp_path: Path) -> None:
    """Slopes, made in __init__ from the number of heads."""
    model = build_model(f"hf:{directory('minimax', tmp_path)}", {}, 1)
    whole = import_transformers().AutoModelForCausalLM.from_config(configuration("minimax"))
    slopes = dict(whole.named_buffers())["model.layers.1.self_attn.slope_rate"]
    assert (
        torch.equal(model.initial("block1.layer.self_attn.slope_rate"), slopes)
        and slopes.unique().numel() > 2
    )


def test_a_forward_that_writes_one_is_refused(
    biased: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    forward = DeepseekV3TopkRouter.forward

    def writing(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.e_score_correction_bias.add_(1e-3)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(DeepseekV3TopkRouter, "forward", writing)
    with pytest.raises(
        ModelError,
        match=r"its forward writes block1\.layer\.mlp\.gate\.e_score_correction_bias",
        check=has_code("MW-INTEROP-116"),
    ):
        build_model(f"hf:{biased}", {}, 1)
