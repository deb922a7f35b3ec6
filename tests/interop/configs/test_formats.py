"""Forms of files: JSON of torchtitan's keys, YAML of Megatron-LM and -Bridge,
and programs without an import.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.errors import ConfigError
from meshwright.optimizer.learning_rate import learning_rate
from meshwright_interop.configs import ImportedConfig, convert_file, file_text, format_report
from tests.interop.configs import dumps, samples
from tests.support.errors import has_code


def imported(path: Path, text: str) -> ImportedConfig:
    path.write_text(text)
    found = convert_file(path)
    assert draw_blueprint(resolve(found.config)).stages  # the model can be built and cut
    assert file_text(found, path.name)
    return found


def test_json_of_torchtitan_is_read_as_its_toml(tmp_path: Path) -> None:
    found = imported(tmp_path / "a.json", samples.TORCHTITAN_JSON)
    toml = imported(tmp_path / "a.toml", samples.TORCHTITAN_PIPELINE)
    assert found.framework == "torchtitan" and found.config == toml.config


def test_the_dump_of_a_python_configuration_is_refused(tmp_path: Path) -> None:
    """Its model is a tree of modules: without it the run would train another one."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            json.loads(samples.TORCHTITAN_JSON) | {"model_spec": {"name": "llama3", "model": {}}}
        )
    )
    for framework in (None, "torchtitan"):
        with pytest.raises(ConfigError, match="model_spec", check=has_code("MW-INTEROP-030")):
            convert_file(path, framework)


def test_the_run_config_of_megatron_bridge(tmp_path: Path) -> None:
    found = imported(tmp_path / "run_config.yaml", dumps.BRIDGE)
    config = found.config
    assert found.framework == "bridge" and not found.open
    assert config.model.options == {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 192,
        "max_sequence_length": 64,
        "norm_eps": 1e-5,
        "tied": True,
        "dropout": 0.0,
        "init_std": 0.01,
        "head_dim": 32,
        "qk_norm": True,
        "rope_theta": 500000.0,
        "rope_scaling_factor": 32.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_original_length": 8192,
    }
    assert (config.parallel.tp, config.parallel.pp, config.parallel.zero) == (2, 2, 1)
    assert (config.train.steps, config.optimizer.decay_until, config.optimizer.warmup_steps) == (
        40,
        30,
        4,
    )
    assert (
        config.optimizer.weight_decay == 0.033
        and "which replaces optimizer.weight_decay = 0.1" in " ".join(format_report(found).split())
    )
    assert (
        config.train.dtype == "bfloat16" and config.run.seed == 7 and config.checkpoint.every == 20
    )
    assert config.model_dump()["data"]["train"] == [
        {"path": "/data/books", "weight": 0.3},
        {"path": "/data/code", "weight": 0.7},
    ]
    unknown = [key.item.key for key in found.dropped if "unknown" in key.note]
    assert not unknown, unknown


@pytest.mark.parametrize(
    ("old", "new", "code", "shown"),
    [
        ("llama.llama_provider.Llama31ModelProvider", "qwen_vl.qwen_vl_provider.QwenVLProvider", "030", "QwenVL"),
        ("num_moe_experts: null", "num_moe_experts: 8", "030", "model.num_moe_experts = 8"),
        ("functional.silu", "functional.gelu", "030", "gelu"),
        ("peft: null", "peft:\n  dim: 32\n  alpha: 4", "089", "peft.dim = 32"),
        ("start_weight_decay: 0.033", "start_weight_decay: 0.01", "089", "scheduler.end_weight_decay"),
        ("softmax_type: vanilla", "softmax_type: learnable", "089", "softmax_type"),
        ("rampup_batch_size: null", "rampup_batch_size: [2, 7, 100]", "089", "rampup_batch_size"),
        ("pretrained_checkpoint: null", "pretrained_checkpoint: /w", "089", "pretrained_checkpoint"),
        ("optimizer: adam\n", "optimizer: muon\n", "089", "optimizer.optimizer"),
        ("qk_layernorm: true", "qk_layernorm: true\n  use_mup: true", "089", "model.use_mup"),
        ("rampup_batch_size: null", "step_batch_size_schedule: 0:4 500:8", "089", "step_batch_size_schedule"),
    ],
)  # fmt: skip
def test_what_a_run_config_may_not_have(
    tmp_path: Path, old: str, new: str, code: str, shown: str
) -> None:
    path = tmp_path / "run_config.yaml"
    assert old in dumps.BRIDGE
    path.write_text(dumps.BRIDGE.replace(old, new))
    with pytest.raises(ConfigError, check=has_code(f"MW-INTEROP-{code}")) as caught:
        convert_file(path)
    assert shown in str(caught.value)


def test_the_model_config_of_megatrons_functional_tests(tmp_path: Path) -> None:
    found = imported(tmp_path / "model_config.yaml", dumps.MODEL_CONFIG)
    config = found.config
    assert found.framework == "megatron" and list(found.open) == ["data.train"]
    assert (
        found.open["data.train"] == "--data-path ${DATA_PATH}/text_document is no path in the file"
    )
    assert config.model.builder == "meshwright_models.gpt2:build" and config.batch.global_batch == 8
    assert (config.optimizer.decay_until, config.train.steps, config.parallel.sequence) == (
        40,
        50,
        False,
    )
    lines = {key.item.key: key.item.place.rpartition(":")[2] for key in found.dropped}
    assert lines["--tensorboard-dir"] == "7"


