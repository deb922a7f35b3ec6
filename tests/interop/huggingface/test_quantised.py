"""Directories with quantised weights: read as transformers dequantises them, and trained and
exported as plain ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.blueprint import draw_blueprint
from meshwright.config import resolve
from meshwright.model.build import build_model
from meshwright.parameters import ParameterInfo, Slice
from meshwright.run.start import check_start
from meshwright.run.summary import summarise
from meshwright_interop.huggingface.convert.exporting import export_checkpoint
from meshwright_interop.huggingface.convert.importing import import_model
from meshwright_interop.huggingface.convert.opening import open_model
from meshwright_interop.huggingface.quantised import from_fp8, from_mxfp4
from meshwright_interop.huggingface.restructure.export import export
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_interop.start import weights as open_weights
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import size
from tests.interop.huggingface.architectures import directory
from tests.interop.huggingface.test_released import (
    IDS,
    changed,
    config_of,
    files_of,
    first_rank,
    written,
)
from tests.support.errors import raises
from tests.support.marks import long_row

pytest.importorskip("transformers")
BLOCK = (4, 8)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8 |= {"weight_block_size": list(BLOCK)}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "router")
"""Tensors that are released unquantised."""
WEIGHT = "model.layers.1.self_attn.o_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


def quantised(kind: str, place: Path) -> Path:
    """Write a small model with quantised weights, as it is released."""
    path = written(kind, place)
    draws = torch.Generator().manual_seed(5)
    found: dict[str, Tensor | None] = {}
    for name, tensor in files_of(path).items():
        is_stack = kind == "gpt_oss" and tensor.dim() == 3
        if any(each in name for each in PLAIN) or (kind == "gpt_oss" and not is_stack):
            found[name] = tensor.bfloat16()
        elif is_stack:
            found |= in_mxfp4(name, tensor, draws)
        elif tensor.dim() == 2:
            found |= in_fp8(name, tensor)
    with_config(path, quantization_config=MXFP4 if kind == "gpt_oss" else FP8, dtype="bfloat16")
    return changed(path, found)


def in_fp8(name: str, weight: Tensor) -> dict[str, Tensor | None]:
    """Return the codes and scales of a matrix, whose sizes the blocks divide."""
    rows, columns = (size // block for size, block in zip(weight.shape, BLOCK, strict=True))
    blocks = weight.reshape(rows, BLOCK[0], columns, BLOCK[1])
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}


def in_mxfp4(name: str, weight: Tensor, draws: torch.Generator) -> dict[str, Tensor | None]:
    """Return drawn codes and exponents of a stack of matrices of this shape."""
    experts, columns, rows = weight.shape
    codes = torch.randint(256, (experts, rows, columns // 32, 16), generator=draws)
    scales = torch.randint(118, 124, codes.shape[:3], generator=draws)
    return {
        name: None,
        f"{name}_blocks": codes.to(torch.uint8),
        f"{name}_scales": scales.to(torch.uint8),
    }


def with_config(path: Path, **fields: Any) -> None:
    """Change fields of a config.json."""
    found = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(found | fields))


def dequantised(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open a model by transformers, which dequantises it to float32."""
    transformers = import_transformers()
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # it asks for accelerate, and then does not use it
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    fields = json.loads((path / "config.json").read_text())["quantization_config"]
    if fields["quant_method"] == "fp8":
        wanted = transformers.FineGrainedFP8Config(weight_block_size=BLOCK, dequantize=True)
    else:
        wanted = transformers.Mxfp4Config(dequantize=True)
    open_it = transformers.AutoModelForCausalLM.from_pretrained
    # tensors that are not quantised stay bfloat16 there: their values are the same
    return open_it(path, dtype=torch.float32, quantization_config=wanted).eval().float()


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3", "gpt_oss", long_row("qwen3_moe")])
def test_values_are_those_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quantised(kind, tmp_path)
    state = dequantised(path, monkeypatch).state_dict()
    model = build_model(f"hf:{path}", {}, 1)
    names: Any = model.layers.names_in_transformers
    for name, of_theirs in names.items():
        assert torch.equal(model.initial(name), state[of_theirs]), name
    assert state[WEIGHT].std() > 0.005, "of the model"


