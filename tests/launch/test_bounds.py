"""Bounds of pyproject.toml admit what people have today."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(text)
    for text in (*PROJECT["dependencies"], *(each for of in EXTRAS.values() for each in of))
]
BOUNDED = [
    each
    for each in REQUIREMENTS
    if any(bound.operator in ("<", "<=", "==") for bound in each.specifier)
]
PYTHONS = [
    line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
]


def newest_of(told: str) -> Version | None:
    """Return the version that ``pip index versions`` names; None: it names none."""
    found = re.search(r"^[\w.-]+ \(([\w.+!-]+)\)$", told, re.MULTILINE)
    return Version(found[1]) if found else None


@pytest.mark.slow
@pytest.mark.parametrize("requirement", BOUNDED, ids=lambda each: each.name)
def test_no_bound_excludes_the_newest_release(requirement: Requirement) -> None:
    """It would downgrade the package under a user's feet. Without a registry nothing is known."""
    words = [
        sys.executable,
        "-m",
        "pip",
        "index",
        "versions",
        requirement.name,
        "--only-binary=:all:",
    ]
    words += [
        "--python-version",
        PYTHONS[-1],
        "--timeout",
        "10",
        "--retries",
        "0",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    newest = newest_of(done.stdout)
    if newest is None:
        pytest.skip(f"no registry answers: {done.stderr.strip()[-200:]}")
    assert newest in requirement.specifier, f"{requirement} excludes {newest}, the newest release"


def test_bounded_packages_are_those_whose_private_parts_are_used() -> None:
    """Others have no upper bound: a bound that nobody has seen broken only refuses."""
    assert sorted(each.name for each in BOUNDED) == ["megatron-core", "torch"]
    assert newest_of("torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1\n") == Version("2.15.0")
    assert newest_of("ERROR: No matching distribution") is None
    assert Version("2.16.0") not in SpecifierSet("<2.16") and PYTHONS[0] == "3.11"


def test_constraints_are_inside_the_bounds() -> None:
    """constraints.txt is for development alone:
    `pip install` of a user takes what the bounds admit.
    """
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    pinned = {
        name.lower().replace("_", "-"): Version(version)
        for name, version in (each.split("==") for each in lines)
    }
    wrong = [
        str(each)
        for each in REQUIREMENTS
        if each.name in pinned and pinned[each.name] not in each.specifier
    ]
    assert not wrong
