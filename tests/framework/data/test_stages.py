"""Data stages: each sample follows from its index alone,
and a corpus of several stages continues in its order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.compatible import check_compatible
from meshwright.checkpoint.manifest import CheckpointMetadata
from meshwright.checkpoint.save import merge
from meshwright.config import RunConfig, load, samples_after, to_toml
from meshwright.data.causal import CorpusSource
from meshwright.data.order import BlendOrder, SampleOrder
from meshwright.data.sources import data_fingerprint, describe_source, open_sources
from meshwright.data.stages import StageOrder
from meshwright.errors import CheckpointError
from meshwright_launch.cli import main
from tests.framework.data.corpora import bytes_tokenizer, made, write_lines
from tests.support.errors import has_code, raises
from tests.support.layouts import microbatch, samples

STEP = 8
"""Samples of a step."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    tokenizer = bytes_tokenizer(folder / "tokenizer")
    for letter, count in (("a", 60), ("b", 40), ("c", 7)):
        texts = [{"text": f"{letter}{number:02}" + letter * 9} for number in range(count)]
        made(folder / letter, tokenizer, write_lines(folder / f"{letter}.jsonl", texts))
    return folder


def config_of(
    corpora: Path, *stages: dict[str, Any], steps: int = 10, first: str = "a"
) -> RunConfig:
    data = {"train": str(corpora / first / "train"), "sequence_length": 12, "packing": "documents"}
    return RunConfig.model_validate(
        {
            "data": data
            | {"stages": [{**each, "train": _under(corpora, each["train"])} for each in stages]},
            "model": {"options": {"vocab_size": 257}},
            "batch": {"micro_batch_size": 2, "chunks": 2, "global_batch": STEP},
            "train": {"steps": steps},
            "parallel": {"dp": 2},
        }
    )


def _under(corpora: Path, train: Any) -> Any:
    if isinstance(train, str):
        return str(corpora / train / "train")
    return [
        {"path": str(corpora / name / "train"), "weight": float(weight)} for name, weight in train
    ]


ANNEALING = ({"from_step": 4, "train": [("a", 3), ("b", 1)]}, {"from_step": 8, "train": "c"})


def letters(source: CorpusSource, first: int, count: int) -> list[str]:
    """Return the documents of samples, one each, such as "a07"."""
    tokens = samples(source, first, count).inputs
    return [bytes((tokens[row, :3] + 33).tolist()).decode() for row in range(count)]


def test_each_stage_reads_its_corpora_and_none_twice(corpora: Path) -> None:
    source = open_sources(config_of(corpora, *ANNEALING))[0]
    assert isinstance(source, CorpusSource) and isinstance(source.order, StageOrder)
    found = letters(source, 0, 10 * STEP)
    before, blended, after = found[: 3 * STEP], found[3 * STEP : 7 * STEP], found[7 * STEP :]
    assert {each[0] for each in before} == {"a"} and {each[0] for each in after} == {"c"}
    assert sorted(each[0] for each in blended) == ["a"] * 24 + ["b"] * 8
    from_a = [each for each in found if each[0] == "a"]
    # the mixture continues where the first stage left its order
    assert len(set(from_a)) == len(from_a) == 48
    assert len(set(after[:7])) == 7


def test_without_stages_before_the_first_start_samples_are_as_before(corpora: Path) -> None:
    plain, staged = (open_sources(config_of(corpora, *stages))[0] for stages in ((), ANNEALING))
    assert letters(plain, 0, 3 * STEP) == letters(staged, 0, 3 * STEP)
    assert letters(plain, 3 * STEP, STEP) != letters(staged, 3 * STEP, STEP)


def test_layouts_read_the_same_samples_across_a_start(corpora: Path) -> None:
    stages = [
        {**each, "from_samples": start} for each, start in zip(ANNEALING, (27, 53), strict=True)
    ]
    config = config_of(
        corpora, *({k: v for k, v in each.items() if k != "from_step"} for each in stages)
    )
    source = open_sources(config)[0]
    whole = samples(source, 0, 80)
    for seen in range(0, 80, STEP):
        parts = [
            microbatch(source, seen, dp_rank, 2, 2, 2, m).inputs
            for dp_rank in range(2)
            for m in range(2)
        ]
        assert torch.equal(torch.cat(parts), whole.inputs[seen : seen + STEP])
    assert {each[0] for each in letters(source, 20, 7)} == {"a"} and letters(source, 53, 1)[0][
        0
    ] == "c"


@pytest.mark.parametrize("weights", [(1,), (7, 2, 1), (1, 1, 1, 1, 5)])
def test_the_draws_of_a_mixture_are_counted_without_drawing(weights: tuple[int, ...]) -> None:
    order = BlendOrder(tuple(SampleOrder(10, seed) for seed in range(len(weights))), weights)
    counts = [0] * len(weights)
    for n in range(60):
        assert order.drawn(n) == tuple(counts)
        at, place = order.place(n)
        assert place == counts[at]
        counts[at] += 1


