"""What a configuration refuses: a row has what is written, the code, and the values in the message.

The texts of the codes are in tests/golden/errors/config.txt.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import load
from meshwright_launch.cli import main
from tests.support.errors import raises

SOUND = """
[data]
train = "corpus/train"
[batch]
micro_batch_size = 2
chunks = 4
"""
DEMO = "configs/demo.toml"
INTEGER = "a whole number, at least 1"
BETAS = "a list of 2, each a number, at least 0 and less than 1"

FILES = [
    # a value of a wrong type or out of bounds: the key, the value, what is allowed, what was meant
    ("[parallel]\npp = 2.0", "MW-CONFIG-020", "parallel.pp = 2.0", INTEGER),
    ('[parallel]\npp = "2"', "MW-CONFIG-020", 'parallel.pp = "2"', INTEGER),
    ("[parallel]\npp = 0", "MW-CONFIG-020", "parallel.pp = 0", INTEGER),
    ("[parallel]\npp = true", "MW-CONFIG-018", "parallel.pp = true", INTEGER),
    ("[parallel]\nzero = true", "MW-CONFIG-018", "parallel.zero = true", "0, 1, 2 or 3"),
    ("[parallel]\nzero = 4", "MW-CONFIG-020", "parallel.zero = 4", "0, 1, 2 or 3"),
    ("[parallel]\ndp = 0", "MW-CONFIG-020", "parallel.dp = 0", INTEGER, '"auto" or -1'),
    ('[parallel]\ndp = "outo"', "MW-CONFIG-020", '"outo"', 'did you mean "auto"?'),
    ("[parallel]\nsequence = 1", "MW-CONFIG-020", "parallel.sequence = 1", "true or false"),
    ('[parallel]\nsequence = "True"', "MW-CONFIG-020", '"True"', "did you mean true?"),
    ('[pipeline]\nschedule = "1f1bb"', "MW-CONFIG-020", '"dualpipe_v"', 'did you mean "1f1b"?'),
    ('[train]\ndtype = "fp32"', "MW-CONFIG-020", '"float16"', 'did you mean "float32"?'),
    ('[train]\ndevice = "quantum"', "MW-CONFIG-020", '"quantum"', '"auto", "cpu" or "cuda"'),
    ("[optimizer]\nlearning_rate = 0", "MW-CONFIG-020", "learning_rate = 0", "greater than 0"),
    ("[optimizer]\nlearning_rate = inf", "MW-CONFIG-019", "learning_rate = inf", "greater than 0"),
    ("[optimizer]\nbetas = [0.9, 1.0]", "MW-CONFIG-020", "[0.9, 1.0]", BETAS),
    ("[optimizer]\nbetas = [0.9]", "MW-CONFIG-020", "[0.9]", BETAS),
    ("[pipeline]\nbalance = [1, 0]", "MW-CONFIG-020", "[1, 0]", '"layers"', INTEGER),
    ('[run]\nname = "../x"', "MW-CONFIG-020", '"../x"', "a letter or digit first"),
    ('[model]\nbuilder = "m.gpt2"', "MW-CONFIG-020", '"m.gpt2"', '"my_package.my_module:build"'),
    ("[run]\nname = 2024-01-01", "MW-CONFIG-019", "run.name = 2024-01-01"),
    ("[model.options]\nx = [1.0, nan]", "MW-CONFIG-019", "model.options = {x = [1.0, nan]}"),
    ("[train.steps]\nx = 1", "MW-CONFIG-020", "train.steps = {x = 1}", INTEGER),
    # a key or section that does not exist
    ("[parallel]\ntpp = 2", "MW-CONFIG-013", "cp_order", "did you mean parallel.tp?"),
    ("[parallel]\nxyzzy = 2", "MW-CONFIG-013", "parallel.xyzzy = 2", "ep_across_nodes"),
    ("[train]\nlearning_rate = 2", "MW-CONFIG-013", "did you mean optimizer.learning_rate?"),
    ("[Train]\nsteps = 2", "MW-CONFIG-011", "[Train]", "did you mean [train]?"),
    ("[optimiser]\neps = 1e-7\nweight_decay = 0.0", "MW-CONFIG-011", "did you mean [optimizer]?"),
    ("[wibble]\nwobble = 1", "MW-CONFIG-013", "wibble.wobble = 1", '"wibble"', "tracking"),
    ("[[parallel]]\ntp = 1", "MW-CONFIG-012", "parallel = [{tp = 1}]", "parallel.KEY"),
    # keys that contradict each other
    ("[optimizer]\nwarmup_steps = 200", "MW-CONFIG-051", "warmup_steps = 200", "at most 100"),
    ("[optimizer]\nmin_learning_rate = 0.1", "MW-CONFIG-052", 0.1, "at most 0.0003"),
    (
        "[checkpoint]\nkeep_every = 150\nevery = 100",
        *("MW-CONFIG-049", "keep_every = 150", "choose 300", "checkpoint.every = 50"),
    ),
    ("[checkpoint]\nkeep_every = 100", "MW-CONFIG-049", "choose checkpoint.every = 100"),
    (
        '[optimizer]\nmin_learning_rate = 1e-5\nschedule = "constant"',
        *("MW-CONFIG-053", "min_learning_rate = 1e-05", '"constant"', '"wsd"'),
    ),
    ("[optimizer]\ndecay_steps = 10", "MW-CONFIG-054", '"cosine"', '"wsd"'),
    ('[optimizer]\nschedule = "wsd"\nwarmup_steps = 10', "MW-CONFIG-054", "from 1 to 90"),
    (
        '[optimizer]\nschedule = "wsd"\nwarmup_steps = 60\ndecay_steps = 50',
        *("MW-CONFIG-054", "warmup_steps 60", "decay_steps 50", 110, "train.steps 100"),
    ),
    ("[train]\nvalidate_every = 10", "MW-CONFIG-055", "train.validate_every = 10"),
    (
        "[train]\nvalidate_every = 10\nvalidate_steps = 3",
        *("MW-CONFIG-055", "train.validate_every = 10", "train.validate_steps = 3"),
    ),
    ("[parallel]\nsequence = true", "MW-CONFIG-040", "parallel.sequence", "parallel.tp = 1"),
    ("[parallel]\ntp_across_nodes = true", "MW-CONFIG-044", "tp_across_nodes = true"),
    (
        "[parallel]\npp = 3\n[pipeline]\nbalance = [4, 4]",
        *("MW-CONFIG-045", "[4, 4]", "2 stages", "parallel.pp = 3", "3 numbers"),
    ),
    (
        "[parallel]\npp = 2\ndp = 2\n[launch]\nprocesses = 8",
        *("MW-CONFIG-038", "launch.processes = 8", "dp 2 x pp 2 x tp 1 = 4"),
    ),
    (
        "[parallel]\npp = 2\ntp = 2\n[launch]\nprocesses = 6",
        *("MW-CONFIG-038", "launch.processes = 6", "pp 2 x tp 2 = 4", "4 or 8"),
    ),
]


@pytest.mark.parametrize(("text", "code", "values"), [(row[0], row[1], row[2:]) for row in FILES])
def test_a_file_is_refused(
    text: str, code: str, values: tuple[object, ...], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SOUND + text)
    with raises(code, path, *values) as caught:
        load(path)
    assert len(caught.value.problems) == 1
    has_proposal = any("did you mean" in str(value) for value in values)
    assert ("did you mean" in caught.value.message) == has_proposal


WORDS = [
    # words that are no key with a value
    (["parallel.tp=4"], "MW-CONFIG-033", "did you mean --parallel.tp=4?"),
    (["-parallel.tp=4"], "MW-CONFIG-033", "did you mean --parallel.tp=4?"),
    (["--parallel.tp=4", "8"], "MW-CONFIG-033", 8),
    (["--"], "MW-CONFIG-033", "--"),
    (["--=4"], "MW-CONFIG-033", "--=4"),
    (["--parallel.tp"], "MW-CONFIG-017", "parallel.tp", INTEGER),
    (["--parallel.tp="], "MW-CONFIG-020", 'parallel.tp = ""', INTEGER),
    (["--parallel.tp=two"], "MW-CONFIG-020", '"two"', INTEGER),
    (["--parallel.tp=4\nx=1"], "MW-CONFIG-020", '"4\\nx=1"', INTEGER),
    (["--optimizer.weight_decay=.5"], "MW-CONFIG-020", '".5"', "a number, at least 0"),
    (["--parallel.tpp=2"], "MW-CONFIG-013", "did you mean parallel.tp?"),
    (["--train.compil"], "MW-CONFIG-013", "did you mean train.compile?"),
    (["--tp=2"], "MW-CONFIG-013", "did you mean parallel.tp?"),
    (["--schedule=wsd"], "MW-CONFIG-013", "pipeline.schedule or optimizer.schedule?"),
    (["--parallel=2"], "MW-CONFIG-012", "parallel = 2"),
    (["--parallel.tp.x=2"], "MW-CONFIG-014", "parallel.tp.x = 2", INTEGER),
    (["--run.name=a\udcff"], "MW-CONFIG-019", "run.name"),
    (["--batch.global_batch=9"], "MW-CONFIG-037", DEMO, "batch.global_batch = 9"),
]


@pytest.mark.parametrize(("words", "code", "values"), [(row[0], row[1], row[2:]) for row in WORDS])
def test_words_are_refused(words: list[str], code: str, values: tuple[object, ...]) -> None:
    with raises(code, "command line", *values) as caught:
        load(DEMO, words)
    assert len(caught.value.problems) == 1


BFLOAT16 = 'train.dtype = "bfloat16"'
TOGETHER = [
    # loss scale
    ("--loss_scale.window=5", "MW-CONFIG-062", 'train.dtype = "float32"'),
    (
        "--train.dtype=float16 --loss_scale.fixed=128 --loss_scale.window=5",
        *("MW-CONFIG-062", "loss_scale.fixed = 128"),
    ),
    (
        "--train.dtype=float16 --loss_scale.initial=2 --loss_scale.minimum=4",
        *("MW-CONFIG-062", "loss_scale.initial = 2", "loss_scale.minimum = 4"),
    ),
    # float8
    ("--train.linear=fp8 --train.dtype=float16", "MW-CONFIG-095", BFLOAT16),
    ("--train.linear=fp8 --train.device=cuda", "MW-CONFIG-096", BFLOAT16),
    ('--train.fp8_keep=["head"]', "MW-CONFIG-065", 'train.linear = "fp8"'),
    # optimizers
    (
        "--optimizer.name=muon --optimizer.momentum=0.8",
        *("MW-CONFIG-073", "optimizer.muon_momentum = 0.8"),
    ),
    ("--optimizer.ns_steps=3", "MW-CONFIG-068", 'optimizer.name = "muon"'),
    ("--optimizer.name=muon --optimizer.ns_steps=0", "MW-CONFIG-020", "at least 1"),
    (
        "--optimizer.name=muon --optimizer.builder=torch.optim:RAdam",
        *("MW-CONFIG-060", "optimizer.name", "optimizer.builder"),
    ),
    # samples
    (
        "--data.eod_mask_loss --data.document_boundaries",
        *("MW-CONFIG-046", "data.eod_mask_loss", "data.document_boundaries"),
    ),
    ("--data.task=span_corruption --data.packing=documents", "MW-CONFIG-046", "data.packing"),
    (
        "--data.train= --data.builder=a:b --data.packing=documents",
        *("MW-CONFIG-046", 'data.packing = "documents"'),
    ),
    # expert parallelism
    ("--parallel.sequence --parallel.ep=3", "MW-CONFIG-076", "ep = 3", "parallel.tp = 2"),
    (
        "--parallel.tp=1 --parallel.ep=2 --optimizer.name=adafactor",
        *("MW-CONFIG-091", '"adafactor"', "parallel.ep = 2"),
    ),
    ("--parallel.ep_across_nodes", "MW-CONFIG-087", "parallel.ep = 1"),
    # context parallelism
    ("--parallel.cp=3 --parallel.dp=1", "MW-CONFIG-069", "cp = 3", "126 or 129"),
    ("--parallel.cp_order=contiguous", "MW-CONFIG-084", "cp_order", "parallel.cp = 1"),
    ("--parallel.cp_exchange=heads", "MW-CONFIG-085", "cp_exchange", "parallel.cp = 1"),
    (
        "--parallel.cp=2 --parallel.cp_head_groups=2 --parallel.cp_exchange=heads",
        *("MW-CONFIG-088", "cp_head_groups = 2", 'cp_exchange = "heads"'),
    ),
    (
        "--parallel.cp=2 --parallel.cp_order=documents",
        *("MW-CONFIG-089", "data.document_boundaries = false"),
    ),
]


@pytest.mark.parametrize(
    ("words", "code", "values"), [(row[0], row[1], row[2:]) for row in TOGETHER]
)
def test_keys_that_contradict_each_other(words: str, code: str, values: tuple[object, ...]) -> None:
    with raises(code, *values):
        load(DEMO, words.split())


UNREAD = [
    (["--adapter.alpha=3"], "MW-CONFIG-066"),
    (["--adapter.dropout=0.1"], "MW-CONFIG-066"),
    (["--adapter.init=gaussian"], "MW-CONFIG-066"),
    (["--adapter.dora=true"], "MW-CONFIG-066"),
    (["--adapter.targets=['block*']"], "MW-CONFIG-066"),
    (["--adapter.rank=3"], "MW-CONFIG-066"),
    (["--optimizer.name=sgd", "--optimizer.betas=[0.8,0.9]"], "MW-CONFIG-068"),
    (["--optimizer.name=adafactor", "--optimizer.betas=[0.8,0.9]"], "MW-CONFIG-068"),
    (["--optimizer.name=sgd", "--optimizer.eps=1e-6"], "MW-CONFIG-068"),
    (["--optimizer.block_size=64"], "MW-CONFIG-068"),
    (["--optimizer.nesterov=false"], "MW-CONFIG-068"),
    (["--optimizer.momentum=0.5"], "MW-CONFIG-068"),
    (["--optimizer.name=lion", "--optimizer.momentum=0.5"], "MW-CONFIG-068"),
    (["--optimizer.name=muon", "--optimizer.momentum=0.5"], "MW-CONFIG-073"),
    (
        ["--parallel.zero=3", "--parallel.shard_factor=1", "--parallel.reduce=microbatch"],
        "MW-CONFIG-042",
    ),
]


@pytest.mark.parametrize(("words", "code"), UNREAD)
def test_a_key_that_nothing_would_read_is_refused(words: list[str], code: str) -> None:
    with raises(code, words[-1].partition("=")[0].removeprefix("--")):
        load(DEMO, words)


READ = [
    "--optimizer.schedule=wsd --optimizer.warmup_steps=60 --optimizer.decay_steps=60",
    "--optimizer.warmup_steps=120 --optimizer.min_learning_rate=3e-4",
    "--parallel.tp=2 --parallel.sequence=true --parallel.tp_across_nodes=true",
    "--parallel.pp=2 --pipeline.balance=[4,5]",
    "--parallel.dp=auto --parallel.pp=2 --parallel.tp=2 --launch.processes=8",
    "--optimizer.clip_norm=0 --optimizer.weight_decay=0",
    "--data.validation=corpus --train.validate_every=10",
    "--optimizer.name=lion --optimizer.betas=[0.8,0.9] --optimizer.eps=1e-6",
    "--optimizer.name=muon --optimizer.betas=[0.8,0.9] --optimizer.eps=1e-6",
    "--optimizer.name=adamw8bit --optimizer.block_size=64",
    "--optimizer.name=adafactor --optimizer.eps=1e-6",
    "--optimizer.name=sgd --optimizer.momentum=0.5",
    "--parallel.zero=3 --parallel.shard_factor=2 --parallel.reduce=microbatch",
    "--parallel.cp=2 --parallel.cp_order=documents --data.document_boundaries",
    "--adapter.rank=3 --adapter.targets=['block*'] --adapter.alpha=3 --adapter.dropout=0.1",
]


@pytest.mark.parametrize("words", READ)
def test_words_go_together(words: str) -> None:
    assert load(DEMO, words.split())


@pytest.mark.parametrize("name", ["sgd", "adafactor"])
def test_mup_has_no_rule_for_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("meshwright_plan")
    words = ["--model.options.mup_base_size=32", f"--optimizer.name={name}"]
    assert main(["dryrun", DEMO, *words]) == 2
    assert "MW-MODEL-036" in capsys.readouterr().err


def test_a_load_beyond_the_experts_group(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("meshwright_plan")
    words = ["dryrun", "configs/moe-demo.toml", "--cluster", "h100", "--skew", "9"]
    assert main(words) == 2
    assert "MW-LAUNCH-090" in capsys.readouterr().err
