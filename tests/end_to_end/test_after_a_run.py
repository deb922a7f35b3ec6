"""What is done with a run that has been trained: it is drawn, it writes,
and it is read with other tools.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import meshwright_models.gpt2
from meshwright.config import RunConfig, load, parse
from meshwright.run.directory import read_peaks, run_directory
from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import GPT2, layout, run_config, tensors, train


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> RunConfig:
    """A few steps of bfloat16 on 2 x 2 x 2: the files hold a model cut in all ways,
    and master weights.
    """
    config = run_config(
        corpus,
        tmp_path_factory.mktemp("runs"),
        parallel=layout("dp2,pp2,tp2"),
        train={"steps": 8, "dtype": "bfloat16", "validate_every": 4},
    )
    train(pool, config)
    return config


def sampled(capfd: pytest.CaptureFixture[str], config: RunConfig, *words: str) -> str:
    capfd.readouterr()
    assert main(["sample", str(run_directory(config.run)), *words]) == 0
    return capfd.readouterr().out


@pytest.mark.long
def test_the_likeliest_tokens_are_those_of_the_plain_model(
    trained: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    model = meshwright_models.gpt2.build(**GPT2).eval()
    saved = tensors(run_directory(trained.run))
    weights = {
        name.removeprefix("weights/"): t.float()
        for name, t in saved.items()
        if name.startswith("weights/")
    }
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    assert trained.data.tokenizer is not None
    tokenizer = Tokenizer.from_file(trained.data.tokenizer)
    ids = tokenizer.encode("the mesh waits. ").ids
    with torch.no_grad():
        for _ in range(40):  # longer than the window of 32
            ids.append(int(model(torch.tensor([ids[-32:]]))[0, -1].argmax()))
    words = ("--prompt", "the mesh waits. ", "--tokens", "40", "--temperature", "0")
    assert sampled(capfd, trained, *words) == tokenizer.decode(ids) + "\n"


@pytest.mark.long
def test_the_memory_of_each_rank_is_written_down(trained: RunConfig) -> None:
    found = read_peaks(run_directory(trained.run))
    assert found is not None and (found.step, found.grid, found.device) == (
        8,
        (2, 2, 2, 1, 1),
        "cpu",
    )
    assert min(found.peaks) > 50 * 2**20 and len(set(found.peaks)) > 1


@pytest.mark.long
def test_the_same_call_writes_the_same(
    trained: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    written = [
        sampled(capfd, trained, "--prompt", prompt, "--tokens", "20")
        for prompt in ("a rank", "a rank", "a step", "")
    ]
    assert (
        written[0] == written[1]
        and written[0].startswith("a rank")
        and written[2].startswith("a step")
    )
    assert len(written[0]) > len("a rank\n")


def test_the_loss_is_drawn(trained: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(run_directory(trained.run))]) == 0
    picture = run_directory(trained.run) / "loss.png"
    assert capfd.readouterr().out == f"{picture}\n" and picture.read_bytes().startswith(b"\x89PNG")


def test_the_configuration_is_kept_in_both_forms(trained: RunConfig) -> None:
    """The one that was resolved, as JSON, and as a file that can be given to the same command."""
    directory = run_directory(trained.run)
    resolved = parse((directory / "resolved.json").read_text())
    assert load(directory / "config.toml") == resolved
    assert (resolved.launch.processes, resolved.batch.chunks) == (8, 4)
    newest = json.loads((directory / "checkpoints/step-00000008/manifest.json").read_text())
    assert {"format": 1, **newest["config"]} == json.loads(
        (directory / "resolved.json").read_text()
    )


def test_a_run_without_a_tokenizer_cannot_write(
    corpus: Path, tmp_path: Path, pool: RankPool, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is none beside the corpus either."""
    moved = tmp_path / "corpus"
    shutil.copytree(corpus, moved)
    (moved / "tokenizer.json").unlink()
    config = run_config(
        moved, tmp_path, data={"tokenizer": None}, parallel=layout(""), train={"steps": 1}
    )
    train(pool, config)
    assert main(["sample", str(run_directory(config.run)), "--prompt", "x"]) == 2
    assert "the run has no tokenizer" in capfd.readouterr().err


def test_a_run_before_its_first_checkpoint_cannot_write(
    trained: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "resolved.json").write_bytes(
        (run_directory(trained.run) / "resolved.json").read_bytes()
    )
    assert main(["sample", str(tmp_path), "--prompt", "x"]) == 2
    assert "has no checkpoint yet" in capfd.readouterr().err
