"""peft's adapters of separate projections on our fused ones: one function before training,
and out again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.adapters.attach import is_adapter
from meshwright.checkpoint import TensorKind, find, open_checkpoint
from meshwright.config import load, resolve
from meshwright.errors import UserError
from meshwright_interop.commands.conversion import convert, convert_onto
from meshwright_interop.huggingface.restructure.float64 import keep_float64
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_launch.pool import RankPool
from meshwright_launch.work import work
from tests.interop.huggingface import theirs as mixtures
from tests.interop.huggingface.architectures import directory
from tests.support.errors import has_code
from tests.support.marks import long_row

pytest.importorskip("transformers")
PREFIX = "base_model.model.model"
LINEARS = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
MLP = {"gate_proj": (64, 32), "up_proj": (64, 32), "down_proj": (32, 64)}
RANK, ALPHA = 2, 3.0
IDS = torch.arange(24).view(2, 12) * 7 % 67
DATA = ["--data.train=none", "--data.sequence_length=12"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fused")


@pytest.fixture(scope="module")
def theirs(place: Path) -> Path:
    """A Llama of transformers with weights."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return directory("llama", place, weights=True, attention_dropout=0.0, rope_parameters=rope)


@pytest.fixture(scope="module")
def base(place: Path, theirs: Path) -> Path:
    """The run directory of its import."""
    convert(place / "base", ("hf", str(theirs)), None, DATA, None, None, None)
    return place / "base"


def peft_files(path: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    modules = sorted(
        {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    )
    fields = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": modules,
        "lora_dropout": 0.0,
    }
    (path / "adapter_config.json").write_text(json.dumps(fields | {"bias": "none"} | changes))
    return path


def drawn(
    leave_out: tuple[str, ...] = (), *, share_a: bool = False, dora: bool = False
) -> dict[str, Tensor]:
    """A and B of every linear and of the embedding, float64; ``share_a``: q, k and v have one A,
    as gate and up.

    ``dora``: magnitudes too, of linears alone.
    """
    generator = torch.Generator().manual_seed(5)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64) * 0.3

    found = {f"{PREFIX}.embed_tokens.lora_embedding_A": normal(RANK, 67)}
    found[f"{PREFIX}.embed_tokens.lora_embedding_B"] = normal(32, RANK)
    for layer in range(3):
        shared: dict[str, Tensor] = {}
        for part, linears in (("self_attn", LINEARS), ("mlp", MLP)):
            for name, (rows, columns) in linears.items():
                key = f"{PREFIX}.layers.{layer}.{part}.{name}"
                down, up = normal(RANK, columns), normal(rows, RANK)
                if share_a and name not in ("o_proj", "down_proj"):
                    down = shared.setdefault(part, down).clone()
                if name not in leave_out:
                    found[f"{key}.lora_A.weight"], found[f"{key}.lora_B.weight"] = down, up
                    if dora:
                        found[f"{key}.lora_magnitude_vector"] = normal(rows).abs() + 0.5
    return {name: tensor for name, tensor in found.items() if not (dora and "embed_tokens" in name)}


def merged(theirs: Path, adapter: Path) -> dict[str, Tensor]:
    """W + (alpha / rank) B A of every target, in float64, by transformers' names."""
    fields = json.loads((adapter / "adapter_config.json").read_text())
    tensors, weights = (
        load_file(adapter / "adapter_model.safetensors"),
        load_file(theirs / "model.safetensors"),
    )
    found = {name: weight.double() for name, weight in weights.items()}
    for name in fields["target_modules"]:
        factors = {
            key.rpartition("lora_")[2]: t
            for key, t in tensors.items()
            if f".{name}.lora_" in f".{key}"
        }
        if "embedding_A" in factors:
            product = (factors["embedding_B"] @ factors["embedding_A"]).t()
        else:
            product = factors["B.weight"] @ factors["A.weight"]
        found[f"{name}.weight"] += fields["lora_alpha"] / fields["r"] * product.double()
        if "magnitude_vector" in factors:
            lengths = factors["magnitude_vector"] / found[f"{name}.weight"].norm(dim=1)
            found[f"{name}.weight"] *= lengths.unsqueeze(1)
    return found


def equals(run: Path, expected: dict[str, Tensor], out: Path) -> None:
    """Check that the merged weights of a run are those."""
    convert(run, None, ("merged", str(out)), [], None, "float64", None)
    found = load_file(out / "model.safetensors")
    for name, weight in expected.items():
        if name in found:
            assert (found[name] - weight).abs().max() <= 1e-12 * weight.abs().max(), name
    assert len(found) >= 20


