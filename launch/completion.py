"""Completion scripts for bash, zsh and fish, generated from the parser and the configuration's schema.

The scripts contain all words: nothing of this project runs while the user types. They are generated anew at each start
of a shell (``eval "$(meshwright completion bash)"``), so they are never out of date.

    where the cursor is                        offered
    after commands so far (the "place")        the place's subcommands, or files, folders, choices for its argument
    --                                         the place's options; where keys are taken, --section.
    --section.                                 --section.key=
    --section.key= , or after --option         the words it allows, or files
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin

from meshwright.config.keys import KEYS, SECTIONS, choices, describe_allowed

FILES, FOLDERS = "<files>", "<folders>"
"""Values that the shell itself can complete."""


class Option(NamedTuple):
    """Option ``--name``, and its values."""

    name: str
    help: str
    values: str | None
    """Words separated by spaces, :data:`FILES`, :data:`FOLDERS`, "" for unknown values, or None for no value."""


class CommandPosition(NamedTuple):
    """Position after some commands, and its possible continuations."""

    words: str
    """Commands so far, such as ``checkpoint list``."""
    children: dict[str, str]
    """Subcommand -> its summary."""
    options: list[Option]
    argument: str
    """Values of the positional argument, as in :class:`Option`."""
    takes_keys: bool


def walk_positions(parser: argparse.ArgumentParser, words: str = "") -> Iterator[CommandPosition]:
    """Yield all positions of the command line, the outermost first."""
    children: dict[str, str] = {}
    options: list[Option] = []
    argument = ""
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            children = {each.dest: _plain(each.help) for each in action._choices_actions}
            below = dict(action.choices)
        elif action.option_strings:
            values = None if action.nargs == 0 else _values(action)
            options += [Option(name, _plain(action.help), values) for name in action.option_strings if name[:2] == "--"]
        else:
            argument = argument or _values(action)
    yield CommandPosition(words, children, options, argument, bool(parser.get_default("takes_overrides")))
    for name, inner in below.items():
        yield from walk_positions(inner, f"{words} {name}".strip())


def _values(action: argparse.Action) -> str:
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if metavar in ("RUN", "DIR"):
        return FOLDERS
    return FILES if action.type is Path or re.search(r"FILE|CONFIG|PATH", metavar) else ""


def _plain(text: str | None) -> str:
    return " ".join((text or "").replace("%%", "%").split())


def keys() -> list[Option]:
    """Return ``--section.key`` for each key of the configuration."""
    found = []
    for key, field in KEYS.items():
        numbers = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        words = " ".join(choices(key) or map(str, numbers))
        is_path = re.search(r"path|folder|file", describe_allowed(key) + key[1]) is not None
        name = f"--{'.'.join(key)}"
        found.append(
            Option(
                name, _plain(describe_allowed(key)), words or (FILES if is_path or key == ("run", "directory") else "")
            )
        )
    return found


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for one of ``bash``, ``zsh`` and ``fish``."""
    return WRITERS[shell](parser.prog, list(walk_positions(parser)), keys())


def _bash_values(values: str | None, word: str = "$cur") -> str:
    if values == FILES:
        return f'mapfile -t COMPREPLY < <(compgen -f -- "{word}"); compopt -o filenames'
    if values == FOLDERS:
        return f'mapfile -t COMPREPLY < <(compgen -d -- "{word}"); compopt -o filenames'
    return f'mapfile -t COMPREPLY < <(compgen -W {shlex.quote(values or "")} -- "{word}")'


def _bash(prog: str, found: list[CommandPosition], known: list[Option]) -> str:
    """Return the bash script. It reads COMP_LINE, because COMP_WORDS is split at each ``=``."""
    descend = " | ".join(shlex.quote(place.words) for place in found if place.words)
    sections = " ".join(f"--{name}." for name in SECTIONS)
    lines = [
        f"# {prog}: completion for bash",
        f"_{prog}() {{",
        '  local line=${COMP_LINE:0:COMP_POINT} at="" cur prev="" word words keys=""',
        "  COMPREPLY=()",
        '  read -ra words <<< "$line"',
        '  if [[ $line == *[[:space:]] ]]; then cur=""; else cur=${words[-1]}; unset "words[-1]"; fi',
        '  for word in "${words[@]:1}"; do',
        f'    case "${{at:+$at }}$word" in {descend}) at="${{at:+$at }}$word" ;; esac',
        "  done",
        "  ((${#words[@]} > 1)) && prev=${words[-1]}",
        f'  case "$at" in {_any(place.words for place in found if place.takes_keys)}) keys=1 ;; esac',
        "  if [[ $cur == --*=* ]]; then prev=${cur%%=*}; cur=${cur#*=}; fi",
        '  case "$at $prev" in',
    ]
    for place in found:
        for option in place.options:
            if option.values is not None:
                lines.append(
                    f"    {shlex.quote(f'{place.words} {option.name}')}) {_bash_values(option.values)}; return ;;"
                )
    lines += ["  esac", '  if [[ $keys ]]; then case "$prev" in']
    lines += [f"    {option.name}) {_bash_values(option.values)}; return ;;" for option in known]
    lines += [
        "  esac; fi",
        "  if [[ $keys && $cur == --*.* ]]; then",
        f"    {_bash_values(' '.join(f'{each.name}=' for each in known))}",
        "    compopt -o nospace; return",
        "  fi",
        '  case "$at" in',
    ]
    for place in found:
        names = " ".join(option.name for option in place.options)
        offered = f"{names} {sections}" if place.takes_keys else names
        lines.append(f"    {shlex.quote(place.words)})")
        lines.append("      if [[ $cur == -* ]]; then")
        lines.append(f"        {_bash_values(offered)}")
        lines.append("        [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *. ]] && compopt -o nospace")
        lines.append(f"      else {_bash_values(' '.join(place.children) or place.argument)}; fi ;;")
    lines += ["  esac", "}", f"complete -F _{prog} {prog}"]
    return "\n".join(lines) + "\n"


