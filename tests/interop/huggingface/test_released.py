"""Directories as they are released, with a tensor for each expert: read as transformers reads them,
by the ranks that need them, and written like that again.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.build import build
from meshwright.config import RunConfig, resolve
from meshwright.errors import ModelError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.model.build import build_model
from meshwright.parameters import ParameterInfo, Slice
from meshwright.run.start import start
from meshwright.step import take_step
from meshwright_interop.huggingface.restructure.export import export
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_interop.huggingface.source import SafetensorsDirectory
from meshwright_interop.start import weights as open_weights
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import layout, save, size, tensors
from tests.interop.huggingface.architectures import configuration, directory, run_config
from tests.support.errors import has_code, raises
from tests.support.marks import long_row

pytest.importorskip("transformers")
LATER = partial(pytest.param, marks=pytest.mark.all_layouts)
KINDS = ("mixtral", "deepseek_v3", "gpt_oss")
LATER_KINDS = ("qwen3_moe", "olmoe", "deepseek_v2", "glm4_moe", "jamba", "phi3", "hunyuan_v1_moe")
LAYOUTS = ("", "dp2", "pp2", "tp2", "dp2,ep2", "dp2,zero3")
IDS = torch.randint(3, 67, (2, 12), generator=torch.Generator().manual_seed(0))
GATE = "model.layers.0.mlp.experts.{}.gate_proj.weight"


def written(kind: str, place: Path, *, released: bool = True) -> Path:
    """Write a small model with weights, in files of at most 50 kB."""
    path = place / kind
    torch.manual_seed(3)
    config = configuration(kind, attention_dropout=0.0)
    model = import_transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path, max_shard_size="50KB", save_original_format=released)
    return path


def files_of(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a directory, under their names in the files."""
    return {
        name: each for file in path.glob("*.safetensors") for name, each in load_file(file).items()
    }


def changed(path: Path, change: dict[str, Tensor | None]) -> Path:
    """Write tensors of a directory again, added, replaced or (None) removed, in one file."""
    found = files_of(path) | change
    for file in [*path.glob("*.safetensors"), *path.glob("*.index.json")]:
        file.unlink()
    kept = {name: each for name, each in found.items() if each is not None}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    return path


def theirs(path: Path) -> Any:
    """Open a model by transformers itself."""
    found = import_transformers().AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return found.eval()


def logits(path: Path) -> Tensor:
    with torch.no_grad():
        return theirs(path)(input_ids=IDS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [*KINDS, *map(LATER, LATER_KINDS)])
def test_values_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    has_experts = any(".experts.1." in name for name in files_of(path))
    assert has_experts == (kind not in ("gpt_oss", "phi3"))
    state = theirs(path).state_dict()
    fused = written(kind, tmp_path / "fused", released=False)
    for directory_of in (path, fused):
        model = build_model(f"hf:{directory_of}", {}, 1)
        names: Any = model.layers.names_in_transformers
        for name, of_theirs in names.items():
            assert torch.equal(model.initial(name), state[of_theirs]), name


