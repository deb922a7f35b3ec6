"""Prompts of evaluation tasks by a chat template: those of lm-evaluation-harness' own class for
transformers, and the scores of a plain model on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from meshwright.config import RunConfig, default_world_size
from meshwright.inference.load import config_for, locate
from meshwright.inference.sample import SAME_NUMBERS
from meshwright.run.directory import run_directory
from meshwright_interop.tasks.chat import ChatPrompts
from meshwright_interop.tasks.job import TaskJob, check, scores_of
from meshwright_interop.tasks.library import TaskRequest
from meshwright_interop.tasks.model import RanksModel
from meshwright_interop.tasks.observer import TaskScores
from meshwright_interop.tasks.texts import TextEncoding
from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from tests.end_to_end.conftest import WORDS, corpus
from tests.end_to_end.driving import LLAMA, layout, lines, run_config, train
from tests.framework.data.prepare.chats import NAMES, folder_of
from tests.interop.test_tasks import PlainModel, evaluate_rank, plain_of, values
from tests.support.errors import raises
from tests.support.marks import long_row

__all__ = ["corpus"]

USER = {"role": "user", "content": "What is two and two?\n"}
SHOT = {"role": "assistant", "content": "Four"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKS = [[USER], [SYSTEM, USER], [USER, SHOT, USER], [SYSTEM, USER, SHOT, USER]]
BEGUN = [
    [USER, {"role": "assistant", "content": text}] for text in ("The sum is", "Sum: ", " It's\n")
]
BEGUN.append([SYSTEM, USER, SHOT, *BEGUN[0]])
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}.\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<assistant>{% endif %}"
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
)


def expected_prompt(tokenizer: Any, messages: Sequence[Any], asks: bool) -> str:
    """Return the prompt of ``HFLM.apply_chat_template``, whose module needs accelerate."""

    def rendered(chat: Sequence[Any]) -> str:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in chat],
            tokenize=False,
            add_generation_prompt=asks,
            continue_final_message=not asks,
        )
        return text

    try:
        return rendered(messages)
    except jinja2.TemplateError:
        return rendered([message for message in messages if message["role"] != "system"])


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = folder_of(name, tmp_path) / "tokenizer.json"
    theirs = PreTrainedTokenizerFast.from_pretrained(path.parent)
    ours = ChatPrompts("tokenizer", path, Tokenizer.from_file(str(path)))
    compared = 0
    for asks, talks in ((True, ASKS), (False, BEGUN)):
        for talk in talks:
            try:
                expected = expected_prompt(theirs, talk, asks)
            except (jinja2.TemplateError, ValueError):  # the message is left out
                with raises("MW-INTEROP-176", "chat_template.jinja"):
                    ours.render(talk, asks=asks)
                continue
            assert ours.render(talk, asks=asks) == expected, talk
            compared += 1
    ours.close()
    assert compared >= 6


def test_the_template_writes_the_token_that_begins_a_prompt(tmp_path: Path) -> None:
    """The tokenizer adds none before it, as it does before other texts."""
    path = folder_of("llama2", tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.save(str(path))
    theirs = PreTrainedTokenizerFast.from_pretrained(path.parent)
    chat = ChatPrompts("tokenizer", path, tokenizer)
    texts = TextEncoding(path, tokenizer, None, frozenset())
    ranks: Any = None
    model = RanksModel(ranks, texts, 0, chat)
    found = model.tok_encode(model.apply_chat_template([SYSTEM, USER]))
    chat.close()
    asked = theirs.apply_chat_template(
        [SYSTEM, USER], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert found == asked and found.count(begin) == 1
    assert RanksModel(ranks, texts, 0).tok_encode("Hi")[0] == begin


def test_prompts_are_those_of_the_library(tmp_path: Path) -> None:
    """Compare with the class itself, where accelerate is installed."""
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    for name in NAMES:
        folder = folder_of(name, tmp_path)
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        model = SimpleNamespace(tokenizer=theirs, chat_template_args={})
        for talk in ASKS:
            prompt = HFLM.apply_chat_template(model, [dict(each) for each in talk])
            assert prompt == expected_prompt(theirs, talk, True)
        begun = [dict(each) for each in BEGUN[0]]
        prompt = HFLM.apply_chat_template(model, begun, add_generation_prompt=False)
        assert prompt == expected_prompt(theirs, BEGUN[0], False)


SHOWN = """
output_type: {output}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{word}}}}"
description: "Go on."
gen_prefix: "{prefix}"
fewshot_config: {{sampler: first_n}}
num_fewshot: 1
metric_list: [{{metric: {metric}}}]
"""


class ChattingModel(PlainModel):
    """The plain model with the chat template of transformers' tokenizer."""

    def __init__(self, config: RunConfig, template: str) -> None:
        super().__init__(*plain_of(config))
        self.theirs = PreTrainedTokenizerFast(tokenizer_object=self.tokens)
        self.theirs.chat_template = template
        self.prompts: list[str] = []

    tokenizer_name = "plain"

    def chat_template(self, chat_template: bool | str = False) -> str:
        return str(self.theirs.chat_template)

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        self.prompts.append(expected_prompt(self.theirs, chat_history, add_generation_prompt))
        return self.prompts[-1]


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> RunConfig:
    config = run_config(
        corpus,
        tmp_path_factory.mktemp("runs"),
        model={"builder": "meshwright_models.llama:build", "options": LLAMA},
        parallel=layout("dp2,pp2"),
        train={"steps": 12, "validate_steps": 1},
    )
    train(pool, config)
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks with a description, an example and a beginning of the answer, and two templates."""
    place = tmp_path_factory.mktemp("tasks")
    rows = [{"text": " ".join(WORDS[n : n + 3]), "word": f" {WORDS[n + 3]}"} for n in range(6)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "test_split": "test", "fewshot_split": "test"}
    files = {"data_files": {"test": str(place / "rows.jsonl")}}
    for name, output, prefix, metric in (
        ("said", "loglikelihood", "", "perplexity"),
        ("begun", "loglikelihood", "So", "perplexity"),
        ("written", "generate_until", "", "exact_match"),
    ):
        text = SHOWN.format(output=output, prefix=prefix, metric=metric)
        if output == "generate_until":
            text += 'generation_kwargs: {until: ["."], max_gen_toks: 6, do_sample: false}\n'
        more = {"task": name, **data, "dataset_kwargs": files}
        lines = "".join(f"{key}: {json.dumps(value)}\n" for key, value in more.items())
        (place / f"{name}.yaml").write_text(text + lines)
    (place / "plain.jinja").write_text(PLAIN)
    (place / "strict.jinja").write_text(STRICT)
    return place


TASKS = ("said", "begun", "written")


def request_of(folder: Path, template: str, *, as_turns: bool = True) -> TaskRequest:
    file = str(folder / f"{template}.jinja")
    return TaskRequest(TASKS, folder, None, None, file, "Be brief.", as_turns)


def expected_scores(
    config: RunConfig, folder: Path, template: str, as_turns: bool
) -> tuple[dict[Any, float], list[str]]:
    """Return the scores and prompts of the plain model."""
    model = ChattingModel(config, template)
    found = simple_evaluate(
        model=model,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=True,
        fewshot_as_multiturn=as_turns,
        system_instruction="Be brief.",
        bootstrap_iters=0,
    )
    assert found is not None
    return values(list(scores_of(found))), model.prompts


@pytest.mark.parametrize(
    ("template", "as_turns", "of"),
    [
        ("plain", True, ("dp1", "dp2,pp2")),
        long_row("strict", False, ("dp1",)),
        long_row("plain", False, ("tp2,sequence", "cp2")),
    ],
)
def test_scores_are_those_of_the_plain_model(
    template: str,
    as_turns: bool,
    of: Sequence[str],
    trained: RunConfig,
    folder: Path,
    pool: RankPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {"plain": PLAIN, "strict": STRICT}
    expected, prompts = expected_scores(trained, folder, texts[template], as_turns)
    request = request_of(folder, template, as_turns=as_turns)
    place = locate(run_directory(trained.run), None)
    written = recorded(monkeypatch)
    for text in of:
        words = [f"--parallel.{key}={str(value).lower()}" for key, value in layout(text).items()]
        asked = config_for(place, words, "eval", defaults=SAME_NUMBERS)
        checked = check(asked, default_world_size(asked.parallel, asked.launch, 0), request)
        work = TaskJob(place, request)
        if text == "dp1":
            scores = [tuple(score) for score in work.evaluate(checked).scores]  # type: ignore[union-attr]
            assert sorted(written) == sorted(prompts)
            assert any("Be brief." in prompt for prompt in prompts) == (template == "plain")
        else:
            scores = pool.run(evaluate_rank, int(checked.launch.processes), work, checked)[0]
        found = {(task, metric): value for task, metric, value, *_ in scores}
        assert found == pytest.approx(expected, rel=1e-5), text


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the prompts of our model, in this process."""
    found: list[str] = []
    render: Callable[..., str] = RanksModel.apply_chat_template

    def rendering(self: RanksModel, chat_history: Any, add_generation_prompt: bool = True) -> str:
        found.append(render(self, chat_history, add_generation_prompt))
        return found[-1]

    monkeypatch.setattr(RanksModel, "apply_chat_template", rendering)
    return found


