"""Runs with adapters on the disk: checkpoints, resuming, peft's format,
and weights with the adapters merged.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.adapters.attach import is_adapter
from meshwright.blueprint import draw_blueprint
from meshwright.checkpoint import TensorKind, find, open_checkpoint
from meshwright.config import RunConfig, load, parse, resolve
from meshwright.data.prepare.stdlib import prepare_files
from meshwright.errors import UserError
from meshwright.inference.load import config_for, locate, open_inference_mesh, open_trained
from meshwright.model.build import configured_model, materialise
from meshwright.parameters import ParameterInfo
from meshwright.run.directory import run_directory
from meshwright.run.observers import total_loss
from meshwright_interop.commands.conversion import convert
from meshwright_interop.huggingface import adapters
from meshwright_interop.huggingface.restructure.float64 import keep_float64
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_launch.pool import RankPool
from meshwright_launch.work import work
from tests.end_to_end.driving import exact_losses
from tests.interop.huggingface.architectures import directory, run_config
from tests.support.errors import has_code
from tests.support.marks import long_row

pytest.importorskip("transformers")
ADAPTER = {
    "rank": 3,
    "alpha": 6.0,
    "targets": ["*.self_attn.*_proj", "*.mlp.*_proj"],
    "dropout": 0.1,
}
LLAMA = {
    "vocab_size": 280,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 24,
    "num_layers": 2,
}
FUSED = ["block*.attention.qkv", "block*.attention.out", "block*.mlp.*"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few kilobytes, 280 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(
        "the ranks of a mesh hold what the stages of a model hand on.\n" * 300
    )
    prepare_files([folder / "text.txt"], folder / "prepared", vocab_size=280, validation_share=0.0)
    return folder / "prepared"


def train_rank(rank: int, world_size: int, config: RunConfig) -> None:
    """One rank of a run."""
    work(config)


def trained(pool: RankPool, config: RunConfig) -> Path:
    """The run directory, after training."""
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    pool.run(train_rank, parallel.dp * parallel.pp * parallel.tp, config)
    return run_directory(config.run)


Configure = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapted")


@pytest.fixture(scope="module")
def base(place: Path) -> Path:
    """A Llama of transformers with weights."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {"vocab_size": 280, "num_hidden_layers": 2}
    return directory(
        "llama", place, weights=True, attention_dropout=0.0, rope_parameters=rope, **sizes
    )


@pytest.fixture(scope="module")
def configure(place: Path, base: Path, corpus: Path) -> Configure:
    """``configure(name, layout, **sections)``: a run of 4 steps on the library's Llama,
    in float64.
    """

    def make(name: str, parallel: dict[str, Any], steps: int = 4, **sections: Any) -> RunConfig:
        tree: dict[str, Any] = {
            "run": {"name": name, "directory": str(place)},
            "adapter": ADAPTER,
            "data": {"train": str(corpus / "train"), "tokenizer": str(corpus / "tokenizer.json")},
            "parallel": {"dp": 1, "pp": 1, "tp": 1, **parallel},
            "optimizer": {"learning_rate": 3e-2, "schedule": "constant"},
            "train": {"dtype": "float64", "steps": steps, "device": "cpu"},
            "checkpoint": {"every": 2, "keep_last": 3},
        }
        return run_config(base, **(tree | sections))

    return make


@pytest.fixture(scope="module")
def run(configure: Configure, pool: RankPool) -> Path:
    """Four steps on pp 2 x tp 2 with sequence parallelism."""
    return trained(pool, configure("whole", {"pp": 2, "tp": 2, "sequence": True}))


@pytest.fixture(scope="module")
def decomposed(configure: Configure, pool: RankPool) -> Path:
    """The same with magnitudes (DoRA)."""
    config = configure(
        "decomposed", {"pp": 2, "tp": 2, "sequence": True}, adapter=ADAPTER | {"dora": True}
    )
    return trained(pool, config)


@pytest.mark.long
def test_checkpoints_hold_adapters_and_a_fingerprint_of_the_base(run: Path) -> None:
    checkpoint = open_checkpoint(find(run)[0].path)
    names = checkpoint.parameters(TensorKind.WEIGHTS)
    assert names and all(map(is_adapter, names))
    assert len(checkpoint.manifest.state["adapter_base"]) == 16


