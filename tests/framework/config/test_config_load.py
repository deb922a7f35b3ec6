"""What is wrong with a configuration is told completely: place, key, value, what is allowed,
what was meant.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.config import Optimizer, RunConfig, load
from meshwright.config.sources import toml_lines
from meshwright.errors import ConfigError
from tests.support.errors import raises

SOUND = """
[data]
train = "corpus/train"
[batch]
micro_batch_size = 2
chunks = 4
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return _write


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert caught.value.exit_code == 2
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return [problem.message.replace(str(path), "run.toml") for problem in caught.value.problems]


def the_problem(path: Path, *overrides: str) -> str:
    found = problems(path, *overrides)
    assert len(found) == 1, found
    return found[0]


def test_a_sound_file_gives_what_it_says_and_defaults_elsewhere(write: Write) -> None:
    config = load(
        write(
            SOUND
            + "[parallel]\npp = 2\ntp = 4\n[optimizer]\nlearning_rate = 1\nbetas = [0, 0.99]\n"
        )
    )
    assert isinstance(config, RunConfig)
    assert (config.parallel.pp, config.parallel.tp, config.parallel.dp) == (2, 4, "auto")
    assert config.optimizer.learning_rate == 1.0 and isinstance(
        config.optimizer.learning_rate, float
    )
    assert config.optimizer.betas == (0.0, 0.99)
    assert config.train == RunConfig.model_fields["train"].get_default()


def test_frozen(write: Write) -> None:
    config = load(write(SOUND))
    with pytest.raises(ValueError, match="frozen"):
        config.parallel.tp = 2  # type: ignore[misc]


def test_an_empty_section_is_fine(write: Write) -> None:
    assert load(write(SOUND + "[parallel]\n[train]\n")).parallel.tp == 1