@pytest.fixture
def words(trained: RunConfig, folder: Path) -> Iterator[list[str]]:
    run = str(run_directory(trained.run))
    yield ["eval", run, "--parallel.dp=1", "--parallel.pp=1", f"--task-folder={folder}"]


def test_what_is_printed_and_written(
    words: list[str], folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, strict = tmp_path / "scores.json", folder / "strict.jinja"
    asked = ["--tasks=said", f"--chat-template={strict}", "--shots-as=text", f"--out={out}"]
    assert main([*words, *asked, "--system=Short."]) == 0
    shown = capfd.readouterr()
    line = f"chat template of {strict}, examples as one text, system text 'Short.'"
    assert line in shown.out and json.loads(out.read_text())["prompts"] == line
    assert shown.err.count("refuses a system message (no system)") == 1, "once"


def test_what_no_template_writes_is_one_message(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in (
        ("broken", "{% if %}"),
        ("refuses", "{{ raise_exception('never') }}"),
    ):
        (tmp_path / f"{name}.jinja").write_text(text)
    for asked, code in [
        (["--tasks=said", "--chat-template=tokenizer"], "MW-DATA-133"),
        (["--tasks=said", f"--chat-template={tmp_path / 'none.jinja'}"], "MW-DATA-134"),
        (["--tasks=said", f"--chat-template={tmp_path / 'broken.jinja'}"], "MW-DATA-139"),
        (["--tasks=said", f"--chat-template={tmp_path / 'refuses.jinja'}"], "MW-INTEROP-176"),
        (["--tasks=said", "--shots-as=text"], "MW-INTEROP-177"),
        (["--system=Short."], "MW-INTEROP-173"),
    ]:
        assert main([*words, *asked]) == 2, asked
        shown = capfd.readouterr()
        assert code in shown.err and "Traceback" not in shown.err and shown.out == "", shown


def callback(parts: Any) -> Any:
    """Evaluate the tasks whose folder the run's name has, with its template."""
    place = Path(parts.config.run.directory) / "tasks"
    template, system = str(place / "plain.jinja"), "Be brief."
    return TaskScores(TASKS, every=0, folder=place, chat_template=template, system=system)


@pytest.mark.long
def test_scores_while_it_trains(
    trained: RunConfig, folder: Path, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """They are those of an evaluation of the same checkpoint."""
    (tmp_path / "tasks").symlink_to(folder)
    steps = {"steps": 2, "validate_steps": 1, "callbacks": (f"{__name__}:callback",)}
    model = trained.model.model_dump()
    config = run_config(corpus, tmp_path, model=model, parallel=layout("pp2"), train=steps)
    train(pool, config)
    place, request = locate(run_directory(config.run), None), request_of(folder, "plain")
    asked = config_for(place, ["--parallel.dp=1", "--parallel.pp=1"], "eval", trust_code=True)
    scores = TaskJob(place, request).evaluate(check(asked, 1, request))
    assert scores is not None
    logged = lines(config)[-1]
    for score in scores.scores:
        found = logged[f"tasks/{score.task}/{score.metric}"]
        assert found == pytest.approx(score.value, rel=1e-5), score
