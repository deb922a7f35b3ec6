"""``meshwright eval RUN --tasks``: tasks of lm-evaluation-harness by a trained model, on the ranks of
any layout.

    rank 0       lm-evaluation-harness -> RanksModel -> Ranks
    all ranks    forwards of the stages, with the key-value cache of ``sample``
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from meshwright.blueprint import Blueprint, draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.errors import ConfigError, UserError, reason_of
from meshwright.inference.load import ModelLocation, open_inference_mesh
from meshwright.inference.rows import RowForward, open_rows
from meshwright.inference.sample import text_config
from meshwright.mesh import Axis
from meshwright.mesh.mesh import close_mesh
from meshwright.system.atomic import write_out
from meshwright.system.process import GiveUp, end_process
from meshwright.terminal.output import print_lines
from meshwright.tracking.observer import has_perplexity
from meshwright.tracking.record import encode_number
from meshwright_interop.tasks.chat import ChatPrompts
from meshwright_interop.tasks.library import (
    TaskRequest,
    import_lm_eval,
    kept_generators,
    open_tasks,
    quiet,
)
from meshwright_interop.tasks.ranks import Ranks
from meshwright_interop.tasks.texts import TextEncoding

BOOTSTRAPS = 1000
"""Number of resamplings for the standard error of metrics that have no formula for it."""


class TaskScore(NamedTuple):
    """One metric of a task."""

    task: str
    metric: str
    value: float
    error: float | None
    """Standard error over the questions; None: unknown."""
    questions: int


@dataclass(frozen=True)
class TaskResult:
    """Scores of a model."""

    checkpoint: str
    step: int
    layout: str
    dtype: str
    lm_eval: str
    """Version of lm-evaluation-harness."""
    scores: tuple[TaskScore, ...]
    versions: Mapping[str, Any] = field(default_factory=dict)
    """Version of each task."""
    prompts: str = ""
    """Form of the prompts, if they have another one than the task's plain text."""

    def lines(self) -> str:
        """Return the result as text for a terminal."""
        place = f"{self.checkpoint}, step {self.step}, on {self.layout} in {self.dtype}"
        width = max(len(score.task) for score in self.scores)
        rows = [
            f"{score.task:<{width}}  {score.metric:<20} {score.value:10.4f}"
            + ("" if score.error is None else f" +- {score.error:.4f}")
            + (f"  of {score.questions:,} questions" if score.questions else "")  # a group has none
            for score in self.scores
        ]
        head = [f"checkpoint     {place}", f"tasks          lm-eval {self.lm_eval}"]
        head += [f"prompts        {self.prompts}"] if self.prompts else []
        return "\n".join([*head, *rows])

    def to_json(self) -> str:
        """Return the result as JSON."""
        scores = [score._asdict() | {"value": encode_number(score.value)} for score in self.scores]
        tree = asdict(self) | {"scores": scores}
        return json.dumps(tree, indent=2, allow_nan=False, default=str) + "\n"


@dataclass(frozen=True)
class TaskJob:
    """Picklable job that the launcher runs on each rank."""

    place: ModelLocation
    request: TaskRequest
    out: Path | None = None

    def __call__(self, config: RunConfig, give_up: GiveUp = end_process) -> None:
        """Run one rank; rank 0 prints the scores and writes them to ``out``. ``config``: from
        :func:`check`.
        """
        result = self.evaluate(config)
        if result is not None:
            print_lines(result.lines())
            if self.out is not None:
                write_out(self.out, result.to_json())

    def evaluate(self, config: RunConfig) -> TaskResult | None:
        """Evaluate on the ranks of a resolved ``config``; return the scores on rank 0, and None on
        the others.
        """
        mesh = open_inference_mesh(config.parallel, config.launch, config.train.device)
        texts = TextEncoding.of(config)
        forward, checkpoint = open_rows(
            config, mesh, self.place, texts.tokenizer, texts.known, set(texts.ends)
        )
        found = run_tasks(forward, texts, self.request)
        close_mesh(mesh)
        if found is None:
            return None
        grid = mesh.grid
        axes = (Axis.DP, Axis.PP, *grid.axes[2:])
        return TaskResult(
            checkpoint=str(checkpoint.path),
            step=checkpoint.manifest.step,
            layout=" x ".join(f"{axis}{grid.degree(axis)}" for axis in axes),
            dtype=config.train.dtype,
            lm_eval=version("lm_eval"),
            scores=tuple(scores_of(found)),
            versions=dict(found["versions"]),
            prompts=self.request.prompts,
        )


