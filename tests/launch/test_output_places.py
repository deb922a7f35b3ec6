"""Every command with --out looks at that place before it begins,
whatever its other arguments are.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.errors import MeshError, UserError
from meshwright_launch import cli
from meshwright_launch.environment import check_rendezvous
from meshwright_launch.verification import verify
from tests.launch.test_hostile_commands import COMMANDS, minimal
from tests.support.errors import has_code

WITH_OUT = sorted(
    name for name, parser in COMMANDS.items() if "--out" in parser._option_string_actions
)
LONGEST_NAME = 255
BAD = {
    "fifo": "MW-SYSTEM-010",
    "socket": "MW-SYSTEM-010",
    "file/below": "MW-SYSTEM-004",
    "/proc/no-file-can-be-made-here": "MW-SYSTEM-005",
    "into-nowhere/a": "MW-SYSTEM-005",
    "x" * (LONGEST_NAME - 1): "MW-LAUNCH-093",
    f"new/{'x' * (LONGEST_NAME - 1)}": "MW-LAUNCH-093",
}
"""Places where no output can be written, with the code of the refusal."""


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with a FIFO, a socket, a file and a link into /proc."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("file").write_text("")
    Path("into-nowhere").symlink_to("/proc/nowhere")
    with socket.socket(socket.AF_UNIX) as listening, tempfile.TemporaryDirectory() as short:
        listening.bind(f"{short}/s")  # the path of a socket has at most 107 characters
        Path(f"{short}/s").rename("socket")
        yield


def test_all_commands_with_an_output_are_tried() -> None:
    assert {
        "calibrate",
        "plan",
        "dryrun",
        "draw",
        "eval",
        "sample",
        "report",
        "plot",
        "data stdlib",
    } <= {*WITH_OUT}


@pytest.mark.parametrize("name", WITH_OUT)
def test_a_place_is_refused_before_the_command_begins(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(run: str) -> None:
        raise AssertionError(f"{run} begins")

    monkeypatch.setattr(cli, "load_command", begin)
    is_folder = COMMANDS[name]._option_string_actions["--out"].metavar == "DIR"
    wrong_kind = {"file" if is_folder else ".": "MW-SYSTEM-003"}
    for place, code in (BAD | wrong_kind).items():
        is_special = place in ("fifo", "socket")
        assert cli.main([*minimal(name, "nothere"), f"--out={place}"]) == 2
        said = capsys.readouterr().err
        wanted = "MW-SYSTEM-003" if is_special and is_folder else code
        assert f"[{wanted}]" in said and said.count("\n") == 1, (place[:40], said)
        assert {each.name for each in Path().iterdir()} == {
            "fifo",
            "socket",
            "file",
            "into-nowhere",
        }, "nothing is left by a check"
    with pytest.raises(AssertionError, match="begins"):
        cli.main([*minimal(name, "nothere"), "--out=new/place"])


@pytest.mark.parametrize("place", ["/dev/null", "new", "new/er", "file", "link", "pipe"])
def test_places_that_can_be_written(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe of this process is one, as in the shell's --out >(cat)."""
    monkeypatch.setattr(cli, "load_command", lambda run: lambda options, overrides: 0)
    Path("link").symlink_to("not-yet/x")
    ends = os.pipe()
    named = f"/dev/fd/{ends[1]}" if place == "pipe" else place
    assert cli.main(["calibrate", "--out", named]) == 0
    for end in ends:
        os.close(end)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--routing-directory new", "MW-LAUNCH-106"),
        ("--routing replay --routing-directory new", "MW-LAUNCH-107"),
        ("--routing record --routing-directory file", "MW-SYSTEM-003"),
        ("--routing record --routing-directory fifo", "MW-SYSTEM-003"),
        ("--routing record --routing-directory /proc/new", "MW-SYSTEM-005"),
    ],
)
def test_a_directory_of_routing_is_refused_before_any_training(words: str, code: str) -> None:
    """The configuration is missing, so that a directory that is looked at later fails
    with another code.
    """
    options = cli.build_parser().parse_args(["verify", "nothere.toml", *words.split()])
    with pytest.raises(UserError, match=r"^--routing-directory", check=has_code(code)):
        verify(options, [])


def test_ranks_without_an_address_are_refused() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    with pytest.raises(MeshError, match="without MASTER_ADDR", check=has_code("MW-LAUNCH-105")):
        check_rendezvous(place)
    check_rendezvous(place | {"MASTER_ADDR": "n0"})
    check_rendezvous(place | {"WORLD_SIZE": "1"})
