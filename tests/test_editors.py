"""What an editor finds by itself: the file of every import, and the types behind it."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import PACKAGES, ROOT, files

MISSPELT = "tests.exmples.a"
"""Module that a test of a wrong name names."""
PYRIGHT = shutil.which("pyright") or shutil.which("pyright", path=str(Path(sys.executable).parent))
needs_pyright = pytest.mark.skipif(
    PYRIGHT is None, reason="pyright is not installed: pip install 'pyright[nodejs]'"
)


def our_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import of our packages in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.partition(".")[0] in PACKAGES:
                yield node.lineno, name


def has_file(module: str) -> bool:
    """Return whether the file of a module is where its name says, below its source root."""
    place = ROOT / PACKAGES[module.partition(".")[0]] / module.replace(".", "/")
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def test_the_import_path_of_a_file_is_its_path() -> None:
    """So an editor, grep and a code host follow each import without being told anything."""
    others = [
        path
        for folder in ("tests", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    lost = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in (*files(), *others)
        for line, module in our_imports(path)
        if not has_file(module)
    ]
    assert not lost, "\n".join(lost)


def test_an_import_that_is_found_by_a_mapping_is_seen(tmp_path: Path) -> None:
    assert has_file("meshwright.mesh.grid") and has_file("meshwright_plan.planner")
    assert not has_file("meshwright.launch.cli") and not has_file("meshwright.tools")
    (tmp_path / "a.py").write_text(
        "import torch\nimport meshwright.tools.x\nfrom meshwright_plan import page\n"
    )
    assert list(our_imports(tmp_path / "a.py")) == [
        (2, "meshwright.tools.x"),
        (3, "meshwright_plan"),
    ]


def diagnostics(*words: str | Path) -> list[dict[str, object]]:
    """Return what pyright says, with no setting but the environment of this Python."""
    done = subprocess.run(
        [str(PYRIGHT), "--pythonpath", sys.executable, "--outputjson", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    found: list[dict[str, object]] = json.loads(done.stdout)["generalDiagnostics"]
    return found


@needs_pyright
@pytest.mark.slow
def test_pyright_resolves_every_import_of_ours() -> None:
    found = [
        each
        for each in diagnostics("framework", "models", "launch", "tools", "examples", "benchmarks")
        if each.get("rule") in ("reportMissingImports", "reportMissingModuleSource")
        and any(f'"{package}' in str(each["message"]) for package in PACKAGES)
    ]
    assert not found, found


@needs_pyright
@pytest.mark.slow
def test_types_of_the_core_reach_an_own_run(tmp_path: Path) -> None:
    """From examples/extend/own_run.py by way of the public names down to the step."""
    text = (ROOT / "examples" / "extend" / "own_run.py").read_text(encoding="utf-8")
    text += (
        "\n\nfrom meshwright.step import"
        " take_step\n\nreveal_type(meshwright.run_training)\nreveal_type(take_step)\n"
    )
    (tmp_path / "own_run.py").write_text(text)
    found = diagnostics(tmp_path / "own_run.py")
    shown = [str(each["message"]) for each in found if each["severity"] == "information"]
    assert (
        len(shown) == 2
        and "RunConfig" in shown[0]
        and "Parts" in shown[1]
        and "StepStats" in shown[1]
    ), shown


def test_functions_of_tests_that_are_named_are_there() -> None:
    """Builders in configurations: ``tests.support.builders:``, and a name."""
    named = re.compile(r"\b(tests(?:\.\w+)+):\w+")
    lost = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in (ROOT / "tests").rglob("*.py")
        for module in named.findall(path.read_text(encoding="utf-8"))
        if module != MISSPELT and not (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
    ]
    assert not lost, "\n".join(lost)
