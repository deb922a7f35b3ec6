"""What was trained is used: evaluated and made to write,
in one process and on layouts that it was not trained on.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import meshwright.inference.sample
from meshwright.config import RunConfig, default_world_size
from meshwright.data.indexed import inspect
from meshwright.data.token_files import TokenStream
from meshwright.errors import DataError
from meshwright.inference.choice import SamplingRequest
from meshwright.inference.corpora import with_corpus
from meshwright.inference.evaluate import EvaluationJob
from meshwright.inference.evaluate import check as check_evaluation
from meshwright.inference.load import config_for, locate
from meshwright.inference.sample import SAME_TEXT, Sampling, generate, sample
from meshwright.inference.sample import check as check_sampling
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.run.directory import run_directory
from meshwright.terminal.output import visible
from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import GPT2, layout, lines, run_config, train
from tests.end_to_end.shell import ROOT, Shell
from tests.support.errors import has_code
from tests.support.marks import long_row
from tests.support.plain import load_plain

LAYOUTS = ["", "dp2", "pp2", "tp2,sequence", "dp2,pp2,tp2"]
PROMPTS = (
    "the mesh waits. ",
    "a",
    "then the rank sends the loss of a stage in the step of the mesh and then",
)
"""The last is longer than the window of 32 tokens."""


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> RunConfig:
    """A vocabulary that no degree divides, so that its last rows are padding in some layouts."""
    config = run_config(
        corpus,
        tmp_path_factory.mktemp("runs"),
        model={"options": {**GPT2, "vocab_size": 301}},
        parallel=layout("dp2,pp2"),
        train={"steps": 10, "validate_every": 5, "validate_steps": 2},
        checkpoint={"every": 5},
    )
    train(pool, config)
    return config


def keys(of: str) -> list[str]:
    """``dp2,tp2`` -> overrides."""
    return [f"--parallel.{key}={str(value).lower()}" for key, value in layout(of).items()]


def evaluate_rank(rank: int, world_size: int, work: EvaluationJob, config: RunConfig) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        work(config)


def sample_rank(rank: int, world_size: int, work: Sampling, config: RunConfig) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        work(config)


def evaluated(
    pool: RankPool, config: RunConfig, out: Path, of: str, step: int | None = None
) -> dict[str, object]:
    place = locate(run_directory(config.run), step)
    asked = config_for(place, keys(of), "eval")
    checked = check_evaluation(asked, default_world_size(asked.parallel, asked.launch, 0))
    pool.run(evaluate_rank, int(checked.launch.processes), EvaluationJob(place, True, out), checked)
    found: dict[str, object] = json.loads(out.read_text())
    return found


@pytest.mark.long
def test_a_model_is_worth_the_same_on_every_layout(
    trained: RunConfig, tmp_path: Path, pool: RankPool
) -> None:
    """Held against the plain model: a Python loop over the windows, torch's own cross-entropy,
    decoded text.
    """
    config, plain = load_plain(run_directory(trained.run))
    assert config.data.validation is not None and config.data.tokenizer is not None
    stream = TokenStream(inspect(Path(config.data.validation)))
    length = config.data.sequence_length
    num_samples = (len(stream) - 1) // length
    total = 0.0
    with torch.no_grad():
        for start in range(0, num_samples * length, length):
            window = torch.from_numpy(stream.read(start, length + 1))
            total += float(
                F.cross_entropy(plain(window[None, :-1])[0], window[1:], reduction="sum")
            )
    tokens = num_samples * length
    text = Tokenizer.from_file(config.data.tokenizer).decode(stream.read(1, tokens).tolist())
    for of in LAYOUTS:
        found = evaluated(pool, trained, tmp_path / "found.json", of)
        assert (found["tokens"], found["bytes"], found["step"]) == (tokens, len(text.encode()), 10)
        assert found["loss"] == pytest.approx(total / tokens, rel=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(
            total / math.log(2) / len(text.encode()), rel=1e-6
        )


@pytest.mark.long
def test_the_loss_of_the_training_is_the_same_number(
    trained: RunConfig, tmp_path: Path, pool: RankPool
) -> None:
    """On the layout that it was trained on bit for bit, of each checkpoint."""
    logged = {
        line["step"]: line["validation/loss"]
        for line in lines(trained)
        if "validation/loss" in line
    }
    assert set(logged) == {5, 10} and logged[5] != logged[10]
    for step, loss in logged.items():
        found = evaluated(pool, trained, tmp_path / "found.json", "dp2,pp2", step)["while_training"]
        assert found == {"loss": loss, "batches": 2, "logged": loss}


@pytest.mark.parametrize(
    ("of", "schedule"), [long_row("tp2", "gpipe"), long_row("pp2,tp2", "gpipe"), ("pp2", "zb_v")]
)
def test_the_likeliest_text_is_that_of_the_plain_model(
    trained: RunConfig, tmp_path: Path, pool: RankPool, of: str, schedule: str
) -> None:
    """In a V the last stage is on the first pipeline rank."""
    config, plain = load_plain(run_directory(trained.run))
    assert config.data.tokenizer is not None
    tokenizer = Tokenizer.from_file(config.data.tokenizer)
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        with torch.no_grad():
            for _ in range(24):
                ids.append(int(plain(torch.tensor([ids[-32:]]))[0, -1, :300].argmax()))
        expected.append(tokenizer.decode(ids))
    assert [
        sample(run_directory(trained.run), prompt, 24, temperature=0) for prompt in PROMPTS
    ] == expected
    place = locate(run_directory(trained.run), None)
    words = [*keys(of), f"--pipeline.schedule={schedule}"]
    asked = config_for(place, words, "sample", defaults=SAME_TEXT)
    checked = check_sampling(
        asked, default_world_size(asked.parallel, asked.launch, 0), len(PROMPTS)
    )
    out = tmp_path / "texts.jsonl"
    work = Sampling(place, SamplingRequest(PROMPTS, 24, temperature=0), out)
    pool.run(sample_rank, int(checked.launch.processes), work, checked)
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == expected


def test_it_stops_where_the_model_ends_the_document(
    trained: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever token the document's end is: of one prompt it comes, the other goes on."""
    place = locate(run_directory(trained.run), None)
    asked = config_for(place, ["--parallel.pp=1"], "sample", defaults=SAME_TEXT)
    config = check_sampling(asked, 1, 2)
    mesh = open_mesh(Grid(), "cpu")
    ask = SamplingRequest(("the mesh waits. ", "a rank"), 12, seed=3)
    monkeypatch.setattr(meshwright.inference.sample, "ends_of_document", lambda *_: set())
    free = generate(config, mesh, place, ask)
    assert [len(each.ids) for each in free] == [12, 12] and not any(each.ended for each in free)
    end = next(token for token in free[0].ids if token not in free[1].ids)
    monkeypatch.setattr(meshwright.inference.sample, "ends_of_document", lambda *_: {end})
    first, second = generate(config, mesh, place, ask)
    assert first.ended and first.ids == free[0].ids[: free[0].ids.index(end)]
    assert second == free[1]