@pytest.mark.parametrize(
    ("kind", "layouts", "by_start"),
    [
        ("gpt_oss", ("dp2,ep2",), True),
        ("deepseek_v3", ("", "pp2"), False),
        long_row("gpt_oss", ("", "tp2", "pp2"), False),
        long_row("deepseek_v3", ("dp2,ep2", "tp2,ep2", "dp2,zero3"), True),
        long_row("qwen3", ("", "tp2,sequence", "dp2,zero3"), False),
    ],
)
def test_layouts_begin_with_the_values_and_export_them(
    kind: str,
    layouts: tuple[str, ...],
    by_start: bool,
    tmp_path: Path,
    pool: RankPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = quantised(kind, tmp_path)
    model = dequantised(path, monkeypatch)
    state = model.state_dict()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, IDS.roll(-1, 1).flatten()).item()
    own: dict[str, Any] = {}
    if by_start:
        blank = directory(kind, tmp_path / "blank", attention_dropout=0.0)
        own = {"run": {"start": str(path)}, "model": {"builder": f"hf:{blank}"}}
    for text in layouts:
        config = config_of(path, text, **own)
        place, out = tmp_path / f"layout-{text}", tmp_path / f"out-{text}"
        loss = pool.run(first_rank, size(config), config, str(place))[0]
        assert loss == pytest.approx(expected, rel=1e-6)
        export(place, out)
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
        again = import_transformers().AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, state[name]), name


def test_a_rank_dequantises_its_experts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(f"hf:{quantised('gpt_oss', tmp_path)}", {}, 1)
    name = "block1.layer.mlp.experts.gate_up_proj"
    shape = tuple(model.layers.get_parameter(name).shape)
    whole = model.initial(name)
    sizes: list[int] = []

    def counting(codes: Tensor, scales: Tensor) -> Tensor:
        sizes.append(len(codes))
        return from_mxfp4(codes, scales)

    monkeypatch.setattr("meshwright_interop.huggingface.quantised.from_mxfp4", counting)
    model = build_model(f"hf:{tmp_path / 'gpt_oss'}", {}, 1)
    assert torch.equal(
        model.initial_part(ParameterInfo(name, shape, Slice(0, 2, 5, 3))), whole[2:5]
    )
    assert sizes == [1, 1, 1], "one at a time"