@pytest.mark.parametrize("leave_out", [long_row(()), ("k_proj", "gate_proj")])
def test_the_fused_adapters_are_the_split_ones(
    theirs: Path, base: Path, tmp_path: Path, leave_out: tuple[str, ...]
) -> None:
    adapter = peft_files(tmp_path / "peft", drawn(leave_out))
    expected = merged(theirs, adapter)
    text = convert_onto(base, tmp_path / "tuned", ("peft", str(adapter)), [])
    rank = RANK * (2 if leave_out else 3)
    assert f"rank {rank} on 13 modules" in text and "llama:build" in text
    equals(tmp_path / "tuned", expected, tmp_path / "merged")
    convert(tmp_path / "tuned", None, ("peft", str(tmp_path / "back")), [], None, None, None)
    again = merged(theirs, tmp_path / "back")
    assert all(
        (again[name] - weight).abs().max() <= 1e-12 * weight.abs().max()
        for name, weight in expected.items()
    )
    model = import_transformers().AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float64)
    before = logits_of(model)
    model.load_state_dict(expected, strict=False)
    assert (logits_of(model) - before).abs().max() > 1e-2


def logits_of(model: Any) -> Tensor:
    with torch.no_grad(), keep_float64(torch.float64):
        found: Tensor = model.eval()(IDS).logits
    return found


def test_fused_magnitudes_are_the_split_ones(theirs: Path, base: Path, tmp_path: Path) -> None:
    adapter = peft_files(
        tmp_path / "peft", drawn(("k_proj", "gate_proj"), dora=True), use_dora=True
    )
    expected = merged(theirs, adapter)
    convert_onto(base, tmp_path / "tuned", ("peft", str(adapter)), [])
    equals(tmp_path / "tuned", expected, tmp_path / "merged")
    convert(tmp_path / "tuned", None, ("peft", str(tmp_path / "back")), [], None, None, None)
    again = merged(theirs, tmp_path / "back")
    assert all(
        (again[name] - weight).abs().max() <= 1e-12 * weight.abs().max()
        for name, weight in expected.items()
    )


def test_one_a_for_all_parts_keeps_the_rank_and_the_bits(
    theirs: Path, base: Path, tmp_path: Path
) -> None:
    """As an export of ours has it: out and in again is the identity."""
    tensors = drawn(share_a=True)
    adapter = peft_files(tmp_path / "peft", tensors)
    assert f"rank {RANK} on" in convert_onto(base, tmp_path / "tuned", ("peft", str(adapter)), [])
    convert(tmp_path / "tuned", None, ("peft", str(tmp_path / "back")), [], None, None, None)
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def train_rank(rank: int, world_size: int, config: Any) -> None:
    work(config)


@pytest.mark.long
def test_training_goes_on_from_them_on_any_layout(
    theirs: Path, base: Path, pool: RankPool, tmp_path: Path
) -> None:
    adapter = peft_files(tmp_path / "peft", drawn())
    data = ["--data.builder=tests.interop.adapters.test_fused:rows"]
    convert_onto(base, tmp_path / "tuned", ("peft", str(adapter)), data)
    more = [
        "--train.steps=1",
        "--train.dtype=float64",
        "--train.device=cpu",
        "--parallel.tp=2",
        "--parallel.dp=1",
    ]
    more += [
        "--batch.global_batch=2",
        "--tracking.console=false",
        "--optimizer.learning_rate=1e-30",
    ]
    config = resolve(load(tmp_path / "tuned" / "config.toml", more), 2)
    pool.run(train_rank, 2, config)
    checkpoint = open_checkpoint(find(tmp_path / "tuned")[0].path)
    assert checkpoint.manifest.step == 1
    assert sum(map(is_adapter, checkpoint.parameters(TensorKind.WEIGHTS))) == 26
    equals(tmp_path / "tuned", merged(theirs, adapter), tmp_path / "merged")


