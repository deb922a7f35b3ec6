"""Commands and schemes that other packages register: they work,
and a broken one stops no other command.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PARSERS = """
from meshwright_launch.arguments.common import command

def fly(added):
    command(added, "fly", "third.parsers:run", "fly away", "Flies.", "meshwright fly")

def show_more(added):
    command(added, "more", "third.parsers:run", "show more", "Shows.", "meshwright config more")

def another(added):
    command(added, "walk", "third.parsers:run", "walk", "Walks.", "meshwright walk")

def fails(added):
    1 / 0

def run(options, overrides):
    print("flew")
    return 0
"""
SCHEME = """
def builder(place):
    if place == "broken":
        raise RuntimeError("no such model")
    from meshwright_models.gpt2 import build
    return build

def vocabulary(place):
    return None
"""


def installed(folder: Path, group: str, *entries: str) -> None:
    """Put a package ``third`` with these entry points on the path of a command."""
    package = folder / "path" / "third"
    package.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("__init__", ""),
        ("parsers", PARSERS),
        ("scheme", SCHEME),
        ("wrong", "def f(:\n"),
    ):
        (package / f"{name}.py").write_text(text)
    (package / "leaves.py").write_text("raise SystemExit(7)\n")
    (package / "needs.py").write_text("import a_module_that_is_not_there\n")
    metadata = folder / "path" / "third-1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *entries, ""]))


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the package ``third``."""
    return subprocess.run(
        [sys.executable, "-m", "meshwright_launch", *words],
        env=os.environ | {"PYTHONPATH": str(folder / "path")},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_command_of_another_package_runs(tmp_path: Path) -> None:
    installed(
        tmp_path,
        "meshwright.commands",
        "fly = third.parsers:fly",
        "config.more = third.parsers:show_more",
    )
    assert run(tmp_path, "fly").stdout == run(tmp_path, "config", "more").stdout == "flew\n"
    assert (
        "fly away" in run(tmp_path, "--help").stdout
        and "show more" in run(tmp_path, "config", "--help").stdout
    )


@pytest.mark.parametrize(
    "entry",
    [
        "fly = third.wrong:fly",
        "fly = third.leaves:fly",
        "fly = third.needs:fly",
        "fly = third.parsers:no_such_function",
        "fly = not_there:fly",
        "fly = not a valid::thing",
        "fly = third.parsers:fails",
        "fly = third.parsers:another",
        "train = third.parsers:fly",
        "foo.bar = third.parsers:fly",
        "train.bar = third.parsers:fly",
    ],
)
def test_a_broken_one_is_left_out_with_a_line(entry: str, tmp_path: Path) -> None:
    installed(tmp_path, "meshwright.commands", entry)
    done = run(tmp_path, "config", "show", "--help")
    assert done.returncode == 0 and "--section.key=value" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"meshwright: the command {entry.partition(' ')[0]} of the package third is left out: "
    )
    assert run(tmp_path, "errors", "MW-DATA-001").returncode == 0


@pytest.mark.parametrize(
    "entry",
    [
        "eval.high = third.wrong:high",
        "eval = third.parsers:fails",
        "nothing.high = third.parsers:fly",
    ],
)
def test_broken_options_are_left_out_with_a_line(entry: str, tmp_path: Path) -> None:
    installed(tmp_path, "meshwright.options", entry)
    done = run(tmp_path, "eval", "--help")
    assert done.returncode == 0 and "--tasks" in done.stdout
    (line,) = done.stderr.splitlines()
    name = entry.partition(" ")[0]
    assert line.startswith(f"meshwright: the options of {name} of the package third are left out: ")


def test_ours_are_not_replaced(tmp_path: Path) -> None:
    installed(
        tmp_path, "meshwright.commands", "mesh = third.parsers:fly", "status = third.parsers:fly"
    )
    assert "straddles nodes" in " ".join(run(tmp_path, "mesh", "--help").stdout.split())
    assert "flew" not in run(tmp_path, "status", "nowhere").stdout


