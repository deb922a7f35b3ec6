"""Files made to hang, to fill memory or to overflow a parser: one message each, exit code 2,
within seconds.
"""

from __future__ import annotations

import gzip
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.data.prepare.input_files import list_files
from meshwright.data.prepare.readers import blocks, lines_of_range
from meshwright.run.files import check_run_files
from meshwright.tracking.jsonl import drop_records_after
from meshwright_launch.cli import main
from tests.plan.report.builders import make_run
from tests.support.errors import raises
from tests.support.marks import mark_all_rows_but

DEEP = 100_000
DIGITS = "9" * 1_000_000
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def within_seconds() -> Iterator[None]:
    """A reader that waits for a writer, or reads without end, fails here."""

    def late(*_: object) -> None:
        raise AssertionError("still reading after 30 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the message of a command that must end with 2."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    said = capsys.readouterr().err
    assert code == 2 and "Traceback" not in said and 0 < len(said) < 2000, (code, said[:2000])
    return said


def as_fifo(path: Path) -> None:
    os.mkfifo(path)


def as_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


SPECIAL = {"fifo": (as_fifo, "a FIFO"), "/dev/zero": (as_zeros, "a device")}
TOML = {
    **SPECIAL,
    "deep": (text("[run]\nname = " + "[" * DEEP), "nested more than"),
    "deep table": (text("x = " + "{a=" * DEEP), "nested more than"),
    "long key": (text("[" + ".".join("a" * DEEP) + "]\nb = 1"), "a key of more than"),
    "deep but read": (text("[model.options]\nx = " + "[" * 150 + "]" * 150), "nested more than"),
    "digits": (text(f"[train]\nsteps = {DIGITS}"), "more than 4,000 digits"),
    "hexadecimal digits": (text(f"[train]\nsteps = 0x{DIGITS}"), "more than 4,000 digits"),
    "large": (lambda path: os.truncate(path, 2**40) if path.touch() is None else None, "at most"),
    "no text": (lambda path: path.write_bytes(b"[run]\nname = \xff"), "UTF-8"),
}
YAML = {
    **SPECIAL,
    "deep": (text("a: " + "[" * DEEP), "nested more than"),
    "deep mapping": (text("a: " + "{a: " * (DEEP // 2)), "nested more than"),
    "digits": (text(f"a: {'9' * 100_000}"), "more than 4,000 digits"),
    "doubling aliases": (
        text(
            "a0: &a0 [x, x]\n"
            + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
        ),
        "with its aliases",
    ),
    "alias of itself": (text("a: &a [*a]"), "contains itself"),
}
FLAGS = {
    **SPECIAL,
    "doubling array": (
        text("A=(--x 1)\n" + "A+=(${A[@]})\n" * 60 + "torchrun p.py ${A[@]}"),
        "a shell script",
    ),
    "deep sum": (
        text("A=$((" + "(" * DEEP + "1" + ")" * DEEP + "))\ntorchrun p.py --x $A"),
        "a shell script",
    ),
    "nested ifs": (text("if x; then " * 10_000 + "\ntorchrun p.py --x 1"), "a shell script"),
    "open quotes": (text("--x '" + '"' * DEEP), "MW-INTEROP-151"),
    "large": (text("torchrun p.py --x 1 " * DEEP), ""),
}


@pytest.mark.parametrize("name", TOML)
@pytest.mark.parametrize("command", ["config show", "config import", "plan --cluster"])
def test_toml(name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, expected = TOML[name]
    path = tmp_path / "hostile.toml"
    make(path)
    if command == "plan --cluster":
        if name in SPECIAL:
            pytest.skip("only a regular file is taken for a cluster")
        words = ["plan", ROOT / "configs" / "demo.toml", "--nodes", "1", "--devices-per-node", "2"]
        words += ["--cluster", path]
    else:
        words = [*command.split(), path]
    said = refused(capsys, *words)
    assert "hostile.toml" in said and expected in said


@pytest.mark.parametrize(
    ("kind", "name"), [*(("yaml", name) for name in YAML), *(("txt", name) for name in FLAGS)]
)
def test_foreign(kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, expected = {"yaml": YAML, "txt": FLAGS}[kind][name]
    path = tmp_path / f"hostile.{kind}"
    make(path)
    said = refused(capsys, "config", "import", path)
    assert ("hostile." in said or not expected) and expected in said


DAMAGE = {
    "deep": "[" * DEEP,
    "deep object": '{"run":' * DEEP,
    "deep but read": '{"model": {"options": {"x": ' + "[" * 150 + "]" * 150 + "}}}",
    "digits": f'{{"step": {DIGITS}}}',
    "float out of range": '{"step": 1e400}',
    "null": "null",
    "surrogate": '{"run": {"name": "\\ud800"}, "step": "\\ud800", "model": {"builder": "\\udfff"}}',
    "nulls": "\0" * 4096,
    "wrong types": '{"step": [], "train": 3, "run": [1], "tensors": 7, "config": null, "at": {}}',
    "half": '{"step": 1, "tra',
    "empty": "",
}
FILES = [
    "resolved.json",
    "starts.jsonl",
    "metrics.jsonl",
    "metrics-again.jsonl",
    "status.json",
    "memory.json",
]
FILES += ["trace-5.json", "checkpoints/step-00000050/manifest.json"]


@mark_all_rows_but(
    "torture",
    "resolved.json-deep",
    "resolved.json-deep object",
    "resolved.json-deep but read",
    "resolved.json-digits",
    "resolved.json-float out of range",
    "resolved.json-null",
    "resolved.json-surrogate",
    "resolved.json-nulls",
    "resolved.json-wrong types",
    "resolved.json-half",
    "resolved.json-empty",
    "metrics.jsonl-deep but read",
    "metrics.jsonl-digits",
    "metrics.jsonl-null",
    "metrics.jsonl-nulls",
    "metrics.jsonl-wrong types",
    "status.json-deep but read",
    "status.json-null",
    "status.json-wrong types",
    "memory.json-deep but read",
)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_garbled_files_of_a_run(
    file: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`report` shows what is left; the others read it or end with one message."""
    directory = make_run(tmp_path / "demo", saved=(50,))
    place = directory / file
    if file.startswith("trace"):
        place = next(iter(directory.rglob("*trace*.json")), place)
    place.write_text(DAMAGE[damage])
    for words in (
        ["report", directory],
        ["status", directory],
        ["plot", directory],
        ["checkpoint", "list", directory],
    ):
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        assert code in (0, 1, 2) and "Traceback" not in said.err, (words, code, said.err[-2000:])
        assert words[0] != "report" or code == 0, said.err


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", ["sample", "eval"])
def test_garbled_configuration_of_a_run(
    command: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(tmp_path / "demo", saved=(50,))
    (directory / "resolved.json").write_text(DAMAGE[damage])
    refused(capsys, command, directory)


RUN_FILES = [
    "lock",
    "starts.jsonl",
    "placement.txt",
    "resolved.json",
    "config.toml",
    "metrics.jsonl",
    "status.json",
]


def as_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [as_fifo, as_zeros, as_folder])
@pytest.mark.parametrize("file", RUN_FILES)
def test_something_else_where_a_run_keeps_a_file(
    file: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    """The launcher says it before any rank starts."""
    make(tmp_path / file)
    # the run begins, and its records wait for a file
    if file == "metrics.jsonl" and make is as_folder:
        check_run_files(tmp_path)
        return
    with raises("MW-RUN-009", file, "symbolic link" if make is as_zeros else "regular file"):
        check_run_files(tmp_path)


def test_metrics_without_a_line_feed(tmp_path: Path) -> None:
    """No more than a line of 1 MiB is held of a file of any size."""
    path = tmp_path / "metrics.jsonl"
    path.touch()
    os.truncate(path, 2**40)
    with raises("MW-TRACKING-003", "metrics.jsonl", "line 1"):
        drop_records_after(path, 10)
    (tmp_path / "starts.jsonl").touch()
    os.truncate(tmp_path / "starts.jsonl", 2**40)
    with raises("MW-RUN-009", "starts.jsonl", "1,099,511,627,776"):
        check_run_files(tmp_path)


def test_a_gzipped_line_without_end(tmp_path: Path) -> None:
    """It packs to a thousandth; no more is unpacked than a line may have."""
    path = tmp_path / "lines.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(b'{"text": "short"}\n{"text": "')
        for _ in range(80):
            stream.write(b"a" * 2**20)
    with raises("MW-DATA-060", "lines.jsonl.gz"):
        list(blocks(list_files([path]), ("text",)))
    plain = tmp_path / "lines.jsonl"
    with gzip.open(path) as packed:
        plain.write_bytes(packed.read())
    with raises("MW-DATA-060", "lines.jsonl"):
        lines_of_range(plain, 18, 1000)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return one to four random edits: a bit, a removal, a repetition, a token of JSON or TOML."""
    tokens = [
        b"[" * 200,
        b"{",
        b"null",
        b"-1",
        b"1e999",
        b'"',
        b"9" * 5000,
        b"\x00",
        b"\xff",
        b"[]",
        b"NaN",
        b"\\u12",
    ]
    for _ in range(chance.randint(1, 4)):
        at, size = chance.randrange(len(content) + 1), chance.randint(0, 30)
        values = list(re.finditer(rb"[:=] *([^,\n}]+)", content))
        match chance.randrange(5):
            case 0:
                content = content[:at] + content[at + size :]
            case 1:
                content = content[:at] + chance.choice(tokens) + content[at:]
            case 2:
                content = content[: at + size] + content[at:]
            case 3:
                content = content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :]
            case _ if values:
                span = chance.choice(values).span(1)
                content = content[: span[0]] + chance.choice(tokens) + content[span[1] :]
    return content


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_mutated_files(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever stands in a file of a run or a configuration, no command ends in a traceback."""
    chance = random.Random(seed)
    directory = make_run(tmp_path / "demo", 20, saved=(10,))
    toml = tmp_path / "demo.toml"
    toml.write_bytes((ROOT / "configs" / "demo.toml").read_bytes())
    whole = {
        directory / file: (directory / file).read_bytes()
        for file in FILES
        if (directory / file).is_file()
    }
    checkpoint = directory / "checkpoints" / "step-00000010"
    for path in (checkpoint / "manifest.json",):
        whole[path] = path.read_bytes()
    for _ in range(25):
        damaged = chance.choice(list(whole))
        damaged.write_bytes(mutated(whole[damaged], chance))
        toml.write_bytes(mutated((ROOT / "configs" / "demo.toml").read_bytes(), chance))
        commands = [["config", "show", toml], ["report", directory], ["status", directory]]
        commands += [["checkpoint", "show", checkpoint]]
        for words in commands:
            state = (seed, damaged.name, damaged.read_bytes()[:300], words)
            assert main([str(word) for word in words]) in (0, 1, 2), state
            assert "Traceback" not in capsys.readouterr().err, state
        damaged.write_bytes(whole[damaged])
