"""What is wrong with a configuration is told completely: place, key, value, what is allowed, what was meant."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.config import Optimizer, RunConfig, load
from meshwright.config.sources import toml_lines
from meshwright.errors import ConfigError
from tests.support.errors import has_code

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
    config = load(write(SOUND + "[parallel]\npp = 2\ntp = 4\n[optimizer]\nlearning_rate = 1\nbetas = [0, 0.99]\n"))
    assert isinstance(config, RunConfig)
    assert (config.parallel.pp, config.parallel.tp, config.parallel.dp) == (2, 4, "auto")
    assert config.optimizer.learning_rate == 1.0 and isinstance(config.optimizer.learning_rate, float)
    assert config.optimizer.betas == (0.0, 0.99)
    assert config.train == RunConfig.model_fields["train"].get_default()


def test_frozen(write: Write) -> None:
    config = load(write(SOUND))
    with pytest.raises(ValueError, match="frozen"):
        config.parallel.tp = 2  # type: ignore[misc]


def test_an_empty_section_is_fine(write: Write) -> None:
    assert load(write(SOUND + "[parallel]\n[train]\n")).parallel.tp == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[parallel]\npp = "2"', 'run.toml: parallel.pp = "2" is not allowed: a whole number, at least 1'),
        ("[parallel]\npp = 2.0", "run.toml: parallel.pp = 2.0 is not allowed: a whole number, at least 1"),
        ("[parallel]\npp = 0", "run.toml: parallel.pp = 0 is not allowed: a whole number, at least 1"),
        ("[parallel]\npp = true", "run.toml: parallel.pp = true is not allowed: a whole number, at least 1"),
        ("[parallel]\nzero = true", "run.toml: parallel.zero = true is not allowed: 0, 1, 2 or 3"),
        ("[parallel]\nzero = 4", "run.toml: parallel.zero = 4 is not allowed: 0, 1, 2 or 3"),
        (
            "[parallel]\ndp = 0",
            'run.toml: parallel.dp = 0 is not allowed: a whole number, at least 1 and at most 1000000; or "auto" or -1',
        ),
        (
            '[parallel]\ndp = "outo"',
            'run.toml: parallel.dp = "outo" is not allowed: a whole number, at least 1 and at most 1000000; or "auto" '
            'or -1; did you mean "auto"?',
        ),
        ("[parallel]\nsequence = 1", "run.toml: parallel.sequence = 1 is not allowed: true or false"),
        (
            '[parallel]\nsequence = "True"',
            'run.toml: parallel.sequence = "True" is not allowed: true or false; did you mean true?',
        ),
        (
            '[pipeline]\nschedule = "1f1bb"',
            'run.toml: pipeline.schedule = "1f1bb" is not allowed: "1f1b", "gpipe", "interleaved_1f1b", "zb_h1", '
            '"zb_h2", "zb_v", "v_half", "v_min" or "dualpipe_v"; or a function of (pp, chunks, num_stages) that '
            'returns rows of actions, as "my_package.my_module:schedule"; did you mean "1f1b"?',
        ),
        (
            '[train]\ndtype = "fp32"',
            'run.toml: train.dtype = "fp32" is not allowed: "float64", "float32", "bfloat16" or '
            '"float16"; did you mean "float32"?',
        ),
        (
            '[train]\ndevice = "quantum"',
            'run.toml: train.device = "quantum" is not allowed: "auto", "cpu" or "cuda"',
        ),
        (
            "[optimizer]\nlearning_rate = 0",
            "run.toml: optimizer.learning_rate = 0 is not allowed: a number, greater than 0",
        ),
        (
            "[optimizer]\nlearning_rate = inf",
            "run.toml: optimizer.learning_rate = inf cannot be used (not a finite number): a number, greater than 0",
        ),
        (
            "[optimizer]\nbetas = [0.9, 1.0]",
            "run.toml: optimizer.betas = [0.9, 1.0] is not allowed: a list of 2, each a number, at least 0 and less "
            "than 1",
        ),
        (
            "[optimizer]\nbetas = [0.9]",
            "run.toml: optimizer.betas = [0.9] is not allowed: a list of 2, each a number, at least 0 and less than 1",
        ),
        (
            "[pipeline]\nbalance = [1, 0]",
            'run.toml: pipeline.balance = [1, 0] is not allowed: "time", "parameters" or "layers"; or a list, each a '
            "whole number, at least 1",
        ),
        (
            '[run]\nname = "../x"',
            'run.toml: run.name = "../x" is not allowed: letters, digits, dots, dashes and underscores, a letter or '
            "digit first: it names a directory",
        ),
        (
            '[model]\nbuilder = "meshwright_models.gpt2"',
            'run.toml: model.builder = "meshwright_models.gpt2" is not allowed: a module and a function in it, as in '
            '"my_package.my_module:build"',
        ),
        ("[run]\nname = 2024-01-01", "run.toml: run.name = 2024-01-01 cannot be used (a date is not allowed; "),
        ("[model.options]\nx = [1.0, nan]", "run.toml: model.options = {x = [1.0, nan]} cannot be used (not a finite"),
    ],
)
def test_a_value_that_is_not_allowed(write: Write, text: str, line: str) -> None:
    assert the_problem(write(SOUND + text)).startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[parallel]\ntpp = 2",
            "run.toml: parallel.tpp = 2: there is no such key in [parallel] (dp, pp, tp, cp, cp_order, cp_exchange, "
            "cp_head_groups, ep, sequence, zero, shard_factor, reduce, offload, offload_directory, bucket_bytes, "
            "tp_across_nodes, ep_across_nodes); did you mean parallel.tp?",
        ),
        (
            "[parallel]\nxyzzy = 2",
            "run.toml: parallel.xyzzy = 2: there is no such key in [parallel] (dp, pp, tp, cp, cp_order, cp_exchange, "
            "cp_head_groups, ep, sequence, zero, shard_factor, reduce, offload, offload_directory, bucket_bytes, "
            "tp_across_nodes, ep_across_nodes)",
        ),
        (
            "[train]\nlearning_rate = 2",
            "run.toml: train.learning_rate = 2: there is no such key in [train] (steps, dtype, linear, fp8_keep, "
            "device, compile, validate_every, validate_steps, gc_every, routing, routing_directory, callbacks); "
            "did you mean optimizer.learning_rate?",
        ),
        (
            "[Train]\nsteps = 2",
            "run.toml: [Train]: there is no such section; did you mean [train]?",
        ),
        (
            "[optimiser]\neps = 1e-7\nweight_decay = 0.0",
            "run.toml: [optimiser]: there is no such section; did you mean [optimizer]?",
        ),
        (
            "[wibble]\nwobble = 1",
            'run.toml: wibble.wobble = 1: there is no section "wibble" (run, model, adapter, data, batch, parallel, '
            "pipeline, optimizer, loss_scale, train, checkpoint, watch, tracking, launch)",
        ),
        ("[[parallel]]\ntp = 1", "run.toml: parallel = [{tp = 1}]: this is a section; its keys are set one by one"),
        ("[train.steps]\nx = 1", "run.toml: train.steps = {x = 1} is not allowed: a whole number, at least 1"),
    ],
)
def test_a_key_that_there_is_not(write: Write, text: str, line: str) -> None:
    found = the_problem(write(SOUND + text))
    assert found.startswith(line) and ("did you mean" in found) == ("did you mean" in line)


def test_fsdp_s_words_are_taken_and_told(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    for word, zero in (("no_shard", 0), ("SHARD_GRAD_OP", 2), ("full_shard", 3)):
        assert load(write(SOUND + f'[parallel]\nzero = "{word}"')).parallel.zero == zero
        assert f'run.toml: parallel.zero = "{word}" is zero = {zero} here' in capsys.readouterr().err
    of_a_node = load(write(SOUND + '[parallel]\nzero = "hybrid_shard"\nshard_factor = 2'))
    assert (of_a_node.parallel.zero, of_a_node.parallel.shard_factor) == (3, 2)
    assert the_problem(write(SOUND + '[parallel]\nzero = "hybrid_shard"')) == (
        'run.toml: parallel.zero = "hybrid_shard" needs parallel.shard_factor, the number of replicas in a node'
    )


def test_a_key_outside_of_the_sections(write: Write) -> None:
    assert the_problem(write("tp = 2\n" + SOUND)) == (
        "run.toml: tp = 2: there is no such key outside of the sections; did you mean parallel.tp?"
    )
    assert the_problem(write("wibble = 2\n" + SOUND)).endswith(
        "there is no such key outside of the sections (run, model, adapter, data, batch, parallel, pipeline, "
        "optimizer, loss_scale, train, checkpoint, watch, tracking, launch)"
    )


def test_a_missing_key(write: Write) -> None:
    assert the_problem(write("[batch]\nchunks = 1\nglobal_batch = 8")) == (
        "run.toml: data.train is missing: the path of a .bin/.idx pair without the suffix (`meshwright data` makes "
        'one), or set data.builder = "module:function" for a dataset of your own'
    )


def test_one_mistake_is_told_once(write: Write) -> None:
    # A misspelled required key is not missing as well, and a misspelled batch number is not one too few.
    text = '[data]\ntrian = "x"\n[batch]\nmicro_batch = 4\nchunks = 2\n'
    assert [line.split(":")[1].split("=")[0].strip() for line in problems(write(text))] == [
        "data.trian",
        "batch.micro_batch",
    ]
    # The same for a section: its keys are judged as if it were spelled right.
    found = problems(write("[dat]\ntrain = 5\n[batch]\nchunks = 2\nglobal_batch = 8\n"))
    assert found == [
        "run.toml: [dat]: there is no such section; did you mean [data]?",
        "run.toml: dat.train = 5 is not allowed: the path of a .bin/.idx pair, without the suffix; or a list such as "
        '[{path = "a", weight = 3}, {path = "b", weight = 1}]',
    ]


def test_a_value_that_is_not_allowed_breaks_no_rule_besides(write: Write) -> None:
    found = the_problem(write(SOUND + '[optimizer]\nwarmup_steps = 200\n[train]\nsteps = "many"'))
    assert found.startswith('run.toml: train.steps = "many" is not allowed')


def test_in_code_too_there_are_no_infinities() -> None:
    with pytest.raises(ValueError, match="finite"):
        Optimizer(learning_rate=float("inf"))


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
    found = problems(write(text), "--optimizer.warmup_steps=20", "--train.device=gpu", "loose", "--checkpoint.every")
    told = "\n".join(found)
    for piece in (
        "command line: loose belongs to no key",
        "run.toml: wibble = 1: there is no such key",
        "run.toml: data.sequence_length = 0 is not allowed",
        "run.toml: data.train is missing",
        "run.toml: [optimiser]: there is no such section",
        'run.toml: optimiser.learning_rate = "fast" is not allowed',
        "run.toml: parallel.tensor_model_parallel_size = 2: there is no such key; here this is parallel.tp",
        "run.toml: batch: micro_batch_size 4 x chunks 2 x dp 2 = 16, not global_batch 20",
        "run.toml: pipeline.balance = [3, 3] names the layers of 2 stages, but parallel.pp = 1",
        'run.toml: pipeline.schedule = "zigzag" is not allowed',
        "run.toml: train.validate_every = 5: no effect",
        "command line and run.toml: optimizer.warmup_steps = 20 is more than train.steps = 10",
        'command line: train.device = "gpu" is not allowed: "auto", "cpu" or "cuda"; did you mean "cuda"?',
        "command line: checkpoint.every needs a value: a whole number, at least 0",
    ):
        assert piece in told, (piece, found)
    assert len(found) == 14, found  # and sequence without tp is not told: parallel.tp was meant to be set


# What must hold between keys.


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[optimizer]\nwarmup_steps = 200\n[train]\nsteps = 100",
            "run.toml: optimizer.warmup_steps = 200 is more than train.steps = 100: at most 100 is allowed",
        ),
        (
            "[optimizer]\nmin_learning_rate = 0.1\nlearning_rate = 0.01",
            "run.toml: optimizer.min_learning_rate = 0.1 is above optimizer.learning_rate = 0.01: at most 0.01 is "
            "allowed",
        ),
        (
            "[checkpoint]\nkeep_every = 150\nevery = 100",
            "run.toml: checkpoint.keep_every = 150 is not a multiple of checkpoint.every = 100: few of those steps "
            "would be saved at all; choose 300, or checkpoint.every = 50",
        ),
        (
            "[checkpoint]\nkeep_every = 100",
            "run.toml: checkpoint.keep_every = 100 has no effect with checkpoint.every = 0, which saves at no such "
            "step: leave it out, or choose checkpoint.every = 100",
        ),
        (
            '[optimizer]\nmin_learning_rate = 1e-5\nschedule = "constant"',
            'run.toml: optimizer.min_learning_rate = 1e-05 has no effect with optimizer.schedule = "constant"',
        ),
        (
            "[optimizer]\ndecay_steps = 10",
            'run.toml: optimizer.decay_steps = 10 has no effect with optimizer.schedule = "cosine": leave it out, or '
            'choose optimizer.schedule = "wsd"',
        ),
        (
            '[optimizer]\nschedule = "wsd"\nwarmup_steps = 10',
            'run.toml: optimizer.schedule = "wsd" needs optimizer.decay_steps, the number of last steps in which the '
            "learning rate falls, from 1 to 90",
        ),
        (
            '[optimizer]\nschedule = "wsd"\nwarmup_steps = 60\ndecay_steps = 50',
            "run.toml: optimizer.warmup_steps 60 + optimizer.decay_steps 50 = 110, more than train.steps 100",
        ),
        (
            "[train]\nvalidate_every = 10",
            "run.toml: train.validate_every = 10: no effect, as there is no data.validation",
        ),
        (
            "[train]\nvalidate_every = 10\nvalidate_steps = 3",
            "run.toml: train.validate_every = 10 and train.validate_steps = 3: no effect, as there is no data.valid",
        ),
        ("[parallel]\nsequence = true", "run.toml: parallel.sequence = true has no effect with parallel.tp = 1"),
        (
            "[parallel]\ntp_across_nodes = true",
            "run.toml: parallel.tp_across_nodes = true has no effect with parallel.tp = 1",
        ),
        (
            "[parallel]\npp = 3\n[pipeline]\nbalance = [4, 4]",
            "run.toml: pipeline.balance = [4, 4] names the layers of 2 stages, but parallel.pp = 3: give 3 numbers",
        ),
        (
            "[parallel]\npp = 2\ndp = 2\n[launch]\nprocesses = 8",
            "run.toml: launch.processes = 8, but dp 2 x pp 2 x tp 1 = 4 ranks",
        ),
        (
            "[parallel]\npp = 2\ntp = 2\n[launch]\nprocesses = 6",
            "run.toml: launch.processes = 6 is not a multiple of pp 2 x tp 2 = 4, the ranks of one replica: set 4 or 8",
        ),
    ],
)
def test_keys_that_contradict_each_other(write: Write, text: str, line: str) -> None:
    assert the_problem(write(SOUND + text)).startswith(line)


@pytest.mark.parametrize(
    "text",
    [
        '[optimizer]\nschedule = "wsd"\nwarmup_steps = 60\ndecay_steps = 40',
        "[optimizer]\nwarmup_steps = 100\nmin_learning_rate = 3e-4",
        "[parallel]\ntp = 2\nsequence = true\ntp_across_nodes = true",
        "[parallel]\npp = 2\n[pipeline]\nbalance = [4, 5]",
        "[parallel]\npp = 2\ntp = 2\n[launch]\nprocesses = 8",
        "[parallel]\npp = 2\ndp = 3\n[launch]\nprocesses = 6",
        "[optimizer]\nclip_norm = 0\nweight_decay = 0",
    ],
)
def test_keys_that_go_together(write: Write, text: str) -> None:
    load(write(SOUND + text))


def test_validation_data_makes_validation_keys_fine(write: Write) -> None:
    text = SOUND.replace("[batch]", 'validation = "corpus/validation"\n[batch]')
    assert load(write(text + "[train]\nvalidate_every = 10")).train.validate_every == 10


# Files.


def test_a_missing_file_names_the_close_ones(tmp_path: Path) -> None:
    for name in ("demo.toml", "gpt2-124m.toml", "notes.txt"):
        (tmp_path / name).write_text(SOUND)
    meant = f"{tmp_path}/dmeo.toml: there is no such file; did you mean {tmp_path}/demo.toml?"
    with pytest.raises(ConfigError, check=has_code("MW-CONFIG-028")) as caught:
        load(tmp_path / "dmeo.toml")
    assert [problem.message for problem in caught.value.problems] == [meant]
    with pytest.raises(ConfigError, match=r"did you mean .*/demo\.toml\?", check=has_code("MW-CONFIG-028")):
        load(tmp_path / "demo")
    with pytest.raises(
        ConfigError, match=r"xyz: there is no such file; in .* there is demo\.toml, gpt2-124m\.toml \[MW-CONFIG-028\]$"
    ):
        load(tmp_path / "xyz")
    with pytest.raises(ConfigError, match="there is no such file, nor the folder", check=has_code("MW-CONFIG-028")):
        load(tmp_path / "nowhere" / "demo.toml")


def test_without_a_file_the_command_line_is_still_judged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("MW-CONFIG-028")) as caught:
        load(tmp_path / "x.toml", ["--parallel.tp=many", "--parallel.ttp=1"])
    assert [problem.message.partition(":")[0] for problem in caught.value.problems] == [
        f"{tmp_path}/x.toml",
        "command line",
        "command line",
    ]


def test_a_folder_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a folder; name a TOML file in it", check=has_code("MW-CONFIG-029")):
        load(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"[data]\n\xff\xfe")
    with pytest.raises(ConfigError, match=r"not a text file in UTF-8 \(byte 7\)", check=has_code("MW-CONFIG-030")):
        load(tmp_path / "x.toml")


def test_a_syntax_error_has_its_line(write: Write) -> None:
    assert the_problem(write("[parallel]\ntp = = 2\n")) == (
        "run.toml:2: not valid TOML, invalid value, in the line: tp = = 2"
    )
    assert the_problem(write("[parallel]\ntp = 2\ntp = 3\n")).startswith(
        "run.toml:3: not valid TOML, cannot overwrite a value, in the line: tp = 3"
    )
    assert "not valid TOML" in the_problem(write('[run]\nname = "x'))


def test_the_lines_of_keys_are_found_in_time_linear_in_the_text() -> None:
    """A line of a long string that begins as a header and has 200,000 blanks."""
    start_s = time.process_time()
    assert toml_lines(f"[ run ]\nname = '''x\n[{' ' * 200_000}\n'''\n[train] # x\nsteps = 0\n") == {
        "run.name": 2,
        "train.steps": 6,
    }
    assert time.process_time() - start_s < 5
