"""What a GPU run may use besides plain layouts: numbers of one plain process on CPU, checkpoints,
checks, the command.

``MESHWRIGHT_GPU_TESTS=cpu pytest -m gpu tests/gpu/test_options.py`` rehearses this file on a
machine without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import RunConfig
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.compare import compare
from meshwright.verify.rank import merge, run_layout
from meshwright.verify.tolerance import tolerance_of
from tests.framework.data.corpora import bytes_tokenizer, made, write_lines
from tests.framework.verify.cases import References, config_of, model_config, size_for
from tests.framework.verify.test_expert_parallel import model as mixture
from tests.gpu import on_gpu

DEVICE = os.environ.get("MESHWRIGHT_GPU_TESTS", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(),
        reason="needs a CUDA device, and `pytest -m gpu`",
    ),
]
STEPS = 4
OPTIONS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "adamw8bit": ("gpt2", "mbs2", "float32", {"optimizer": {"name": "adamw8bit"}}),
    "muon": ("llama", "mbs2", "float32", {"optimizer": {"name": "muon"}}),
    "muon bfloat16": ("gpt2", "zero2,mbs2", "bfloat16", {"optimizer": {"name": "muon"}}),
    "recompute full": ("llama", "full,mbs2", "float32", {}),
    "recompute selective": ("llama", "selective,mbs2", "bfloat16", {}),
    "t5": ("t5", "mbs2", "float32", {}),
    "zero2": ("gpt2", "zero2,mbs2", "bfloat16", {}),
    "zero3": ("llama", "zero3,mbs2", "float32", {}),
    "zero3 offload": ("llama", "zero3,offload,mbs2", "float32", {}),
    "zero-bubble": ("gpt2", "zb_v,mbs2", "float32", {}),
    "lion": ("gpt2", "mbs2", "bfloat16", {"optimizer": {"name": "lion"}}),
    "adafactor": ("llama", "mbs2", "float32", {"optimizer": {"name": "adafactor"}}),
    "activation offload": (
        "llama",
        "mbs2",
        "float32",
        {"pipeline": {"offload_activations": ["block*"]}},
    ),
    "activation offload, zero-bubble": (
        "gpt2",
        "zb_v,mbs2",
        "bfloat16",
        {"pipeline": {"offload_activations": ["*"]}},
    ),
    "lora": (
        "llama",
        "mbs2",
        "float32",
        {"adapter": {"rank": 2, "targets": ["block*.attention.*"]}},
    ),
    "experts": ("mixture:mixtral", "mbs2", "float64", {}),
    "experts in groups": ("mixture:deepseek", "mbs2", "float32", {}),
    "experts, one product": ("mixture:mixtral", "mbs2", "bfloat16", {}),
}


def with_sections(config: RunConfig, sections: dict[str, Any]) -> RunConfig:
    return config.replace(**sections) if sections else config


def base_of(model: str, layout: str, sections: dict[str, Any]) -> RunConfig:
    """Return the configuration of a model by name; ``mixture:NAME`` is one of
    test_expert_parallel.py.
    """
    kind, _, name = model.partition(":")
    base = (
        mixture(name) if kind == "mixture" else model_config(model, size_for(parse_layout(layout)))
    )
    return with_sections(base, sections)


def check_numbers(
    base: RunConfig,
    layout: str,
    dtype: str,
    on_device: Callable[..., Any],
    references: References,
) -> None:
    """Loss, gradients and weights of the device within the bars,
    against one plain process on CPU.
    """
    parsed = parse_layout(layout)
    expected = references.expected(base, 4, STEPS, dtype)
    config = layout_config(base, parsed, 4, dtype, DEVICE)
    found = merge([on_device(run_layout, 0, 1, config.model_dump_json(), STEPS, True)])
    row = compare(
        layout, found, found, expected.findings, tolerance_of(dtype, parsed), expected.rounding
    )
    assert row.passed, row.problems


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, on_device: Callable[..., Any], references: References) -> None:
    model, layout, dtype, sections = OPTIONS[name]
    check_numbers(base_of(model, layout, sections), layout, dtype, on_device, references)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_documents(
    model: str, tmp_path: Path, on_device: Callable[..., Any], references: References
) -> None:
    """Attention inside documents: masks instead of the fused causal kernel."""
    texts = [{"text": "w" * (3 + 7 * number % 16)} for number in range(40)]
    made(
        tmp_path / "text",
        bytes_tokenizer(tmp_path / "tok"),
        write_lines(tmp_path / "text.jsonl", texts),
    )
    base = model_config(model, size_for(parse_layout("mbs2")), vocab_size=257)
    base = base.replace(
        data={
            "train": str(tmp_path / "text" / "train"),
            "packing": "documents",
            "document_boundaries": True,
        }
    )
    check_numbers(base, "mbs2", "float32", on_device, references)


def test_a_model_of_transformers(
    tmp_path: Path, on_device: Callable[..., Any], references: References
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    ).save_pretrained(tmp_path)
    check_numbers(config_of(f"hf:{tmp_path}", {}, 8), "mbs2", "float32", on_device, references)


def small(directory: Path, **sections: Any) -> RunConfig:
    base = model_config("gpt2", size_for(parse_layout("mbs2")), dropout=0.1)
    config = layout_config(base, parse_layout("mbs2"), 4, "float32", DEVICE)
    return with_sections(config, {"run": {"directory": str(directory)}, **sections})


def test_a_layer_that_draws_on_the_device_is_refused(
    tmp_path: Path, on_device: Callable[..., Any]
) -> None:
    """Dropout of torch on CUDA alone; the draw on meta, before the run, does not see it."""
    config = small(tmp_path).replace(
        model={"builder": "tests.gpu.on_gpu:drawing", "options": {"device": DEVICE}}
    )
    said = on_device(on_gpu.refusal, config)
    assert "layer 1 draws from torch's random generator" in said and "MW-PIPELINE-020" in said


def test_a_checkpoint_goes_from_one_device_to_the_other(
    tmp_path: Path, on_device: Callable[..., Any]
) -> None:
    """Bit for bit: what CUDA saves, a CPU loads and saves again, and back."""
    config = small(tmp_path)
    first = on_device(on_gpu.saved_bits, config, 2)
    on_cpu = config.replace(train={"device": "cpu"})
    assert on_device(on_gpu.saved_bits, on_cpu, 0) == first
    later = on_device(on_gpu.saved_bits, on_cpu, 1)
    assert later != first and on_device(on_gpu.saved_bits, config, 0) == later


def test_copies_of_one_replica_do_not_drift(tmp_path: Path, on_device: Callable[..., Any]) -> None:
    """The hash of weights and optimizer state on the device equals that
    of the same numbers on the CPU.
    """
    assert on_device(on_gpu.hashes_agree, small(tmp_path))


def test_nan_is_named(tmp_path: Path, on_device: Callable[..., Any]) -> None:
    said = on_device(on_gpu.poisoned, small(tmp_path))
    assert "block1" in said and "MW-WATCH" in said, said


@pytest.mark.slow
def test_compiled_layers_with_recompute(on_device: Callable[..., Any], tmp_path: Path) -> None:
    config = small(tmp_path).replace(pipeline={"recompute": "full"})
    plain = on_device(on_gpu.losses, config, STEPS)
    compiled = config.replace(train={"compile": True})
    assert on_device(on_gpu.losses, compiled, STEPS) == pytest.approx(plain, rel=1e-5)


def test_the_command_trains_resumes_and_evaluates(tmp_path: Path) -> None:
    """`meshwright train` on one rank of its own, twice, and `eval`."""
    texts = [{"text": f"text number {number}"} for number in range(200)]
    made(
        tmp_path / "text",
        bytes_tokenizer(tmp_path / "tok"),
        write_lines(tmp_path / "text.jsonl", texts),
    )
    config = tmp_path / "run.toml"
    config.write_text(
        f"""
        run.directory = "{tmp_path}"
        model.builder = "meshwright_models.gpt2:build"
        model.options = {{ vocab_size = 257, hidden_size = 32, num_layers = 2, num_heads = 2 }}
        data.train = "{tmp_path / "text" / "train"}"
        data.sequence_length = 16
        batch.micro_batch_size = 2
        batch.chunks = 2
        train.steps = 4
        train.device = "{DEVICE}"
        launch.processes = 1
        """
    )
    commands = [
        ["train", str(config)],
        ["train", str(config), "--train.steps=6"],
        [
            "eval",
            str(tmp_path / "run"),
            "--data",
            str(tmp_path / "text" / "train"),
            "--batches",
            "2",
        ],
    ]
    for words in commands:
        program = [sys.executable, "-m", "meshwright_launch", *words]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU has no stream to wait for")
def test_the_host_waits_as_often_as_on_fake_tensors(
    tmp_path: Path, on_device: Callable[..., Any]
) -> None:
    """torch's own count of synchronising calls in a step,
    beside that of tests/plan/dryrun/test_cuda_path.py.
    """
    found = on_device(on_gpu.host_waits, small(tmp_path))
    assert found <= 1, f"{found} synchronising calls of torch in a step"
