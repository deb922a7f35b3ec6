"""`meshwright convert` as users have it: what it says, what it refuses, no socket,
and the memory of one tensor.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshwright.checkpoint import find
from meshwright.config import load, parse, write_snapshot
from meshwright.data.prepare.stdlib import prepare_files
from meshwright.run.directory import run_directory
from meshwright_interop.huggingface.convert.exporting import export_checkpoint
from meshwright_interop.huggingface.convert.families import FAMILIES
from meshwright_launch.arguments import build_parser
from meshwright_launch.arguments.common import size
from meshwright_launch.cli import main, split_overrides
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import initial_weights, layout, run_config
from tests.interop.huggingface import theirs
from tests.interop.huggingface.conftest import Written
from tests.interop.huggingface.test_convert_families import files, same_bits
from tests.support.plain import load_plain

Write = Callable[..., Written]


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a connection, or asks for an address, fails the test."""

    def blocked(*args: Any, **_: Any) -> None:
        raise AssertionError(f"a connection was opened: {args}")

    for name in ("connect", "connect_ex", "bind", "sendto"):
        monkeypatch.setattr(socket.socket, name, blocked)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, blocked)


def test_no_connection_is_opened_on_the_way_in_or_out(
    written: Write, tmp_path: Path, no_sockets: None
) -> None:
    for at, name in enumerate(("gpt2", "llama 3.1", "t5")):
        run, out = tmp_path / f"run{at}", tmp_path / f"out{at}"
        path = written(name).path
        assert main(["convert", "--from", "hf", str(path), str(run)]) == 0
        assert main(["convert", str(run), "--to", "hf", str(out)]) == 0
        same_bits(files(out), files(path))
    with pytest.raises(AssertionError, match="a connection was opened"):
        socket.create_connection(("localhost", 9))


