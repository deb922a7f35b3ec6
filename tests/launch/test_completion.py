"""The scripts complete commands, options, keys and words, in the shells themselves."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.config.keys import KEYS
from meshwright_launch.arguments import build_parser
from meshwright_launch.completion import keys, script, walk_positions

ROOT = Path(__file__).parents[2]
SCHEDULES = [
    "1f1b",
    "gpipe",
    "interleaved_1f1b",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "v_min",
    "dualpipe_v",
]
TRAIN = "meshwright train configs/demo.toml"

CASES: list[tuple[str, list[str]]] = [
    ("meshwright ch", ["checkpoint"]),
    ("meshwright checkpoint ", ["list", "verify", "show", "export"]),
    ("meshwright err", ["errors"]),
    ("meshwright errors ", []),
    ("meshwright completion ", ["bash", "zsh", "fish"]),
    ("meshwright config import --from ", ["torchtitan", "nanotron", "megatron", "bridge"]),
    ("meshwright mesh configs/demo.toml --no", ["--nodes"]),
    ("meshwright train configs/dem", ["configs/demo.toml"]),
    ("meshwright train tests/framework/tr", ["tests/framework/tracking"]),
    ("meshwright status tests/framework/tr", ["tests/framework/tracking"]),
    ("meshwright status configs/de", []),
    (f"{TRAIN} --par", ["--parallel."]),
    (f"{TRAIN} --parallel.ze", ["--parallel.zero="]),
    (f"{TRAIN} --parallel.zero=", ["0", "1", "2", "3"]),
    (f"{TRAIN} --pipeline.schedule=", SCHEDULES),
    (f"{TRAIN} --pipeline.schedule=zb", ["zb_h1", "zb_h2", "zb_v"]),
    (f"{TRAIN} --pipeline.schedule zb", ["zb_h1", "zb_h2", "zb_v"]),
    (f"{TRAIN} --train.compile=t", ["true"]),
    (f"{TRAIN} --data.train=configs/dem", ["configs/demo.toml"]),
    ("meshwright plot runs/demo --parallel.", []),
    ("meshwright plan configs/demo.toml --nodes ", []),
]


def test_bash_offers_what_there_is(tmp_path: Path) -> None:
    """The function as bash calls it, for each line with the cursor at its end."""
    file = tmp_path / "completion.bash"
    file.write_text(script(build_parser(), "bash"))
    asked = "\n".join(
        f'COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; _meshwright; echo "${{COMPREPLY[*]}}"'
        for line, _ in CASES
    )
    program = f"source {file}\ncompopt() {{ :; }}\n{asked}\n"
    done = subprocess.run(
        ["bash", "--norc", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    told = [line.split() for line in done.stdout.splitlines()]
    assert {line: found for (line, _), found in zip(CASES, told, strict=True)} == dict(CASES)


def test_the_tab_key_in_a_real_bash(tmp_path: Path) -> None:
    """Readline in a terminal: what is typed, and what Tab makes of it."""
    file = tmp_path / "completion.bash"
    file.write_text(script(build_parser(), "bash"))
    typed = {
        "meshwright checkp\t": "meshwright checkpoint ",
        "meshwright train configs/dem\t": "meshwright train configs/demo.toml ",
        f"{TRAIN} --optimizer.warm\t": f"{TRAIN} --optimizer.warmup_steps=",
        f"{TRAIN} --pipeline.schedule=gp\t": f"{TRAIN} --pipeline.schedule=gpipe ",
        f"{TRAIN} --pipe\t": f"{TRAIN} --pipeline.",
    }
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        environment = {
            "PATH": os.environ["PATH"],
            "PS1": "$ ",
            "TERM": "dumb",
            "INPUTRC": "/dev/null",
            "COLUMNS": "500",
        }
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
    try:
        _until(terminal, "$ ")
        os.write(
            terminal, f"meshwright() {{ echo \"[$*]\"; }}; source {file}; echo rea''dy\n".encode()
        )
        _until(terminal, "ready\r\n")
        for keys_, expected in typed.items():
            os.write(terminal, keys_.encode())
            time.sleep(0.2)
            os.write(terminal, b"END\n")
            shown = _until(terminal, "]\r\n")
            assert f"[{expected.removeprefix('meshwright ')}END]" in shown, (keys_, shown)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def _until(terminal: int, text: str) -> str:
    seen, deadline_s = "", time.monotonic() + 20
    while text not in seen:
        assert time.monotonic() < deadline_s, f"{text!r} never came: {seen!r}"
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")
    return seen


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_others_find_nothing_wrong_with_their_script(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} here")
    file = tmp_path / f"completion.{shell}"
    file.write_text(script(build_parser(), shell))
    done = subprocess.run([program, "-n", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_offers_what_there_is(tmp_path: Path) -> None:
    program = shutil.which("fish")
    if program is None:
        pytest.skip("there is no fish here")
    file = tmp_path / "completion.fish"
    file.write_text(script(build_parser(), "fish"))
    for line, expected in CASES:
        if "/" in line.split()[-1] or line.endswith(" zb"):
            continue  # files are fish's own, and it offers them as it likes
        asked = ["fish", "-c", f"source {file}; complete -C {line!r}"]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
        told = {
            row.split("\t")[0].rpartition("=")[2] or row.split("\t")[0]
            for row in done.stdout.splitlines()
        }
        assert {word.rstrip("=") for word in expected if not word.endswith(".")} <= told, line


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_no_command_option_or_key_is_missing(shell: str) -> None:
    """Also those that are added later: the script is made of the parser and the schema."""
    text = script(build_parser(), shell)
    dashes = "" if shell == "fish" else "--"
    for place in walk_positions(build_parser()):
        assert all(re.search(rf"\b{name}\b", text) for name in place.children)
        assert all(f"{dashes}{option.name[2:]}" in text for option in place.options)
    assert all(f"{dashes}{'.'.join(key)}" in text for key in KEYS)


def test_words_of_keys_are_those_of_the_schema() -> None:
    words = {option.name: option.values for option in keys()}
    assert words["--pipeline.schedule"] == " ".join(SCHEDULES)
    assert words["--train.compile"] == "auto true false"
    assert words["--optimizer.eps"] == ""


def test_it_is_quick_and_needs_no_torch() -> None:
    program = (
        "import sys\nfrom meshwright_launch.cli import main\nassert main(['completion', 'bash']) =="
        " 0\nassert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("# meshwright: completion for bash")
