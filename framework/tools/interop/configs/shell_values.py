"""What a shell script's conditions and sums come to, where that can be told without running it."""

from __future__ import annotations

import ast
import re


def either(one: bool | None, other: bool | None) -> bool | None:
    """``one || other``."""
    return True if one or other else None if one is None or other is None else False


def both(one: bool | None, other: bool | None) -> bool | None:
    """``one && other``."""
    return False if one is False or other is False else None if one is None or other is None else True


def holds(words: list[str]) -> bool | None:
    """Of ``[[ words ]]``; None: it cannot be told."""
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
    """Arithmetic of whole numbers.

    Raises:
        ValueError: it is something else.
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
