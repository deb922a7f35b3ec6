"""Runs as users have them: a configuration, ranks that call ``meshwright_launch.work.work``,
and their files.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from meshwright.build import build
from meshwright.checkpoint import TensorKind, find, open_checkpoint
from meshwright.config import RunConfig, batch_numbers, resolve
from meshwright.data.causal import CorpusSource
from meshwright.data.sources import open_sources
from meshwright.errors import UserError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.parameters import ParameterInfo
from meshwright.parts import Parts
from meshwright.run.directory import run_directory
from meshwright.run.resume import resume
from meshwright.run.saving import Saver
from meshwright.step import take_step
from meshwright_launch.pool import RankPool
from meshwright_launch.work import work

GPT2 = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_sequence_length": 32,
    "dropout": 0.1,
}
LLAMA = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 48,
    "max_sequence_length": 32,
}

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "builder": "meshwright_models.gpt2:build",
        "options": {**GPT2, "vocab_size": 301},
    },  # tied; no degree divides it
    "llama": {"builder": "meshwright_models.llama:build", "options": LLAMA},
    "few_heads": {
        "builder": "meshwright_models.llama:build",
        "options": {**LLAMA, "num_kv_heads": 1},
    },
    "frozen": {"builder": "tests.end_to_end.builders:partly_frozen", "options": GPT2},
    "mixture": {
        "builder": "meshwright_models.llama:build",
        "options": {**LLAMA, "moe": {"num_experts": 4, "top_k": 2, "balance": "bias"}},
    },
}
LATER = partial(pytest.param, marks=pytest.mark.torture)
"""A variant of what others test shorter: of ``make torture``."""


def run_config(corpus: Path, runs: Path, **sections: dict[str, Any]) -> RunConfig:
    """Return a small GPT-2 with dropout on a prepared corpus; ``sections`` go on top, key by key."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "directory": str(runs)},
        "model": {"builder": "meshwright_models.gpt2:build", "options": GPT2},
        "data": {
            "train": str(corpus / "train"),
            "validation": str(corpus / "validation"),
            "tokenizer": str(corpus / "tokenizer.json"),
            "sequence_length": 32,
        },
        "batch": {"micro_batch_size": 1, "global_batch": 8},
        "parallel": {"bucket_bytes": 8192},  # several buckets per stage
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2},
        "train": {"steps": 6, "device": "cpu", "validate_steps": 2},
        "tracking": {"console": False},
    }
    for section, keys in sections.items():
        tree.setdefault(section, {}).update(keys)
    return RunConfig.model_validate(tree)


def with_own_samples(config: RunConfig) -> RunConfig:
    """Return the configuration on a dataset of the user's, of random tokens: without the corpus, ranks need
    not import megatron-core, which is half of what it takes to start them.
    """
    tree = config.model_dump(exclude_unset=True)
    return RunConfig.model_validate(
        {**tree, "data": {"builder": "tests.framework.watch.hanging:samples"}}
    )


def changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """Return the same configuration with other values."""
    tree = config.model_dump()
    for section, keys in sections.items():
        tree[section].update(keys)
    return RunConfig.model_validate(tree)


def layout(text: str) -> dict[str, Any]:
    """``dp2,pp2,sequence,zero0,shard2,offload`` -> the keys of ``[parallel]``."""
    keys: dict[str, Any] = {"dp": 1, "pp": 1, "tp": 1}
    for word in text.split(","):
        if word in ("sequence", "offload"):
            keys[word] = True
        elif word.startswith("shard"):
            keys["shard_factor"] = int(word[-1])
        elif word.startswith("zero"):
            keys["zero"] = int(word[-1])
        elif word == "contiguous":
            keys["cp_order"] = word
        elif word:
            keys[word[:2]] = int(word[2:])
    return keys


def size(config: RunConfig) -> int:
    """Return the number of ranks of a configuration that sets dp."""
    assert isinstance(config.parallel.dp, int)
    return config.parallel.dp * config.parallel.ranks_per_batch


def train_rank(rank: int, world_size: int, config: RunConfig) -> str:
    """One rank of ``meshwright train``; what it has said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        work(config)
    return said.getvalue()


def refused_rank(rank: int, world_size: int, config: RunConfig) -> tuple[str, int]:
    """Return the message and the exit code with which a rank leaves before it trains."""
    try:
        work(config)
    except UserError as error:
        return str(error), error.exit_code
    return "not refused", 0


def train(pool: RankPool, config: RunConfig) -> str:
    """Train on as many ranks as the layout has; what the first has said. The others say nothing."""
    said: list[str] = pool.run(train_rank, size(config), config)
    assert not any(said[1:])
    return said[0]


class LoadedRank(NamedTuple):
    """What one rank tells of a run that it has gone on with."""

    losses: list[float]
    seen: dict[int, tuple[list[int], list[int]]]
    """Global sample index -> its token ids and labels."""


class Recording(CorpusSource):
    """A feed that remembers what was taken from it."""

    seen: dict[int, tuple[list[int], list[int]]]

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        batch = super().read(indices)
        for tokens, labels, index in zip(*batch, indices, strict=True):
            self.seen[index] = (tokens.tolist(), labels.tolist())
        return batch


def load_rank(
    rank: int, world_size: int, config: RunConfig, saved: str, again: str, steps: int
) -> LoadedRank:
    """Load the newest checkpoint of ``saved``, save at once what lies in this layout's ranks,
    then take some steps.
    """
    config = resolve(config, world_size)
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    mesh = open_mesh(Grid.of(parallel.degrees), "cpu")
    feed = Recording(*open_sources(config)[0])
    feed.seen = {}
    parts = build(config, mesh, (feed, {}))
    resume(parts, Path(saved), _keep_quiet)
    save(parts, again)
    losses = [take_step(parts).loss for _ in range(steps)]
    assert parts.state.samples_seen == (parts.state.step) * batch_numbers(config.batch).global_batch
    close_mesh(mesh)
    return LoadedRank(losses, feed.seen)


def save(parts: Parts, directory: str) -> None:
    """Write a checkpoint and wait for it."""
    saver = Saver(parts, Path(directory), _keep_quiet)
    saver.start()
    saver.finish()


def initial_weights(rank: int, world_size: int, config: RunConfig, directory: str) -> None:
    """Save a run that has not taken a step."""
    config = resolve(config, world_size)
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    mesh = open_mesh(Grid.of(parallel.degrees), "cpu")
    save(build(config, mesh), directory)
    close_mesh(mesh)


def _keep_quiet(text: str) -> None:
    pass


def lines(config: RunConfig) -> list[dict[str, Any]]:
    """``metrics.jsonl``."""
    text = (run_directory(config.run) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def exact_losses(config: RunConfig) -> dict[int, str]:
    """Step -> the loss, bit by bit. Each step has one line."""
    found = lines(config)
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    return {line["step"]: line["train/loss_hex"] for line in found}


def tensors(directory: Path) -> dict[str, Tensor]:
    """Return every tensor of a run's newest checkpoint, whole: weights, moments and, where there
    are some, master weights.
    """
    with open_checkpoint(find(directory)[0].path) as checkpoint:
        checkpoint.verify()
        found = {}
        for name, entry in checkpoint.manifest.tensors.items():
            kind, _, parameter = name.partition("/")
            tensor = checkpoint.read(TensorKind(kind), ParameterInfo(parameter, tuple(entry.shape)))
            assert tensor is not None
            found[name] = tensor.clone()
    return found


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return names of the tensors that are not the same bits."""
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]