def test_what_it_says_and_what_comes_next(written: Write, tmp_path: Path, capsys: Any) -> None:
    path, run, out = written("llama 3.1").path, tmp_path / "runs" / "mine", tmp_path / "out"
    assert (
        main(["convert", "--from", "hf", str(path), str(run), "--parallel.pp=2", "--train.steps=7"])
        == 0
    )
    said = capsys.readouterr().out
    assert (
        f"{path}: LlamaForCausalLM, meshwright_models.llama:build\n" in said
        and "rope_scaling_factor 8.0" in said
    )
    assert f"{run}/checkpoints/step-00000000: 21 tensors, " in said
    assert f"data.train = {run}/data/train is still missing" in said
    assert (
        f"meshwright data prepare TEXT --tokenizer {run}/huggingface/tokenizer.json --out"
        f" {run}/data\n" in said
    )
    assert f"fine-tune with:  meshwright train {run}/config.toml\n" in said
    config = load(run / "config.toml")
    assert (config.parallel.pp, config.train.steps, config.parallel.dp) == (2, 7, "auto")
    assert run_directory(config.run) == run
    assert parse((run / "resolved.json").read_text()).model == config.model

    assert main(["checkpoint", "verify", str(run)]) == 0
    assert main(["checkpoint", "show", str(run), "--step", "0"]) == 0
    assert "weights       21 tensors" in capsys.readouterr().out
    arguments = [
        "convert",
        str(run),
        "--to",
        "hf",
        str(out),
        "--shard-size",
        "30kB",
        "--dtype",
        "bfloat16",
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        f"{run}/checkpoints/step-00000000: step 0\n{out}: LlamaForCausalLM, 30 tensors, bfloat16\n"
    )
    assert (
        "  model-00001-of-00002.safetensors" in said
        and f"AutoModelForCausalLM.from_pretrained('{out}')" in said
    )
    same_bits(files(out), {name: tensor.bfloat16() for name, tensor in files(path).items()})
    sizes = {file.name: file.stat().st_size for file in out.glob("*.safetensors")}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == sizes.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in files(out).values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["RUN"], "one of the arguments --from --to is required"),
        (["--from", "hf", "PATH", "NEW", "--step", "3"], "--step without effect with --from"),
        (
            ["RUN", "--to", "hf", "NEW", "--train.steps=3"],
            "--to takes no configuration keys: --train.steps=3",
        ),
        (["RUN", "--to", "gguf", "NEW"], "'gguf' is not a known format of models"),
        (
            ["RUN", "--to", "hf", "NEW", "--shard-size", "much"],
            "'much' is not a size, such as 500MB, 5GB or 2GiB",
        ),
        (
            ["RUN", "--to", "hf", "NEW", "--step", "3"],
            "has no checkpoint of step 3; it has those of steps 0",
        ),
        (["--from", "hf", "PATH", "NEW", "--train.stepz=3"], "did you mean"),
        (["--from", "hf", "PATH", "NEW", "--model.options.dropuot=0.1"], "did you mean dropout?"),
        (["--from", "hf", "PATH", "NEW", "--model.options.hidden_size=64"], "and the model needs"),
        (["--from", "hf", "PATH", "NEW", "--model.options.num_heads=0"], "num_heads=0"),
        (
            ["--from", "hf", "PATH", "NEW", "--model.options.num_layers=2"],
            "tensor transformer.h.2.attn.c_attn.bias",
        ),
        (
            ["--from", "hf", "PATH", "NEW", "--model.builder=meshwright_models.llama:build"],
            "model.builder follows from",
        ),
    ],
)
def test_what_is_refused(
    arguments: list[str], said: str, written: Write, tmp_path: Path, capsys: Any
) -> None:
    path = written("gpt2").path
    assert main(["convert", "--from", "hf", str(path), str(tmp_path / "run")]) == 0
    places = {"RUN": str(tmp_path / "run"), "PATH": str(path), "NEW": str(tmp_path / "new")}
    capsys.readouterr()
    assert main(["convert", *(places.get(word, word) for word in arguments)]) == 2
    told = capsys.readouterr()
    assert said in told.err and "Traceback" not in told.err
    assert sorted(found.name for found in tmp_path.iterdir()) == ["run"]


def test_the_page_and_the_help_say_what_there_is(capsys: Any) -> None:
    """The page names every family and no other, and each of its commands is one; so does --help."""
    page = (Path(__file__).parents[3] / "docs/convert.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    told = [
        (row[1].strip(" `"), row[2].strip(" `"), row[3].strip(" `"))
        for row in rows
        if ":build" in row[3]
    ]
    assert told == [(family.model_type, family.architecture, family.builder) for family in FAMILIES]
    assert main(["convert", "--help"]) == 0
    help_ = capsys.readouterr().out
    commands = [
        line.strip()
        for line in (page + help_).splitlines()
        if line.strip().startswith("meshwright convert -")
    ]
    commands += [line.strip() for line in (page + help_).splitlines() if " --to hf models" in line]
    assert len(commands) >= 6
    for command in commands:
        words, overrides = split_overrides(command.split("  ")[0].split()[1:])
        options = build_parser().parse_args(words)
        assert (options.source is None) != (options.target is None) and (
            not overrides or options.source
        )


def test_sizes_as_people_write_them() -> None:
    sizes = {
        "5GB": 5 * 10**9,
        "500MB": 5 * 10**8,
        "2GiB": 2**31,
        "1.5k": 1500,
        "300": 300,
        "1 TiB": 2**40,
    }
    assert {text: size(text) for text in sizes} == sizes


