"""Options that change the training and have no counterpart are refused by name, all at once;
others are notes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright_interop.configs import DropReason, convert_file
from meshwright_launch.cli import main
from tests.interop.configs import dumps, samples
from tests.support.errors import has_code

FLAGS = samples.MEGATRON_FLAGS
LLAMA = samples.MEGATRON_LLAMA
STAGES = samples.NANOTRON.replace(
    "general:",
    """- data:
    dataset:
      dataset_folder:
      - datasets/code
    seed: 6
  name: Annealing
  start_training_step: 10
general:""",
)
RATE = "    lr_decay_style: cosine\n"
COSINE = "--global-batch-size 2 --lr-decay-iters 40 " + FLAGS.replace("WSD", "cosine")
TITAN = samples.TORCHTITAN_PIPELINE

FINAL = [
    ("a.txt", LLAMA.replace("pretrain_gpt.py", "examples/multimodal/train.py"), "train.py"),
    ("a.txt", f"--language-model-type mistral_7b --img-h 336 {FLAGS}", "--language-model-type mistral_7b"),
    ("a.txt", LLAMA.replace("--swiglu", "--swiglu --num-experts 8"), "--num-experts 8"),
    ("a.txt", LLAMA.replace("--swiglu", "--swiglu --mtp-num-layers 1").replace("rope", "learned_absolute"),
     "--mtp-num-layers 1"),
    ("a.txt", LLAMA.replace("--swiglu", "--swiglu --mtp-use-repeated-layer"), "--mtp-use-repeated-layer"),
    ("a.toml", '[model]\nname = "llama3-siglip2"\nflavor = "a"\n', 'model.name = "llama3-siglip2"'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "shown"), FINAL)
def test_another_model_is_never_imported_as_a_llama(
    tmp_path: Path, name: str, text: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    words = ["num-experts", "mtp-num-layers", "language-model-type"]
    options = [word for key in words for word in ("--without", key)]
    assert main(["config", "import", str(path), *options]) == 2
    output = capsys.readouterr()
    assert f"{shown}: " in output.err and "MW-INTEROP-030" in output.err and output.out == ""


REFUSED = [
    ("a.txt", f"--step-batch-size-schedule '0:2 100K:4' {FLAGS}", "step-batch-size-schedule"),
    ("a.txt", f"--rampup-batch-size 2 2 100 {FLAGS}", "rampup-batch-size"),
    ("a.txt", f"--rampup-batch-size 2 3 9 --global-batch-size 16 {FLAGS}", "rampup-batch-size"),
    ("a.txt", f"--rampup-batch-size 2 2 --global-batch-size 16 {FLAGS}", "rampup-batch-size"),
    ("a.txt", f"--decoupled-lr 5e-4 --decoupled-min-lr 1e-5 {FLAGS}", "decoupled-lr"),
    ("a.txt", f"--fim-data {FLAGS}", "fim-data"),
    ("run_config.yaml", dumps.BRIDGE.replace("optimizer:\n", "optimizer:\n  decoupled_weight_decay: false\n"),
     "optimizer.decoupled_weight_decay"),
    ("run_config.yaml", dumps.BRIDGE.replace("optimizer:\n", "optimizer:\n  apply_wd_to_qk_layernorm: true\n"),
     "apply-wd-to-qk-layernorm"),
    ("a.txt", f"--sft {FLAGS}", "sft"),
    ("a.txt", f"--optimizer lion {FLAGS}", "optimizer"),
    ("a.txt", f"--optimizer dist_muon --muon-momentum 0.9 {FLAGS}", "optimizer"),
    ("a.txt", f"--optimizer soap {FLAGS}", "optimizer"),
    ("a.txt", f"--weight-decay-incr-style cosine {FLAGS}", "weight-decay-incr-style"),
    ("a.txt", f"--lr-warmup-init 1e-5 {FLAGS}", "lr-warmup-init"),
    *(("a.txt", f"--{key} {value} {COSINE}", key)
      for key, value in (("lr-warmup-iters", 11), ("lr-warmup-samples", 30), ("lr-warmup-fraction", 0.5))),
    ("a.yaml", samples.NANOTRON.replace("lr_warmup_steps: 2", "lr_warmup_steps: 1000"),
     "optimizer.learning_rate_scheduler.lr_warmup_steps"),
    ("a.txt", FLAGS.replace("decay-style linear", "decay-style exponential"), "lr-wsd-decay-style"),
    ("a.txt", FLAGS.replace("WSD", "inverse-square-root"), "lr-decay-style"),
    ("a.txt", f"--pretrained-checkpoint /x --finetune {FLAGS}", "pretrained-checkpoint"),
    ("a.yaml", samples.NANOTRON.replace("cosine", "1-sqrt"), "optimizer.learning_rate_scheduler.lr_decay_style"),
    ("a.yaml", samples.NANOTRON.replace("    std: 0.025", "    path: /w"), "model.init_method.path"),
    ("a.yaml", samples.NANOTRON.replace("    std: 0.025", "    use_mup: true"), "model.init_method.use_mup"),
    ("a.txt", f"--use-mup --mup-base-hidden-size 16 {FLAGS}", "use-mup"),
    ("a.yaml", samples.NANOTRON.replace("resume_checkpoint_path: null", "resume_checkpoint_path: /w"),
     "checkpoints.resume_checkpoint_path"),
    ("a.yaml", samples.NANOTRON + "doremi:\n  domain_names: [a, b]\n", "doremi.domain_names"),
    ("a.yaml", samples.NANOTRON.replace("starting_step: null", "starting_step: 1"),
     "optimizer.learning_rate_scheduler.lr_decay_starting_step"),
    ("a.toml", TITAN + '[optimizer]\nname = "Adam"\n', "optimizer.name"),
    ("a.toml", TITAN.replace('"cosine"', '"sqrt"'), "lr_scheduler.decay_type"),
    ("a.toml", TITAN + '[checkpoint]\nenable = true\ninitial_load_path = "/w"\n', "checkpoint.initial_load_path"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "key"), REFUSED)
def test_a_recipe_without_a_counterpart_is_refused_by_name(
    tmp_path: Path, name: str, text: str, key: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-089")) as caught:
        convert_file(path)
    refused = {named(problem) for problem in caught.value.problems}
    assert key in refused
    without = convert_file(path, without=refused)
    left_out = [item.note for item in without.dropped if item.reason is DropReason.NONE]
    assert key not in text or any("left out by --without" in note for note in left_out)


def named(problem: ConfigError) -> str:
    """Return the key that an error says to leave out."""
    return problem.message.rpartition("`--without ")[2].partition("`")[0]


def test_a_warm_up_as_long_as_the_run_is_imported(tmp_path: Path) -> None:
    path, yaml = tmp_path / "a.txt", tmp_path / "a.yaml"
    path.write_text(f"--lr-warmup-iters 10 {COSINE}")
    assert convert_file(path).config.optimizer.warmup_steps == 10
    constant = samples.NANOTRON.replace("lr_warmup_steps: 2", "lr_warmup_steps: 1000")
    yaml.write_text(constant.replace("lr_warmup_style: linear", "lr_warmup_style: constant"))
    assert convert_file(yaml).config.optimizer.warmup_steps == 0


def test_all_of_them_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(f"--rampup-batch-size 2 2 100 --sft --optimizer lion {FLAGS}")
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-089")) as caught:
        convert_file(path)
    assert len(caught.value.problems) == 3


def test_what_changes_no_number_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(
        "--overlap-grad-reduce --tensorboard-dir x --mup-base-hidden-size 8 --moe-router-topk 2 "
        f"--rotary-seq-len-interpolation-factor 1 {FLAGS}"
    )
    found = convert_file(path)
    assert {key.item.key for key in found.dropped if key.reason is not DropReason.NEEDLESS} == {
        "--tensorboard-dir",
        "--no-such-flag-there-is",
    }


def test_with_a_model_of_ones_own_its_features_are_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(LLAMA.replace("pretrain_gpt.py", "examples/multimodal/train.py"))
    assert (
        convert_file(path, overrides=["--model.builder=mine:build"]).config.model.builder
        == "mine:build"
    )


def test_later_stages_of_data_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(STAGES)
    imported = convert_file(path)
    assert [
        (key.item.key, key.reason) for key in imported.dropped if "data.stages" in key.note
    ] == [("data_stages", DropReason.BY_HAND)]
    assert list(imported.open) == ["data.train"]
