"""Evaluation tasks while a run trains."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ConfigError, UserError
from meshwright.inference.rows import rows_of_training
from meshwright.inference.sample import text_config
from meshwright.optimizer import evaluating
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.run.observers import evaluation_mode
from meshwright_interop.tasks.job import (
    check_probabilities,
    check_prompts,
    run_tasks,
    scores_of,
)
from meshwright_interop.tasks.library import TaskRequest, open_tasks
from meshwright_interop.tasks.texts import TextEncoding


class TaskScores(Observer):
    """Observer that evaluates tasks of lm-evaluation-harness every few steps and after the last.

    The ranks, layout and dtype are those of the training. The scores are metrics of the step,
    ``tasks/TASK/METRIC``. Generation runs the whole row for each token: prefer tasks that score.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        every: int,
        *,
        folder: Path | str | None = None,
        shots: int | None = None,
        questions: int | None = None,
        chat_template: str | None = None,
        system: str | None = None,
    ) -> None:
        """Create the observer; arguments as the options of ``meshwright eval``.

        ``every``: steps between two evaluations; 0: after the last step only.
        """
        names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
        place = None if folder is None else Path(folder)
        self._request = TaskRequest(names, place, shots, questions, chat_template, system)
        self._every = every

    def setup(self, parts: Parts) -> None:
        """Check that there are such tasks, and a tokenizer.

        Raises:
            ConfigError: there is no such task, or the run does not train on text.
        """
        text_config(parts.config)
        check_probabilities(parts.blueprint)
        error = ""
        if parts.mesh.rank == 0:
            try:
                open_tasks(self._request)
                check_prompts(self._request, text_config(parts.config))
            except UserError as refused:
                error = str(refused)
        (message, *_) = parts.mesh.world.gather_objects(error)
        if message:
            raise ConfigError("MW-INTEROP-172", f"TaskScores: {message}")

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Evaluate if due. Collective over all ranks; blocks."""
        is_due = self._every > 0 and parts.state.step % self._every == 0
        if not (is_due or event.is_last):
            return
        texts = TextEncoding.of(text_config(parts.config))
        with (
            parts.mesh.activity.during("evaluating tasks"),
            evaluating(parts.optimizer),
            evaluation_mode(parts),
        ):
            forward = rows_of_training(parts, texts.tokenizer, texts.known, set(texts.ends))
            found = run_tasks(forward, texts, self._request)
        if found is not None:
            event.metrics |= {
                f"tasks/{_name(score.task)}/{_name(score.metric)}": score.value
                for score in scores_of(found)
                if math.isfinite(score.value)
            }


def _name(text: str) -> str:
    """Return a name that a record takes."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-")