def test_fsdp_s_words_are_read(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    for word, zero in (("no_shard", 0), ("SHARD_GRAD_OP", 2), ("full_shard", 3)):
        assert load(write(SOUND + f'[parallel]\nzero = "{word}"')).parallel.zero == zero
        assert f'parallel.zero = "{word}" is zero = {zero} here' in capsys.readouterr().err
    hybrid = SOUND + '[parallel]\nzero = "hybrid_shard"'
    parallel = load(write(hybrid + "\nshard_factor = 2")).parallel
    assert (parallel.zero, parallel.shard_factor) == (3, 2)
    assert 'zero = "hybrid_shard" needs parallel.shard_factor' in the_problem(write(hybrid))


def test_a_missing_key(write: Write) -> None:
    with raises("MW-CONFIG-046", "run.toml", "data.train", 'data.builder = "module:function"'):
        load(write("[batch]\nchunks = 1\nglobal_batch = 8"))


def test_one_mistake_is_one_problem(write: Write) -> None:
    """A misspelled required key is not missing as well; keys of a misspelled section are judged."""
    text = '[data]\ntrian = "x"\n[batch]\nmicro_batch = 4\nchunks = 2\n'
    names = [problem.split(":")[1].split("=")[0].strip() for problem in problems(write(text))]
    assert names == ["data.trian", "batch.micro_batch"]
    section, value = problems(write("[dat]\ntrain = 5\n[batch]\nchunks = 2\nglobal_batch = 8\n"))
    assert "[dat]" in section and "[data]" in section and "dat.train = 5" in value


def test_a_value_that_is_not_allowed_breaks_no_rule_besides(write: Write) -> None:
    with raises("MW-CONFIG-020", 'train.steps = "many"') as caught:
        load(write(SOUND + '[optimizer]\nwarmup_steps = 200\n[train]\nsteps = "many"'))
    assert len(caught.value.problems) == 1


def test_in_code_too_there_are_no_infinities() -> None:
    with pytest.raises(ValueError, match="finite"):
        Optimizer(learning_rate=float("inf"))


def place_and_key(problem: ConfigError) -> str:
    place, key = re.sub(r"\S*/run\.toml", "run.toml", problem.message).split(": ")[:2]
    return f"{place}: {key.split()[0]}"


def test_all_problems_in_one_go(write: Write) -> None:
    text = """
    wibble = 1
    [data]
    sequence_length = 0
    [optimiser]
    learning_rate = "fast"
    [parallel]
    tensor_model_parallel_size = 2
    dp = 2
    sequence = true
    [batch]
    micro_batch_size = 4
    chunks = 2
    global_batch = 20
    [pipeline]
    balance = [3, 3]
    schedule = "zigzag"
    [train]
    steps = 10
    validate_every = 5
    """
    words = ("--optimizer.warmup_steps=20", "--train.device=gpu", "loose", "--checkpoint.every")
    with raises("MW-CONFIG-033") as caught:
        load(write(text), words)
    assert [(problem.code, place_and_key(problem)) for problem in caught.value.problems] == [
        ("MW-CONFIG-033", "command line: loose"),
        ("MW-CONFIG-013", "run.toml: wibble"),
        ("MW-CONFIG-011", "run.toml: [optimiser]"),
        ("MW-CONFIG-013", "run.toml: parallel.tensor_model_parallel_size"),
        ("MW-CONFIG-017", "command line: checkpoint.every"),
        ("MW-CONFIG-020", "run.toml: data.sequence_length"),
        ("MW-CONFIG-020", "run.toml: pipeline.schedule"),
        ("MW-CONFIG-020", "run.toml: optimiser.learning_rate"),
        ("MW-CONFIG-020", "command line: train.device"),
        ("MW-CONFIG-037", "run.toml: batch"),
        ("MW-CONFIG-045", "run.toml: pipeline.balance"),
        ("MW-CONFIG-046", "run.toml: data.train"),
        ("MW-CONFIG-051", "command line and run.toml: optimizer.warmup_steps"),
        ("MW-CONFIG-055", "run.toml: train.validate_every"),
    ]  # and not sequence without tp, as parallel.tp was meant to be set


# Files.


def test_a_missing_file_names_the_close_ones(tmp_path: Path) -> None:
    for name in ("demo.toml", "gpt2-124m.toml", "notes.txt"):
        (tmp_path / name).write_text(SOUND)
    for name, values in (
        ("dmeo.toml", (f"{tmp_path}/dmeo.toml", f"{tmp_path}/demo.toml?")),
        ("demo", ("/demo.toml?",)),
        ("xyz", ("demo.toml, gpt2-124m.toml",)),
        ("nowhere/demo.toml", ()),
    ):
        with raises("MW-CONFIG-028", *values) as caught:
            load(tmp_path / name)
        assert len(caught.value.problems) == 1


def test_without_a_file_the_command_line_is_still_judged(tmp_path: Path) -> None:
    with raises("MW-CONFIG-028", "parallel.tp", "parallel.ttp") as caught:
        load(tmp_path / "x.toml", ["--parallel.tp=many", "--parallel.ttp=1"])
    codes = [problem.code for problem in caught.value.problems]
    assert codes == ["MW-CONFIG-028", "MW-CONFIG-013", "MW-CONFIG-020"]


def test_a_folder_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with raises("MW-CONFIG-029"):
        load(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"[data]\n\xff\xfe")
    with raises("MW-CONFIG-030", 7):
        load(tmp_path / "x.toml")


def test_a_syntax_error_has_its_line(write: Write) -> None:
    for text, values in (
        ("[parallel]\ntp = = 2\n", ("run.toml:2", "tp = = 2")),
        ("[parallel]\ntp = 2\ntp = 3\n", ("run.toml:3", "tp = 3")),
        ('[run]\nname = "x', ("run.toml",)),
    ):
        with raises("MW-CONFIG-031", *values):
            load(write(text))


def test_the_lines_of_keys_are_found_in_time_linear_in_the_text() -> None:
    """A line of a long string that begins as a header and has 200,000 blanks."""
    start_s = time.process_time()
    assert toml_lines(f"[ run ]\nname = '''x\n[{' ' * 200_000}\n'''\n[train] # x\nsteps = 0\n") == {
        "run.name": 2,
        "train.steps": 6,
    }
    assert time.process_time() - start_s < 5