@pytest.mark.parametrize(
    ("shape", "block"), [((12, 20), (8, 8)), ((3, 5, 7), (2, 3)), ((5, 9), (128, 128))]
)
def test_blocks_that_are_cut_off(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    """Check the last blocks of rows and columns, element by element."""
    draws = torch.Generator().manual_seed(1)
    codes = torch.randn(shape, generator=draws).to(torch.float8_e4m3fn)
    grid = [-(-size // part) for size, part in zip(shape[-2:], block, strict=True)]
    scales = torch.rand(*shape[:-2], *grid, generator=draws)
    values = from_fp8(codes, scales, block=block)
    for place in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        *stack, row, column = place
        scale = scales[(*stack, row // block[0], column // block[1])]
        assert values[tuple(place)] == codes[tuple(place)].float() * scale


def test_every_exponent_and_code_of_mxfp4() -> None:
    """Compare all 256 bytes under all exponents, the not-a-number 255 too, with transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.arange(256).reshape(1, 1, 16, 16).expand(1, 256, 16, 16).to(torch.uint8)
    scales = torch.arange(256).reshape(1, 256, 1).expand(1, 256, 16).to(torch.uint8)
    theirs = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
    ours = from_mxfp4(codes, scales)
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), "signs of zero too"


FAULTS: dict[str, tuple[str, dict[str, Tensor | None], tuple[str, ...]]] = {
    "missing": ("qwen3", {f"{WEIGHT}_scale_inv": None}, (f"{WEIGHT}_scale_inv", "[8, 4]")),
    "extra": ("qwen3", {"model.x.weight_scale_inv": torch.ones(1, 1)}, ("model.x.weight",)),
    "alone": ("qwen3", {WEIGHT: None}, (f"{WEIGHT}_scale_inv", WEIGHT)),
    "shape": ("qwen3", {f"{WEIGHT}_scale_inv": torch.ones(4, 8)}, ("[4, 8]", "[8, 4]")),
    "whole": ("qwen3", {f"{WEIGHT}_scale_inv": torch.tensor(1.0)}, ("[]", "[8, 4]")),
    "dtype": ("qwen3", {f"{WEIGHT}_scale_inv": torch.ones(8, 4, dtype=torch.uint8)}, ("U8",)),
    "plain": ("qwen3", {WEIGHT: torch.ones(32, 32)}, (WEIGHT, "F32", "[32, 32]")),
    "vector": (
        "qwen3",
        {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)},
        ("model.norm.weight", "F8_E4M3", "[32]"),
    ),
    "no scales": ("gpt_oss", {f"{EXPERTS}_scales": None}, (f"{EXPERTS}_scales",)),
    "no blocks": ("gpt_oss", {f"{EXPERTS}_blocks": None}, (f"{EXPERTS}_blocks",)),
    "twice": ("gpt_oss", {EXPERTS: torch.ones(8, 32, 128)}, (EXPERTS,)),
    "bytes": (
        "gpt_oss",
        {f"{EXPERTS}_blocks": torch.ones(8, 128, 2, 8, dtype=torch.uint8)},
        ("[8, 128, 2, 8]", "16"),
    ),
    "rows": (
        "gpt_oss",
        {f"{EXPERTS}_scales": torch.ones(8, 1, 128, dtype=torch.uint8)},
        ("[8, 1, 128]", "[8, 128, 1]"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_scales_is_named(fault: str, tmp_path: Path) -> None:
    kind, change, values = FAULTS[fault]
    path = changed(quantised(kind, tmp_path), change)
    with raises("MW-INTEROP-175", *values, "get these files again"):
        build_model(f"hf:{path}", {}, 1)


def test_a_shape_that_fits_its_scales_and_not_the_model(tmp_path: Path) -> None:
    path = quantised("gpt_oss", tmp_path)
    experts = {
        f"{EXPERTS}_blocks": torch.ones(8, 120, 1, 16, dtype=torch.uint8),
        f"{EXPERTS}_scales": torch.ones(8, 120, 1, dtype=torch.uint8),
    }
    with raises("MW-INTEROP-037", EXPERTS, "[8, 32, 120]", "[8, 32, 128]"):
        build_model(f"hf:{changed(path, experts)}", {}, 1)


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        ({"quant_method": "gptq", "bits": 4}, "MW-INTEROP-053", ("gptq", "original directory")),
        ({"quant_method": "awq"}, "MW-INTEROP-053", ("awq",)),
        ({"quant_method": "bitsandbytes"}, "MW-INTEROP-053", ("dequantize",)),
        ({"quant_method": "compressed-tensors"}, "MW-INTEROP-053", ("run_compressed=False",)),
        ({"bits": 4}, "MW-INTEROP-053", ("some way",)),
        ({"quant_method": ["fp8"]}, "MW-INTEROP-053", ("['fp8']",)),
        (FP8 | {"weight_block_size": None}, "MW-INTEROP-174", ("weight_block_size", "None")),
        (FP8 | {"weight_block_size": [0, 128]}, "MW-INTEROP-174", ("[0, 128]",)),
        (FP8 | {"weight_block_size": [2**40, 1]}, "MW-INTEROP-174", ("weight_block_size",)),
        (FP8 | {"weight_block_size": [True, 1]}, "MW-INTEROP-174", ("weight_block_size",)),
        (FP8 | {"activation_scheme": "static"}, "MW-INTEROP-174", ("activation_scheme",)),
    ],
)
def test_other_quantisations_are_refused(
    change: dict[str, Any], code: str, values: tuple[str, ...], tmp_path: Path
) -> None:
    path = directory("deepseek_v3", tmp_path)
    with_config(path, quantization_config=change)
    with raises(code, "config.json", *values):
        build_model(f"hf:{path}", {"weights": False}, 1)
    with raises(code, "config.json", *values):
        save_file({"a": torch.ones(1)}, path / "model.safetensors")
        open_model(path)


def test_the_accounts_name_what_is_dequantised(tmp_path: Path) -> None:
    """Check the summary of a run, the account of a start, and the notes of an import."""
    path = quantised("deepseek_v3", tmp_path)
    number = sum(each.dtype == torch.float8_e4m3fn for each in files_of(path).values())
    said = f"{number} tensors of {path} are dequantised to float32: fp8 in blocks of 4 x 8"
    blueprint = draw_blueprint(resolve(config_of(path, ""), 1))
    assert said in summarise(blueprint, [""])
    blank = directory("deepseek_v3", tmp_path / "blank", attention_dropout=0.0)
    config = config_of(path, "", model={"builder": f"hf:{blank}"}, run={"start": str(path)})
    check_start(draw_blueprint(resolve(config, 1)), tmp_path / "run")
    notes = open_weights(str(path), config.model).notes
    assert said in notes and not any("quantization_config" in note for note in notes)
    assert said in open_model(path).settings.notes


@pytest.mark.parametrize("kind", ["qwen3", long_row("deepseek_v3")])
def test_an_import_has_the_values(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Import into a family, and export all of its weights again."""
    path = quantised(kind, tmp_path)
    state = dequantised(path, monkeypatch).state_dict()
    done = import_model(path, tmp_path / "run", ["--train.dtype=float32"])
    assert any("are dequantised to float32" in note for note in done.notes)
    export_checkpoint(tmp_path / "run", tmp_path / "again", dtype="float32")
    found = import_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert not hasattr(found.config, "quantization_config")
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, state[name]), name
