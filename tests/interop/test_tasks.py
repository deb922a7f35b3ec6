"""``meshwright eval RUN --tasks``: the scores of lm-evaluation-harness, on any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows
from tokenizers import Tokenizer
from torch import nn

from meshwright.config import RunConfig, default_world_size
from meshwright.inference.load import config_for, locate
from meshwright.inference.sample import SAME_NUMBERS
from meshwright.run.directory import run_directory
from meshwright_interop.tasks.job import TaskJob, check, scores_of
from meshwright_interop.tasks.library import TaskRequest
from meshwright_launch.cli import main
from meshwright_launch.pool import RankPool
from tests.end_to_end.conftest import WORDS, corpus
from tests.end_to_end.driving import GPT2, LLAMA, layout, lines, run_config, train
from tests.support.marks import long_row
from tests.support.plain import load_plain

__all__ = ["corpus"]

WINDOW = 32
CHOICE = """
task: own_choice
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
LAST_WORD = """
task: own_word
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: "{{word}}"
metric_list: [{metric: perplexity}, {metric: acc}]
"""
TEXT = """
task: own_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
WRITE = """
task: own_write
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{expected}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
NAMES = ("own_choice", "own_text", "own_word", "own_write")


@pytest.fixture(scope="module", params=["gpt2", long_row("llama")])
def trained(
    corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
    pool: RankPool,
    request: pytest.FixtureRequest,
) -> RunConfig:
    options = {"gpt2": {**GPT2, "vocab_size": 301}, "llama": LLAMA}[request.param]
    config = run_config(
        corpus,
        tmp_path_factory.mktemp("runs"),
        model={"builder": f"meshwright_models.{request.param}:build", "options": options},
        parallel=layout("dp2,pp2"),
        train={"steps": 12, "validate_steps": 1},
    )
    train(pool, config)
    return config


def plain_of(config: RunConfig) -> tuple[nn.Module, Tokenizer]:
    _, plain = load_plain(run_directory(config.run))
    return plain, Tokenizer.from_file(str(config.data.tokenizer))


