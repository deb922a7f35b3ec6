"""Where a conversion writes: beside others that are at work, over what a killed one has left,
and through links.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.errors import CheckpointError
from meshwright_interop.huggingface.destination import check_output_directory, published_directory
from meshwright_launch.cli import main
from tests.support.errors import has_code


def test_others_that_are_at_work_keep_what_they_have(tmp_path: Path) -> None:
    """Names that begin alike, a name that is a pattern, and the same name once more."""
    with (
        published_directory(tmp_path / "llama-2", 1) as other,
        published_directory(tmp_path / "same", 1) as same,
    ):
        (other / "file").write_text("half")
        for name in ("llama", "llama-[12]", "llama-*", "same"):
            with published_directory(tmp_path / name, 1) as temporary:
                (temporary / "file").write_text("whole")
        assert (other / "file").read_text() == "half"
        assert same.is_dir()
        (tmp_path / "same" / "file").unlink()
    assert (tmp_path / "llama-2" / "file").read_text() == "half"


@pytest.mark.long
def test_what_a_killed_one_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from meshwright_interop.huggingface.destination import published_directory\n"
        "with published_directory(Path(sys.argv[1]), 1): os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")], env=os.environ, check=False
    )
    assert killed.returncode == -signal.SIGKILL and len(list(tmp_path.glob(".tmp-run-*"))) == 1
    with published_directory(tmp_path / "run", 1):
        assert len(list(tmp_path.glob(".tmp-run-*"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_link_is_followed_and_a_file_above_is_named(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "ahead").symlink_to(tmp_path / "not-yet")
    assert check_output_directory(tmp_path / "link") == tmp_path / "real"
    assert check_output_directory(tmp_path / "ahead") == tmp_path / "not-yet"
    with published_directory(check_output_directory(tmp_path / "link"), 1) as temporary:
        (temporary / "file").write_text("whole")
    assert (tmp_path / "link" / "file").read_text() == "whole"
    (tmp_path / "plain").write_text("")
    with pytest.raises(
        CheckpointError,
        match=f"{tmp_path}/plain/a/b .* {tmp_path}/plain ",
        check=has_code("MW-INTEROP-041"),
    ):
        check_output_directory(tmp_path / "plain" / "a" / "b")


def test_a_place_that_may_not_be_looked_into_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``is_file`` fails in a directory of another user."""

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "model").mkdir()
    monkeypatch.setattr(Path, "is_file", refuse)
    code = main(["convert", "--from", "hf", str(tmp_path / "model"), str(tmp_path / "run")])
    told = capsys.readouterr().err
    assert code == 2 and f"{tmp_path}/model/" in told and "Permission denied (errno 13)" in told
    assert len(told.splitlines()) == 1