def cosine(peak: float, low: float, start: int, end: int) -> Callable[[int], float]:
    """Rate after ``done`` steps of the decay from ``start`` to ``end``, flat before and after."""

    def rate(done: int) -> float:
        share = min(1.0, max(0.0, (done - start) / (end - start)))
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * share))

    return rate


EARLY = {
    "a.txt": samples.MEGATRON_GPT.replace("--rampup-batch-size 16 16 5000\n", ""),
    "a.yaml": samples.NANOTRON.replace("lr_decay_steps: 13", "lr_decay_steps: 8"),
    "a.toml": samples.TORCHTITAN_PIPELINE.replace(
        "warmup_steps = 4", "warmup_steps = 4\ntotal_steps = 30"
    ),
}
ENDS = {
    "a.txt": (6e-5, 6e-6, 4, 400),
    "a.yaml": (3e-4, 1e-5, 2, 10),
    "a.toml": (8e-4, 0.0, 4, 30),
}


@pytest.mark.parametrize("name", EARLY)
def test_a_decay_that_ends_before_the_run_does(tmp_path: Path, name: str) -> None:
    config = imported(tmp_path / name, EARLY[name]).config
    peak, low, warmup, end = ENDS[name]
    assert (config.optimizer.warmup_steps, config.optimizer.decay_until) == (warmup, end)
    theirs = cosine(peak, low, warmup, end)
    for step in range(warmup, config.train.steps):
        assert learning_rate(config.optimizer, step, config.train.steps) == pytest.approx(
            theirs(step + 1), rel=1e-9
        )


STARTS = {
    "a.yaml": (
        samples.NANOTRON.replace("starting_step: null", "starting_step: 6")
        .replace("lr_decay_steps: 13", "lr_decay_steps: 5")
        .replace("lr_decay_style: cosine", "lr_decay_style: linear")
    ),
    "a.toml": samples.TORCHTITAN_PIPELINE.replace(
        'decay_type = "cosine"', 'decay_type = "linear"\ntotal_steps = 30\ndecay_ratio = 0.5'
    ),
    "a.txt": samples.MEGATRON_FLAGS.replace(
        "--lr-wsd-decay-iters 3", "--lr-wsd-decay-iters 3 --lr-decay-iters 8"
    ),
}
LINES = {"a.yaml": (6, 11), "a.toml": (15, 30), "a.txt": (5, 8)}


@pytest.mark.parametrize("name", STARTS)
def test_a_decay_that_starts_late_and_ends_early(tmp_path: Path, name: str) -> None:
    config = imported(tmp_path / name, STARTS[name]).config
    optimizer, (start, end) = config.optimizer, LINES[name]
    assert (
        optimizer.schedule,
        optimizer.decay_until - optimizer.decay_steps,
        optimizer.decay_until,
    ) == (
        "wsd",
        start,
        end,
    )
    peak, low = optimizer.learning_rate, optimizer.min_learning_rate
    for step in range(optimizer.warmup_steps, config.train.steps):
        share = min(1.0, max(0.0, (step + 1 - start) / (end - start)))
        assert learning_rate(optimizer, step, config.train.steps) == pytest.approx(
            peak + (low - peak) * share
        )


LOW = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 128 --seq-length 32 --lr"
    " 1e-4 --train-iters 9"
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--fp16", {}),
        ("--fp16 --loss-scale 128 --hysteresis 4", {"fixed": 128.0}),
        (
            (
                "--fp16 --initial-loss-scale 65536 --min-loss-scale 2 --loss-scale-window 500"
                " --hysteresis 1"
            ),
            {"initial": 65536.0, "minimum": 2.0, "window": 500, "hysteresis": 1},
        ),
    ],
)
def test_float16_of_megatron_with_its_loss_scale(
    tmp_path: Path, flags: str, expected: dict[str, float]
) -> None:
    path = tmp_path / "flags.txt"
    path.write_text(f"{LOW} {flags}")
    config = convert_file(path).config
    assert (
        config.train.dtype == "float16"
        and config.loss_scale == RunConfig().loss_scale.model_copy(update=expected)
    )


def test_a_ramp_of_megatron_and_samples_as_steps_in_it(tmp_path: Path) -> None:
    path = tmp_path / "flags.txt"
    samples = LOW.replace(
        "--train-iters 9", "--train-samples 64 --lr-warmup-samples 8 --lr-decay-samples 48"
    )
    path.write_text(
        f"{samples} --micro-batch-size 1 --global-batch-size 8 --rampup-batch-size 2 2 2_4"
    )
    found = convert_file(path)
    config = found.config
    # steps of 2, 2, 2, 2, 4, 4, 6, 6, 8, 8, ...: 8 after 4, 28 after 8
    assert config.batch.ramp == (2, 2, 24)
    assert (config.train.steps, config.optimizer.warmup_steps, config.optimizer.decay_until) == (
        12,
        4,
        10,
    )
    assert any("the learning rate follows steps here" in note for note in found.decided)