class Rows:
    """Rows of IDS as samples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return IDS[index % 2], IDS[index % 2].roll(-1)


def rows(split: str) -> Rows:
    """Build the samples."""
    return Rows()


def first_rank(rank: int, world_size: int, config: RunConfig, again: str) -> float:
    """Build one rank, save what it holds, and take a step; the loss."""
    config = resolve(config, world_size)
    mesh = open_mesh(Grid.of(config.parallel.degrees), "cpu")
    parts = build(config, mesh)
    if config.run.start:
        Path(again).mkdir(parents=True, exist_ok=True)
        start(parts, Path(again), lambda line: None)
    save(parts, again)
    loss = take_step(parts).loss
    close_mesh(mesh)
    return loss


def config_of(path: Path, text: str, **sections: Any) -> RunConfig:
    """Return a training of a directory in a layout."""
    tree = run_config(path, parallel=layout(text), **sections).model_dump(exclude_unset=True)
    return RunConfig.model_validate(
        tree | {"data": {"builder": "tests.interop.huggingface.test_released:rows"}}
    )


@pytest.mark.parametrize(
    ("kind", "layouts", "by_start"),
    [
        ("mixtral", ("", "dp2,ep2"), True),
        long_row("deepseek_v3", LAYOUTS, False),
        *[LATER(kind, LAYOUTS, True) for kind in KINDS],
        *[LATER(kind, LAYOUTS, False) for kind in ("mixtral", "gpt_oss", *LATER_KINDS[:4])],
    ],
)
def test_layouts_begin_alike_and_the_export_is_the_directory_again(
    kind: str, layouts: tuple[str, ...], by_start: bool, tmp_path: Path, pool: RankPool
) -> None:
    """Compare layouts by ``model.builder``, and by ``run.start``."""
    path = written(kind, tmp_path)
    own: dict[str, Any] = {}
    if by_start:
        blank = directory(kind, tmp_path / "blank", attention_dropout=0.0)
        own = {"run": {"start": str(path)}, "model": {"builder": f"hf:{blank}"}}
    impossible = build_model(f"hf:{path}", {}, 1).impossible
    losses, held = [], []
    for text in layouts:
        if "tp" in text and "tp" in impossible:
            continue
        config = config_of(path, text, **own)
        place = tmp_path / f"layout-{text}"
        losses.append(pool.run(first_rank, size(config), config, str(place))[0])
        held.append(tensors(place))
        out = tmp_path / f"out-{text}"
        export(place, out)
        before, after = files_of(path), files_of(out)
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert torch.equal(logits(out), logits(path))
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)
    for each in held[1:]:
        assert all(torch.equal(each[name], held[0][name]) for name in held[0])


def test_a_rank_reads_its_experts_alone_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written("qwen3_moe", tmp_path)
    model = build_model(f"hf:{path}", {}, 1)
    name = "block1.layer.mlp.experts.gate_up_proj"
    shape = tuple(model.layers.get_parameter(name).shape)
    whole = model.initial(name)
    read: list[str] = []
    original = SafetensorsDirectory.read

    def reading(self: SafetensorsDirectory, key: str, *files: Any) -> Tensor:
        read.append(key)
        return original(self, key, *files)

    monkeypatch.setattr(SafetensorsDirectory, "read", reading)
    info = ParameterInfo(name, shape, Slice(0, 2, 4, 2, over="ep"))
    assert model.reads_part(info)
    assert torch.equal(model.initial_part(info), whole[2:4])
    stem = "model.layers.1.mlp.experts"
    expected = [f"{stem}.{n}.{part}_proj.weight" for n in (2, 3) for part in ("gate", "up")]
    assert read == expected
    read.clear()
    source = open_weights(str(path), config_of(path, "").model)
    assert torch.equal(source.read_box(name, (3, 5, 0), (1, 7, 32)), whole[3:4, 5:12])
    assert read == expected[2:]


def test_what_is_wrong_with_experts_is_named(tmp_path: Path) -> None:
    whole = files_of(written("qwen3_moe", tmp_path / "whole"))

    def refused(change: dict[str, Tensor | None], *values: object) -> None:
        path = changed(written("qwen3_moe", tmp_path), change)
        with raises("MW-INTEROP-158", *values):
            build_model(f"hf:{path}", {}, 1)

    fused = torch.zeros(8, 48, 32)
    seven, eight = GATE.format(7), GATE.format(8)
    own = "model.layers.0.mlp.experts.gate_up_proj"
    refused({seven: None}, f"tensor {seven} [24, 32]", "in none of the files")
    refused({seven: torch.zeros(24, 31)}, seven, "[24, 31]", "[24, 32]")
    refused({eight: whole[seven].clone()}, f"{eight} is of expert 8", "has 8")
    refused({GATE.format("07"): whole[seven].clone()}, GATE.format("07"), "the same expert")
    refused({own: fused}, "is a part of", own, "remove one of the two forms")
    bare = {"layers.0.input_layernorm.weight": torch.ones(32)}
    refused(bare, "are both model.layers.0.input_layernorm.weight")


@pytest.mark.parametrize(
    "name",
    [
        GATE.format("\u00b2"),
        "model.layers.0.mlp.experts." * 4000 + "gate_proj.weight",
        GATE.format("0.deeper"),
        GATE.format("9" * 400),
        "model.layers.1.mlp.experts.gate_up_proj.weight",
        "model.layers.0.mlp.experts.\x1b[31m0.gate_proj.weight",
    ],
    ids=("digit", "long", "deeper", "large", "almost", "escape"),
)
def test_a_hostile_name_is_refused(name: str, tmp_path: Path) -> None:
    path = changed(written("qwen3_moe", tmp_path), {name: torch.zeros(24, 32)})
    with pytest.raises(ModelError, check=has_code("MW-INTEROP-037", "MW-INTEROP-158")):
        build_model(f"hf:{path}", {}, 1)


def test_tensors_that_transformers_leaves_out_are_named(tmp_path: Path) -> None:
    """Check the layer for multi-token prediction in DeepSeek-V3's files."""
    extra = "model.layers.61.eh_proj.weight"
    path = changed(written("deepseek_v3", tmp_path), {extra: torch.zeros(2, 2)})
    assert build_model(f"hf:{path}", {}, 1).layers.left_over == [extra]
    source = open_weights(str(path), config_of(path, "").model)
    assert any(extra in note for note in source.notes)
    changed(path, {"model.layers.60.eh_proj.weight": torch.zeros(2, 2)})
    with raises("MW-INTEROP-037", "model.layers.60.eh_proj.weight"):
        build_model(f"hf:{path}", {}, 1)


def test_weights_of_fewer_layers(tmp_path: Path) -> None:
    path = written("mixtral", tmp_path)
    model = build_model(f"hf:{path}", {"num_hidden_layers": 1}, 1)
    name = "block0.layer.mlp.experts.down_proj"
    assert torch.equal(
        model.initial(name), theirs(path).state_dict()["model.layers.0.mlp.experts.down_proj"]
    )
