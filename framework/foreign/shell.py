"""The flags that a shell script gives to Megatron-LM, without running it.

NAME=value, ARRAY=( ... ), ARRAY+=( ... )    kept, with the line of each word
$NAME ${NAME:-default} ${ARRAY[@]} $((A*B))  put in; what the file does not define stays as it is written, `$NAME`
if [[ "$A" == "b" ]]; then ... else ... fi   followed where the condition can be told; else its flags are not taken
for, while, case, functions, $(...)          not run
torchrun ... pretrain_gpt.py --flag value    the words after the .py are the flags, those before it the launcher's
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from framework.errors import ConfigError
from framework.foreign.draft import Item

LAUNCHER = "launcher."
"""Before the names of the launcher's own flags, such as ``launcher.nproc-per-node``."""
OPERATORS = ("&&", "||", ";;", "|&", ";", "|", "&", "\n", "(", ")")
REDIRECT = re.compile(r"\d*(>>|>&|<<<|<<|>|<|&>)")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
LOOPS = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
DECLARE = ("export", "declare", "local", "readonly", "typeset")
ARGUMENTS = re.compile(r"\$@|\$\*|\$\{[@*]\}|\$\{\w+\[[@*]\]\}")
"""What more a script may be given when it is called."""
VARIABLE = re.compile(r"\$(?:\{([^{}]*)\}|\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)|([A-Za-z_]\w*|[0-9@*#?!$-]))")


class Part(NamedTuple):
    """A piece of a word, as it was quoted."""

    text: str
    quote: str
    """``'``, ``"`` or nothing."""


class Token(NamedTuple):
    """A word, or an operator (which has no parts)."""

    parts: tuple[Part, ...]
    operator: str
    line: int

    @property
    def bare(self) -> str:
        """As written, without quotes."""
        return self.operator or "".join(part.text for part in self.parts)

    @property
    def keyword(self) -> str:
        """What a shell would take for ``if`` or ``fi``: only where nothing is quoted."""
        return self.bare if self.parts and not any(part.quote for part in self.parts) else ""


class Word(NamedTuple):
    """What is left of a token when variables are put in."""

    text: str
    line: int


def tokens(text: str, path: Path) -> list[Token]:
    """The words and operators of a script; comments and continued lines are gone.

    Raises:
        ConfigError: a quote or a ``$(`` is never closed.
    """
    found: list[Token] = []
    at, line = 0, 1
    while at < len(text):
        char = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif char in " \t\r":
            at += 1
        elif char == "#":
            at = (text.find("\n", at) + len(text) + 1) % (len(text) + 1)
        elif match := REDIRECT.match(text, at):
            found.append(Token((), ">", line))
            at = match.end()
        elif operator := next((each for each in OPERATORS if text.startswith(each, at)), ""):
            found.append(Token((), operator, line))
            at, line = at + len(operator), line + (operator == "\n")
        else:
            parts, end = _word(text, at, f"{path}:{line}")
            found.append(Token(tuple(parts), "", line))
            line += text.count("\n", at, end)
            at = end
    return found


def _word(text: str, at: int, place: str) -> tuple[list[Part], int]:
    """One word from ``at`` on -> (its parts, where it ends)."""
    parts: list[Part] = []
    start = at

    def plain(end: int) -> None:
        piece = re.sub(r"\\(?!\n)(.)", r"\1", text[start:end]).replace("\\\n", "")
        if piece:
            parts.append(Part(piece, ""))

    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char in "'\"":
            plain(at)
            end = _closing(text, at, char, place)
            inner = text[at + 1 : end]
            parts.append(Part(inner if char == "'" else re.sub(r'\\(["$`\\\n])', _escaped, inner), char))
            at = start = end + 1
        elif text.startswith("$(", at) or char == "`" or text.startswith("${", at):
            at = _balanced(text, at, place)
        elif char in " \t\r\n;|&<>()":
            break
        else:
            at += 1
    plain(min(at, len(text)))
    return parts, min(at, len(text))


def _escaped(match: re.Match[str]) -> str:
    return "" if match[1] == "\n" else match[1]


def _closing(text: str, at: int, quote: str, place: str) -> int:
    end = at + 1
    while end < len(text):
        if text[end] == "\\" and quote == '"':
            end += 2
        elif text[end] == quote:
            return end
        else:
            end += 1
    raise ConfigError(f"{place}: the quote {quote} is never closed")


def _balanced(text: str, at: int, place: str) -> int:
    """After ``$(...)``, ``$((...))``, ``${...}`` or backticks."""
    if text[at] == "`":
        return _closing(text, at, "`", place) + 1
    opening = text[at + 1]
    closing = {"(": ")", "{": "}"}[opening]
    depth, end = 0, at + 1
    while end < len(text):
        depth += (text[end] == opening) - (text[end] == closing)
        end += 1
        if depth == 0:
            return end
    raise ConfigError(f"{place}: ${opening} is never closed")


