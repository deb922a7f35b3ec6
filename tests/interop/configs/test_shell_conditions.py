"""Assignments in a script that may or may not be run: their variables have no value that is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright_interop.configs.shell_script import Script

RUN = "torchrun pretrain_gpt.py --lr $LR --tp ${TP:-2}\n"


def words(text: str) -> list[str]:
    """The words of the last command."""
    return [word.text for word in Script(text, Path("run.sh")).commands[-1]]


def found(text: str) -> tuple[str, str]:
    """The values of --lr and --tp in the command, with both variables set before ``text``."""
    line = words(f"LR=3e-4; TP=1\n{text}\n{RUN}")
    return line[line.index("--lr") + 1], line[line.index("--tp") + 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("3e-4", "1")),
        ('if [ "$SIZE" = 7b ]; then TP=8; LR=1e-5; fi', ("$LR", "${TP:-2}")),
        ('if [ "$SIZE" = 7b ]; then LR=1e-5; else LR=2e-5; fi', ("$LR", "1")),
        ("if [ a = a ]; then LR=1e-5; else LR=2e-5; fi", ("1e-5", "1")),
        ("if [ a = b ]; then LR=1e-5; elif [ c = c ]; then LR=2e-5; else LR=4e-5; fi", ("2e-5", "1")),
        ('if [ "$SIZE" = 7b ]; then LR=1e-5; elif [ c = c ]; then TP=4; fi', ("$LR", "${TP:-2}")),
        ("case $1 in\n 70b) TP=8 ;;\n *) LR=1e-5 ;;\nesac", ("$LR", "${TP:-2}")),
        ('while getopts "l:" opt; do LR=$OPTARG; done', ("$LR", "1")),
        ("for LR in 1 2; do TP=$LR; done", ("3e-4", "${TP:-2}")),
        ('[ "$SIZE" = 70b ] && TP=8', ("3e-4", "${TP:-2}")),
        ("[[ $SIZE == small ]] || LR=1e-5", ("$LR", "1")),
        ('test -n "$FOO" && LR=1e-5', ("$LR", "1")),
        ("grep -q x file && LR=1e-5", ("$LR", "1")),
        ("false && LR=9e-9", ("3e-4", "1")),
        ("true || LR=8e-8", ("3e-4", "1")),
        ("true && LR=8e-8", ("8e-8", "1")),
        ("false || LR=8e-8", ("8e-8", "1")),
        ("[ a = b ] && LR=9e-9 || TP=4", ("3e-4", "4")),
        ("[ a = a ] && LR=9e-9 || TP=4", ("9e-9", "1")),
        ("[ $A = b ] && { LR=9e-9; TP=4; }", ("$LR", "${TP:-2}")),
        ("[ a = b ] && { LR=9e-9; TP=4; }; TP=16", ("3e-4", "16")),
        ("[ $A = b ] && LR=9e-9; LR=7e-7", ("7e-7", "1")),
        ("[ $A = b ] && LR=9; LR+=7", ("$LR", "1")),
        ("set -e\ncd dir && LR=1e-5", ("1e-5", "1")),
        ("if [ $A = b ]; then TP=1; fi && LR=1e-5", ("$LR", "${TP:-2}")),
        ("! false && LR=1e-5", ("1e-5", "1")),
        ("! grep x file && LR=1e-5", ("$LR", "1")),
        ("setup() {\n LR=1e-5\n}\nTP=4", ("3e-4", "4")),
        ("function setup\n{\n LR=1e-5\n}\nTP=4", ("3e-4", "4")),
    ],
)
def test_values_that_are_known_and_unknown(text: str, expected: tuple[str, str]) -> None:
    assert found(text) == expected


def test_arrays_that_may_be_longer() -> None:
    text = 'ARGS=(--lr 1)\n[ "$MOE" = 1 ] && ARGS+=(--experts 8)\ntorchrun pretrain_gpt.py ${ARGS[@]}\n'
    assert words(text) == ["torchrun", "pretrain_gpt.py", "${ARGS[@]}"]
    known = 'ARGS=(--lr 1)\n[ "1" = 1 ] && ARGS+=(--experts 8)\ntorchrun pretrain_gpt.py ${ARGS[@]}\n'
    assert words(known) == ["torchrun", "pretrain_gpt.py", "--lr", "1", "--experts", "8"]


@pytest.mark.parametrize("before", ["cd megatron && ", "mkdir -p x && cd x && ", "[ -d data ] && ", "sleep 3 && "])
def test_a_command_after_others_is_found(before: str) -> None:
    assert words(f"{before}torchrun pretrain_gpt.py --lr 1") == ["torchrun", "pretrain_gpt.py", "--lr", "1"]