CONFIG = (
    '[run]\nname = "x"\n[model]\nbuilder = "{}"\n[data]\ntrain = "a"\n[batch]\nchunks ='
    " 1\nmicro_batch_size = 1\n"
)


def test_a_scheme_of_another_package_builds_the_model(tmp_path: Path) -> None:
    installed(tmp_path, "meshwright.schemes", "third-x = third.scheme")
    (tmp_path / "c.toml").write_text(CONFIG.format("third-x:some/place"))
    done = run(tmp_path, "dryrun", "c.toml")
    assert done.returncode == 0 and "the same collectives" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("builder", "said"),
    [("third-x:broken", "no such model [MW-MODEL-059]"), ("nobody:some/place", "MW-CONFIG-008")],
)
def test_a_scheme_that_fails_or_is_not_there(builder: str, said: str, tmp_path: Path) -> None:
    installed(tmp_path, "meshwright.schemes", "third-x = third.scheme")
    (tmp_path / "c.toml").write_text(CONFIG.format(builder))
    done = run(tmp_path, "dryrun", "c.toml")
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_scheme_of_another_package_does_not_take_ours(tmp_path: Path) -> None:
    installed(tmp_path, "meshwright.schemes", "hf = third.scheme")
    (tmp_path / "c.toml").write_text(CONFIG.format("hf:nowhere"))
    done = run(tmp_path, "dryrun", "c.toml")
    assert done.returncode == 2 and "nowhere" in done.stderr and "third" not in done.stderr


PAGE = (Path(__file__).parents[2] / "docs" / "packages.md").read_text()
(ENTRIES,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
MODULES = dict(
    re.findall(
        r"block is\s+`my_package/(\w+)\.py`:\n\n```python\n(.*?)^```$",
        PAGE,
        re.MULTILINE | re.DOTALL,
    )
)
"""Module of the package on the page -> its source."""
(ADDED,) = re.findall(
    r"is added to `my_package/parsers\.py`:\n\n```python\n(.*?)^```$",
    PAGE,
    re.MULTILINE | re.DOTALL,
)
MODULES["parsers"] += ADDED


@pytest.fixture
def documented(tmp_path: Path) -> Path:
    """A folder whose commands have the package of docs/packages.md."""
    package = tmp_path / "path" / "my_package"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", **MODULES}.items():
        (package / f"{name}.py").write_text(text)
    lines = []
    for group, entries in tomllib.loads(ENTRIES)["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())]
    metadata = tmp_path / "path" / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "c.toml").write_text(CONFIG.format("tiny:narrow"))
    return tmp_path


@pytest.mark.long
def test_the_documented_command_and_scheme_work(documented: Path) -> None:
    done = run(documented, "layers", "c.toml", "--most=1")
    assert done.stdout == "embedding Embedding\n", done.stderr
    assert run(documented, "config", "layers", "c.toml", "--most=1").stdout == done.stdout
    assert run(documented, "status", "a/run", "--loud").stdout == "A/RUN\n"
    wide = run(documented, "layers", "c.toml", "--most=1", "--model.builder=tiny:wide")
    assert wide.returncode == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [(("--most=900",), "MY-001"), (("--model.builder=tiny:no_width",), "MW-MODEL-003")],
)
def test_the_documented_errors_are_one_message(
    words: tuple[str, ...], code: str, documented: Path
) -> None:
    done = run(documented, "layers", "c.toml", *words)
    assert done.returncode == 2 and code in done.stderr and "Traceback" not in done.stderr


def test_the_documented_scheme_is_code_of_others(documented: Path) -> None:
    (documented / "metrics.jsonl").write_text("")  # now c.toml is a configuration of a run
    refused = run(documented, "layers", "c.toml")
    assert refused.returncode == 2 and "MW-RUN-030" in refused.stderr
    assert run(documented, "layers", "c.toml", "--trust-code").returncode == 0
