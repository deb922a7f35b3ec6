"""Trust check for code that a file names: the builders that a downloaded run,
checkpoint or configuration may import.

    file given on the command line          any builder: the user has chosen the file
    file of a run or checkpoint,            meshwright's own builders (config/functions.py), builders that the
    of any origin                           user names too (--model.builder=my_model:build), or any with --trust-code

The check itself imports nothing, and without trust nothing is imported at all. No torch.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig, given_keys, load
from meshwright.config.functions import OWN_BUILDERS, current_name, find_source, is_own_builder
from meshwright.config.keys import KEYS
from meshwright.errors import ConfigError
from meshwright.run.directory import is_checkpoint, is_run
from meshwright.system.bounded import real_path
from meshwright.terminal.output import tell

CODE_KEYS = (
    *(
        ("model", "builder"),
        ("model", "parameter_groups"),
        ("model", "attention"),
        ("data", "builder"),
        ("data", "collate"),
    ),
    *(("optimizer", "builder"), ("optimizer", "schedule"), ("pipeline", "schedule")),
    *(("train", "callbacks"), ("tracking", "sinks")),
)
"""Configuration keys whose value, or each value of a list, is imported as code."""
OWN_DATASET = "meshwright.data.huggingface:build"
"""Builder of datasets of meshwright itself, which runs no code of what it opens:
any file may name it, too.
"""
BESIDE = ("metrics.jsonl", "starts.jsonl", "*.safetensors")
"""Files that mark the folder of a configuration as that of a run or exported model,
if its other files are missing.
"""
MAX_LINKS = 40
"""Links that are followed from a file to the next, as on Linux."""


def check_trusted(
    config: RunConfig, source: str, overrides: Sequence[str] = (), *, trust_code: bool = False
) -> None:
    """Refuse foreign builders that only ``source``, a file of a run or checkpoint, names.

    With ``trust_code`` each function is printed with its file instead.

    ``overrides``: the arguments of the command line; a builder named there is the user's choice.

    Raises:
        ConfigError: one line for each such key, with the function, its file and the remedy.
    """
    named = given_keys(overrides)
    problems = []
    for section, key, path in foreign_builders(config):
        chosen = named.get((section, key))
        if path == chosen or (isinstance(chosen, list) and path in chosen):
            continue
        function, file = path.partition(":")[2], find_source(path)
        where = f"from {file}" if file else "of a module that Python does not find from here"
        if trust_code:
            if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":  # print it once
                tell(f"--trust-code: {section}.{key} = {path!r} imports {function} {where}")
            continue
        is_list = not isinstance(getattr(getattr(config, section), key), str)
        named_as = shlex.quote(json.dumps([path])) if is_list else path
        problems.append(
            ConfigError(
                "MW-RUN-030",
                f"{source}: {section}.{key} = {path!r} would import the function {function}"
                f" {where}, and importing it runs that code. If you trust it, add --trust-code, or"
                f" name it yourself: --{section}.{key}={named_as}. Without that a run or checkpoint"
                f" may name only meshwright's own builders ({', '.join(OWN_BUILDERS)},"
                f" hf:DIRECTORY; {OWN_DATASET})",
            )
        )
    if problems:
        raise ConfigError.join(problems)


def foreign_builders(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return (section, key, function) of all functions that a configuration names and
    that are not meshwright's own.
    """
    found = []
    for section, key in CODE_KEYS:
        value = getattr(getattr(config, section), key)
        paths = [
            each
            for each in ([value] if isinstance(value, str) else value or ())
            if isinstance(each, str)
        ]
        is_own = OWN_FUNCTIONS.get((section, key), _is_word)
        found += [(section, key, path) for path in paths if not is_own(path)]
    return found


def _is_word(value: str) -> bool:
    """Return whether a value names no code: "tensorboard" is a sink of ours,
    "cosine" and "1f1b" are schedules.
    """
    return ":" not in value


OWN_FUNCTIONS = {("model", "builder"): is_own_builder, ("data", "builder"): OWN_DATASET.__eq__}
"""Key -> predicate of meshwright's own functions.
Other keys have only words (names without a colon) of our own.
"""


def changed_keys(saved: RunConfig, overrides: Sequence[str]) -> dict[tuple[str, ...], Any]:
    """Return the keys that ``overrides`` set, with their values,
    without builders that equal the saved one.

    An override that names the saved builder changes nothing: it only marks the builder as trusted.
    """
    given = {key[:2]: value for key, value in given_keys(overrides).items() if key[:2] in KEYS}
    return {
        path: value
        for path, value in given.items()
        if path not in CODE_KEYS or not _is_same(value, getattr(getattr(saved, path[0]), path[1]))
    }


def _is_same(value: Any, saved: Any) -> bool:
    """Return whether an override of a key in CODE_KEYS names the saved function,
    or the saved list of functions.
    """
    return bool(
        value == list(saved) if isinstance(saved, tuple) else current_name(str(value)) == saved
    )


def check_file(path: str, overrides: Sequence[str] = (), *, trust_code: bool = False) -> None:
    """Apply :func:`check_trusted` to a configuration that belongs to a run;
    any other one is the user's own.

    Raises:
        ConfigError: a builder is not trusted, or the configuration is invalid.
    """
    if comes_with_run(Path(path)):
        check_trusted(load(path, overrides), path, overrides, trust_code=trust_code)


def comes_with_run(file: Path) -> bool:
    """Check whether a file, or a link on the way to it, lies in a run directory,
    a checkpoint or an exported model.
    """
    try:
        places = _places(file)
        if any(any(place.parent.glob(name)) for place in places for name in BESIDE):
            return True
        return any(map(_holds_run, {folder for place in places for folder in place.parents}))
    except OSError:
        return True


def _places(file: Path) -> list[Path]:
    """Return the absolute path of a file as it is named,
    and without links that of each link on the way to it.
    """
    places = [Path(os.path.normpath(file.absolute()))]
    place = real_path(places[0].parent) / places[0].name
    while place.is_symlink() and len(places) <= MAX_LINKS:
        places.append(place)
        target = place.parent / place.readlink()
        place = real_path(target.parent) / target.name
    return [*places, place, real_path(file)]


def _holds_run(folder: Path) -> bool:
    return (
        is_run(folder)
        or is_checkpoint(folder)
        or any(map(is_checkpoint, (folder / "checkpoints").glob("*")))
    )