def resumed(
    name: str, run: Path, configure: Configure, parallel: dict[str, Any], pool: RankPool
) -> RunConfig:
    """The run of this name, begun from the checkpoint of step 2 of another."""
    config = configure(name, parallel)
    shutil.copytree(run, run_directory(config.run))
    shutil.rmtree(run_directory(config.run) / "checkpoints" / "step-00000004")
    trained(pool, config)
    return config


@pytest.mark.long
def test_a_resumed_run_is_bit_equal_on_its_layout_and_close_on_another(
    run: Path, configure: Configure, pool: RankPool
) -> None:
    unbroken = exact_losses(configure("whole", {}))
    same = resumed("again", run, configure, {"pp": 2, "tp": 2, "sequence": True}, pool)
    assert exact_losses(same) == unbroken and weights_of(run_directory(same.run)) == weights_of(run)
    other = resumed("other", run, configure, {"dp": 2, "zero": 3}, pool)
    for step, loss in exact_losses(other).items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(unbroken[step]), rel=1e-11)
    checkpoints = [open_checkpoint(find(run_directory(each.run))[0].path) for each in (same, other)]
    assert len({each.manifest.state["adapter_base"] for each in checkpoints}) == 1


@pytest.mark.long
def test_adapters_of_another_scale_are_refused(
    run: Path, configure: Configure, pool: RankPool
) -> None:
    config = configure(
        "whole", {"pp": 2, "tp": 2, "sequence": True}, 6, adapter=ADAPTER | {"alpha": 7.0}
    )
    with pytest.raises(Exception, match=r"adapter.alpha was 6.0 and is 7.0"):
        trained(pool, config)


def weights_of(run: Path) -> dict[str, list[float]]:
    checkpoint = open_checkpoint(find(run)[0].path)
    return {
        name: read(checkpoint, name).flatten().tolist()
        for name in checkpoint.parameters(TensorKind.WEIGHTS)
    }


def read(checkpoint: Any, name: str) -> Tensor:
    shape = checkpoint.shape(TensorKind.WEIGHTS, name)
    found = checkpoint.read(TensorKind.WEIGHTS, ParameterInfo(name, shape))
    assert isinstance(found, Tensor)
    return found