def test_stages_are_described(
    corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(corpora, *ANNEALING)
    said = [
        "data       data.train, steps 1 to 3, 24 samples:",
        f"           100.0% of {corpora}/a/train, 0.4 times through it",
        "data       data.stages[0].train, steps 4 to 7, 32 samples:",
        f"           75.0% of {corpora}/a/train, 0.4 times through it",
        f"           25.0% of {corpora}/b/train, 0.2 times through it",
        "data       data.stages[1].train, steps 8 to 10, 24 samples:",
        f"           100.0% of {corpora}/c/train, 3.43 times through it",
    ]
    assert describe_source(open_sources(config)[0], 80).splitlines() == said
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert main(["data", "show", str(tmp_path / "run.toml"), "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[:7] == said and shown.count("--- sample 0") == 3
    assert (
        main(
            ["data", "show", str(tmp_path / "run.toml"), "--samples", "1", "--sequence-length", "1"]
        )
        == 0
    )
    assert capsys.readouterr().out.count("--- sample 0: 1 tokens") == 3


def compare(saved: RunConfig, now: RunConfig, samples_seen: int) -> list[str]:
    tree, fingerprint = saved.model_dump(mode="json"), data_fingerprint(open_sources(saved)[0])
    before = merge(
        CheckpointMetadata(
            samples_seen // STEP, samples_seen, saved.run.seed, tree, fingerprint, {}
        ),
        [],
    )
    return check_compatible(
        before, now.model_dump(mode="json"), data_fingerprint(open_sources(now)[0])
    )


def test_a_stage_may_change_until_it_has_begun(corpora: Path) -> None:
    plain, staged = config_of(corpora), config_of(corpora, *ANNEALING)
    moved = config_of(corpora, {**ANNEALING[0], "from_step": 5}, ANNEALING[1])
    other = config_of(corpora, {"from_step": 4, "train": [("a", 2), ("b", 1)]}, ANNEALING[1])
    for now in (plain, moved, other):
        assert compare(staged, now, 24)[0].startswith("data.stages: ") and compare(now, staged, 24)
        for before, after in ((staged, now), (now, staged)):
            with pytest.raises(
                CheckpointError,
                match=r"from sample 24: .*data\.stages\[0\]\.train\[\d\] \(weight",
                check=has_code("MW-CHECKPOINT-002"),
            ):
                compare(before, after, 48)
    assert compare(staged, staged, 80) == []


LONG = {"exact": 1234561.0, "same in six digits": 1234564.0, "six digits": 1234560.0}


def mixtures(corpora: Path, weight: float) -> list[RunConfig]:
    """Return a mixture from the first step on, and one from step 4."""
    train, tree = [("a", weight), ("b", 765432)], config_of(corpora).model_dump()
    tree["data"] |= {"train": _under(corpora, train)}
    return [RunConfig.model_validate(tree), config_of(corpora, {"from_step": 4, "train": train})]


@pytest.mark.parametrize("at", [0, 1], ids=["train", "stages"])
def test_weights_are_compared_in_all_their_digits(corpora: Path, at: int) -> None:
    exact, other, six = (mixtures(corpora, weight)[at] for weight in LONG.values())
    assert compare(exact, exact, 80) == []
    for before, after in ((exact, other), (other, exact), (exact, six), (six, exact)):
        with pytest.raises(
            CheckpointError, match=r"\(weight 1\.?2345", check=has_code("MW-CHECKPOINT-002")
        ):
            compare(before, after, 80)
    assert "(weight 1.23456e+06)" in " ".join(data_fingerprint(open_sources(six)[0])), (
        "the name in checkpoints"
    )


@pytest.mark.parametrize(
    ("stages", "values"),
    [
        ([{"from_step": 5, "train": "b"}, {"from_samples": 99, "train": "c"}], ()),
        ([{"train": "b"}], ()),
        ([{"from_step": 5, "train": "b"}, {"from_step": 5, "train": "c"}], ("5, 5",)),
        ([{"from_step": 1, "train": "b"}], ()),
        ([{"from_step": 11, "train": "b"}], ("11", "10")),
    ],
)
def test_wrong_stages(
    tmp_path: Path, corpora: Path, stages: list[dict[str, Any]], values: tuple[object, ...]
) -> None:
    (tmp_path / "run.toml").write_text(to_toml(config_of(corpora, *stages)))
    with raises("MW-CONFIG-061", *values):
        load(tmp_path / "run.toml")


def test_stages_need_a_corpus_and_samples_left(corpora: Path, tmp_path: Path) -> None:
    with raises("MW-DATA-105", "sample 80", "train.steps = 10"):
        open_sources(config_of(corpora, {"from_samples": 80, "train": "b"}))
    own = config_of(corpora, *ANNEALING)
    own = own.replace(
        data={"train": "", "builder": "a:b", "packing": "stream", "sequence_length": 1024}
    )
    (tmp_path / "run.toml").write_text(to_toml(own))
    with raises("MW-CONFIG-046", "data.stages", "data.builder"):
        load(tmp_path / "run.toml")


def test_in_a_batch_size_ramp_a_stage_begins_with_its_step(corpora: Path) -> None:
    # steps of 4, 4, 4, 8, 8 ... samples
    config = config_of(corpora, *ANNEALING).replace(batch={"ramp": (4, 4, 12)})
    source, _ = open_sources(config)
    text = describe_source(source, samples_after(config.batch, 10))
    assert "steps 1 to 3, 12 samples" in text and "steps 4 to 7, 32 samples" in text, text
    assert "steps 8 to 10, 24 samples" in text, text
