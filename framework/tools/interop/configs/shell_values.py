"""Static evaluation of a shell script's conditions and arithmetic. None means unknown without running the script."""

from __future__ import annotations

import ast
import re


def either(one: bool | None, other: bool | None) -> bool | None:
    """Evaluate ``one || other`` in three-valued logic."""
    return True if one or other else None if one is None or other is None else False


def both(one: bool | None, other: bool | None) -> bool | None:
    """Evaluate ``one && other`` in three-valued logic."""
    return False if one is False or other is False else None if one is None or other is None else True


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
        case [one, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as how, other] if _whole(one) and _whole(other):
            a, b = int(one), int(other)
            return {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}[how]
    return None


def _whole(text: str) -> bool:
    return re.fullmatch(r"-?\d+", text) is not None


def compute(node: ast.expr) -> int:
    """Evaluate arithmetic of whole numbers: + - * // % and negation.

    Raises:
        ValueError: the expression contains anything else.
    """
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -compute(inner)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = compute(left), compute(right)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv():
                    return a // b
                case ast.Mod():
                    return a % b
    raise ValueError("not arithmetic of whole numbers")
