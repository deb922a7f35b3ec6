"""Command ``meshwright eval RUN --tasks``."""

from __future__ import annotations

import argparse

from meshwright.errors import ConfigError
from meshwright.inference.load import config_for, locate
from meshwright.inference.sample import SAME_NUMBERS
from meshwright_interop.tasks.job import TaskJob, check
from meshwright_interop.tasks.library import TaskRequest
from meshwright_launch.jobs import check_inference, run_inference


def evaluate_tasks(options: argparse.Namespace, overrides: list[str]) -> int:
    """Evaluate tasks of lm-evaluation-harness on the ranks of a layout."""
    if options.tasks is None:
        raise ConfigError(
            "MW-INTEROP-173",
            "--task-folder, --shots, --questions, --chat-template, --system and --shots-as are of"
            " --tasks: name the tasks, or leave them out",
        )
    if options.shots_as is not None and options.chat_template is None:
        raise ConfigError(
            "MW-INTEROP-177",
            f"--shots-as {options.shots_as} is of a chat template: name one with --chat-template, or"
            " leave it out",
        )
    is_launched = check_inference(options)
    for name in ("data", "batches"):
        if getattr(options, name) is not None:
            raise ConfigError(
                "MW-INTEROP-168",
                f"--{name} is of the loss, and --tasks has questions of its own: leave one out",
            )
    place = locate(options.place, options.step)._replace(weights=options.weights)
    defaults = [*SAME_NUMBERS, *(["--parallel.dp=auto"] if is_launched else [])]
    config = config_for(
        place,
        overrides,
        "eval",
        defaults=defaults,
        trust_code=options.trust_code,
        has_own_rows=True,
    )
    request = TaskRequest(
        options.tasks,
        options.task_folder,
        options.shots,
        options.questions,
        options.chat_template,
        options.system,
        options.shots_as != "text",
    )
    work = TaskJob(place, request, options.out)
    return run_inference(
        config, place.run, lambda config, size: (work, check(config, size, request))
    )