class Rows:
    """Rows of IDS as samples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = IDS[index % 2]
        return row, torch.cat([row[1:], torch.full_like(row[:1], -100)])


def rows(split: str) -> Rows:
    """Build the samples."""
    return Rows()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"r": 3}, "MW-INTEROP-113"),
        ({"lora_bias": True}, "MW-INTEROP-104"),
        ({"init_lora_weights": "pissa"}, "MW-INTEROP-104"),
        ({"name": "q"}, "MW-INTEROP-115"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    tensors = {
        name.replace("q_proj", "q" if "name" in changes else "q_proj"): t
        for name, t in drawn().items()
    }
    changes.pop("name", None)
    adapter = peft_files(tmp_path / "peft", tensors, **changes)
    with pytest.raises(
        UserError, match=code, check=has_code("MW-INTEROP-104", "MW-INTEROP-113", "MW-INTEROP-115")
    ):
        convert_onto(base, tmp_path / "tuned", ("peft", str(adapter)), [])
    assert not (tmp_path / "tuned").exists()


def test_another_model_and_a_base_with_adapters_are_refused(base: Path, tmp_path: Path) -> None:
    tensors = drawn()
    wide = tensors | {f"{PREFIX}.layers.0.self_attn.k_proj.lora_B.weight": torch.zeros(24, RANK)}
    with pytest.raises(
        UserError,
        match=r"k_proj .* block0.attention.qkv.weight \[64, 32\]",
        check=has_code("MW-INTEROP-114"),
    ):
        convert_onto(base, tmp_path / "x", ("peft", str(peft_files(tmp_path / "wide", wide))), [])
    adapter = peft_files(tmp_path / "peft", tensors)
    convert_onto(base, tmp_path / "tuned", ("peft", str(adapter)), [])
    with pytest.raises(UserError, match="MW-INTEROP-111"):
        convert_onto(tmp_path / "tuned", tmp_path / "x", ("peft", str(adapter)), [])
    with pytest.raises(UserError, match="MW-LAUNCH-084"):
        convert_onto(base, tmp_path / "x", ("hf", str(adapter)), [])


def test_adapters_of_a_mixture_are_merged_beside_its_biases(tmp_path: Path) -> None:
    """DeepSeek-V3's routers have a bias, a buffer, which the merged files hold too."""
    base, name = tmp_path / "theirs", f"{PREFIX}.layers.0.mlp.down_proj"
    mixtures.write("deepseek_v3", base)
    convert(tmp_path / "base", ("hf", str(base)), None, DATA, None, None, None)
    shape = load_file(base / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].shape
    factors = {
        f"{name}.lora_A.weight": torch.ones(RANK, shape[1]),
        f"{name}.lora_B.weight": torch.ones(shape[0], RANK),
    }
    adapter = peft_files(tmp_path / "peft", factors)
    convert_onto(tmp_path / "base", tmp_path / "tuned", ("peft", str(adapter)), [])
    expected = merged(base, adapter)
    assert any(each.endswith("e_score_correction_bias") for each in expected)
    convert(tmp_path / "tuned", None, ("merged", str(tmp_path / "out")), [], None, "float64", None)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(
        (found[each] - weight).abs().max() <= 1e-12 * weight.abs().max()
        for each, weight in expected.items()
    )


@pytest.fixture(scope="module")
def mixture(place: Path) -> Path:
    """The run directory of a Mixtral."""
    mixtures.write("mixtral", place / "mixtral")
    convert(place / "of_mixtral", ("hf", str(place / "mixtral")), None, DATA, None, None, None)
    return place / "of_mixtral"


@pytest.mark.parametrize("name", ["gate", "experts.0.w1"])
def test_routers_and_experts_have_no_adapters(mixture: Path, tmp_path: Path, name: str) -> None:
    rows = {"gate": 6, "experts.0.w1": 40}[name]
    key = f"{PREFIX}.layers.0.block_sparse_moe.{name}"
    factors = {
        f"{key}.lora_A.weight": torch.ones(RANK, 32),
        f"{key}.lora_B.weight": torch.ones(rows, RANK),
    }
    with pytest.raises(UserError, match="MW-INTEROP-123"):
        convert_onto(
            mixture, tmp_path / "x", ("peft", str(peft_files(tmp_path / "peft", factors))), []
        )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "tensor", "code"),
    [
        ("lora_A.weight", torch.ones(RANK), "MW-INTEROP-113"),
        ("lora_A.weight", torch.ones(RANK, 32, 1), "MW-INTEROP-113"),
        ("lora_B.weight", torch.ones(32, RANK).to(torch.float8_e4m3fn), "MW-INTEROP-124"),
        ("lora_magnitude_vector", torch.ones(1), "MW-INTEROP-114"),
        ("lora_magnitude_vector", torch.ones(32, 1), "MW-INTEROP-113"),
    ],
)
def test_tensors_of_other_shapes_are_refused(
    base: Path, tmp_path: Path, name: str, tensor: Tensor, code: str
) -> None:
    tensors = drawn(dora=True) | {f"{PREFIX}.layers.0.self_attn.q_proj.{name}": tensor}
    adapter = peft_files(tmp_path / "peft", tensors, use_dora=True)
    with pytest.raises(
        UserError, match=code, check=has_code("MW-INTEROP-113", "MW-INTEROP-114", "MW-INTEROP-124")
    ):
        convert_onto(base, tmp_path / "tuned", ("peft", str(adapter)), [])
    assert not (tmp_path / "tuned").exists()


def test_factors_of_two_precisions_keep_the_larger_one(
    theirs: Path, base: Path, tmp_path: Path
) -> None:
    """B of q in float64 was rounded to the bfloat16 of its A, and k's A to that of q."""
    tensors = drawn()
    for name in tensors:
        if "q_proj.lora_A" in name:
            tensors[name] = tensors[name].bfloat16()
    adapter = peft_files(tmp_path / "peft", tensors)
    convert_onto(base, tmp_path / "tuned", ("peft", str(adapter)), [])
    equals(tmp_path / "tuned", merged_exactly(theirs, adapter), tmp_path / "merged")


def merged_exactly(theirs: Path, adapter: Path) -> dict[str, Tensor]:
    """As :func:`merged`, of factors in float64."""
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.double() for name, tensor in load_file(file).items()}, file)
    return merged(theirs, adapter)