def test_seeds_prompts_and_what_is_printed(
    trained: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        capfd.readouterr()
        assert main(["sample", str(run_directory(trained.run)), "--tokens=8", *words]) == 0
        return capfd.readouterr().out

    alone = said("--prompt=a step", "--seed=1")
    assert alone == said("--prompt=a step", "--seed=1") != said("--prompt=a step", "--seed=2")
    out = tmp_path / "texts.jsonl"
    several = said(
        "--prompt=a step",
        "--prompt=the",
        "--prompt=a step",
        "--seed=1",
        f"--out={out}",
        "--top-k=0",
    )
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert texts[0] != texts[2] and all(text.startswith("a step") for text in (texts[0], texts[2]))
    assert several == "".join(
        f"--- {n} of 3\n{visible(text)}\n" for n, text in enumerate(texts, start=1)
    )


def test_another_corpus(
    trained: RunConfig, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The training text, by the path of its pair;
    bfloat16 is another precision of the same weights.
    """
    out = tmp_path / "found.json"
    words = ["eval", str(run_directory(trained.run)), *keys(""), f"--out={out}", "--batches=3"]
    assert main([*words, f"--data={corpus / 'train'}"]) == 0
    found = json.loads(out.read_text())
    assert (found["data"], found["samples"], found["while_training"]) == (
        str(corpus / "train"),
        24,
        None,
    )
    assert main([*words, f"--data={corpus}", "--train.dtype=bfloat16"]) == 0
    other = json.loads(out.read_text())
    assert other["data"] == str(corpus / "validation") and other["loss"] == pytest.approx(
        found["loss"], rel=0.1
    )
    assert (
        main([*words, "--batches=1"]) == 0 and json.loads(out.read_text())["while_training"] is None
    )
    assert "in bfloat16" in capfd.readouterr().out


def test_a_corpus_of_another_tokenizer_is_refused(
    trained: RunConfig, corpus: Path, tmp_path: Path
) -> None:
    for name in ("validation.bin", "validation.idx", "fingerprint.json"):
        (tmp_path / name).write_bytes((corpus / name).read_bytes())
    tree = json.loads((corpus / "tokenizer.json").read_text())
    tree["model"]["merges"] = tree["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(
        DataError, match="another tokenizer than the run's", check=has_code("MW-INFERENCE-006")
    ):
        with_corpus(trained.data, tmp_path)


def test_what_cannot_be_used_is_one_message(
    trained: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = str(run_directory(trained.run))
    for words, said in [
        (["eval", run, "--step=7"], "has no checkpoint of step 7; it has those of steps 5, 10"),
        (["eval", f"{run}/checkpoints/step-00000005", "--step=10"], "is the checkpoint of step 5"),
        (["eval", str(run_directory(trained.run).parent)], "is not a run, but contains"),
        (
            ["eval", run, "--optimizer.eps=1e-3"],
            "optimizer.eps: eval uses the run's own configuration",
        ),
        (["eval", run, "--parallel.pp=9"], "9 stages"),
        (["eval", run, f"--data={tmp_path}"], "holds no corpus"),
        (["eval", run, f"--data={tmp_path / 'none'}"], "there is no corpus at"),
        (
            ["eval", run, f"--out={tmp_path}"],
            "there is a folder of that name; name a file, such as",
        ),
        (
            ["sample", run, "--prompt=x", f"--out={run}/metrics.jsonl/x"],
            "is a file, and nothing can lie below it",
        ),
        (["sample", run, "--prompt=x", "--parallel.dp=2"], "parallel.dp has no use here"),
        (["sample", run, "--prompt=x", "--step=6"], "has no checkpoint of step 6"),
    ]:
        assert main(words) == 2
        shown = capfd.readouterr()
        assert said in shown.err and "Traceback" not in shown.err and shown.out == "", (
            words,
            shown,
        )


def test_a_damaged_checkpoint_is_passed_over(
    trained: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when a run goes on; and a checkpoint that was copied out of its run is enough."""
    run = tmp_path / "copied"
    shutil.copytree(run_directory(trained.run), run)
    newest = run / "checkpoints" / "step-00000010"
    file = next(newest.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    words = [*keys(""), "--batches=1"]
    assert main(["eval", str(run), *words]) == 0
    shown = capfd.readouterr()
    assert (
        "step-00000005, step 5, on dp1 x pp1 x tp1" in shown.out
        and f"{file}: its sha256" in shown.err
    )
    assert main(["eval", str(newest), *words]) == 2
    assert f"{file}: its sha256" in capfd.readouterr().err
    alone = tmp_path / "alone"
    shutil.copytree(run / "checkpoints" / "step-00000005", alone)
    assert main(["eval", str(alone), *words]) == 0
    assert "alone, step 5" in capfd.readouterr().out


@pytest.mark.torture
def test_ranks_are_started_as_those_that_train(
    trained: RunConfig, tmp_path: Path, shell: Shell
) -> None:
    """By the command itself, and by torchrun: pp 2, as the run has it."""
    run, out = str(run_directory(trained.run)), tmp_path / "found.json"
    logs = sorted(run_directory(trained.run).rglob("*"))
    done = shell.run("-m", "meshwright_launch", "eval", run, "--parallel.dp=1", f"--out={out}")
    assert (done.returncode, done.stderr) == (0, "") and "on dp1 x pp2 x tp1" in done.stdout
    logged = [line["validation/loss"] for line in lines(trained) if "validation/loss" in line][-1]
    assert json.loads(out.read_text())["while_training"]["loss"] == pytest.approx(logged, rel=1e-6)
    words = ("sample", run, "--prompt=the mesh", "--temperature=0", "--tokens=12")
    alone = shell.run("-m", "meshwright_launch", *words)
    together = shell.run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "meshwright_launch",
        *words,
    )
    assert (alone.returncode, together.returncode) == (0, 0)
    assert alone.stdout == together.stdout and len(alone.stdout) > len("the mesh\n")
    assert sorted(run_directory(trained.run).rglob("*")) == logs, "nothing is written into the run"


@pytest.mark.long
@pytest.mark.parametrize("words", [["eval"], ["sample", "--prompt", "a", "--tokens", "2"]])
def test_a_reader_that_has_gone_is_no_failure(trained: RunConfig, words: list[str]) -> None:
    """`meshwright eval RUN | head -1`, on ranks of their own."""
    theirs, ours = os.pipe()
    os.close(theirs)
    said = [
        "-m",
        "meshwright_launch",
        words[0],
        str(run_directory(trained.run)),
        *words[1:],
        *keys("pp2"),
    ]
    done = Shell(ROOT).run(*said, stdout=ours)
    os.close(ours)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
