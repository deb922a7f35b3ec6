"""Every command of meshwright in README, docs and help texts is run as it is printed,
or has a reason in a table.

A desk has what the commands name: configurations, a small corpus, the run ``demo`` (120 steps of
the demo with a small model on one rank) under each name that a page gives a run, texts, chats and a
tokenizer. Pages of docs/tasks are run in order by test_tasks.py.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from meshwright_launch.cli import main
from tests.docs.test_commands import COMMANDS, ROOT
from tests.interop.configs.samples import TORCHTITAN
from tests.support.marks import marked_rows

ELSEWHERE = {
    r"init$": (
        "12 MB of text: tests/launch/test_init.py, and tests/launch/test_wheel.py from a wheel"
    ),
    r"train first.toml$": "the same tests, with fewer steps",
    r"train configs/demo.toml": (
        "minutes on eight ranks: `make demo`, and tests/end_to_end of the same layouts"
    ),
    r"verify configs/demo.toml": (
        "minutes on eight ranks: tests/framework/verify proves the same layouts"
    ),
    r"(train|verify) own_run.toml": "tests/examples/test_own_run.py, with fewer steps",
    r"(train|verify) examples/vision/": "tests/examples/test_vision.py, with fewer steps",
    r"(train|verify) examples/stream/": "tests/examples/test_streams.py, with fewer steps",
    r"checkpoint export .*--weights ema": (
        "needs a callback with a state; other kinds: tests/interop/test_dcp.py"
    ),
    r"convert --from hf models/Llama-3.1-8B": (
        "its weights are 16 GB; small ones: tests/interop/huggingface"
    ),
    r"convert .*(peft|--merge|runs/base)": (
        "needs a run with adapters; docs/tasks, tests/framework/adapters"
    ),
    r"train runs/llama/config.toml": (
        "follows from that conversion; tests/interop/huggingface/test_back.py"
    ),
    r"(train|verify) run.toml": (
        "needs a transformers directory; tests/interop/huggingface/test_restructure.py"
    ),
    r"train configs/moe-demo.toml": (
        "minutes on eight ranks: tests/end_to_end/test_shared_experts.py, a smaller model"
    ),
    r"verify configs/moe-demo.toml": (
        "minutes on eight ranks: tests/framework/verify/test_routing.py, a smaller model"
    ),
    r"verify moe.toml": (
        "minutes on eight ranks: tests/framework/verify/test_model_options.py proves such layouts"
    ),
    r"eval .*--tasks": "needs datasets of the hub; others: tests/interop/test_tasks.py, docs/tasks",
    r"(eval|sample) runs/llama3-70b": "a model of 70 billion parameters",
    r"slurm .*--submit": (
        "needs a cluster: `make slurm-test`; the script itself: tests/launch/test_slurm_script.py"
    ),
    r"doctor ": (
        "measures links between the nodes of a job: `make slurm-test`, tests/framework/doctor"
    ),
    r"calibrate ": "measures this machine for a minute: tests/plan/commands/test_plan.py",
    r"data prepare 'crawl/.*parquet'": (
        "needs a token of that tokenizer; tests/framework/data/prepare reads it"
    ),
    r"data stdlib ": "12 MB of text: `make demo`, tests/framework/data",
}
"""Pattern of a command -> where it is run, or why it cannot be."""
LONG = (
    r"plan configs/mixtral-8x7b.toml",
    r"llama3-(70b|405b|8b).*--cluster",
    r"dryrun configs/llama3-405b",
    r"stages configs/llama3-405b",
    r"--parallel.tp=2",
    r"dryrun ",
)
"""Seconds to half a minute each, or several ranks: run by `make torture`."""
ENDS_WITH = {
    r"--seed-fault": 1,
    r"plan configs/llama3-405b.toml --cluster h100 --nodes 1$": 2,
    r"plan configs/llama3-8b.toml --cluster h100 --nodes 37$": 2,
}
"""The exit codes that the pages say, where it is not 0."""


TOKENIZERS = (
    "tok",
    "models/Llama-3.1-8B",
    "models/llama-3.1-8b",
    "models/mine",
    "models/qwen3-0.6b",
    "models/gpt2",
)
TOKENIZERS += ("runs/llama/huggingface",)
CHAT_TEMPLATE = ROOT / "tests/framework/data/prepare/chat_templates/chatml.jinja"


def is_of_tasks(where: str) -> bool:
    return where.startswith("docs/tasks/")


def reason(command: str) -> str | None:
    return next(
        (why for pattern, why in ELSEWHERE.items() if re.search(f"meshwright {pattern}", command)),
        None,
    )


PRINTED = sorted({command for where, command in COMMANDS if not is_of_tasks(where)})
HERE = [command for command in PRINTED if reason(command) is None]


def test_every_reason_is_needed() -> None:
    for pattern in ELSEWHERE:
        assert any(re.search(f"meshwright {pattern}", command) for command in PRINTED), pattern
    for pattern in (*LONG, *ENDS_WITH):
        assert any(re.search(pattern, command) for command in HERE), pattern
    assert len(HERE) > 55


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands name, made by the commands themselves."""
    place = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        shutil.copytree(ROOT / "configs", "configs")
        (place / "pages").mkdir()
        for page in (ROOT / "docs").glob("*.md"):
            shutil.copy(page, "pages")
        made("data files pages --out runs/data/stdlib --vocab-size 512")
        small = (
            "--model.options.vocab_size=512 --model.options.hidden_size=16"
            " --model.options.num_layers=2"
        )
        one = (
            "--parallel.dp=1 --parallel.pp=1 --parallel.tp=1 --batch.micro_batch_size=1"
            " --batch.global_batch=2"
        )
        rest = (
            "--data.sequence_length=32 --model.options.max_sequence_length=32 --tracking.wandb=off"
            " --train.device=cpu"
        )
        made(f"train configs/demo.toml {small} {one} {rest} --checkpoint.keep_last=4")
        for name in ("llama", "deep", "other", "moe-demo", "unbalanced", "dense"):
            shutil.copytree("runs/demo", f"runs/{name}")
        tokenizer = place / "runs/data/stdlib/tokenizer.json"
        for folder in TOKENIZERS:
            Path(folder).mkdir(parents=True)
            shutil.copy(tokenizer, folder)
            shutil.copy(CHAT_TEMPLATE, Path(folder) / "chat_template.jinja")
        texts = [
            f"{number}. The mesh has {number} ranks, and each of them counts its samples."
            for number in range(200)
        ]
        for folder in ("books", "notes", "texts"):
            Path(folder).mkdir()
            Path(folder, "one.txt").write_text("\n".join(texts))
        lines = "\n".join(json.dumps({"text": text}) for text in texts) + "\n"
        Path("pages.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        Path("pages", "one.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        Path("book.txt").write_text("\n".join(texts))
        chat = [
            {"role": "user", "content": "How many?"},
            {"role": "assistant", "content": "Eight ranks."},
        ]
        Path("chats.jsonl").write_text(
            "".join(json.dumps({"messages": chat}) + "\n" for _ in range(200))
        )
        Path("llama3_8b.toml").write_text(
            TORCHTITAN.replace('decay_type = "cosine"', 'decay_type = "linear"')
        )
        made(
            "data prepare chats.jsonl --format messages --chat-template tokenizer"
            " --tokenizer models/mine --out data/chats --validation-share 0.1"
        )
        made("data prepare notes/ --tokenizer tok/ --validation-share 0.1 --out data/notes")
        made("data prepare pages.jsonl.gz --tokenizer tok/ --validation-share 0.1 --out data/pages")
        shutil.copytree("runs/data/stdlib", "runs/data/other")
    return place


def made(words: str) -> None:
    assert main(words.split()) == 0, words


@marked_rows(
    "long",
    "meshwright checkpoint export runs/demo --out exported/demo",
    "meshwright data prepare books/ pages.jsonl.gz --tokenizer '~/models/gpt2' --out data/books",
    "meshwright data prepare books/ pages.jsonl.gz --tokenizer models/Llama-3.1-8B --out data/mine",
    "meshwright data prepare chats.jsonl --format messages --chat-template tokenizer"
    " --tokenizer models/mine --max-tokens 4096 --out data/chats",
    "meshwright data prepare chats.jsonl --format messages --chat-template tokenizer"
    " --tokenizer models/mine --out data/chats",
    "meshwright data prepare notes/ pages.jsonl.gz --tokenizer tok/ --validation-share 0.1 --out data/notes",
    "meshwright eval runs/llama",
    "meshwright plan configs/demo.toml --cluster h100 --nodes 1 --cp 2",
    "meshwright plot runs/demo",
    "meshwright report runs/llama runs/other",
    "meshwright report runs/moe-demo runs/unbalanced runs/dense --out experts.html",
    "meshwright sample runs/demo --prompt 'def main' --temperature 0",
    "meshwright sample runs/demo --prompt 'def main' --tokens 60 --temperature 0",
    "meshwright sample runs/demo --prompt class --tokens 80",
    "meshwright sample runs/demo --prompt import --prompt class --top-p 0.9 --seed 7 --out texts.jsonl",
)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            each,
            marks=(
                pytest.mark.torture
                if any(re.search(one, each) for one in LONG)
                else pytest.mark.slow
            ),
        )
        for each in HERE
    ],
    ids=lambda command: command,  # pytest would number the longest ones
)
def test_it_does_what_is_printed(
    command: str,
    desk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On a copy of the desk, with the exit code that the page says."""
    copy = shutil.copytree(desk, tmp_path / "desk", symlinks=True)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("HOME", str(copy))
    expected = next((code for pattern, code in ENDS_WITH.items() if re.search(pattern, command)), 0)
    prepare(command)
    code = main([each for word in shlex.split(command)[1:] for each in as_the_shell_does(word)])
    said = capfd.readouterr()
    assert code == expected, f"{command}\n{said.out[-2000:]}{said.err}"
    assert "Traceback" not in said.err


@pytest.mark.slow
def test_records_on_the_pages_have_the_fields_that_a_run_writes(desk: Path) -> None:
    """In their order. The start in docs/cluster.md is one of Slurm's, which adds two fields."""
    written = json.loads((desk / "runs/demo/starts.jsonl").read_text().splitlines()[-1])
    lines = re.findall(r"^\{\"at\": .*$", (ROOT / "docs/cluster.md").read_text(), re.MULTILINE)
    assert lines
    for shown in map(json.loads, lines):
        assert [*shown] == [*written, "slurm_job", "slurm_restart"]
        assert (
            sum(number for _, number in shown["ranks_on"]) == 8
            and len(shown["ranks_on"]) == shown["nodes"]
        )
        assert [Path(file).suffix for file in shown["corpus"]] == [
            Path(file).suffix for file in written["corpus"]
        ]
    (text,) = re.findall(
        r"^```json\n(.*?)^```", (ROOT / "docs/checkpoints.md").read_text(), re.MULTILINE | re.DOTALL
    )
    manifest = json.loads(text)
    saved = json.loads(max((desk / "runs/demo/checkpoints").glob("*/manifest.json")).read_text())
    assert [*manifest] == [*saved]
    for part in ("data_fingerprint", "versions", "state"):
        assert [*manifest[part]] == [*saved[part]], part
    for part in ("tensors", "files"):
        fields = [*next(iter(saved[part].values()))]
        assert all([*entry] == fields for entry in manifest[part].values()), part


def as_the_shell_does(word: str) -> list[str]:
    """Expand ``~`` and patterns of files; a pattern that fits nothing stays."""
    word = str(Path(word).expanduser()) if word.startswith("~") else word
    return sorted(map(str, Path().glob(word))) if "*" in word else [word]


def prepare(command: str) -> None:
    """Make way for what the command makes, and put there what only it wants."""
    words = shlex.split(command)
    out = Path(words[words.index("--out") + 1]) if "--out" in words else None
    if out is not None and out.is_dir() and out.parts[0] == "data":
        shutil.rmtree(out)
    if "--to" in words:
        shutil.rmtree("models/mine")


OTHER = re.compile(r"(?:^|`|\$ )((?:make|python) [^`\n]+)", re.MULTILINE)
PAGES_OF_OTHERS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def others() -> list[str]:
    """``make`` and ``python`` commands of the pages, without their remarks."""
    found = {
        re.split(r"\s{2,}|\s#", match)[0].strip()
        for page in PAGES_OF_OTHERS
        for match in OTHER.findall(page.read_text())
    }
    return sorted(
        command
        for command in found
        if re.match(r"make [a-z-]+( [A-Z]+=\S+)*$|python (-m )?benchmarks", command)
    )


@pytest.mark.parametrize("command", others())
def test_targets_and_benchmarks_are_there(command: str) -> None:
    """A target of the Makefile; a benchmark that knows each option. They take minutes:
    `make bench`, `make torture`.
    """
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
        return
    file = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
    source = (ROOT / file).read_text()
    for word in words[2:]:
        assert not word.startswith("--") or f'"{word.partition("=")[0]}"' in source, (
            f"{file} has no option {word}"
        )


def test_others_are_found() -> None:
    found = others()
    assert {"make test", "make demo", "make check"} <= set(found) and sum(
        "benchmarks" in each for each in found
    ) > 8
