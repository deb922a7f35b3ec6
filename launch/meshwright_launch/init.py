"""Command ``meshwright init``: a complete configuration to start from,
and the small corpus that it trains on.

--text PATH ... | Python's own source text  ->  runs/data/NAME: tokens and a tokenizer of at most 4,096 tokens
templates/init.toml.j2                      ->  FILE, written last and only if it does not exist
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.config.keys import toml_value
from meshwright.errors import ConfigError
from meshwright.system.atomic import check_place
from meshwright.terminal.output import put, tell
from meshwright_launch.rendering import render_template

if TYPE_CHECKING:
    from meshwright.data.prepare import Outcome

VOCAB_SIZE = 4096
"""Largest number of tokens of the tokenizer; that of a short text has fewer."""
VOCAB_MULTIPLE = 8
"""Number that divides the model's vocabulary, and so may be the degree of tensor parallelism."""
SEQUENCE_LENGTH = 128
"""Tokens of a sample in a new configuration: validation needs one more."""
CORPORA = Path("runs/data")
STDLIB = "stdlib"
"""Name of the corpus of Python's own source text, the one of `make demo`."""


class Starter(NamedTuple):
    """Model of a new configuration."""

    title: str
    num_sentinels: int = 0
    """Tokens of the vocabulary that stand for missing spans."""
    can_sample: bool = True
    """True if ``meshwright sample`` can continue a prompt with it."""


STARTERS = {
    "gpt2": Starter("A small GPT-2"),
    "llama": Starter("A small Llama"),
    "t5": Starter("A small T5, encoder and decoder", num_sentinels=8, can_sample=False),
}
"""Value of ``--model`` -> model."""


def init(options: argparse.Namespace, _: list[str]) -> int:
    """Prepare the corpus, then write the configuration.

    Raises:
        UserError: the file exists or cannot be written, or the text cannot be read.
    """
    file: Path = options.file
    if not str(file).isprintable():
        raise ConfigError(
            "MW-LAUNCH-060",
            f"{str(file)!r} is no name for a configuration: give one such as mine.toml",
        )
    _check_new(file)
    check_place(file, folder=False, example="first.toml")
    name = run_name(file)
    corpus = CORPORA / (name if options.text else STDLIB)
    outcome = _prepare(options.text, corpus)
    put(outcome)
    text = render(options.model, file, name, corpus, outcome)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        _check_new(file)
    except OSError as error:
        raise ConfigError(
            "MW-LAUNCH-061", f"{file} cannot be written ({error.strerror}): choose another place"
        ) from error
    put(f"written: {file}; next: `meshwright train {shlex.quote(str(file))}`")
    return 0


def run_name(file: Path) -> str:
    """Return a name for the run of a configuration file: its stem,
    with dashes for what a run's name may not have.
    """
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem)) or "run"


def render(model: str, file: Path, name: str, corpus: Path, outcome: Outcome) -> str:
    """Render the configuration for a prepared corpus."""
    starter, tokens = STARTERS[model], outcome.fingerprint.vocab_size
    vocab_size = -(-(tokens + starter.num_sentinels) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    vocab_note = f"at least the tokenizer's {tokens}"
    if starter.num_sentinels:
        vocab_note += f", and {starter.num_sentinels} sentinels"
    validation = outcome.fingerprint.splits.get("validation")
    has_validation = validation is not None and validation.tokens > SEQUENCE_LENGTH
    word = shlex.quote(str(file))
    commands = [
        (f"meshwright train {word}", "trains; the same command again resumes"),
        (
            f"meshwright train {word} --run.name={name}-4 --parallel.pp=2 --parallel.tp=2",
            "4 ranks: the same numbers",
        ),
        (f"meshwright verify {word}", "proves that"),
        (f"meshwright eval runs/{name}", "loss and perplexity"),
        (f"meshwright report runs/{name}", "a page with curves"),
    ]
    if starter.can_sample:
        commands.append((f'meshwright sample runs/{name} --prompt "class"', "lets it write"))
    return render_template(
        "init.toml.j2",
        {
            "title": f"{starter.title} on {outcome.fingerprint.source.description}",
            "commands": commands,
            "width": max(len(command) for command, _ in commands),
            "file": word,
            "name": name,
            "model": model,
            "vocab_size": vocab_size,
            "vocab_note": vocab_note,
            "corpus": corpus.as_posix(),
            "has_validation": has_validation,
            "sequence_length": SEQUENCE_LENGTH,
        },
        {"toml": toml_value},
    )


def _check_new(file: Path) -> None:
    if file.exists() or file.is_symlink():
        raise ConfigError(
            "MW-LAUNCH-062",
            f"{file} exists and stays as it is: name another file, as in `meshwright init"
            f" {file.stem}-2.toml`",
        )


def _prepare(paths: list[Path] | None, corpus: Path) -> Outcome:
    """Prepare the corpus."""
    from meshwright.data import prepare as data

    if not paths:
        return data.prepare_stdlib(corpus, VOCAB_SIZE, say=tell)
    return data.prepare_files(paths, corpus, VOCAB_SIZE, say=tell)
