"""The only import of ``lm_eval``: late, and quiet."""

from __future__ import annotations

import io
import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from meshwright.data.prepare.chat.template import OF_TOKENIZER
from meshwright.errors import ConfigError, reason_of


class TaskRequest(NamedTuple):
    """Tasks to evaluate."""

    names: tuple[str, ...]
    folder: Path | None = None
    """Folder of tasks of one's own, searched before those of the library."""
    shots: int | None = None
    """Number of examples before each question; None: that of the task."""
    limit: int | None = None
    """Number of questions of each task; None: all."""
    chat_template: str | None = None
    """Chat template that writes the prompts: ``tokenizer`` or a .jinja file; None: no template."""
    system: str | None = None
    """System message, or text before each prompt without a chat template."""
    shots_as_turns: bool = True
    """With a chat template: an example is a message of the user and one of the assistant; False:
    examples and question are one message of the user.
    """

    @property
    def prompts(self) -> str:
        """Return a line on the form of the prompts; empty: the task's plain text."""
        parts = []
        if self.chat_template is not None:
            place = "the tokenizer" if self.chat_template == OF_TOKENIZER else self.chat_template
            form = "turns" if self.shots_as_turns else "one text"
            parts.append(f"chat template of {place}, examples as {form}")
        if self.system is not None:
            parts.append(f"system text {self.system[:60]!r}")
        return ", ".join(parts)


def import_lm_eval() -> Any:
    """Import and return the package ``lm_eval``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import datasets
        import lm_eval
        import lm_eval.evaluator
        import lm_eval.tasks
    except ImportError as error:
        raise ConfigError(
            "MW-INTEROP-160",
            f"--tasks needs lm-evaluation-harness ({error}): pip install 'meshwright[lm-eval]'",
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    # it runs git in the working directory, whatever that is
    lm_eval.evaluator.get_git_commit_hash = lambda: None
    return lm_eval


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the process's random generators after the block: the library seeds all of them."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress what the library prints, its progress bars and its pool of processes within the
    block: it has no option for some of them.
    """
    from tqdm import tqdm

    drawn, name = tqdm.__init__, "DISABLE_MULTIPROC"
    # the children of a rank would keep its handlers of signals, and never end
    had = os.environ.get(name)
    os.environ[name] = "1"
    tqdm.__init__ = partialmethod(drawn, disable=True)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        tqdm.__init__ = drawn
        del os.environ[name]
        if had is not None:
            os.environ[name] = had


def open_tasks(request: TaskRequest) -> tuple[Any, list[str]]:
    """Return the library's manager of tasks, and the names of the tasks that are asked for.

    The files of a folder of one's own may name functions, which are imported.

    Raises:
        ConfigError: there is no such task, or a file of the folder is broken.
    """
    manager_of = import_lm_eval().tasks.TaskManager
    if request.folder is not None and not request.folder.is_dir():
        raise ConfigError(
            "MW-INTEROP-161", f"--task-folder {request.folder}: there is no such folder"
        )
    folder = None if request.folder is None else str(request.folder)
    try:
        # the library's own ten thousand files take seconds: only where they are wanted
        manager = (
            None if folder is None else manager_of(include_path=folder, include_defaults=False)
        )
        if manager is None or _unknown(manager, request.names):
            manager = manager_of(include_path=folder)
    except Exception as error:
        raise ConfigError(
            "MW-INTEROP-162", f"--task-folder {request.folder} cannot be read: {reason_of(error)}"
        ) from error
    if unknown := _unknown(manager, request.names):
        near = f"; --task-folder {request.folder} has none of that name either" if folder else ""
        raise ConfigError(
            "MW-INTEROP-163",
            f"--tasks: lm-evaluation-harness has no task {', '.join(unknown)}{near}:"
            " `lm_eval ls tasks` lists its own",
        )
    return manager, sorted(manager.match_tasks(list(request.names)))


def _unknown(manager: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not manager.match_tasks([name])]