def _any(words: Iterator[str]) -> str:
    return " | ".join(map(shlex.quote, words))


def _zsh_values(values: str | None) -> str:
    if values == FILES:
        return "_files"
    if values == FOLDERS:
        return "_files -/"
    return f"compadd -- {values}" if values else "_message value"


def _described(pairs: Iterator[tuple[str, str]]) -> str:
    return " ".join(shlex.quote(f"{name.replace(':', chr(92) + ':')}:{text}") for name, text in pairs)


def _zsh(prog: str, found: list[CommandPosition], known: list[Option]) -> str:
    lines = [
        f"#compdef {prog}",
        f"# {prog}: completion for zsh",
        f"_{prog}() {{",
        '  local at="" previous="" word keys=""',
        "  local -a offered sections",
        '  for word in "${(@)words[2,CURRENT-1]}"; do',
        '    case "${at:+$at }$word" in',
        f'      ({_any(place.words for place in found if place.words)}) at="${{at:+$at }}$word" ;;',
        "    esac",
        "  done",
        "  (( CURRENT > 2 )) && previous=${words[CURRENT-1]}",
        f'  case "$at" in ({_any(place.words for place in found if place.takes_keys)}) keys=1 ;; esac',
        "  if [[ $PREFIX == --*=* ]]; then previous=${PREFIX%%=*}; compset -P '*='; fi",
        '  case "$at $previous" in',
    ]
    for place in found:
        for option in place.options:
            if option.values is not None:
                lines.append(
                    f"    ({shlex.quote(f'{place.words} {option.name}')}) {_zsh_values(option.values)}; return ;;"
                )
    lines += ["  esac", '  if [[ -n $keys ]]; then case "$previous" in']
    lines += [f"    ({option.name}) {_zsh_values(option.values)}; return ;;" for option in known]
    lines += [
        "  esac; fi",
        "  if [[ -n $keys && $PREFIX == --*.* ]]; then",
        f"    offered=({_described((each.name, each.help) for each in known)})",
        "    _describe -o key offered -S =; return",
        "  fi",
        '  case "$at" in',
    ]
    for place in found:
        lines.append(f"    ({shlex.quote(place.words)})")
        lines.append("      if [[ $PREFIX == -* ]]; then")
        lines.append(f"        offered=({_described((each.name, each.help) for each in place.options)})")
        if place.takes_keys:
            lines.append(f"        sections=({' '.join(f'--{name}.' for name in SECTIONS)})")
            lines.append("        compadd -S '' -a sections")
        lines.append("        _describe -o option offered")
        if place.children:
            lines.append(
                f"      else offered=({_described(iter(place.children.items()))}); _describe command offered; fi ;;"
            )
        else:
            lines.append(f"      else {_zsh_values(place.argument)}; fi ;;")
    lines += [
        "  esac",
        "}",
        f'if [[ $funcstack[1] == _{prog} ]]; then _{prog} "$@"; else',
        "  (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }",
        f"  compdef _{prog} {prog}",
        "fi",
    ]
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish_values(values: str | None) -> str:
    """Return the arguments of ``complete`` for the values of an option."""
    if values is None:
        return ""
    if values == FILES:
        return " -r -F"
    if values == FOLDERS:
        return " -x -a '(__fish_complete_directories)'"
    return f" -x -a {_fish_quoted(values)}" if values else " -x"


def _fish(prog: str, found: list[CommandPosition], known: list[Option]) -> str:
    every = " ".join(_fish_quoted(place.words) for place in found if place.words)
    lines = [
        f"# {prog}: completion for fish",
        f"function __{prog}_at",
        "  set -l at ''",
        "  for word in (commandline -opc)[2..-1]",
        '    set -l next (string trim -- "$at $word")',
        f"    contains -- $next {every}; and set at $next",
        "  end",
        '  contains -- "$at" $argv',
        "end",
        f"complete -c {prog} -f",
    ]
    for place in found:
        where = f"complete -c {prog} -n {_fish_quoted(f'__{prog}_at {_fish_quoted(place.words)}')}"
        lines += [f"{where} -a {name} -d {_fish_quoted(text)}" for name, text in place.children.items()]
        for option in place.options:
            lines.append(f"{where} -l {option.name[2:]}{_fish_values(option.values)} -d {_fish_quoted(option.help)}")
        if place.argument == FILES:
            lines.append(f"{where} -F")
        elif place.argument:
            words = "(__fish_complete_directories)" if place.argument == FOLDERS else place.argument
            lines.append(f"{where} -a {_fish_quoted(words)}")
    takes = " ".join(_fish_quoted(place.words) for place in found if place.takes_keys)
    where = f"complete -c {prog} -n {_fish_quoted(f'__{prog}_at {takes}')}"
    lines += [f"{where} -l {each.name[2:]}{_fish_values(each.values)} -d {_fish_quoted(each.help)}" for each in known]
    return "\n".join(lines) + "\n"


WRITERS: dict[str, Callable[[str, list[CommandPosition], list[Option]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
