"""Megatron-LM's flags in a text file: words as a shell would pass them on, and no script."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright_interop.configs import convert_file
from meshwright_interop.configs.flags import read_flags
from tests.interop.configs import samples
from tests.support.errors import has_code

WORDS = {
    "quotes": (
        """--a 'one two' --b "three four" --c a\\ b --d="e f" --g '' --h '(3, 0)' --i 'x $HOME'"""
    ),
    "continued": "--a 1 \\\n  --b 2 \\\n  --c\n",
    "comments": "# --no 1\n--a 1 # --no 2\n",
    "several values": "--a 1 2 -3 --b --c=4\n",
    "the last counts": "--a 1 --b --a 2\n",
}


@pytest.mark.parametrize("name", WORDS)
def test_the_words_are_those_that_bash_passes_on(name: str, tmp_path: Path) -> None:
    script = f"words=(\n{WORDS[name]}\n)\nprintf '%s\\0' \"${{words[@]}}\""
    seen = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    expected: dict[str, list[str]] = {}
    flag = ""
    for word in seen.split("\0")[:-1]:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            expected[flag] = [value] if equals else []
        else:
            expected[flag].append(word)
    found = read_flags(Path("a.txt"), WORDS[name])
    assert {
        item.key: (
            []
            if item.value is True
            else item.value
            if isinstance(item.value, list)
            else [item.value]
        )
        for item in found.values()
    } == expected


def test_a_printed_command_line_has_a_launcher_and_a_program() -> None:
    found = read_flags(Path("a.txt"), samples.MEGATRON_LLAMA)
    assert found["launcher.program"].key == "pretrain_gpt.py"
    assert found["launcher.nproc-per-node"].value == "4" and "nproc-per-node" not in found
    assert found["swiglu"].place == "a.txt:8" and found["swiglu"].value is True
    assert (found["num-layers"].value, found["split"].value) == ("4", "99,1,0")


SCRIPTS = {
    "a shebang": (
        "#!/bin/bash\ntorchrun pretrain_gpt.py --lr 1\n",
        "a.sh:1: #!/bin/bash: a shell script",
    ),
    "an array": (
        "ARGS=(\n  --num-layers 2\n)\ntorchrun pretrain_gpt.py\n",
        "a.sh:1: (: a shell script",
    ),
    "a variable": ("--num-layers 2\n--lr $LR\n", "a.sh:2: $LR: a shell script"),
    "a variable in quotes": ('--num-layers 2 --lr "$LR"\n', "a.sh:1: $LR"),
    "a command in it": ("--num-layers 2 --lr `cat lr`\n", "a.sh:1: `cat"),
    "a condition": ("if test -f x\nthen\n torchrun pretrain_gpt.py --lr 1\nfi\n", "a.sh:1: if"),
    "a pipe": ("torchrun pretrain_gpt.py --lr 1 | tee log\n", "a.sh:1: |"),
    "a redirection": ("torchrun pretrain_gpt.py --lr 1 2>&1\n", "a.sh:1: >"),
    "two commands": (
        "torchrun pretrain_gpt.py --lr 1\ntorchrun pretrain_gpt.py --lr 2\n",
        "a.sh:2: pretrain_gpt.py",
    ),
    "no program": ("run --lr 1\n", "a.sh:1: run"),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("framework", [None, "megatron"])
def test_a_script_is_one_error(name: str, framework: str | None, tmp_path: Path) -> None:
    text, said = SCRIPTS[name]
    path = tmp_path / "a.sh"
    path.write_text(text)
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-150")) as caught:
        convert_file(path, framework)
    assert said in str(caught.value) and len(caught.value.problems) == 1


def test_an_unclosed_quote_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("--lr '1\n2'\n")
    with pytest.raises(ConfigError, check=has_code("MW-INTEROP-151")) as caught:
        convert_file(path)
    assert "a.txt:1: --lr '1" in str(caught.value)
