"""The feeds that a configuration names: several corpora by weight, the same in every layout;
tokenizers that fit.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, dump, load, parse, to_toml
from meshwright.data.causal import CorpusSource
from meshwright.data.sources import describe_source, open_sources
from tests.framework.data.corpora import bytes_tokenizer, made, write_lines
from tests.support.errors import raises
from tests.support.layouts import microbatch, samples


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    tokenizer = bytes_tokenizer(folder / "tokenizer")
    for letter, count in (("a", 5), ("b", 20)):
        made(
            folder / letter,
            tokenizer,
            write_lines(folder / f"{letter}.jsonl", [{"text": letter * 23}] * count),
        )
    return folder


def config_of(corpora: Path, **data: Any) -> RunConfig:
    weighted = [
        {"path": str(corpora / "a/train"), "weight": 0.7},
        {"path": str(corpora / "b/train"), "weight": 0.1},
    ]
    keys = {"train": weighted, "sequence_length": 12, "packing": "documents", **data}
    return RunConfig.model_validate({"data": keys, "model": {"options": {"vocab_size": 257}}})


def test_samples_are_drawn_by_weight_the_same_in_every_layout(corpora: Path) -> None:
    training, _ = open_sources(config_of(corpora))
    assert isinstance(training, CorpusSource) and training.num_samples == 5 + 20
    whole = samples(training, 0, 160)
    assert Counter(whole.inputs[:, 0].tolist()).most_common() == [(64, 140), (65, 20)]
    step = 16  # as dp 2 x chunks 4 x 2 samples, from any sample on
    for seen in range(0, 160, step):
        parts = [
            microbatch(training, seen, dp_rank, 2, 2, 4, m).inputs
            for dp_rank in range(2)
            for m in range(4)
        ]
        assert torch.equal(torch.cat(parts), whole.inputs[seen : seen + step])
    assert describe_source(training, 160).splitlines() == [
        (
            f"data       {corpora}/a/train: 87.5% of the samples, 28 times through it; 5 of 5"
            " documents are longer than 12 tokens and cut"
        ),
        (
            f"data       {corpora}/b/train: 12.5% of the samples, 1 times through it; 20 of 20"
            " documents are longer than 12 tokens and cut"
        ),
    ]


def test_a_list_of_one_is_drawn_as_often(corpora: Path) -> None:
    one = open_sources(config_of(corpora, train=[{"path": str(corpora / "b/train")}]))[0]
    assert Counter(samples(one, 0, 40).inputs[:, 0].tolist()) == {65: 40}


def test_lists_in_files_and_on_the_command_line(corpora: Path, tmp_path: Path) -> None:
    config = config_of(corpora)
    assert parse(dump(config)) == config
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config) + "[batch]\nmicro_batch_size = 1\nchunks = 1\n")
    assert load(file).data == config.data
    file.write_text(
        '[[data.train]]\npath = "x"\nweight = 2\n[[data.train]]\npath = "y"\n[batch]\nchunks ='
        " 1\nmicro_batch_size = 1"
    )
    assert [(each.path, each.weight) for each in load(file).data.train] == [("x", 2.0), ("y", 1.0)]  # type: ignore[union-attr]
    other = load(file, ['--data.train=[{path = "z", weight = 0.5}]'])
    assert [(each.path, each.weight) for each in other.data.train] == [("z", 0.5)]  # type: ignore[union-attr]
    assert load(file, ["--data.train=[z]"]).data.train == "[z]"
    for wrong in ('[{path = "z", weight = 0}]', "[]", '[{path = "z", wieght = 1}]', "[5]"):
        with raises("MW-CONFIG-020", "data.train"):
            load(file, [f"--data.train={wrong}"])


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(corpora: Path) -> None:
    """Although no text uses its last ids: the one was not made for the other."""
    config = config_of(corpora)
    small = config.model_copy(
        update={"model": config.model.model_copy(update={"options": {"vocab_size": 256}})}
    )
    with raises("MW-DATA-004", 257, 256):
        open_sources(small)
    tokenizer = {"tokenizer": str(corpora / "tokenizer/tokenizer.json")}
    small = small.model_copy(update={"data": small.data.model_copy(update=tokenizer)})
    with raises("MW-DATA-090", "tokenizer.json", 256):
        open_sources(small)


def test_a_model_that_takes_no_boundaries(corpora: Path) -> None:
    config = config_of(corpora, document_boundaries=True)
    batch = {"micro_batch_size": 1, "chunks": 1, "global_batch": 1}
    own = {"builder": "tests.support.builders:plain", "options": {"vocab_size": 257}}
    tree = {
        **config.model_dump(exclude_unset=True),
        "model": own,
        "batch": batch,
        "parallel": {"dp": 1},
    }
    with raises("MW-RUN-001"):
        draw_blueprint(RunConfig.model_validate(tree))