@pytest.fixture(scope="module")
def tasks(trained: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of all kinds. The expected texts of ``own_write`` are the plain model's for every
    second question.
    """
    folder, draw = tmp_path_factory.mktemp("tasks"), torch.Generator().manual_seed(5)

    def words(count: int) -> list[str]:
        return [WORDS[int(n)] for n in torch.randint(len(WORDS), (count,), generator=draw)]

    model = PlainModel(*plain_of(trained))
    rows: dict[str, list[dict[str, Any]]] = {"choice": [], "word": [], "text": [], "write": []}
    for number in range(14):
        start = " ".join(words(1 + 3 * number))  # beyond the window too
        choices = [f" {word}" for word in words(3)]
        rows["choice"].append({"text": start, "choices": choices, "answer": number % 3})
        rows["word"].append({"text": start, "word": f" {words(1)[0]}"})
        rows["text"].append({"text": " ".join(words(4 + 9 * number)) + "."})
        expected = model.written(
            start,
            [
                ".",
            ],
            12,
        )
        rows["write"].append({"text": start, "expected": expected if number % 2 else "nothing"})
    for name, text in (("choice", CHOICE), ("word", LAST_WORD), ("text", TEXT), ("write", WRITE)):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        data = {"dataset_path": "json", "test_split": "test"}
        data |= {"dataset_kwargs": {"data_files": {"test": str(file)}}}  # type: ignore[dict-item]
        (folder / f"{name}.yaml").write_text(
            text + "".join(f"{key}: {json.dumps(value)}\n" for key, value in data.items())
        )
    return folder


class PlainModel(TemplateLM):  # type: ignore[misc]
    """The plain model in one process, a row at a time, as the library's documentation describes a
    model.
    """

    eot_token_id = 0

    def __init__(self, plain: nn.Module, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.plain = plain.eval()
        self.tokens = tokenizer
        self.eot_token_id = tokenizer.token_to_id("<|endoftext|>")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        ids: list[int] = self.tokens.encode(string, add_special_tokens=False).ids
        return ids

    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.plain(torch.tensor([ids]))[0]
        return found.double()

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        found = []
        for _, context, continuation in requests:
            ids = [*context, *continuation][-WINDOW - 1 :]
            logits = self._logits(ids[:-1])[-len(continuation) :]
            chosen = logits.log_softmax(-1)[range(len(continuation)), continuation]
            found.append((float(chosen.sum()), logits.argmax(-1).tolist() == continuation))
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.eot_token_id,
                max_seq_len=WINDOW,
                context_len=1,
            )
            total = 0.0
            for read, predicted in windows:
                log_probabilities = self._logits(read)[-len(predicted) :].log_softmax(-1)
                total += float(log_probabilities[range(len(predicted)), predicted].sum())
            found.append(total)
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        return [
            self.written(context, options["until"], options["max_gen_toks"])
            for context, options in (request.args for request in requests)
        ]

    def written(self, context: str, until: Sequence[str], most: int) -> str:
        ids = self.tok_encode(context)[-(WINDOW - most) :]
        new: list[int] = []
        for _ in range(most):
            logits = self._logits([*ids, *new])[-1, : self.tokens.get_vocab_size()]
            token = int(logits.argmax())
            if token == self.eot_token_id:
                break
            new.append(token)
        text: str = self.tokens.decode(new, skip_special_tokens=False)
        for stop in until:
            text = text.split(stop)[0]
        return text


def values(scores: Sequence[Any]) -> dict[tuple[str, str], float]:
    return {(score.task, score.metric): score.value for score in scores}


@pytest.fixture(scope="module")
def expected(trained: RunConfig, tasks: Path) -> Mapping[tuple[str, str], float]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(
        model=PlainModel(*plain_of(trained)),
        tasks=list(NAMES),
        task_manager=manager,
        bootstrap_iters=0,
    )
    assert found is not None
    scores = values(list(scores_of(found)))
    assert scores[("own_write", "exact_match")] == 0.5  # every second expected text is its own
    return scores


def evaluate_rank(rank: int, world_size: int, work: TaskJob, config: RunConfig) -> Any:
    result = work.evaluate(config)
    return None if result is None else [tuple(score) for score in result.scores]


@pytest.mark.parametrize(
    "of",
    ["dp1", "dp2,pp2", *map(long_row, ("tp2", "tp2,sequence", "dp2,tp2", "pp2,tp2", "cp2", "pp4"))],
)
def test_scores_are_those_of_the_plain_model(
    trained: RunConfig,
    tasks: Path,
    expected: Mapping[tuple[str, str], float],
    pool: RankPool,
    of: str,
) -> None:
    """Truncated contexts, whole texts in windows and greedy texts among them."""
    if of == "pp4" and trained.model.builder.endswith("gpt2:build"):
        pytest.skip("two blocks")
    place = locate(run_directory(trained.run), None)
    words = [f"--parallel.{key}={str(value).lower()}" for key, value in layout(of).items()]
    asked = config_for(place, words, "eval", defaults=SAME_NUMBERS)
    request = TaskRequest(NAMES, tasks)
    checked = check(asked, default_world_size(asked.parallel, asked.launch, 0), request)
    work = TaskJob(place, request)
    found, *others = pool.run(evaluate_rank, int(checked.launch.processes), work, checked)
    assert others == [None] * len(others)
    scores = {(task, metric): value for task, metric, value, *_ in found}
    assert scores.keys() == expected.keys()
    for name, value in expected.items():
        assert scores[name] == pytest.approx(value, rel=1e-5), name


def callback(parts: Any) -> Any:
    """Evaluate the tasks whose folder the run's name has."""
    from meshwright_interop.tasks.observer import TaskScores

    folder = Path(parts.config.run.directory) / "tasks"
    return TaskScores(NAMES, every=3, folder=folder)


@pytest.mark.parametrize("of", ["dp2,pp2", *map(long_row, ("zero3,dp2", "cp2", "tp2,sequence"))])
def test_scores_while_it_trains(
    trained: RunConfig, tasks: Path, corpus: Path, tmp_path: Path, pool: RankPool, of: str
) -> None:
    """They are those of a plain evaluation of the same checkpoint, and the training goes on as it
    would without them.
    """
    (tmp_path / "tasks").symlink_to(tasks)
    sections: dict[str, Any] = {
        "model": trained.model.model_dump(),
        "parallel": {**layout(of), "bucket_bytes": 8192},
        "checkpoint": {"every": 3},
    }
    steps = {"steps": 6, "validate_steps": 1}
    alone = run_config(corpus, tmp_path / "alone", train=steps, **sections)
    train(pool, alone)
    here = {**steps, "callbacks": (f"{__name__}:callback",)}
    watched = run_config(corpus, tmp_path, train=here, **sections)
    train(pool, watched)
    of_alone, of_watched = lines(alone), lines(watched)
    assert [line["train/loss"] for line in of_alone] == [line["train/loss"] for line in of_watched]
    for step in (3, 6):
        place = locate(run_directory(watched.run), step)
        request = TaskRequest(NAMES, tasks)
        words = [f"--parallel.{axis}=1" for axis in ("dp", "pp", "tp", "cp")]
        asked = config_for(place, [*words, "--parallel.sequence=false"], "eval", trust_code=True)
        scores = TaskJob(place, request).evaluate(check(asked, 1, request))
        assert scores is not None
        logged = of_watched[step - 1]
        for score in scores.scores:
            name = f"tasks/{score.task}/{score.metric}"
            assert logged[name] == pytest.approx(score.value, rel=1e-5), name
    assert not [name for name in of_watched[0] if name.startswith("tasks/")]


def test_what_is_printed_and_written(
    trained: RunConfig, tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    run = str(run_directory(trained.run))
    words = ["eval", run, "--parallel.dp=1", "--parallel.pp=1", f"--task-folder={tasks}"]
    assert main([*words, "--tasks=own_choice,own_text", "--questions=5", f"--out={out}"]) == 0
    shown = capfd.readouterr()
    assert "own_choice" in shown.out and "of 5 questions" in shown.out and "step 12" in shown.out
    assert shown.err == ""
    found = json.loads(out.read_text())
    assert {score["task"] for score in found["scores"]} == {"own_choice", "own_text"}
    assert found["layout"] == "dp1 x pp1 x tp1" and found["dtype"] == "float32"


DRAW = """
task: own_draw
output_type: generate_until
doc_to_text: ""
doc_to_target: "x"
repeats: 3
generation_kwargs: {until: [], max_new_tokens: 9, do_sample: true, temperature: 3.0, top_k: 50}
metric_list: [{metric: exact_match}]
"""


def written_task(folder: Path, name: str, text: str, rows: Sequence[Mapping[str, Any]]) -> None:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (
        f"dataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: {file}}}}}\n"
    )
    (folder / f"{name}.yaml").write_text(text + data)


def drawn_rank(rank: int, world_size: int, work: TaskJob, config: RunConfig) -> Any:
    """Return the texts that the task's metric was given."""
    found: list[Any] = []
    from lm_eval.api.model import TemplateLM as Model

    from meshwright_interop.tasks.model import RanksModel

    generate = RanksModel.generate_until

    def kept(self: Model, requests: Any, disable_tqdm: bool = True) -> list[str]:
        texts: list[str] = generate(self, requests, disable_tqdm)
        found.extend(texts)
        return texts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RanksModel, "generate_until", kept)
        work.evaluate(config)
    return found


def test_drawn_texts_differ_and_no_layout_changes_them(
    trained: RunConfig, tmp_path: Path, pool: RankPool
) -> None:
    """A repeated question draws anew, and equal questions too; an empty one begins a document."""
    written_task(tmp_path, "draw", DRAW, [{"a": 1}, {"a": 2}])
    place, request = locate(run_directory(trained.run), None), TaskRequest(("own_draw",), tmp_path)
    texts = []
    for words in (
        ["--parallel.dp=1", "--parallel.pp=1"],
        ["--parallel.dp=1", "--parallel.pp=2", "--batch.micro_batch_size=4"],
    ):
        asked = config_for(place, words, "eval", defaults=SAME_NUMBERS, has_own_rows=True)
        checked = check(asked, default_world_size(asked.parallel, asked.launch, 0), request)
        work = TaskJob(place, request)
        texts.append(pool.run(drawn_rank, int(checked.launch.processes), work, checked)[0])
    assert texts[0] == texts[1] and len(set(texts[0])) == len(texts[0]) == 6


def failing_callback(parts: Any) -> Any:
    """Evaluate a task whose metric raises."""
    from meshwright_interop.tasks.observer import TaskScores

    return TaskScores("raises", every=1, folder=str(Path(parts.config.run.directory) / "raises"))


def no_task_callback(parts: Any) -> Any:
    from meshwright_interop.tasks.observer import TaskScores

    return TaskScores("none", every=1, folder=str(Path(parts.config.run.directory) / "raises"))


@pytest.mark.parametrize(
    ("first", "code"),
    [("failing_callback", "by a task"), ("no_task_callback", "MW-INTEROP-163")],
)
def test_a_failing_task_ends_the_training_of_all_ranks(
    trained: RunConfig, corpus: Path, tmp_path: Path, pool: RankPool, first: str, code: str
) -> None:
    """Also with another callback behind it, which the ranks would else enter one by one."""
    folder = tmp_path / "raises"
    folder.mkdir()
    text = CHOICE.replace("own_choice", "raises") + "process_results: !function code.process\n"
    row = {"text": "a", "choices": [" a", " b"], "answer": 0}
    written_task(folder, "raises", text, [row])
    (folder / "code.py").write_text("def process(*_):\n    raise ArithmeticError('by a task')\n")
    config = run_config(
        corpus,
        tmp_path,
        model=trained.model.model_dump(),
        parallel=layout("pp2"),
        train={
            "steps": 2,
            "callbacks": (f"{__name__}:{first}", f"{__name__}:failing_callback"),
        },
    )
    with pytest.raises(Exception, match=code) as refused:
        train(pool, config)
    assert "RankTimeout" not in type(refused.value).__name__


def test_a_batch_ramp(trained: RunConfig, corpus: Path, tmp_path: Path, pool: RankPool) -> None:
    """An evaluation runs the largest batch, whatever that of the step is."""
    written_task(tmp_path, "word", LAST_WORD, [{"text": "the mesh", "word": " waits"}] * 5)
    config = run_config(
        corpus,
        tmp_path,
        model=trained.model.model_dump(),
        parallel=layout("dp1"),
        batch={"ramp": (1, 1, 6)},
        train={"steps": 4, "callbacks": (f"{__name__}:ramped_callback",)},
    )
    train(pool, config)
    perplexities = [line["tasks/own_word/perplexity"] for line in lines(config)]
    assert len(perplexities) == 4


def ramped_callback(parts: Any) -> Any:
    from meshwright_interop.tasks.observer import TaskScores

    return TaskScores(["own_word"], every=1, folder=parts.config.run.directory)


def without_its_data(folder: Path) -> None:
    """Write a task ``broken``, whose file of questions is gone."""
    (folder / "a.yaml").write_text(
        "task: broken\ndataset_path: json\noutput_type: loglikelihood\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'gone.jsonl'}}}}}\n"
    )


def test_what_cannot_be_evaluated_is_one_message(
    trained: RunConfig, tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, folder = str(run_directory(trained.run)), f"--task-folder={tasks}"
    broken = tmp_path / "broken"
    broken.mkdir()
    without_its_data(broken)
    raises = tmp_path / "raises"
    raises.mkdir()
    (raises / "a.yaml").write_text(
        (tasks / "choice.yaml").read_text().replace("own_choice", "raises")
        + "process_docs: !function code.process\n"
    )
    (raises / "code.py").write_text("def process(docs):\n    raise ArithmeticError('by a task')\n")
    (raises / "leaves.yaml").write_text(
        (tasks / "choice.yaml").read_text().replace("own_choice", "leaves")
        + "process_docs: !function code.leave\n"
    )
    with (raises / "code.py").open("a") as file:
        file.write("\n\ndef leave(docs):\n    raise SystemExit(3)\n")
    beams = tmp_path / "beams"
    beams.mkdir()
    write = (tasks / "write.yaml").read_text()
    for name, options in (("beams", "num_beams: 3"), ("hot", "do_sample: true, temperature: .nan")):
        changed = write.replace("do_sample: false", options).replace("own_write", name)
        (beams / f"{name}.yaml").write_text(changed)
    for words, code in [
        (["--tasks=own_nothing", folder], "MW-INTEROP-163"),
        (["--tasks=own_choice", f"--task-folder={tmp_path / 'none'}"], "MW-INTEROP-161"),
        (["--tasks=own_choice", folder, "--batches=3"], "MW-INTEROP-168"),
        (["--tasks=,"], "MW-LAUNCH-054"),
        (["--shots=3"], "MW-INTEROP-173"),
        (["--tasks=beams", f"--task-folder={tmp_path / 'beams'}"], "MW-INTEROP-170"),
        (["--tasks=hot", f"--task-folder={tmp_path / 'beams'}"], "MW-INTEROP-171"),
        (["--tasks=leaves", f"--task-folder={raises}"], "MW-INTEROP-166"),
        (["--tasks=broken", f"--task-folder={broken}"], "MW-INTEROP-166"),
        (["--tasks=raises", f"--task-folder={raises}"], "MW-INTEROP-166"),
        (["--tasks=own_choice", folder, "--parallel.pp=9"], "MW-PIPELINE"),
    ]:
        alone = [] if "pp=9" in words[-1] else ["--parallel.pp=1"]
        assert main(["eval", run, "--parallel.dp=1", *alone, *words]) == 2, words
        shown = capfd.readouterr()
        assert code in shown.err and "Traceback" not in shown.err and shown.out == "", shown


def test_the_ranks_end_when_the_first_one_fails(
    trained: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    without_its_data(tmp_path)
    run = str(run_directory(trained.run))
    words = ["--tasks=broken", f"--task-folder={tmp_path}", "--parallel.pp=2", "--parallel.dp=1"]
    assert main(["eval", run, *words]) == 2
    shown = capfd.readouterr()
    assert "cannot evaluate broken" in shown.err and "Traceback" not in shown.err
