"""A locale without UTF-8: the C locale with Python's UTF-8 mode off, Latin-1. Text may be escaped;
all goes on.
"""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.terminal.output import make_printable, print_lines, put, tell
from tests.end_to_end.shell import Shell
from tests.launch.test_mpi import CONFIG
from tests.support.sources import ROOT, files

C_LOCALE = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Commands in the C locale, without the UTF-8 mode that Python would turn on in it."""
    (tmp_path / "a.toml").write_text(CONFIG, encoding="utf-8")
    found = Shell(tmp_path)
    found.environment |= C_LOCALE
    return found


@pytest.mark.slow
def test_a_run_of_several_ranks_goes_on(shell: Shell) -> None:
    """Pictures, a bar, logs of ranks, names beyond ASCII; on the command line, too."""
    words = ("train", "a.toml", "--tracking.notes=kä│se", "--train.steps=3")
    done = shell.run("-m", "meshwright_launch", *words)
    assert done.returncode == 0, done.stderr
    assert "\\u250c" in done.stdout and done.stdout.isascii() and "Traceback" not in done.stderr
    assert "kä│se" in (shell.directory / "runs/mpi/config.toml").read_text(encoding="utf-8")


@pytest.mark.long
def test_a_failing_rank_says_why_in_any_text(shell: Shell) -> None:
    """The message passes a record, a log and two processes."""
    done = shell.run(
        "-m",
        "meshwright_launch",
        "train",
        "a.toml",
        "--data.builder=tests.framework.system.test_encodings:refused",
    )
    assert done.returncode != 0 and "UnicodeEncodeError" not in done.stderr
    assert "gr\\xf6\\xdfer \\u2502" in done.stderr


def refused(split: str) -> list[object]:
    """Refuse to open, as ``data.builder``."""
    raise ValueError("größer │ als")


def test_a_name_that_the_locale_cannot_write_is_one_message(shell: Shell) -> None:
    done = shell.run("-m", "meshwright_launch", "train", "a.toml", "--run.directory=läufe")
    assert (
        done.returncode == 2 and "LC_ALL=C.UTF-8" in done.stderr and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_streams_of_any_encoding_take_any_text(
    encoding: str, errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a script of the user's own, which has not called ``make_printable``."""
    for prepared in (False, True):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, errors=errors)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        if prepared:
            make_printable()
            print("┌ é")
        put("┌ é")
        tell("┌ é")
        print_lines("┌ é")
        stream.flush()
        written = raw.getvalue().decode(encoding)
        expected = "\\u250c " + ("\\xe9" if encoding == "ascii" else "é")
        assert written.splitlines() == [expected] * (4 if prepared else 3)


def calls_without_encoding(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of calls that open a text file or pipe in the locale's encoding."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        given = {keyword.arg for keyword in call.keywords}
        name = (
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        )
        texts = [
            each.value
            for each in call.args
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
        is_pipe = name in ("run", "Popen", "check_output") and bool(
            given & {"text", "universal_newlines"}
        )
        is_text = isinstance(call.func, ast.Attribute) and (
            name == "write_text"
            or (name == "read_text" and not call.args)
            or (name == "open" and texts in (["w"], ["a"], ["r"], ["x"]))
        )
        if (is_pipe or is_text) and "encoding" not in given:
            yield call.lineno, ast.unparse(call)[:80]


def test_no_file_or_pipe_has_the_locales_encoding() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files()
        for line, text in calls_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(['add encoding="utf-8":', *found])


@pytest.mark.parametrize(
    "source", ["p.write_text('x', {})", "p.open('a', {})", "p.read_text({})", "run(['a'], {})"]
)
def test_a_call_without_encoding_is_seen(source: str) -> None:
    pipe = "text=True" if source.startswith("run") else ""
    assert list(calls_without_encoding(source.format(pipe)))
    assert not list(calls_without_encoding(source.format("encoding='utf-8'")))
