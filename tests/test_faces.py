"""The face of the trainer that the packages of tools/ use:
a change of it shows in tests/golden/faces.
"""

from __future__ import annotations

import pytest

from tests.support.faces import GOLDEN, TOOLS, face, imported
from tests.support.sources import files


@pytest.mark.parametrize("package", TOOLS)
def test_what_tools_use_of_the_trainer_is_listed(package: str) -> None:
    """Names come and go, and signatures change, with a diff of the list."""
    advice = "python -m tests.support.faces writes the list anew: read its diff"
    assert (GOLDEN / f"{package}.txt").read_text(encoding="utf-8") == face(package), advice


@pytest.mark.parametrize("package", TOOLS)
def test_tools_use_public_names_alone(package: str) -> None:
    private = {
        f"{path.name}: {module}.{name}"
        for path in files(package)
        for module, name in imported(path)
        if any(part.startswith("_") for part in (*module.split("."), name))
    }
    assert not private, private
