"""Values that a file does not give: marked on their line, and no command starts on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import load
from meshwright.errors import ConfigError
from meshwright_interop.configs import ImportedConfig, convert_file, file_text, format_report
from meshwright_launch.cli import main
from tests.interop.configs import dumps, samples
from tests.support.errors import has_code

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --micro-batch-size 2"
    " --data-path /d/a --train-iters 10 --lr 1e-3 --vocab-size 128 "
)
HUB = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model somebody/a-model "


def imported(path: Path, text: str, *overrides: str) -> ImportedConfig:
    path.write_text(text)
    return convert_file(path, overrides=overrides)


def without(*flags: str, text: str = FLAGS) -> str:
    for flag in flags:
        before, found, after = text.partition(f"{flag} ")
        assert found, flag
        text = before + after.partition(" ")[2]
    return text


MISSING = {
    "model.options.vocab_size": without("--vocab-size") + HUB,
    "optimizer.learning_rate": without("--lr"),
    "train.steps": without("--train-iters"),
    "data.train": without("--data-path"),
    "batch.micro_batch_size": without("--micro-batch-size"),
}


@pytest.mark.parametrize("key", MISSING)
def test_no_command_takes_the_file_before_the_value_is_set(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = imported(tmp_path / "a.txt", MISSING[key])
    assert list(found.open) == [key] and f"{key}: {found.open[key]}" in " ".join(
        format_report(found).split()
    )
    ours = tmp_path / "ours.toml"
    ours.write_text(file_text(found, "a.txt"))
    name = key.rpartition(".")[2]
    marked = [line for line in ours.read_text().splitlines() if line.startswith(f"{name} = ")]
    assert marked == [f'{name} = "SET-ME"  # SET: {found.open[key]}']
    assert main(["train", str(ours)]) == 2
    said = capsys.readouterr().err
    assert f"{key} is still to be set: there, or as --{key}=VALUE [MW-CONFIG-058]" in said
    assert load(ours, [f"--{key}=64"]).model.options  # the command line sets it


def test_a_value_on_the_command_line_is_no_guess(tmp_path: Path) -> None:
    found = imported(
        tmp_path / "a.txt", MISSING["optimizer.learning_rate"], "--optimizer.learning_rate=3e-4"
    )
    assert not found.open and found.config.optimizer.learning_rate == 3e-4
    assert "SET-ME" not in file_text(found, "a.txt")


def test_the_vocabulary_of_a_known_tokenizer_is_no_guess(tmp_path: Path) -> None:
    found = imported(
        tmp_path / "a.txt", without("--vocab-size") + "--tokenizer-type GPT2BPETokenizer"
    )
    assert not found.open and found.config.model.options["vocab_size"] == 50257


def test_the_null_tokenizer_adds_an_end_of_document(tmp_path: Path) -> None:
    """Its id is --vocab-size itself: without a row of its own,
    the corpora that hold it would not be read.
    """
    found = imported(tmp_path / "a.txt", f"{FLAGS} --tokenizer-type NullTokenizer")
    assert found.config.model.options["vocab_size"] == 129
    assert any(
        "vocab_size = 129: --vocab-size and NullTokenizer's end of document" in note
        for note in found.decided
    )
    theirs = pytest.importorskip(
        "megatron.core.tokenizers.text.libraries.null_tokenizer"
    ).NullTokenizer(128)
    assert (theirs.vocab_size, theirs.eod) == (129, 128)


def test_the_null_tokenizer_of_megatron_bridge_holds_it_already(tmp_path: Path) -> None:
    text = dumps.BRIDGE.replace(
        "  vocab_size: 512\n  window_size", "  vocab_size: null\n  window_size"
    )
    assert text.count("vocab_size: 512") == 1
    assert imported(tmp_path / "run_config.yaml", text).config.model.options["vocab_size"] == 512


def test_a_negative_number_of_samples_is_refused(tmp_path: Path) -> None:
    text = FLAGS.replace("--train-iters 10", "--train-samples -1 --global-batch-size 8")
    with pytest.raises(ConfigError, match="--train-samples -1: ", check=has_code("MW-INTEROP-029")):
        imported(tmp_path / "a.txt", text)


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", samples.NANOTRON), ("a.toml", samples.TORCHTITAN_PIPELINE)]
)
def test_nanotron_and_torchtitan_have_their_data_in_another_form(
    tmp_path: Path, name: str, text: str
) -> None:
    found = imported(tmp_path / name, text)
    validates = name == "a.toml"
    assert list(found.open) == ["data.train", *(["data.validation"] if validates else [])]


def test_what_nanotron_itself_requires_is_never_guessed(tmp_path: Path) -> None:
    text = samples.NANOTRON
    for line in ("    learning_rate: 3e-4\n", "  train_steps: 15\n", "  sequence_length: 256\n"):
        assert line in text
        text = text.replace(line, "")
    found = imported(tmp_path / "a.yaml", text)
    assert {"optimizer.learning_rate", "train.steps", "data.sequence_length", "data.train"} == set(
        found.open
    )


def test_the_placeholder_is_refused_wherever_it_is_given(tmp_path: Path) -> None:
    ours = tmp_path / "a.toml"
    ours.write_text(
        '[model.options]\nnum_layers = 2\n[data]\ntrain = "x"\n[batch]\nchunks ='
        " 1\nmicro_batch_size = 1\n"
    )
    load(ours)
    for words in ("--run.seed=SET-ME", "--model.options.num_layers=SET-ME", "--data.train=SET-ME"):
        with pytest.raises(ConfigError, check=has_code("MW-CONFIG-058")):
            load(ours, [words])