def test_a_model_that_was_trained_here_goes_out_with_its_tokenizer(
    tmp_path: Path, pool: RankPool
) -> None:
    """A run of our own, saved by pp2 x tp2: nothing of it came from transformers,
    which opens what is written.
    """
    transformers = pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text(
        "the cat sat on the mat, and the rank sat on the node\n" * 20
    )
    (tmp_path / "more.txt").write_text("the mat sat on the cat\n" * 20)
    prepare_files(
        [tmp_path / "text.txt", tmp_path / "more.txt"],
        tmp_path / "corpus",
        280,
        validation_share=0.5,
    )
    config = run_config(
        tmp_path / "corpus", tmp_path / "runs", parallel=layout("pp2,tp2") | {"bucket_bytes": 8192}
    )
    pool.run(initial_weights, 4, config, str(run_directory(config.run)))
    out = export_checkpoint(find(run_directory(config.run))[0].path, tmp_path / "out").path
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer("the cat").input_ids
    assert tokenizer.decode(tokenizer("the cat sat").input_ids) == "the cat sat"
    said = json.loads((out / "tokenizer_config.json").read_text())
    assert said["model_input_names"] == ["input_ids", "attention_mask"], (
        "transformers 4 has a third, which GPT-2 adds"
    )
    model, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert (
        type(model).__name__ == "GPT2LMHeadModel"
        and model.config.eos_token_id == tokenizer.eos_token_id
    )
    ids = tokenizer("the cat", return_tensors="pt").input_ids
    written = model.generate(
        **tokenizer("the cat", return_tensors="pt"), max_new_tokens=9, do_sample=False
    )
    write_snapshot(run_directory(config.run), config)
    assert written.shape[1] > 4
    assert written[0].tolist() == theirs.greedy(
        load_plain(run_directory(config.run))[1], ids[0].tolist(), 9, {0}
    )


MEASURED = """
import json, sys, threading
from pathlib import Path
from meshwright_interop.huggingface.convert.importing import import_model
from meshwright_interop.huggingface.convert.exporting import export_checkpoint
import meshwright_models.llama

def bytes_of(field):
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines[field].split()[0]) * 1024

def peak_of(function, *arguments, **options):
    # memory of its own, read every 2 ms: the peak that the kernel keeps counts pages of mapped files too
    before, found, done = bytes_of("RssAnon"), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            found.append(bytes_of("RssAnon") - before)

    thread = threading.Thread(target=watch)
    thread.start()
    function(*arguments, **options)
    done.set()
    thread.join()
    return max(found)

source, small, out = map(Path, sys.argv[1:])
import_model(small, out / "warm")  # what is loaded with the first use
export_checkpoint(out / "warm/checkpoints/step-00000000", out / "warm-out")
inwards = peak_of(import_model, source, out / "run", max_file_bytes=4 << 20)
outwards = peak_of(export_checkpoint, out / "run/checkpoints/step-00000000", out / "theirs", shard_bytes=16 << 20)
print(json.dumps([inwards, outwards]))
"""


@pytest.mark.long
def test_the_memory_of_one_tensor_and_one_file(written: Write, tmp_path: Path) -> None:
    """A model of 67 MB in one file, whose largest tensor of ours has 2 and whose files 4:
    both ways in far less.
    """
    small = written("llama 2").path
    hidden, ffn, layers = 256, 1024, 16
    fields = json.loads((small / "config.json").read_text())
    fields |= {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "head_dim": hidden // 4,
    }
    shapes = {
        "model.embed_tokens.weight": (99, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (99, hidden),
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{layer}.mlp.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (hidden, ffn)}
        shapes |= {
            f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
        }
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(fields))
    save_file(
        {name: torch.rand(shape) for name, shape in shapes.items()}, source / "model.safetensors"
    )
    total = (source / "model.safetensors").stat().st_size
    assert total > 60e6
    command = [sys.executable, "-c", MEASURED, str(source), str(small), str(tmp_path)]
    # glibc gives back every tensor at once, and keeps none
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    inwards, outwards = json.loads(done.stdout)
    # the tensor, those that it is made of, a file that fills
    assert inwards < total / 3 and outwards < total / 3, (inwards, outwards, total)
    same_bits(files(tmp_path / "theirs"), files(source))
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) == 5
