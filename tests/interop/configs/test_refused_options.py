"""Options that change the training and have no counterpart are refused by name, all at once; others are notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import load
from meshwright.errors import ConfigError
from meshwright_interop.configs import DropReason, convert_file, file_text
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
LONG = "the warm-up ends with the run here, after {} steps"
TITAN = samples.TORCHTITAN_PIPELINE

FINAL = [
    (
        "a.txt",
        LLAMA.replace("pretrain_gpt.py", "examples/multimodal/train.py"),
        "train.py: meshwright has no model with",
    ),
    (
        "a.txt",
        f"--language-model-type mistral_7b --img-h 336 {FLAGS}",
        "--language-model-type mistral_7b: meshwright has",
    ),
    (
        "a.txt",
        LLAMA.replace("--swiglu", "--swiglu --num-experts 8"),
        "--num-experts 8: meshwright has no model with mixture",
    ),
    (
        "a.txt",
        LLAMA.replace("--swiglu", "--swiglu --mtp-num-layers 1").replace("rope", "learned_absolute"),
        "--mtp-num-layers 1: meshwright has no model with multi-token prediction and learned positions",
    ),
    ("a.txt", LLAMA.replace("--swiglu", "--swiglu --mtp-use-repeated-layer"), "one module of multi-token prediction"),
    (
        "a.toml",
        '[model]\nname = "llama3-siglip2"\nflavor = "a"\n',
        'model.name = "llama3-siglip2": meshwright has no model',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said"), FINAL)
def test_another_model_is_never_imported_as_a_llama(
    tmp_path: Path, name: str, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    words = ["num-experts", "mtp-num-layers", "language-model-type"]
    options = [word for key in words for word in ("--without", key)]
    assert main(["config", "import", str(path), *options]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == ""


REFUSED = [
    *(
        ("a.txt", f"--step-batch-size-schedule {value} {FLAGS}", "step-batch-size-schedule", said)
        for value, said in (
            ("'0:2 100K:4 150K:6'", "equal increments after equal numbers of samples, not as 2 from sample 0, 4 from"),
            ("'0:4 100K:2'", "batch.ramp rises by equal increments"),
            ("'0:2 100K:4 200K:8'", "batch.ramp rises by equal increments"),
            ("'1K:2 100K:4'", "it is no list of TOKENS:SAMPLES that starts at 0"),
            ("'0:2 100K'", "it is no list of TOKENS:SAMPLES"),
            ("'0:2 1:4'", "rises by a sample or more"),
            ("'0:2 100K:4' --global-batch-size 8", "it contradicts --global-batch-size"),
        )
    ),
    ("a.txt", f"--rampup-batch-size 2 2 100 {FLAGS}", "rampup-batch-size", "the ramp ends at --global-batch-size"),
    ("a.txt", f"--rampup-batch-size 2 3 9 --global-batch-size 16 {FLAGS}", "rampup-batch-size", "no number of incr"),
    ("a.txt", f"--rampup-batch-size 2 2 --global-batch-size 16 {FLAGS}", "rampup-batch-size", "no start, increment"),
    ("a.txt", f"--decoupled-lr 5e-4 --decoupled-min-lr 1e-5 {FLAGS}", "decoupled-lr",
     "a factor here, on --lr and --min-lr alike"),
    ("a.txt", f"--fim-data {FLAGS}", "fim-data", "filling in the middle"),
    ("run_config.yaml", dumps.BRIDGE.replace("optimizer:\n", "optimizer:\n  decoupled_weight_decay: false\n"),
     "optimizer.decoupled_weight_decay", "the decay is part of the gradient there"),
    ("run_config.yaml", dumps.BRIDGE.replace("optimizer:\n", "optimizer:\n  apply_wd_to_qk_layernorm: true\n"),
     "apply-wd-to-qk-layernorm", "norm"),
    ("a.txt", f"--sft {FLAGS}", "sft", "conversation"),
    ("a.txt", f"--optimizer lion {FLAGS}", "optimizer", 'then set optimizer.name = "lion" and its keys'),
    ("a.txt", f"--optimizer soap {FLAGS}", "optimizer", "no such optimizer here, only adam"),
    ("a.txt", f"--weight-decay-incr-style cosine {FLAGS}", "weight-decay-incr-style", "the weight decay is constant"),
    ("a.txt", f"--lr-warmup-init 1e-5 {FLAGS}", "lr-warmup-init", "warm-up starts at 1/warmup_steps"),
    *(("a.txt", f"--{key} {value} {COSINE}", key, LONG.format(10))
      for key, value in (("lr-warmup-iters", 11), ("lr-warmup-samples", 30), ("lr-warmup-fraction", 0.5))),
    ("a.yaml", samples.NANOTRON.replace("lr_warmup_steps: 2", "lr_warmup_steps: 1000"),
     "optimizer.learning_rate_scheduler.lr_warmup_steps", LONG.format(15)),
    ("a.txt", FLAGS.replace("decay-style linear", "decay-style exponential"), "lr-wsd-decay-style",
     "exponential there"),
    ("a.txt", FLAGS.replace("WSD", "inverse-square-root"), "lr-decay-style", "no such decay here"),
    ("a.txt", f"--pretrained-checkpoint /x --finetune {FLAGS}", "pretrained-checkpoint",
     "would start from random weights"),
    ("a.yaml", STAGES.replace("start_training_step: 10", "start_training_step: 1"), "data_stages", "here: 1, 1"),
    ("a.yaml", samples.NANOTRON.replace("cosine", "1-sqrt"), "optimizer.learning_rate_scheduler.lr_decay_style",
     "no such decay"),
    ("a.yaml", samples.NANOTRON.replace("    std: 0.025", "    path: /w"), "model.init_method.path", "random weights"),
    ("a.yaml", samples.NANOTRON.replace("    std: 0.025", "    use_mup: true"), "model.init_method.use_mup",
     "spectral muP draws each matrix"),
    ("a.txt", LLAMA.replace("--swiglu", "--swiglu --use-mup --mtp-num-layers 1"), "use-mup", "modules of multi-token"),
    *(("a.txt", f"--use-mup --optimizer {name} --muon-extra-scale-factor 0.2 {FLAGS}", "use-mup", "muP here is AdamW's")
      for name in ("sgd", "muon")),
    ("a.yaml", samples.NANOTRON.replace("resume_checkpoint_path: null", "resume_checkpoint_path: /w"),
     "checkpoints.resume_checkpoint_path", "would start from random weights"),
    ("a.yaml", samples.NANOTRON + "doremi:\n  domain_names: [a, b]\n", "doremi.domain_names", "weights of corpora"),
    ("a.yaml", samples.NANOTRON.replace("starting_step: null", "starting_step: 1"),
     "optimizer.learning_rate_scheduler.lr_decay_starting_step", "starts inside of the warm-up"),
    ("a.toml", TITAN + '[optimizer]\nname = "Adam"\n', "optimizer.name", "weight decay is decoupled here"),
    ("a.toml", TITAN.replace('"cosine"', '"sqrt"'), "lr_scheduler.decay_type", "no such decay here"),
    ("a.toml", TITAN + '[checkpoint]\nenable = true\ninitial_load_path = "/w"\n', "checkpoint.initial_load_path",
     "random"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "key", "said"), REFUSED)
def test_a_recipe_without_a_counterpart_is_refused_by_name(
    tmp_path: Path, name: str, text: str, key: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-089")) as caught:
        convert_file(path)
    message = str(caught.value)
    assert said in message and f"`--without {key}` imports the file without it" in message
    refused = [problem for problem in caught.value.problems if problem.code == "MW-INTEROP-089"]
    others = {problem.message.rpartition("--without ")[2].partition("`")[0] for problem in refused}
    found = convert_file(path, without=others)
    left = {dropped.note for dropped in found.dropped if dropped.reason is DropReason.NONE}
    assert any(said in note and "left out by --without" in note for note in left) or key not in text


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
        f"--overlap-grad-reduce --tensorboard-dir x --mup-base-hidden-size 8 --moe-router-topk 2 "
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
    assert convert_file(path, overrides=["--model.builder=mine:build"]).config.model.builder == "mine:build"


def test_stages_of_data_keep_their_starts_and_weights(tmp_path: Path) -> None:
    path, own = tmp_path / "a.yaml", tmp_path / "own.toml"
    path.write_text(STAGES.replace("      - datasets/code", "        datasets/code: 3\n        datasets/web: 1"))
    imported = convert_file(path)
    (stage,) = imported.config.data.stages
    assert stage.from_step == 10 and not isinstance(stage.train, str)
    assert [each.weight for each in stage.train] == [3.0, 1.0]
    own.write_text(file_text(imported, "a.yaml"))
    open_stage = (
        'stages = [{train = [{path = "SET-ME", weight = 3.0}, {path = "SET-ME", weight = 1.0}], from_step = 10}]'
    )
    assert open_stage in own.read_text() and "Annealing from step 10" in own.read_text()
    with pytest.raises(ConfigError, match=r"data\.stages is still to be set", check=has_code("MW-CONFIG-058")):
        load(own, ["--data.train=c"])
    set_ = '--data.stages=[{from_step = 10, train = "d"}]'
    assert load(own, ["--data.train=c", set_]).data.stages[0].train == "d"
