"""What a user can get wrong ends with one message and exit code 2,
before any process is started.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.config import to_toml
from meshwright_launch.cli import main
from tests.end_to_end.driving import LLAMA, layout, run_config
from tests.support.marks import long_row

BUILDERS = "tests.end_to_end.builders"


@pytest.fixture
def own_corpus(corpus: Path, tmp_path: Path) -> Path:
    """A copy to damage; without the fingerprint, which would tell first."""
    shutil.copytree(corpus, tmp_path / "corpus")
    (tmp_path / "corpus/fingerprint.json").unlink()
    return tmp_path / "corpus"


def refused(
    capfd: pytest.CaptureFixture[str],
    corpus: Path,
    runs: Path,
    *overrides: str,
    **sections: dict[str, Any],
) -> str:
    """Return what `meshwright train` says when it refuses,
    without the words that begin every such message.
    """
    file = runs / "run.toml"
    file.write_text(to_toml(run_config(corpus, runs, **sections)))
    before = sorted(runs.rglob("*"))
    assert main(["train", str(file), *overrides]) == 2
    said = capfd.readouterr()
    assert (
        said.out == ""
        and said.err.startswith("meshwright: error: ")
        and "Traceback" not in said.err
    )
    assert sorted(runs.rglob("*")) == before  # nothing was begun
    return said.err.removeprefix("meshwright: error: ")


def cut_short(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def of_floats(corpus: Path) -> None:
    """The dtype code of the index is that of float32, and the bytes agree."""
    index = bytearray((corpus / "train.idx").read_bytes())
    index[17] = 7
    (corpus / "train.idx").write_bytes(index)


def emptied(corpus: Path) -> None:
    """A whole pair of files of no documents."""
    head = bytearray((corpus / "train.idx").read_bytes()[:34])
    head[18:26] = (0).to_bytes(8, "little")
    head[26:34] = (1).to_bytes(8, "little")
    (corpus / "train.idx").write_bytes(bytes(head) + bytes(8))
    (corpus / "train.bin").write_bytes(b"")


def with_a_large_id(corpus: Path) -> None:
    tokens = np.fromfile(corpus / "train.bin", dtype=np.uint16)
    tokens[40] = 5000
    tokens.tofile(corpus / "train.bin")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda c: (c / "train.bin").unlink(),
            "train.bin is missing: a corpus is a .bin/.idx pair",
        ),
        (
            lambda c: (c / "train.idx").unlink(),
            "train.idx is missing: a corpus is a .bin/.idx pair",
        ),
        (
            lambda c: [(c / f"train.{end}").unlink() for end in ("bin", "idx")],
            "there is no corpus at",
        ),
        (lambda c: (c / "validation.idx").unlink(), "validation.idx is missing"),
        long_row(lambda c: (c / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda c: (c / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda c: cut_short(c / "train.idx", 20), "train.idx ends inside its header"),
        (lambda c: cut_short(c / "train.idx", 100), "train.idx has 100 bytes where"),
        (
            lambda c: (c / "train.idx").write_bytes(b"not an index of anything, really" * 9),
            "is no index of a Megatron",
        ),
        (
            lambda c: cut_short(c / "train.bin", 1000),
            "train.bin has 1,000 bytes where its index counts",
        ),
        (of_floats, "has tokens of type float32: token ids must be integers"),
        (emptied, "is empty: 0 documents, 0 tokens"),
        (
            with_a_large_id,
            "holds token id 5,000 in sample 1 (token 40), the model's vocabulary has 300",
        ),
        (lambda c: (c / "fingerprint.json").write_text("{"), "fingerprint.json"),
    ],
)
def test_a_corpus_that_is_none(
    damage: Callable[[Path], object],
    said: str,
    own_corpus: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    damage(own_corpus)
    message = refused(capfd, own_corpus, tmp_path)
    assert said in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("said", "overrides"),
    [
        (
            "is smaller than dp 2: no sample for some replicas",
            ["--parallel.dp=2", "--batch.global_batch=1"],
        ),
        (
            "is not a multiple of micro_batch_size 1 x dp 2 = 2",
            ["--parallel.dp=2", "--batch.global_batch=7"],
        ),
        (
            "sequence_length",
            ["--parallel.tp=4", "--parallel.sequence", "--data.sequence_length=30"],
        ),
        (
            "launch.processes = 3, but dp 2 x pp 1 x tp 2 = 4 ranks",
            ["--launch.processes=3", "--parallel.dp=2", "--parallel.tp=2"],
        ),
        (
            "launch.processes = 3 is not a multiple of pp 2 x tp 1 = 2",
            ["--launch.processes=3", "--parallel.dp=auto", "--parallel.pp=2"],
        ),
        ("5 layers", ["--parallel.pp=8"]),
        ("parallel.tp = 8 does not divide 4: use a tp of 1, 2, 4", ["--parallel.tp=8"]),
        ("pipeline.balance = [2, 2]", ["--parallel.pp=2", "--pipeline.balance=[2,2]"]),
        ("no_such_package", ["--model.builder=no_such_package:build"]),
        (
            "did you mean meshwright_models.gpt2:build?",
            ["--model.builder=meshwright_models.gpt2:biuld"],
        ),
        (
            "returned a Linear: a pipeline is cut between",
            [f"--model.builder={BUILDERS}:counts_letters"],
        ),
        ("it must return logits of shape", [f"--model.builder={BUILDERS}:two_outputs"]),
        (
            "layer 1 (Linear) cannot take what layer 0 returns",
            [f"--model.builder={BUILDERS}:of_another_width"],
        ),
        ("did you mean num_layers?", ["--model.options.num_layer=3"]),
        ("vocab_size", ["--model.options.vocab_size=200"]),
        ("max_sequence_length", ["--data.sequence_length=64"]),
        ('train.dtype = "fp8" is not allowed', ["--train.dtype=fp8"]),
        long_row(
            "less than one sample",
            ["--data.sequence_length=1000000", "--model.options.max_sequence_length=1000000"],
        ),
        ("train.device", ["--train.device=cuda"]),
    ],
)
def test_a_configuration_that_cannot_work(
    said: str, overrides: list[str], corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sections: dict[str, dict[str, Any]] = {"parallel": layout("")}
    if any(BUILDERS in word for word in overrides):
        sections["model"] = {"options": {}}
    assert said in refused(capfd, corpus, tmp_path, *overrides, **sections)


def test_key_value_heads_that_tp_neither_divides_nor_shares(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = {"builder": "meshwright_models.llama:build", "options": LLAMA}
    message = refused(capfd, corpus, tmp_path, model=model, parallel=layout("tp3"))
    assert "parallel.tp = 3 does not divide 2" in message and "use a tp of 1, 2, 4" in message


def test_a_file_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "nowhere.toml")]) == 2
    said = capfd.readouterr().err
    assert str(tmp_path / "nowhere.toml") in said and said.count("\n") == 1


def test_a_directory_that_cannot_be_written(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    said = refused(capfd, corpus, tmp_path, "--run.name=taken", parallel=layout(""))
    assert said.startswith(
        f"the directory of this run, {tmp_path}/taken, is a file; choose another run.directory"
    )
    said = refused(
        capfd, corpus, tmp_path, f"--run.directory={tmp_path}/taken", parallel=layout("")
    )
    assert "cannot be made: Not a directory" in said
    said = refused(capfd, corpus, tmp_path, "--run.directory=/proc/nobody", parallel=layout(""))
    assert "the directory of this run, /proc/nobody/run, cannot be made" in said


def test_a_port_in_use(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run_config(corpus, tmp_path, parallel=layout("dp2"))))
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert main(["train", str(file)]) == 2
    said = capfd.readouterr().err
    assert f"port {port} (MASTER_PORT)" in said and said.count("\n") == 1


def test_a_world_of_another_size_under_torchrun(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    message = refused(capfd, corpus, tmp_path, parallel=layout("dp2,pp2"))
    assert message.startswith("dp 2 x pp 2 x tp 1 = 4 ranks, but 3 were started")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ["sample", "{runs}/nowhere", "--prompt=x"],
            "nowhere does not exist: name a run directory",
        ),
        (["plot", "{runs}/nowhere"], "metrics.jsonl"),
        (["verify", "{file}", "--layouts", "dp3,tp4"], "12 ranks"),
        (["verify", "{file}", "--layouts", "dp2,banana"], "banana"),
        (["data", "files", "{runs}/nowhere.txt", "--out", "{runs}/out"], "nowhere.txt"),
        (["data", "files", "{runs}/empty", "--out", "{runs}/out"], "empty"),
    ],
)
def test_the_other_commands(
    command: list[str],
    said: str,
    corpus: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # where no runs are, which would be named
    (tmp_path / "run.toml").write_text(to_toml(run_config(corpus, tmp_path)))
    (tmp_path / "empty").mkdir()
    assert main([word.format(runs=tmp_path, file=tmp_path / "run.toml") for word in command]) == 2
    error = capfd.readouterr().err
    assert said in error and error.startswith("meshwright: error: ") and "Traceback" not in error
