"""The wheel, built from this checkout and installed into an environment of its own,
as a user has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.sources import PACKAGES, SOURCE_ROOTS, files

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "README.md", "LICENSE")
FOLDERS = (*SOURCE_ROOTS, "configs", "examples", "docs")


def run(*words: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command without this checkout on its path."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, cwd=cwd, env=kept | env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, (
        f"{' '.join(map(str, words))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done


MAX_BYTES = 2_500_000
"""Of the wheel; half of it are pages and configurations."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as ``python -m build`` does from the sdist of a copy:
    nothing is left in this checkout.
    """
    place = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, place)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    out, unpacked = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("sdist")
    make = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", make, unpacked, cwd=place)
    (sdist,) = unpacked.glob("*.tar.gz")
    run(
        *(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
        ),
        *("--wheel-dir", out, sdist),
        cwd=out,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of a new environment with the wheel; its dependencies are those of this one."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place)
    (site,) = place.glob("lib/python*/site-packages")
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        *(
            sys.executable,
            "-m",
            "pip",
            "--python",
            place / "bin" / "python",
            "install",
            "--quiet",
            "--no-deps",
        ),
        *("--no-index", "--ignore-installed", wheel),
        cwd=place,
    )
    return place / "bin"


@pytest.mark.long
def test_init_train_and_verify_in_an_empty_directory(environment: Path, tmp_path: Path) -> None:
    run(environment / "meshwright", "init", cwd=tmp_path)
    short = (
        "--train.steps=2",
        "--batch.global_batch=4",
        "--train.device=cpu",
        "--optimizer.warmup_steps=1",
    )
    told = run(
        environment / "meshwright", "train", "first.toml", *short, cwd=tmp_path, OMP_NUM_THREADS="1"
    ).stdout
    assert "saved runs/first/checkpoints/step-00000002" in told
    layouts = ("--layouts=pp2", "--layouts=dp2,zero3", "--steps=2")
    told = run(
        environment / "meshwright",
        "verify",
        "first.toml",
        *layouts,
        cwd=tmp_path,
        OMP_NUM_THREADS="1",
    ).stdout
    assert "all 2 layouts agree" in told
    where = run(
        environment / "python", "-c", "import meshwright; print(meshwright.__file__)", cwd=tmp_path
    ).stdout
    assert Path(where.strip()).is_relative_to(environment.parent), "the wheel, not this checkout"


def test_a_page_that_a_message_names_is_where_it_says(environment: Path, tmp_path: Path) -> None:
    """Messages name pages of docs/, which a folder without a checkout does not have."""
    told = (
        "import meshwright_launch.jobs as jobs; print(jobs.places_of_pages('see docs/models.md,"
        " docs/no.md'))"
    )
    place = (
        run(environment / "python", "-c", told, cwd=tmp_path)
        .stdout.strip()
        .removeprefix("docs/models.md is ")
    )
    assert Path(place).is_relative_to(environment.parent)
    assert Path(place).read_text() == (ROOT / "docs" / "models.md").read_text()


def test_error_codes_are_read_from_the_installed_files(environment: Path, tmp_path: Path) -> None:
    for code, package in (("MW-DATA-001", "meshwright"), ("MW-INTEROP-051", "meshwright_interop")):
        _, place, *_ = run(
            environment / "meshwright", "errors", code, cwd=tmp_path
        ).stdout.splitlines()
        assert place.startswith(f"raised in {package}.")
        assert Path(place.partition(": ")[2].partition(", line")[0]).is_relative_to(
            environment.parent
        )


@pytest.mark.long
def test_files_that_are_no_code_are_in_it(wheel: Path) -> None:
    def of(root: Path, pattern: str, package: str) -> set[str]:
        return {f"{package}/{path.relative_to(root).as_posix()}" for path in root.glob(pattern)}

    wanted = of(ROOT / "configs", "**/*.toml", "meshwright/configs") | of(
        ROOT / "docs", "**/*.md", "meshwright/docs"
    )
    for package, root in PACKAGES.items():
        for folder in ("templates", "tables"):
            wanted |= of(ROOT / root / package, f"**/{folder}/*", package)
    assert wanted and wanted <= set(zipfile.ZipFile(wheel).namelist())


def test_it_has_the_packages_and_nothing_else(wheel: Path) -> None:
    """No tests, no caches; every module of the checkout; the version of pyproject.toml."""
    names = zipfile.ZipFile(wheel).namelist()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (
        wheel.name == f"meshwright-{version}-py3-none-any.whl" and wheel.stat().st_size < MAX_BYTES
    )
    assert {name.split("/")[0] for name in names} == {*PACKAGES, f"meshwright-{version}.dist-info"}
    assert not [
        name for name in names if name.endswith(".pyc") or "/tests/" in name or "/runs/" in name
    ]
    modules = {path.relative_to(ROOT).as_posix().partition("/")[2] for path in files()}
    assert modules <= set(names), sorted(modules - set(names))


TYPED = """\
import meshwright

config: meshwright.RunConfig = meshwright.load_config("first.toml", ["--train.steps=2"])
steps: int = config.train.steps
reveal_type(meshwright.run_training)
"""
UNTYPED = """\
import meshwright

meshwright.load_config(1)
meshwright.load_confg("first.toml")
steps: str = meshwright.load_config("first.toml").train.steps
"""


@pytest.mark.long
def test_types_reach_who_imports_it(environment: Path, tmp_path: Path) -> None:
    """mypy, strict, reads the annotations of the installed package: right use passes,
    and wrong use does not.
    """
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        environment / "python",
        "--no-incremental",
    ]
    (tmp_path / "right.py").write_text(TYPED)
    told = run(*mypy, "right.py", cwd=tmp_path).stdout
    assert (
        "Success" in told and "Any" not in told.partition("Revealed type is")[2].partition("->")[0]
    ), told
    (tmp_path / "wrong.py").write_text(UNTYPED)
    done = subprocess.run(
        [*mypy, "wrong.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "3 errors" in done.stdout.replace("Found 3", "3"), done.stdout
    assert (
        "[arg-type]" in done.stdout
        and "[attr-defined]" in done.stdout
        and "[assignment]" in done.stdout
    )
