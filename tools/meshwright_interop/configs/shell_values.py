"""Static evaluation of a shell script's conditions and arithmetic. None means unknown without running the script."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from meshwright.system.numbers import MAX_INT64, whole_number

COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def evaluate_condition(words: list[str]) -> bool | None:
    """Evaluate a chain of ``[[ ... ]]`` tests joined by ``||`` and ``&&``, from left to right."""
    met: bool | None = None
    joined = ""
    while words:
        end = next((at for at, word in enumerate(words) if word in ("]]", "]")), None)
        if words[0] not in ("[[", "[") or end is None:
            return None
        test = evaluate_test(words[1:end])
        if not joined:
            met = test
        elif (joined == "||") in (met, test):  # true || x, false && x, whatever the other is
            met = joined == "||"
        else:
            met = None if None in (met, test) else joined == "&&"
        joined, words = "".join(words[end + 1 : end + 2]), words[end + 2 :]
        if joined not in ("", "||", "&&"):
            return None
    return met


def evaluate_test(words: list[str]) -> bool | None:
    """Evaluate the test ``[[ words ]]``; None if it contains unresolved variables or an unsupported form."""
    if any("$" in word or "`" in word for word in words):
        return None
    match words:
        case ["-z", text]:
            return not text
        case ["-n", text]:
            return bool(text)
        case [one, "==" | "=", other]:
            return one == other
        case [one, "!=", other]:
            return one != other
        case [one, how, other] if how in COMPARISONS:
            first, second = whole_number(one, -MAX_INT64), whole_number(other, -MAX_INT64)
            return None if first is None or second is None else COMPARISONS[how](first, second)
    return None


OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def compute(node: ast.expr) -> int:
    """Evaluate arithmetic of whole numbers: + - * // % and negation.

    Raises:
        ValueError: The expression contains anything else, or exceeds 64 bits.
    """
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -compute(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](compute(left), compute(right))
            if abs(result) > MAX_INT64:
                raise ValueError("beyond the shell's 64 bits")
            return result
    raise ValueError("not arithmetic of whole numbers")


SUCCEED = frozenset(
    [":", ".", "true", "cd", "pushd", "popd", "mkdir", "source", "echo", "set", "module", "ulimit", "rm", "cp", "touch"]
)
"""Commands that are taken to succeed."""


def both(one: bool | None, other: bool | None) -> bool | None:
    """Return whether both hold; None: unknown."""
    return False if False in (one, other) else None if None in (one, other) else True


def opposite(value: bool | None) -> bool | None:
    """Return the opposite of a truth value; None: unknown."""
    return None if value is None else not value


def succeeds(words: list[str]) -> bool | None:
    """Return whether a command succeeds, a test or one of ``SUCCEED``; None: unknown."""
    if words[0] in ("[", "[["):
        return evaluate_condition(words)
    if words[0] == "test":
        return evaluate_test(words[1:])
    return True if words[0] in SUCCEED else False if words[0] == "false" else None