@pytest.mark.long
def test_another_base_is_refused(
    run: Path, configure: Configure, base: Path, place: Path, pool: RankPool
) -> None:
    weights = load_file(base / "model.safetensors")
    changed = {name: w.clone() for name, w in weights.items()}
    changed["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.01
    save_file(changed, base / "model.safetensors", {"format": "pt"})
    try:
        with pytest.raises(UserError, match="MW-RUN-035"):
            convert(run, None, ("merged", str(place / "wrong")), [], None, None, None)
        with pytest.raises(Exception, match="MW-RUN-035"):
            pool.run(loss_rank, 1, run, 1)
        with pytest.raises(Exception, match="MW-RUN-035"):
            resumed("elsewhere", run, configure, {"pp": 2, "tp": 2, "sequence": True}, pool)
    finally:
        save_file(weights, base / "model.safetensors", {"format": "pt"})


class Rows:
    """The rows of IDS as samples."""

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = IDS[[index % 2 for index in indices]]
        return rows, torch.cat([rows[:, 1:], torch.full_like(rows[:, :1], -100)], 1)


def loss_rank(rank: int, world_size: int, run: Path, tp: int) -> float:
    """Mean loss of IDS in a run's model as commands load it, over ``tp`` ranks."""
    place = locate(run, None)
    layout = [
        f"--parallel.tp={tp}",
        "--parallel.pp=1",
        "--parallel.dp=1",
        "--parallel.sequence=false",
    ]
    config = resolve(config_for(place, layout, "eval", trust_code=True), world_size)
    mesh = open_inference_mesh(config.parallel, config.launch, config.train.device)
    blueprint = draw_blueprint(config, mesh.tp, mesh.cp, mesh.ep)
    parts = open_trained(blueprint, mesh, place)[0]
    total = total_loss(parts, parts.feeds(Rows(), [0]))
    return total.loss_sum / total.num_tokens


@pytest.mark.long
def test_commands_load_the_base_and_the_adapters(
    run: Path, base: Path, pool: RankPool, tmp_path: Path
) -> None:
    convert(run, None, ("peft", str(tmp_path / "peft")), [], None, None, None)
    logits = logits_of(base, with_formula(tmp_path / "peft"))
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    for tp in (1, 2):
        assert pool.run(loss_rank, tp, run, tp)[0] == pytest.approx(float(expected), rel=1e-12)


def test_adapters_that_are_not_the_trained_ones_are_caught(
    run: Path, base: Path, pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same comparison fails for an export of first values, whose B is zero."""
    model = configured_model(parse(json.dumps(open_checkpoint(find(run)[0].path).manifest.config)))
    monkeypatch.setattr(
        adapters, "read_factor", lambda checkpoint, name: model.initial(name).double()
    )
    convert(run, None, ("peft", str(tmp_path / "peft")), [], None, None, None)
    logits = logits_of(base, with_formula(tmp_path / "peft"))
    found = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert pool.run(loss_rank, 1, run, 1)[0] != pytest.approx(float(found), rel=1e-6)


IDS = torch.arange(24).view(2, 12) * 7 % 280


def logits_of(path: Path, change: Callable[[Any], Any] = lambda model: model) -> Tensor:
    """Logits of the library's model, in float64."""
    model = import_transformers().AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad(), keep_float64(torch.float64):
        found: Tensor = change(model).eval()(IDS).logits
    return found


def with_formula(exported: Path) -> Callable[[Any], Any]:
    """Add the exported adapters to the library's linears, by hooks."""

    def change(model: Any) -> Any:
        fields = json.loads((exported / "adapter_config.json").read_text())
        tensors = load_file(exported / "adapter_model.safetensors")
        modules = {
            name: module
            for name, module in model.named_modules()
            if name in fields["target_modules"]
        }
        assert (
            len(modules)
            == len(fields["target_modules"])
            == len(tensors) // (3 if fields["use_dora"] else 2)
        )
        for name, module in modules.items():
            a, b = (tensors[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
            low = fields["lora_alpha"] / fields["r"] * b @ a
            if fields["use_dora"]:
                whole, length = (
                    module.weight + low,
                    tensors[f"base_model.model.{name}.lora_magnitude_vector"],
                )
                low = whole * (length / whole.norm(dim=1)).unsqueeze(1) - module.weight
            module.register_forward_hook(lambda m, x, y, low=low: y + x[0] @ low.t())
        return model

    return change


@pytest.mark.parametrize("which", ["run", long_row("decomposed")])
def test_peft_s_files_and_merged_weights_are_one_model(
    which: str, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run: Path = request.getfixturevalue(which)
    assert "peft.PeftModel" in convert(
        run, None, ("peft", str(tmp_path / "peft")), [], None, None, None
    )
    convert(run, None, ("merged", str(tmp_path / "merged")), [], None, None, None)
    adapted, merged = (
        logits_of(base, with_formula(tmp_path / "peft")),
        logits_of(tmp_path / "merged"),
    )
    assert (adapted - logits_of(base)).abs().max() > 1e-3
    assert (adapted - merged).abs().max() <= 1e-12 * adapted.abs().max()
    with pytest.raises(UserError, match="MW-LAUNCH-074"):
        convert(run, None, ("hf", str(tmp_path / "plain")), [], None, None, None)


def test_merging_rounds_once_to_float32(run: Path, base: Path, tmp_path: Path) -> None:
    convert(run, None, ("merged", str(tmp_path / "merged")), [], None, "float32", None)
    checkpoint, name = open_checkpoint(find(run)[0].path), "block1.layer.mlp.up_proj"
    a, b = (read(checkpoint, f"{name}.lora_{each}.weight") for each in "ab")
    theirs = "model.layers.1.mlp.up_proj.weight"
    expected = (load_file(base / "model.safetensors")[theirs].double() + 2.0 * (b @ a)).float()
    assert torch.equal(load_file(tmp_path / "merged" / "model.safetensors")[theirs], expected)


def test_a_model_of_ours_gives_each_of_the_fused_linears_its_part(
    configure: Configure, place: Path, pool: RankPool, tmp_path: Path
) -> None:
    model = {
        "builder": "meshwright_models.llama:build",
        "options": LLAMA | {"max_sequence_length": 16},
    }
    config = configure(
        "ours", {"dp": 1, "tp": 2}, 2, model=model, adapter=ADAPTER | {"targets": FUSED}
    )
    run = trained(pool, config)
    convert(run, None, ("peft", str(tmp_path / "peft")), [], None, None, None)
    convert(run, None, ("merged", str(tmp_path / "merged")), [], None, None, None)
    checkpoint = open_checkpoint(find(run)[0].path)
    assert not all(map(is_adapter, checkpoint.parameters(TensorKind.WEIGHTS)))
    plain = tmp_path / "plain"
    shutil.copytree(tmp_path / "merged", plain)
    tensors = load_file(plain / "model.safetensors")
    peft = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for name in {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in peft}:
        a, b = (peft[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] - 2.0 * b @ a
    assert {"q_proj", "gate_proj"} <= {key.split(".")[6] for key in peft if ".layers.0." in key}
    qkv = read(checkpoint, "block0.attention.qkv.weight").view(2, 4, 4, 16)
    assert torch.allclose(
        tensors["model.layers.0.self_attn.k_proj.weight"].view(2, 4, 16), qkv[:, 2], atol=1e-14
    )


@pytest.mark.long
def test_magnitudes_go_out_and_come_back(
    decomposed: Path, base: Path, corpus: Path, pool: RankPool, tmp_path: Path
) -> None:
    """Run, export, import: the loss of all three,
    and the differences from the base's rows to rounding.
    """
    convert(decomposed, None, ("peft", str(tmp_path / "peft")), [], None, None, None)
    logits = logits_of(base, with_formula(tmp_path / "peft"))
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    for tp in (1, 2):
        assert pool.run(loss_rank, tp, decomposed, tp)[0] == pytest.approx(
            float(expected), rel=1e-12
        )
    data = [f"--data.train={corpus / 'train'}", "--data.sequence_length=12"]
    convert(tmp_path / "back", ("peft", str(tmp_path / "peft")), None, data, None, None, None)
    again, before = (
        open_checkpoint(find(tmp_path / "back")[0].path),
        open_checkpoint(find(decomposed)[0].path),
    )
    names = before.parameters(TensorKind.WEIGHTS)
    assert (
        again.parameters(TensorKind.WEIGHTS) == names
        and sum("magnitude" in name for name in names) == 14
    )
    for name in names:
        assert torch.allclose(read(again, name), read(before, name), rtol=0, atol=1e-14), name
        assert "magnitude" not in name or read(before, name).abs().max() > 1e-2


@pytest.mark.long
def test_adapters_of_peft_go_out_and_come_back(
    run: Path, base: Path, corpus: Path, pool: RankPool, tmp_path: Path
) -> None:
    convert(run, None, ("peft", str(tmp_path / "peft")), [], None, None, None)
    data = [f"--data.train={corpus / 'train'}", "--data.sequence_length=12"]
    text = convert(
        tmp_path / "back", ("peft", str(tmp_path / "peft")), None, data, None, None, None
    )
    assert f"beside hf:{base}" in text and "rank 3 on 14 modules" in text
    again, before = (
        open_checkpoint(find(tmp_path / "back")[0].path),
        open_checkpoint(find(run)[0].path),
    )
    names = before.parameters(TensorKind.WEIGHTS)
    assert again.parameters(TensorKind.WEIGHTS) == names
    assert all(torch.equal(read(again, name), read(before, name)) for name in names)
    more = ["--train.steps=1", "--train.dtype=float64", "--parallel.dp=2", "--batch.global_batch=2"]
    more += ["--tracking.console=false", "--optimizer.learning_rate=1e-30"]
    trained(pool, resolve(load(tmp_path / "back" / "config.toml", more), 2))
    assert pool.run(loss_rank, 1, tmp_path / "back", 1) == pool.run(loss_rank, 1, run, 1)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"lora_bias": True}, "MW-INTEROP-104"),
        ({"use_dora": True}, "MW-INTEROP-113"),
        long_row({"r": 4}, "MW-INTEROP-113"),
        ({"base_model_name_or_path": "someone/model"}, "MW-INTEROP-105"),
    ],
)
def test_adapters_that_are_not_imported(
    run: Path, tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    convert(run, None, ("peft", str(tmp_path / "peft")), [], None, None, None)
    config = tmp_path / "peft" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(
        UserError, match=code, check=has_code("MW-INTEROP-113", "MW-INTEROP-104", "MW-INTEROP-105")
    ):
        convert(
            tmp_path / "back",
            ("peft", str(tmp_path / "peft")),
            None,
            ["--data.train=x"],
            None,
            None,
            None,
        )
    assert not (tmp_path / "back").exists()


@pytest.mark.long
def test_an_imported_model_is_the_base_of_adapters_that_start_at_their_first_values(
    base: Path, corpus: Path, place: Path, pool: RankPool, tmp_path: Path
) -> None:
    run = place / "imported"
    overrides = [
        f"--data.train={corpus / 'train'}",
        f"--data.tokenizer={corpus / 'tokenizer.json'}",
    ]
    convert(
        run, ("hf", str(base)), None, [*overrides, "--data.sequence_length=12"], None, None, None
    )
    before = {name: w.clone() for name, w in load_file(base / "model.safetensors").items()}
    adapted = [
        "--adapter.rank=3",
        f"--adapter.targets={json.dumps(FUSED)}",
        "--train.steps=2",
        "--train.dtype=float32",
    ]
    more = [
        "--batch.micro_batch_size=1",
        "--batch.global_batch=4",
        "--parallel.dp=2",
        "--parallel.tp=2",
    ]
    more += ["--tracking.console=false", "--checkpoint.every=1", "--parallel.zero=3"]
    config = resolve(
        load(
            run / "config.toml",
            [*adapted, *more, "--tracking.console=false", "--checkpoint.every=1"],
        ),
        4,
    )
    trained(pool, config)
    convert(run, None, ("peft", str(tmp_path / "peft")), [], None, None, None)
    convert(run, None, ("merged", str(tmp_path / "merged")), [], None, None, None)
    merged, peft = (
        load_file(tmp_path / "merged" / "model.safetensors"),
        load_file(tmp_path / "peft" / "adapter_model.safetensors"),
    )
    for name, weight in merged.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in peft:
            product = peft[f"{key}.lora_B.weight"].double() @ peft[f"{key}.lora_A.weight"].double()
            assert product.any() and torch.equal(weight, (before[name].double() + product).float())
        else:
            assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize("which", ["run", "decomposed"])
def test_peft_computes_the_same(
    which: str, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Logits, and the gradients of A, B and the magnitudes of every target, in one process."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    run: Path = request.getfixturevalue(which)
    convert(run, None, ("peft", str(tmp_path / "peft")), [], None, None, None)
    theirs = import_transformers().AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft", is_trainable=True).eval()
    layers = own_layers(run).eval()
    with keep_float64(torch.float64):
        logits, expected = layers(IDS), theirs(IDS).logits
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()
    for found in (logits, expected):
        F.cross_entropy(found[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    gradients = {name: each.grad for name, each in theirs.named_parameters() if each.requires_grad}
    ours = {name: each.grad for name, each in layers.named_parameters() if each.requires_grad}
    assert len(gradients) == len(ours) == (28 if which == "run" else 42)
    for name, gradient in ours.items():
        block, inner, factor = re.match(
            r"block(\d+)\.layer\.(.*)\.lora_([ab]|magnitude)", name
        ).groups()  # type: ignore[union-attr]
        theirs_name = "magnitude_vector" if factor == "magnitude" else factor.upper()
        wanted = gradients[
            f"base_model.model.model.layers.{block}.{inner}.lora_{theirs_name}.default.weight"
        ]
        assert gradient is not None and (gradient - wanted).norm() <= 1e-10 * wanted.norm(), name


def own_layers(run: Path) -> torch.nn.Sequential:
    """The layers of a run, with the base of its directory and the adapters
    of its newest checkpoint, in float64.
    """
    checkpoint = open_checkpoint(find(run)[0].path)
    model = configured_model(parse(json.dumps(checkpoint.manifest.config)))
    names = model.layers.named_parameters(remove_duplicate=False)
    infos = {name: ParameterInfo(name, tuple(p.shape)) for name, p in names}

    def local_of(info: ParameterInfo) -> Tensor:
        return read(checkpoint, info.name) if is_adapter(info.name) else model.initial(info.name)

    return materialise(model.layers, model, infos, torch.float64, torch.device("cpu"), local_of)


def test_a_function_that_a_checkpoint_names_for_its_groups_is_not_called() -> None:
    """Export and merging build the model of a checkpoint's configuration,
    which may come from anyone.
    """
    config = RunConfig.model_validate(
        {
            "model": {
                "builder": "meshwright_models.llama:build",
                "options": {**LLAMA, "max_sequence_length": 16},
                "parameter_groups": "no_such_module_anywhere:groups",
            },
            "data": {"train": "none", "sequence_length": 16},
            "batch": {"micro_batch_size": 1, "global_batch": 1},
            "adapter": {**ADAPTER, "targets": FUSED},
        }
    )
    with pytest.raises(UserError, match="no_such_module_anywhere", check=has_code("MW-CONFIG-008")):
        configured_model(config)
    assert any(map(is_adapter, dict(adapters.model_of(config).layers.named_parameters())))
