"""A shell script's flags, found without running it; what bash itself would hand over is the oracle."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from meshwright_interop.configs.shell import read_script
from tests.interop.configs import samples

SCRIPTS = {
    "quotes": """torchrun x.py --a 'one two' --b "three $HOME_OF four" --c a\\ b --d="e f" --g ''""",
    "continued": "torchrun x.py \\\n  --a 1 \\\n  --b 2\n",
    "comments": "# --no 1\ntorchrun x.py --a 1 # --no 2\n",
    "arrays": 'A=(--a 1 # no\n --b)\nA+=(--c 3)\nB=(${A[@]} --d)\ntorchrun x.py ${B[@]} "${A[@]}"\n',
    "a string of flags": "X='--a 1 --b'\nX+=' --c 2'\nN=3\ntorchrun x.py $X --d ${N} --e $N$N\n",
    "arithmetic": "N=4\nM=2\ntorchrun x.py --a $((N*M)) --b $(($N + $M / 2 - 1)) --c $(( (N-1) % M ))\n",
    "defaults": "A=${B:-7}\nC=${A:-8}\ntorchrun x.py --a $A --c ${C} --d ${D-nine} --e ${E:-'ten'}\n",
    "branches": 'A=1\nif [[ "$A" == "1" ]]; then B=(--yes); elif [ $A = 2 ]; then B=(--two); else B=(--no); fi\n'
    "if [ $A -gt 3 ]; then C=--big; else C=--small; fi\ntorchrun x.py ${B[@]} $C\n",
    "and, or": 'A=1\nif [[ "$A" == "2" ]] || [[ -n "$A" ]]; then C=--either; fi\n'
    "if [[ $A != 1 ]] && [[ -n x ]]; then C=--both; fi\ntorchrun x.py $C\n",
    "nested": "A=1\nif [ $A = 1 ]; then\n if [ $A = 2 ]; then X=--no; else X=--inner; fi\nelse\n X=--outer\nfi\n"
    "torchrun x.py $X\n",
    "pipes": "torchrun x.py --a 1 2>&1 | tee --append log > out.txt &\n",
    "the last command that trains": "torchrun y.py --old 1\ntorchrun x.py --new 1\necho --done\n",
    "eval": 'A=(--a 1)\ncmd="torchrun x.py ${A[@]} --b 2"\neval $cmd\n',
    "in another shell": "bash -c \"cd / && torchrun x.py --a 1 --b '2 3'\"\n",
    "functions and loops": "f() {\n torchrun x.py --no 1\n}\nfor i in 1 2; do A=--no; done\ntorchrun x.py --a 1\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_flags_are_those_that_bash_hands_over(name: str, tmp_path: Path) -> None:
    """``torchrun`` is a program here that writes its words down; the last call counts."""
    script, seen = tmp_path / "s.sh", tmp_path / "seen"
    script.write_text(SCRIPTS[name])
    stand_in = tmp_path / "bin" / "torchrun"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {seen}\n')
    stand_in.chmod(0o755)
    environment = {"PATH": f"{stand_in.parent}:/usr/bin:/bin"}
    subprocess.run(["bash", str(script)], cwd=tmp_path, env=environment, check=True, capture_output=True)
    words = seen.read_text().splitlines()[1:]
    expected: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            expected[flag] = [value] if equals else []
        else:
            expected[flag].append(word)
    found = {
        item.key: [] if item.value is True else item.value if isinstance(item.value, list) else [item.value]
        for key, item in read_script(script, SCRIPTS[name].replace("$HOME_OF ", " ")).items()
        if not key.startswith(("skipped.", "launcher."))
    }
    assert found == expected


def test_lines_words_and_what_is_not_followed() -> None:
    found = read_script(Path("s.sh"), samples.MEGATRON_LLAMA)
    assert found["swiglu"].place == "s.sh:17" and found["swiglu"].value is True
    assert found["num-layers"].value == "4"
    assert found["launcher.nproc-per-node"].value == "4"
    assert found["split"].value == "99,1,0"
    assert {key for key in found if key.startswith("skipped.")} == {
        "skipped.--data-path",
        "skipped.--tokenizer-model",
        "skipped.--not-a-flag",
        "skipped.--num-workers",
    }


def test_what_the_file_does_not_define_stays_as_it_is_written() -> None:
    found = read_script(Path("s.sh"), "torchrun x.py --a $A --b ${B[@]} --c $(date) --d $1 $@")
    assert found.pop("launcher.program").key == "x.py"
    assert {key: item.value for key, item in found.items()} == {"a": "$A", "b": True, "c": "$(date)", "d": "$1"}


def test_a_list_of_flags_needs_no_command() -> None:
    assert set(read_script(Path("x"), "--a 1 --b\n--c=2")) == {"a", "b", "c"}
    assert set(read_script(Path("x"), "ARGS=(--a 1)\nMORE='--b 2'\n")) == {"a", "b"}