class Script:
    """What a script has defined so far, and the commands it has come to."""

    def __init__(self, text: str, path: Path) -> None:
        self.path = path
        self.variables: dict[str, list[Word]] = {}
        self.commands: list[list[Word]] = []
        self.skipped: list[list[Word]] = []
        """Commands and arrays in branches and loops that were not followed."""
        self.rest = tokens(text, path)
        self.arrays: set[str] = set()
        self._statements(live=True, until=())

    # -- statements

    def _statements(self, *, live: bool, until: tuple[str, ...]) -> str:
        """Statements up to one of the words that end them, which is returned and gone."""
        while self.rest:
            token = self.rest[0]
            word = token.keyword
            if word in until:
                self.rest.pop(0)
                return word
            if token.operator and token.operator != ">":
                self.rest.pop(0)
            elif word == "if":
                self.rest.pop(0)
                self._if(live)
            elif word == "function":
                del self.rest[:2]
                self._statements(live=False, until=("}",))
            elif word in LOOPS:
                self.rest.pop(0)
                self._statements(live=False, until=(LOOPS[word],))
            elif word in ("{", "}", "do", "then", "!", "time", "exec"):
                self.rest.pop(0)
            else:
                self._command(live)
        return ""

    def _if(self, live: bool) -> None:
        taken: bool | None = False
        while True:
            condition: list[Token] = []
            while self.rest and self.rest[0].keyword != "then":
                condition.append(self.rest.pop(0))
            self.rest[:1] = []
            holds = self._condition(condition)
            follow = live and taken is False and holds is True
            ended = self._statements(live=follow, until=("elif", "else", "fi"))
            taken = True if holds or taken else None if holds is None or taken is None else False
            if ended == "else":
                self._statements(live=live and taken is False, until=("fi",))
                return
            if ended != "elif":
                return

    def _command(self, live: bool) -> None:
        line: list[Token] = []
        while self.rest:
            token = self.rest[0]
            if token.operator == ">":
                del self.rest[:2]
            elif token.operator == "(" and line and ASSIGNMENT.fullmatch(line[-1].bare):
                self._array(line.pop(), live)
            elif token.operator == "(" and len(line) == 1 and len(self.rest) > 1 and self.rest[1].operator == ")":
                del self.rest[:2]  # name() { ... }: not run
                self._statements(live=False, until=("}",))
                return
            elif token.operator:
                break
            else:
                line.append(self.rest.pop(0))
        while line and line[0].keyword in DECLARE:
            line.pop(0)
        while line and not line[0].keyword.startswith("-") and ASSIGNMENT.match(line[0].bare):
            self._assign(line.pop(0), live)
        if not line:
            return
        words = [word for token in line for word in self._expand(token)]
        if live:
            self.commands.append(words)
        else:
            self.skipped.append(words)

    def _assign(self, token: Token, live: bool) -> None:
        name, plus = ASSIGNMENT.match(token.bare).groups()  # type: ignore[union-attr]
        cut = len(name) + len(plus) + 1
        first = Part(token.parts[0].text[cut:], token.parts[0].quote)
        text = "".join(self._put_in(part) for part in (first, *token.parts[1:]))
        if not live:
            self.skipped.append([Word(each, token.line) for each in text.split()])
            return
        before = " ".join(word.text for word in self.variables.get(name, [])) if plus else ""
        self.variables[name] = [Word(before + text, token.line)]
        self.arrays.discard(name)

    def _array(self, head: Token, live: bool) -> None:
        name, plus = ASSIGNMENT.fullmatch(head.bare).groups()  # type: ignore[union-attr]
        self.rest.pop(0)
        words: list[Word] = []
        while self.rest and self.rest[0].operator != ")":
            token = self.rest.pop(0)
            words += self._expand(token) if token.parts else []
        if not self.rest:
            raise ConfigError(f"{self.path}:{head.line}: {name}=( is never closed")
        self.rest.pop(0)
        if not live:
            self.skipped.append(words)
            return
        self.variables[name] = [*(self.variables.get(name, []) if plus else []), *words]
        self.arrays.add(name)

    # -- words

    def _expand(self, token: Token) -> list[Word]:
        """A token with variables put in: one word, or several where an unquoted variable or an array holds several."""
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", token.bare)
        if array:
            held = self.variables.get(array[1])
            if held is None:
                return [Word(token.bare, token.line)]
            return [Word(each, word.line) for word in held for each in _split(word.text)]
        text = "".join(self._put_in(part) for part in token.parts)
        if any(part.quote for part in token.parts) or "$" not in token.bare:
            return [Word(text, token.line)]
        return [Word(each, self._line(each, token.line)) for each in _split(text)]

    def _line(self, flag: str, otherwise: int) -> int:
        """Where a flag that came out of a variable was written down."""
        if flag.startswith("--"):
            for words in self.variables.values():
                for word in words:
                    if flag in word.text.split():
                        return word.line
        return otherwise

    def _put_in(self, part: Part) -> str:
        return part.text if part.quote == "'" else VARIABLE.sub(self._value, part.text)

    def _value(self, match: re.Match[str]) -> str:
        inner, sum_, name = match.groups()
        if sum_ is not None:
            return self._arithmetic(sum_, match[0])
        if inner is None:
            return self._held(name) if self._held(name) is not None else match[0]  # type: ignore[return-value]
        found = re.fullmatch(r"(\w+)(?:\[[@*]\])?(?::?([-=])(.*))?", inner, re.DOTALL)
        if found is None:
            return match[0]
        held = self._held(found[1])
        if held is not None:
            return held
        default = found[3]
        if default is None:
            return match[0]
        return VARIABLE.sub(self._value, default.strip("\"'"))

    def _held(self, name: str) -> str | None:
        words = self.variables.get(name)
        return None if words is None else " ".join(word.text for word in words)

    def _arithmetic(self, text: str, written: str) -> str:
        text = VARIABLE.sub(self._value, text)
        text = re.sub(r"[A-Za-z_]\w*", lambda match: self._held(match[0]) or match[0], text)
        try:
            return str(_compute(ast.parse(text.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return written

    def inside(self, word: Word) -> list[Word]:
        """A whole command in one word, as in ``eval "$cmd"`` or ``bash -c "..."``, taken apart; else the word alone."""
        if ".py --" not in word.text and word.text.count(" --") < 2:
            return [word]
        return [Word(each, self._line(each, word.line)) for each in _split(word.text)]

    # -- conditions

    def _condition(self, condition: list[Token]) -> bool | None:
        """Whether ``[[ ... ]]`` holds; None where it cannot be told without running it."""
        words = [token.operator or "".join(map(self._put_in, token.parts)) for token in condition]
        words = [word for word in words if word not in (";", "\n")]
        told: bool | None = None
        joined = ""
        while words:
            ends = [at for at, word in enumerate(words) if word in ("]]", "]")]
            if words[0] not in ("[[", "[") or not ends:
                return None
            holds = _test(words[1 : ends[0]])
            told = holds if not joined else _either(told, holds) if joined == "||" else _both(told, holds)
            rest = words[ends[0] + 1 :]
            if not rest:
                return told
            joined, words = rest[0], rest[1:]
            if joined not in ("||", "&&"):
                return None
        return told


def _either(one: bool | None, other: bool | None) -> bool | None:
    return True if one or other else None if one is None or other is None else False


def _both(one: bool | None, other: bool | None) -> bool | None:
    return False if one is False or other is False else None if one is None or other is None else True


def _test(words: list[str]) -> bool | None:
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


def _compute(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_compute(inner)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _compute(left), _compute(right)
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


def _split(text: str) -> list[str]:
    """As a shell would, where quotes inside a variable (``"--split '99,1,0'"``) were meant as quotes."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def read_script(path: Path, text: str) -> dict[str, Item]:
    """Flag without its dashes -> item. The value: True for one alone, text for one word, a list for several.

    The launcher's own flags have :data:`LAUNCHER` before their names; flags of branches that were not followed are
    under ``skipped``.

    Raises:
        ConfigError: a quote or bracket is never closed.
    """
    script = Script(text, path)
    launcher, words = _launched(script)
    found: dict[str, Item] = {}
    for prefix, these in ((LAUNCHER, launcher), ("", words)):
        for flag, values, line in _flags(these):
            value: object = True if not values else values[0] if len(values) == 1 else values
            found[prefix + flag.lstrip("-").replace("_", "-")] = Item(flag, value, f"{path}:{line}")
    for group in script.skipped:
        for flag, values, line in _flags(group):
            if flag.lstrip("-").replace("_", "-") not in found:
                found[f"skipped.{flag}"] = Item(" ".join([flag, *values]), True, f"{path}:{line}")
    return found


def _launched(script: Script) -> tuple[list[Word], list[Word]]:
    """(the launcher's words, Megatron's) of the command that trains: the last one with a .py and flags after it.

    A file without such a command is a list of flags, or of arrays of them.
    """
    for command in reversed(script.commands):
        words = [inner for word in command for inner in script.inside(word)]
        for at, word in enumerate(words):
            if word.text.endswith(".py") and any(each.text.startswith("--") for each in words[at:]):
                return words[:at], words[at + 1 :]
    loose = [word for command in script.commands if command[0].text.startswith("--") for word in command]
    if loose:
        return [], loose
    held = [words for name, words in script.variables.items() if name in script.arrays or " --" in f" {words[0].text}"]
    return [], [Word(each, word.line) for words in held for word in words for each in _split(word.text)]


def _flags(words: list[Word]) -> Iterator[tuple[str, list[str], int]]:
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not re.match(r"--[A-Za-z]", word.text):
            continue
        flag, equals, value = word.text.partition("=")
        values = [value] if equals else []
        if " " in flag:  # an array's element of two words, "--fp8-format hybrid"
            flag, *values = _split(flag)
        while at < len(words) and not re.match(r"--[A-Za-z]", words[at].text):
            if not ARGUMENTS.fullmatch(words[at].text):
                values.append(words[at].text)
            at += 1
        yield flag, values, word.line
