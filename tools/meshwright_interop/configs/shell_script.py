"""Variables and commands of a shell script, found without running it.

NAME=value, ARRAY=( ... ), ARRAY+=( ... )    stored, with the line of each word
$NAME ${NAME:-default} ${ARRAY[@]} $((A*B))  expanded; names that the file does not define stay as written, `$NAME`
if [[ "$A" == "b" ]]; then ... else ... fi   followed if the condition can be evaluated; else its flags are skipped
[ "$A" = b ] && NAME=value                   the same
for, while, case, functions, $(...)          not run

A variable that is assigned in a branch that may or may not run has no known value from there on. It stays as written,
like one that the file does not define.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import ConfigError
from meshwright_interop.configs.shell_values import both, compute, evaluate_condition, opposite, succeeds
from meshwright_interop.configs.shell_words import QuotedPart, Token, split_words, tokens, words_of

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
LOOPS = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
DECLARE = ("export", "declare", "local", "readonly", "typeset")
VARIABLE = re.compile(r"\$(?:\{([^{}]*)\}|\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)|([A-Za-z_]\w*|[0-9@*#?!$-]))")


MAX_EXPANDED = 2**20
"""Upper limit of the characters that all expansions of variables and arrays produce together."""
MAX_SUM = 1000
"""Upper limit of the characters of one arithmetic expression."""


class Word(NamedTuple):
    """Word after expansion of variables, with its line."""

    text: str
    line: int


class Script:
    """Variables and commands of a script, collected by the constructor without running it."""

    def __init__(self, text: str, path: Path) -> None:
        self.path = path
        self.variables: dict[str, list[Word]] = {}
        self.commands: list[list[Word]] = []
        self.skipped: list[list[Word]] = []
        """Commands, assignments and arrays in branches, loops and functions that were not followed."""
        self.lines = text.splitlines()
        self.rest = tokens(text, path)
        self.arrays: set[str] = set()
        self.unknown: set[str] = set()
        """Variables whose value is known only when the script runs."""
        self._expanded = 0
        self._lines_of: dict[str, list[int]] = {}
        """Lines of each word of the script."""
        self._statements(live=True, until=())

    # -- statements

    def _statements(self, *, live: bool | None, until: tuple[str, ...]) -> str:
        """Consume statements up to and including one of the words ``until``, and return that word ("" at the end).

        ``live``: whether they are run; None: unknown. Commands that may not run only go to ``skipped``.
        """
        here, succeeded, negated = live, True if live else None, False
        """True if the next statement is run; if the list before it has succeeded; if `!` precedes it."""
        while self.rest:
            token = self.rest[0]
            word = token.keyword
            if word in until:
                self.rest.pop(0)
                return word
            if token.operator in ("&&", "||"):
                self.rest.pop(0)
                wanted = token.operator == "&&"
                here = both(live, None if succeeded is None else succeeded is wanted)
            elif token.operator and token.operator != ">":
                self.rest.pop(0)
                here, succeeded = live, True if live else None
            elif word == "if":
                self.rest.pop(0)
                self._if(here)
                succeeded = None
            elif word == "function":
                del self.rest[:2]
                self._function()
            elif word in LOOPS:
                self.rest.pop(0)
                self._statements(live=both(here, None), until=(LOOPS[word],))
                succeeded = None
            elif word == "{" and here is not live:
                self.rest.pop(0)
                self._statements(live=here, until=("}",))
                succeeded = None
            elif word in ("{", "}", "do", "then", "!", "time", "exec"):
                self.rest.pop(0)
                negated = word == "!"
            else:
                found = self._command(live, here)
                succeeded = succeeded if here is False else opposite(found) if negated else found
                succeeded, negated = None if here is None else succeeded, False
        return ""

    def _function(self) -> None:
        """Skip the body of a function."""
        while self.rest and (self.rest[0].operator or self.rest[0].keyword == "{"):
            opens = self.rest.pop(0).keyword == "{"
            if opens:
                break
        self._statements(live=False, until=("}",))

    def _if(self, live: bool | None) -> None:
        taken: bool | None = False
        while True:
            condition: list[Token] = []
            while self.rest and self.rest[0].keyword != "then":
                condition.append(self.rest.pop(0))
            self.rest[:1] = []
            words = [token.operator or "".join(map(self._substitute, token.parts)) for token in condition]
            met = evaluate_condition([word for word in words if word not in (";", "\n")])
            ended = self._statements(live=both(live, both(opposite(taken), met)), until=("elif", "else", "fi"))
            taken = True if met or taken else None if met is None or taken is None else False
            if ended == "else":
                self._statements(live=both(live, opposite(taken)), until=("fi",))
                return
            if ended != "elif":
                return

    def _command(self, live: bool | None, here: bool | None) -> bool | None:
        """Consume a command; return whether it succeeds, None: unknown.

        ``live``: whether its list is run; ``here``: whether it is, after the ``&&`` and ``||`` before it.
        """
        line: list[Token] = []
        while self.rest:
            token = self.rest[0]
            if token.operator == ">":
                del self.rest[:2]
            elif token.operator == "(" and line and ASSIGNMENT.fullmatch(line[-1].bare):
                self._array(line.pop(), here)
            elif token.operator == "(" and len(line) == 1 and len(self.rest) > 1 and self.rest[1].operator == ")":
                del self.rest[:2]  # name() { ... }: not run
                self._function()
                return True
            elif token.operator:
                break
            else:
                line.append(self.rest.pop(0))
        while line and line[0].keyword in DECLARE:
            line.pop(0)
        while line and not line[0].keyword.startswith("-") and ASSIGNMENT.match(line[0].bare):
            self._assign(line.pop(0), here)
        words = [word for token in line for word in self._expand(token)]
        if not words:
            return True
        if live and here is not False:
            self.commands.append(words)
        else:
            self.skipped.append(words)
        return succeeds([word.text for word in words])

    def _assign(self, token: Token, live: bool | None) -> None:
        name, plus = ASSIGNMENT.match(token.bare).groups()  # type: ignore[union-attr]
        cut = len(name) + len(plus) + 1
        first = QuotedPart(token.parts[0].text[cut:], token.parts[0].quote)
        text = "".join(self._substitute(part) for part in (first, *token.parts[1:]))
        if not live:
            self.skipped.append([Word(each, token.line) for each in text.split()])
            self._forget(name, live)
            return
        before = " ".join(word.text for word in self.variables.get(name, [])) if plus else ""
        self._count_expanded(len(before))
        if name in self.unknown and plus:
            return
        self.variables[name] = [Word(before + text, token.line)]
        self.arrays.discard(name)
        self.unknown.discard(name)

    def _forget(self, name: str, live: bool | None) -> None:
        """Drop the value of a variable, if it is unknown whether its assignment runs (``live`` = None)."""
        if live is None:
            self.variables.pop(name, None)
            self.arrays.discard(name)
            self.unknown.add(name)

    def _array(self, head: Token, live: bool | None) -> None:
        name, plus = ASSIGNMENT.fullmatch(head.bare).groups()  # type: ignore[union-attr]
        self.rest.pop(0)
        words: list[Word] = []
        while self.rest and self.rest[0].operator != ")":
            token = self.rest.pop(0)
            words += self._expand(token) if token.parts else []
        if not self.rest:
            raise ConfigError("MW-INTEROP-020", f"{self.path}:{head.line}: {name}=( is never closed")
        self.rest.pop(0)
        if not live:
            self.skipped.append(words)
            self._forget(name, live)
            return
        if name in self.unknown and plus:
            return
        self.unknown.discard(name)
        self.variables[name] = [*(self.variables.get(name, []) if plus else []), *words]
        self.arrays.add(name)

    # -- words

    def _expand(self, token: Token) -> list[Word]:
        """Expand the variables of a token; an unquoted variable or an array may give several words."""
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", token.bare)
        if array and self._contents(array[1]) is not None:
            return [Word(each, word.line) for word in self.variables[array[1]] for each in split_words(word.text)]
        text = "".join(self._substitute(part) for part in token.parts)
        if any(part.quote for part in token.parts) or "$" not in token.bare:
            return [Word(text, token.line)]
        return [Word(each, self._line(each, token.line)) for each in split_words(text)]

    def _line(self, flag: str, otherwise: int) -> int:
        """Return the line where a flag that came from a variable is written."""
        if flag.startswith("--"):
            for words in self.variables.values():
                for word in words:
                    if flag in words_of(word.text):
                        return self._line_in_file(flag, word.line)
        return otherwise

    def _line_in_file(self, flag: str, first: int) -> int:
        """Return the line of a flag in the script: the first from ``first`` on, else the first anywhere.

        ``first`` is the line of an assignment. Its quoted text may span several lines, or only repeat the contents of a
        variable that was assigned before.
        """
        if not self._lines_of:
            for number, line in enumerate(self.lines, start=1):
                for word in set(re.split(r"[\s\"'\\]+", line)):
                    self._lines_of.setdefault(word, []).append(number)
        lines = self._lines_of.get(flag, [])
        return min((number for number in lines if number >= first), default=min(lines, default=first))

    def _substitute(self, part: QuotedPart) -> str:
        return part.text if part.quote == "'" else VARIABLE.sub(self._value, part.text)

    def _value(self, match: re.Match[str]) -> str:
        inner, arithmetic, name = match.groups()
        if arithmetic is not None:
            return self._arithmetic(arithmetic, match[0])
        reference = re.fullmatch(r"(\w+)(?:\[[@*]\])?(?::?[-=](.*))?", name if inner is None else inner, re.DOTALL)
        if reference is None:
            return match[0]
        contents, default = self._contents(reference[1]), reference[2]
        if reference[1] in self.unknown:
            return match[0]
        if contents is None:
            return match[0] if default is None else VARIABLE.sub(self._value, default.strip("\"'"))
        return contents

    def _contents(self, name: str) -> str | None:
        words = self.variables.get(name)
        if words is None:
            return None
        self._count_expanded(sum(len(word.text) + 1 for word in words))
        return " ".join(word.text for word in words)

    def _count_expanded(self, characters: int) -> None:
        """Add to the characters expanded so far, and stop scripts that grow a variable exponentially.

        Raises:
            ConfigError: more than ``MAX_EXPANDED`` characters.
        """
        self._expanded += characters
        if self._expanded > MAX_EXPANDED:
            raise ConfigError(
                "MW-INTEROP-021",
                f"{self.path}: its variables expand to more than {MAX_EXPANDED:,} characters: write out the flags, "
                f"or give a shorter script",
            )

    def _arithmetic(self, text: str, written: str) -> str:
        text = VARIABLE.sub(self._value, text)
        text = re.sub(r"[A-Za-z_]\w*", lambda match: self._contents(match[0]) or match[0], text)
        try:
            if len(text) > MAX_SUM:
                return written
            return str(compute(ast.parse(text.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return written

    def split_command(self, word: Word) -> list[Word]:
        """Split a word that holds a whole command, as in ``eval "$cmd"`` or ``bash -c "..."``; else return the word."""
        if ".py --" not in word.text and word.text.count(" --") < 2:
            return [word]
        return [Word(each, self._line(each, word.line)) for each in split_words(word.text)]
