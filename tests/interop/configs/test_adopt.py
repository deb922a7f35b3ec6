"""Others' files become configurations that resolve and can be laid out;
no key of theirs is lost in silence.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.blueprint import draw_blueprint
from meshwright.config import load, resolve
from meshwright.errors import ConfigError
from meshwright.optimizer.learning_rate import learning_rate
from meshwright_interop.configs import (
    DropReason,
    ImportedConfig,
    convert_file,
    file_text,
    format_report,
)
from meshwright_interop.configs.torchtitan_model import LLAMA3
from tests.interop.configs import samples
from tests.support.errors import has_code
from tests.support.marks import long_row

ROOT = Path(__file__).parents[3]
FILES = {
    "torchtitan.toml": samples.TORCHTITAN,
    "pipeline.toml": samples.TORCHTITAN_PIPELINE,
    "nanotron.yaml": samples.NANOTRON,
    "gpt.txt": samples.MEGATRON_GPT,
    "llama.txt": samples.MEGATRON_LLAMA,
    "flags.txt": samples.MEGATRON_FLAGS,
}


WITHOUT = {"torchtitan.toml": {"lr_scheduler.decay_type"}}
"""Keys of the samples that have no counterpart and change the training."""


@pytest.fixture
def adopted(tmp_path: Path) -> Callable[..., ImportedConfig]:
    """A sample, read."""

    def read(
        name: str, *overrides: str, text: str | None = None, ranks: int | None = None
    ) -> ImportedConfig:
        path = tmp_path / name
        path.write_text(FILES[name] if text is None else text)
        return convert_file(path, None, overrides, ranks, WITHOUT.get(name, ()))

    return read


def values(found: ImportedConfig, *keys: str) -> dict[str, Any]:
    """Our keys, dotted, with their values."""
    tree = found.config.model_dump()
    return {key: tree[key.split(".")[0]][key.split(".", 1)[1]] for key in keys}


def reasons(found: ImportedConfig) -> dict[str, tuple[DropReason, int]]:
    """Their key -> why it stays behind, and the line it is on."""
    return {
        key.item.key: (key.reason, int(key.item.place.rpartition(":")[2])) for key in found.dropped
    }


EXPECTED: dict[str, dict[str, Any]] = {
    "torchtitan.toml": {
        "model.builder": "meshwright_models.llama:build",
        "parallel.dp": 16,
        "parallel.tp": 4,
        "parallel.sequence": True,
        "parallel.zero": 3,
        "parallel.shard_factor": 8,
        "batch.micro_batch_size": 4,
        "batch.global_batch": 512,
        "pipeline.schedule": "1f1b",
        "pipeline.recompute": "selective",
        "optimizer.learning_rate": 3e-4,
        "optimizer.min_learning_rate": 3e-5,
        "optimizer.schedule": "wsd",
        "optimizer.decay_steps": 500,
        "optimizer.warmup_steps": 200,
        "train.dtype": "bfloat16",
        "checkpoint.every": 500,
        "checkpoint.asynchronous": False,
        "tracking.log_every": 10,
        "tracking.wandb": "auto",
        "launch.timeout_s": 300.0,
        "run.directory": "./outputs",
    },
    "pipeline.toml": {
        "parallel.dp": 2,
        "parallel.pp": 2,
        "parallel.zero": 2,
        "parallel.reduce": "step",
        "pipeline.schedule": "interleaved_1f1b",
        "pipeline.interleave": 2,
        "batch.micro_batch_size": 2,
        "batch.chunks": 4,
        "pipeline.recompute": "full",
        "pipeline.recompute_layers": ["block2", "block5"],
        "optimizer.learning_rate": 8e-4,
        "optimizer.schedule": "cosine",
        "train.dtype": "float32",
        "train.validate_every": 20,
        "train.validate_steps": 5,
        "run.seed": 7,
    },
    "nanotron.yaml": {
        "parallel.dp": 2,
        "parallel.pp": 2,
        "parallel.tp": 2,
        "parallel.sequence": True,
        "parallel.zero": 1,
        "batch.micro_batch_size": 3,
        "batch.chunks": 4,
        "pipeline.recompute": "full",
        "optimizer.learning_rate": 3e-4,
        "optimizer.min_learning_rate": 1e-5,
        "optimizer.schedule": "cosine",
        "optimizer.weight_decay": 0.01,
        "run.name": "tiny_llama",
        "run.seed": 41,
        "tracking.project": "debug",
        "checkpoint.every": 10,
        "data.sequence_length": 256,
        "parallel.bucket_bytes": 25 * 2**20,
    },
    "gpt.txt": {
        "model.builder": "meshwright_models.gpt2:build",
        "parallel.dp": 4,
        "parallel.pp": 2,
        "parallel.tp": 2,
        "parallel.sequence": True,
        "parallel.zero": 1,
        "pipeline.schedule": "interleaved_1f1b",
        "pipeline.interleave": 2,
        "pipeline.recompute": "full",
        "batch.micro_batch_size": 1,
        "batch.global_batch": 32,
        "batch.ramp": (16, 16, 5000),
        "optimizer.warmup_steps": 4,
        "optimizer.betas": (0.9, 0.95),
        "train.dtype": "float16",
        "data.train": "/data/books_text_document",
    },
    "llama.txt": {
        "model.builder": "meshwright_models.llama:build",
        "parallel.dp": 4,
        "parallel.zero": 3,
        "train.steps": 500,
        "optimizer.warmup_steps": 10,
        "optimizer.schedule": "cosine",
        "batch.global_batch": 8,
    },
    "flags.txt": {
        "parallel.dp": "auto",
        "parallel.zero": 0,
        "batch.micro_batch_size": 2,
        "batch.chunks": 1,
        "optimizer.schedule": "wsd",
        "optimizer.decay_steps": 3,
        "optimizer.betas": (0.9, 0.999),
        "optimizer.weight_decay": 0.01,
        "pipeline.recompute": "selective",
        "train.dtype": "float32",
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_it_becomes(adopted: Callable[..., ImportedConfig], name: str) -> None:
    found = adopted(name, ranks=64 if name == "torchtitan.toml" else None)
    assert values(found, *EXPECTED[name]) == EXPECTED[name]


OPTIONS: dict[str, dict[str, Any]] = {
    "nanotron.yaml": {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 128,
        "init_std": 0.025,
        "max_sequence_length": 256,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "tied": True,
    },
    "llama.txt": {
        "vocab_size": 257,  # and NullTokenizer's end of document
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 192,
        "max_sequence_length": 128,
        "norm_eps": 1e-5,
        "tied": False,
        "dropout": 0.0,
        "rope_theta": 1_000_000.0,
    },
    "gpt.txt": {
        "vocab_size": 50257,
        "hidden_size": 64,
        "num_layers": 8,
        "num_heads": 8,
        "ffn_size": 256,
        "max_sequence_length": 128,
        "norm_eps": 1e-5,
        "tied": True,
        "dropout": 0.1,
        "init_std": 0.006,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_model(adopted: Callable[..., ImportedConfig], name: str) -> None:
    assert adopted(name).config.model.options == OPTIONS[name]


@pytest.mark.parametrize("flavor", ["8B", "70B", "405B"])
def test_sizes_of_torchtitan_are_those_of_the_paper(flavor: str) -> None:
    own = load(ROOT / f"configs/llama3-{flavor.lower()}.toml").model.options
    assert LLAMA3[flavor]._asdict() == {key: own[key] for key in LLAMA3[flavor]._asdict()}


@pytest.mark.parametrize(
    "name",
    [
        long_row("pipeline.toml"),
        "nanotron.yaml",
        long_row("gpt.txt"),
        long_row("llama.txt"),
        "flags.txt",
    ],
)
def test_the_written_file_can_be_laid_out(
    adopted: Callable[..., ImportedConfig], name: str, tmp_path: Path
) -> None:
    """The file is read back equal, resolves,
    and its model is cut into stages on the meta device.
    """
    found = adopted(name)
    path = tmp_path / "ours.toml"
    path.write_text(file_text(found, name))
    tree = found.config.model_dump()
    stand_ins = [f"--{key}={tree[key.split('.')[0]][key.split('.', 1)[1]]}" for key in found.open]
    config = load(path, stand_ins)
    assert config == found.config
    blueprint = draw_blueprint(resolve(config))
    assert len(blueprint.stages) == config.parallel.pp * config.pipeline.stages_per_rank


LEFT: dict[str, dict[str, tuple[DropReason, int]]] = {
    "torchtitan.toml": {
        "model.converters": (DropReason.BY_HAND, 21),
        "lr_scheduler.decay_type": (DropReason.NONE, 31),
        "training.dataset": (DropReason.BY_HAND, 40),
        "metrics.enable_tensorboard": (DropReason.NONE, 13),
        "quantize.linear.float8.enable_fsdp_float8_all_gather": (DropReason.BY_HAND, 66),
        "metrics.save_tb_folder": (DropReason.NEEDLESS, 15),
    },
    "nanotron.yaml": {
        "data_stages": (DropReason.BY_HAND, 6),
        "model.model_config.rope_interleaved": (DropReason.DIFFERS, 39),
        "tokenizer.tokenizer_name_or_path": (DropReason.BY_HAND, 75),
    },
    "gpt.txt": {
        "--recompute-num-layers": (DropReason.BY_HAND, 30),
        "--split": (DropReason.BY_HAND, 34),
        "--save": (DropReason.NEEDLESS, 35),
    },
    "llama.txt": {
        "--fp8-format": (DropReason.BY_HAND, 16),
        "--mock-data": (DropReason.BY_HAND, 17),
    },
    "flags.txt": {"--no-such-flag-there-is": (DropReason.UNKNOWN, 4)},
}


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_behind_is_told_with_reason_and_line(
    adopted: Callable[..., ImportedConfig], name: str
) -> None:
    found = reasons(adopted(name))
    assert {key: found.get(key) for key in LEFT[name]} == LEFT[name]


WEIGHTED = [{"path": "/d/a", "weight": 0.3}, {"path": "/d/b", "weight": 7.0}]


@pytest.mark.parametrize(
    ("words", "train"),
    [
        ("--data-path /d/a", "/d/a"),
        ("--data-path 1.0 /d/a", "/d/a"),
        ("--data-path 0.3 /d/a 7 /d/b", WEIGHTED),
        ("--train-data-path 0.3 /d/a 7 /d/b", WEIGHTED),
        ("--data-path /d/a /d/b", None),
        ("--data-path 0.3 /d/a 0 /d/b", None),
        ("--data-path 0.3 /d/a nan /d/b", None),
        ("--data-path 0.3 /d/a 0.7", None),
    ],
)
def test_weighted_corpora_come_along(
    adopted: Callable[..., ImportedConfig], words: str, train: Any
) -> None:
    found = adopted("flags.txt", text=f"{words} {FILES['flags.txt']}")
    assert found.config.model_dump()["data"]["train"] == (train or "runs/data/corpus/train")
    assert ("data-path" in "".join(reasons(found))) == (train is None)


def test_documents_that_are_kept_apart_stay_apart(adopted: Callable[..., ImportedConfig]) -> None:
    """Attention, positions and labels here go together; what asks for one of them is told so."""
    both = "--reset-position-ids --reset-attention-mask "
    apart = {"data.document_boundaries": True, "data.eod_mask_loss": False}
    for words in (both, f"{both}--eod-mask-loss "):
        found = adopted("flags.txt", text=words + FILES["flags.txt"])
        assert values(found, *apart) == apart and not [
            key for key in reasons(found) if "reset" in key
        ]
    one = adopted("flags.txt", text="--reset-position-ids --eod-mask-loss " + FILES["flags.txt"])
    assert values(one, *apart) == {"data.document_boundaries": False, "data.eod_mask_loss": True}
    assert reasons(one)["--reset-position-ids"] == (DropReason.BY_HAND, 1)
    flex = adopted("torchtitan.toml", text=FILES["torchtitan.toml"].replace('"8B"', '"8B_flex"'))
    assert values(flex, "data.document_boundaries") == {"data.document_boundaries": True}
    mask = FILES["nanotron.yaml"].replace(
        "    hidden_act: silu", "    hidden_act: silu\n    _use_doc_masking: true"
    )
    assert values(adopted("nanotron.yaml", text=mask), "data.document_boundaries")[
        "data.document_boundaries"
    ]
    assert not adopted("nanotron.yaml").config.data.document_boundaries


def test_context_parallelism_comes_along(adopted: Callable[..., ImportedConfig]) -> None:
    """Of torchtitan and Megatron-LM the data-parallel degree is the ranks that cp leaves."""
    keys = ("parallel.dp", "parallel.cp", "parallel.cp_exchange", "parallel.shard_factor")
    titan = FILES["torchtitan.toml"].replace(
        "context_parallel_degree = 1", "context_parallel_degree = 2"
    )
    assert tuple(values(adopted("torchtitan.toml", text=titan, ranks=64), *keys).values()) == (
        8,
        2,
        "keys",
        8,
    )
    flags = "--context-parallel-size 2 --cp-comm-type a2a --sequence-parallel " + FILES["flags.txt"]
    megatron, without = (
        values(adopted("flags.txt", text=text, ranks=64), *keys)
        for text in (flags, FILES["flags.txt"])
    )
    assert megatron["parallel.dp"] * 2 == without["parallel.dp"]
    assert (megatron["parallel.cp"], megatron["parallel.cp_exchange"]) == (2, "heads")
    tron = FILES["nanotron.yaml"].replace("  expert_parallel_size: 1", "  context_parallel_size: 2")
    assert values(adopted("nanotron.yaml", text=tron), *keys)["parallel.cp"] == 2


@pytest.mark.parametrize(
    ("name", "line", "key"),
    [
        ("torchtitan.toml", "[training]\nnever_heard_of = 3\n", "training.never_heard_of = 3"),
        ("nanotron.yaml", "tokens:\n  never_heard_of: 3\n", "tokens.never_heard_of = 3"),
        ("flags.txt", "--never-heard-of 3 ", "--never-heard-of 3"),
    ],
)
def test_an_unknown_key_is_listed(
    adopted: Callable[..., ImportedConfig], name: str, line: str, key: str
) -> None:
    head = line.split("\n")[0] + ("\n" if "\n" in line else "")
    text = FILES[name].replace(head, line) if "\n" in line else line + FILES[name]
    found = adopted(name, text=text)
    assert any(each.item.written == key and "unknown key" in each.note for each in found.dropped)
    assert key in format_report(found)


def theirs_torchtitan(step: int, steps: int, warmup: int, decay: int) -> float:
    """``linear_warmup_stable_decay`` of torchtitan's lr_scheduler.py, cosine,
    as a share of the peak.
    """
    stable = steps + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step + 1 - warmup - stable) / decay))


def test_the_learning_rate_is_torchtitans(adopted: Callable[..., ImportedConfig]) -> None:
    """But for one step: theirs has a last step beyond the end,
    in which it would reach its lowest.
    """
    config = adopted("pipeline.toml").config
    ours = [learning_rate(config.optimizer, step, 40) for step in range(40)]
    theirs = [8e-4 * theirs_torchtitan(step, 40, 4, 36) for step in range(41)]
    assert ours[:4] == pytest.approx(theirs[:4]) and ours[4:] == pytest.approx(
        theirs[5:], abs=1e-12
    )


@pytest.mark.parametrize("end", [300, 400, 500, 700])
def test_the_learning_rate_is_megatrons(adopted: Callable[..., ImportedConfig], end: int) -> None:
    """``get_lr`` of its optimizer_param_scheduler, which counts the steps done: warm-up,
    a cosine to ``end``, flat.
    """
    text = FILES["gpt.txt"].replace("--lr-decay-iters 400", f"--lr-decay-iters {end}")
    found = adopted("gpt.txt", text=text)
    config = found.config
    assert config.train.steps == 500 and "--lr-decay-iters" not in reasons(found)
    warmup, low, peak = config.optimizer.warmup_steps, 6e-6, 6e-5
    for step in range(500):
        done = step + 1
        share = min(1.0, (done - warmup) / (end - warmup))
        theirs = (
            peak * done / warmup
            if done <= warmup
            else low + (peak - low) * 0.5 * (1 + math.cos(math.pi * share))
        )
        assert learning_rate(config.optimizer, step, 500) == pytest.approx(theirs, rel=1e-9)


def test_a_key_of_ours_goes_on_top(adopted: Callable[..., ImportedConfig]) -> None:
    found = adopted("nanotron.yaml", "--run.name=mine", "--parallel.zero=3")
    assert values(found, "run.name", "parallel.zero") == {"run.name": "mine", "parallel.zero": 3}
    assert not any(line.startswith("run.name") for line in found.decided)


def test_a_model_of_ones_own(adopted: Callable[..., ImportedConfig]) -> None:
    """What no builder here makes is refused, unless the command line names one."""
    text = FILES["gpt.txt"].replace("--num-layers 8", "--num-layers 8 --num-experts 8")
    with pytest.raises(
        ConfigError,
        match=r"gpt.txt:2: --num-experts 8: ",
        check=has_code("MW-INTEROP-030"),
    ):
        adopted("gpt.txt", text=text)
    found = adopted("gpt.txt", "--model.builder=mine:build", "--model.options.experts=8", text=text)
    assert found.config.model.builder == "mine:build" and found.config.model.options == {
        "experts": 8
    }
    assert values(found, "parallel.tp", "optimizer.learning_rate")["parallel.tp"] == 2


@pytest.mark.parametrize(
    ("name", "text", "code", "shown"),
    [
        ("a.py", "x = 1", "001", "a.py"),
        ("a.toml", "[run]\nname = 'x'\n[batch]\nchunks = 1\n", "003", "a.toml"),
        ("a.toml", "[model\n", "015", "a.toml"),
        ("a.toml", "", "144", "a.toml"),
        ("a.toml", "[model]\nflavor = '9B'\n", "030", 'a.toml:2: model.flavor = "9B"'),
        ("a.toml", "[model]\nname = 'deepseek_v3'\nflavor = '16B'\n", "030", "a.toml:2: model.name"),
        ("a.toml", "[training]\nsteps = 'many'\nlocal_batch_size = 1\n", "029", 'a.toml:2: training.steps = "many"'),
        ("a.toml", "[training]\nsteps = 2.5\nlocal_batch_size = 1\n", "029", "training.steps = 2.5"),
        ("a.toml", "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 2\n"
         "[training]\nlocal_batch_size = 3\n", "027", "training.local_batch_size = 3"),
        ("a.toml", "[training]\nlocal_batch_size = 1\nbatch_size = 2\n", "089", "a.toml:3: training.batch_size = 2"),
        ("a.yaml", "a: [\n", "016", "<stream end>"),
        ("a.yaml", "- 1\n", "018", "a.yaml"),
        ("a.yaml", "a: &a\n  b: *a\n", "017", "a.yaml"),
        ("a.yaml", "a: !!python/object/apply:os.system ['true']\n", "016", "a.yaml:1"),
        ("a.yaml", "model:\n  model_config:\n    is_mamba_config: true\n", "030", "is_mamba_config"),
        ("a.json", "[1]", "018", "a.json"),
        ("a.json", "{", "016", "a.json"),
        ("a.json", "null", "018", "a.json"),
        ("a.txt", "echo hello\n", "002", "a.txt"),
        ("a.txt", "torchrun pretrain_gpt.py --bf16\n", "008", "--num-layers and --hidden-size"),
        ("a.txt", "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --normalization L1", "030", "L1"),
        ("a.txt", "torchrun pretrain_bert.py --bf16\n", "030", "a.txt:1: pretrain_bert.py"),
        ("a.txt", "torchrun train.py --train-iters 3 --vocab-file a\n", "030", "a.txt:1: train.py"),
        ("a.txt", samples.MEGATRON_FLAGS.replace("10", "-10"), None, "train.steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_error(
    tmp_path: Path, name: str, text: str, code: str | None, shown: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        convert_file(path)
    assert code is None or caught.value.code == f"MW-INTEROP-{code}"
    assert shown in str(caught.value)


def test_what_looks_like_a_secret_is_not_told(adopted: Callable[..., ImportedConfig]) -> None:
    found = adopted(
        "torchtitan.toml", text='[metrics]\nwandb_api_key = "canary-1234"\n[model]\nflavor = "8B"\n'
    )
    told = file_text(found, "x")
    assert "canary" not in told and "metrics.wandb_api_key" in told


@pytest.mark.parametrize(("is_script", "code"), [(False, 0), (True, 2)])
def test_it_needs_no_torch_and_runs_nothing(is_script: bool, code: int, tmp_path: Path) -> None:
    trace, flags = tmp_path / "ran", tmp_path / "a.txt"
    commands = f"X=$(touch {trace})\n`touch {trace}`\ntouch {trace}\n" if is_script else ""
    flags.write_text(commands + samples.MEGATRON_FLAGS)
    program = (
        "import sys\nfrom meshwright_launch.cli import main\ncode = main(['config', 'import',"
        f" {str(flags)!r}, '--out', {str(tmp_path / 'o.toml')!r}])\nassert not {{'torch', 'numpy'}}"
        " & sys.modules.keys()\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code and not trace.exists()
    if is_script:
        assert "MW-INTEROP-150" in done.stderr and not (tmp_path / "o.toml").exists()
    else:
        assert done.stderr == "" and "written: " in done.stdout
        assert load(tmp_path / "o.toml", ["--data.train=x"]).train.steps == 10