def run_tasks(
    forward: RowForward, texts: TextEncoding, request: TaskRequest
) -> dict[str, Any] | None:
    """Evaluate tasks on all ranks; return the results of the library on rank 0, and None on the
    others. Blocks.

    Raises:
        ConfigError: on every rank; the library fails, such as for a dataset that is not there.
    """
    ranks = Ranks(forward, texts.tokenizer, texts.ends)
    if forward.parts.mesh.rank != 0:
        ranks.follow()
        return None
    failure = f"lm-evaluation-harness cannot evaluate {', '.join(request.names)}"
    error_text = "it was ended"
    chat = None
    try:
        from meshwright_interop.tasks.model import RanksModel

        chat = open_prompts(request, texts.path, texts.tokenizer)
        manager, names = open_tasks(request)
        with quiet(), kept_generators():
            found: dict[str, Any] = import_lm_eval().evaluator.simple_evaluate(
                model=RanksModel(ranks, texts, forward.parts.config.run.seed, chat),
                tasks=names,
                task_manager=manager,
                num_fewshot=request.shots,
                limit=request.limit,
                apply_chat_template=chat is not None,
                fewshot_as_multiturn=chat is not None and request.shots_as_turns,
                system_instruction=request.system,
                log_samples=False,
                bootstrap_iters=BOOTSTRAPS,
            )
        error_text = ""
    except UserError as error:
        error_text = str(error)
        raise
    except (Exception, SystemExit) as error:  # a task's own code may leave the process
        error_text = f"{failure}: {reason_of(error)}"
        raise ConfigError("MW-INTEROP-166", error_text) from error
    finally:
        if chat is not None:
            chat.close()
        ranks.end(error_text)
    return found


def open_prompts(request: TaskRequest, path: Path, tokenizer: Tokenizer) -> ChatPrompts | None:
    """Open the chat template that is asked for. ``path``: that of the ``tokenizer.json``.

    Raises:
        DataError: there is no such template, or it is none.
    """
    if request.chat_template is None:
        return None
    return ChatPrompts(request.chat_template, path, tokenizer)


def scores_of(found: Mapping[str, Any]) -> Iterator[TaskScore]:
    """Yield the metrics of each task in the library's results."""
    for task, metrics in found["results"].items():
        questions = found["n-samples"].get(task, {}).get("effective", 0)
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, Real):
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            shown = metric if kind == "none" else f"{metric} ({kind})"
            is_known = isinstance(error, Real) and float(error) == float(error)
            yield TaskScore(
                task, shown, float(value), float(error) if is_known else None, questions
            )


def check(config: RunConfig, world_size: int, request: TaskRequest) -> RunConfig:
    """Check before any rank exists that the tasks can be evaluated; return the resolved
    configuration.

    A forward has a micro-batch for each stage, so that none of them waits for the whole pipeline.

    Raises:
        ConfigError: the model was not trained on text, or there is no such task.
    """
    open_tasks(request)
    config = text_config(config)
    check_prompts(request, config)
    batch = {"chunks": config.parallel.pp, "global_batch": None, "balance": "index"}
    config = resolve(config.replace(batch=batch), world_size)
    check_probabilities(draw_blueprint(config))
    return config


def check_prompts(request: TaskRequest, config: RunConfig) -> None:
    """Raise :class:`DataError` for a chat template that is not there, or that is none.
    ``config``: names its tokenizer.
    """
    if request.chat_template is not None:
        texts = TextEncoding.of(config)
        chat = open_prompts(request, texts.path, texts.tokenizer)
        assert chat is not None
        chat.close()


def check_probabilities(blueprint: Blueprint) -> None:
    """Raise :class:`ConfigError` for a model whose loss is no cross-entropy over tokens."""
    if not has_perplexity(blueprint):
        raise ConfigError(
            "MW-INTEROP-167",
            f"{blueprint.config.model.builder} has a loss of its own: tasks need probabilities of"
            " tokens",
        )
