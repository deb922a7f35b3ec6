"""Every message of a training step, of a drift check and of a save, rank by rank, as text: a change of
one is a diff to read in a review.

After a wanted change write the files again with ``python -m tests.framework.test_collectives``; read
the diff. Messages stand in the order in which a rank posts them, with the bytes of the whole tensor.
The order of the sums of a gradient is part of the numbers; so is the rank that counts an element in the
norm, or writes it to a checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import meshwright.mesh.comm
from meshwright.build import build
from meshwright.config import RunConfig, parse
from meshwright.mesh.comm import Group
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.parts import Parts
from meshwright.run.base import fingerprint, saves_frozen
from meshwright.run.pieces import saved_pieces
from meshwright.step import take_step
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import open_verify_source
from meshwright.watch.drift import check_drift
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import Size, config_of, model_config

GOLDEN = Path(__file__).parents[1] / "golden" / "collectives"
SIZE = Size(heads=2, sequence_length=8, num_blocks=2, global_batch=8)
MIXTURE = {"num_experts": 4, "top_k": 2}
ADAPTER = {"adapter": {"rank": 2, "targets": ["block*"]}}


def optimizer(name: str) -> dict[str, Any]:
    return {"optimizer": {"name": name, "warmup_steps": 2}}


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "zero0": ("plain", "dp4,zero0,mbs2", {}),
    "zero1": ("plain", "dp4,zero1,mbs2", {}),
    "zero2": ("plain", "dp4,zero2", {}),
    "zero3": ("plain", "dp4,zero3", {}),
    "shards": ("plain", "dp4,shard2,mbs2", {}),
    "shards-zero3": ("plain", "dp4,shard2,zero3,mbs2", {}),
    "sequence": ("gpt2", "dp2,tp2,sequence", {}),
    "ties": ("gpt2", "dp2,pp2,mbs2", {}),
    "synchronised": ("synchronised", "dp2,pp2,mbs2,zero2", {}),
    "context": ("llama", "cp2,mbs2", {}),
    "three-axes": ("llama", "dp2,pp2,tp2,mbs2", {}),
    "experts": ("mixture", "dp4,ep2,mbs2", {}),
    "experts-zero3": ("mixture", "dp4,ep2,zero3,mbs2", {}),
    "experts-tp": ("mixture", "dp2,tp2,ep2,sequence,mbs2", {}),
    "muon": ("llama", "dp2,tp2", optimizer("muon")),
    "muon-experts": ("mixture", "dp4,ep2,mbs2", optimizer("muon")),
    "adafactor": ("gpt2", "dp2,pp2,tp2,mbs2", optimizer("adafactor")),
    "adapters": ("llama", "dp2,tp2", ADAPTER),
    "adapters-zero3": ("llama", "dp2,tp2,zero3", ADAPTER),
}
"""Name of the golden file -> model, layout, and sections of the configuration."""


def config_for(model: str, layout: str, sections: dict[str, Any]) -> RunConfig:
    """Return the configuration of a case."""
    if model == "plain":
        options = {"vocab_size": 61, "width": 16, "depth": 3}
        config = config_of("tests.support.builders:plain", options, SIZE.sequence_length)
    elif model == "synchronised":
        builder = "tests.framework.verify.synchronised:build"
        config = config_of(builder, {"depth": 2}, SIZE.sequence_length)
    elif model == "mixture":
        config = model_config("llama", SIZE, moe=MIXTURE)
    else:
        config = model_config(model, SIZE)
    config = config.replace(parallel={"bucket_bytes": 6000, "ep_across_nodes": True}, **sections)
    return layout_config(config, parse_layout(layout), SIZE.global_batch, "float32")


@dataclass
class Recorder:
    """Messages that this rank posts, in order."""

    lines: list[str] = field(default_factory=list)
    labels: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)
    """Name and ranks of a group -> name in the lines: groups of one name get numbers."""

    def label(self, group: Group) -> str:
        same = [name for name, _ in self.labels if name == group.name]
        new = group.name + (f".{len(same) + 1}" if same else "")
        return self.labels.setdefault((group.name, group.ranks), new)

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record each message that a group counts."""
    recorder, dtypes = Recorder(), ["?"]
    tensor_bytes, count = meshwright.mesh.comm.tensor_bytes, Group._count

    def measure(tensor: Tensor) -> int:
        dtypes[0] = str(tensor.dtype).removeprefix("torch.")  # a message is measured, then counted
        return tensor_bytes(tensor)

    def record(group: Group, operation: str, message_bytes: int) -> None:
        # a router's choices, and so the rows that go to experts, may depend on the machine's arithmetic
        is_routed = group.name == "ep" and dtypes[0] != "int64"
        size = "rows" if is_routed else message_bytes
        recorder.lines.append(f"{recorder.label(group)} {operation} {size} {dtypes[0]}")
        count(group, operation, message_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshwright.mesh.comm, "tensor_bytes", measure)
        patch.setattr(Group, "_count", record)
        yield recorder


def observe(rank: int, world_size: int, config_json: str) -> dict[str, list[str]]:
    """Return the lines of one rank, by section. The second step: the first may send things once."""
    config = parse(config_json)
    mesh = open_mesh(Grid.of(config.parallel.degrees), "cpu", ep_across_nodes=True)
    parts = build(config, mesh, (open_verify_source(config, True), {}))
    found: dict[str, list[str]] = {}
    take_step(parts)
    _wait(parts)
    with recording() as recorder:
        take_step(parts)
        _wait(parts)
        found["step"] = recorder.take()
        check_drift(parts)
        found["drift check"] = recorder.take()
        fingerprint(parts)
        written = _written(parts)
        found["save"] = recorder.take() + written
    for shard in parts.optimizer.shards:
        shard.gradient.fill_(1.0)
    found["norm"] = [f"counts {round(float(parts.optimizer.square_norm()))} elements"]
    groups = sorted((label, ranks) for (_, ranks), label in recorder.labels.items())
    found["groups"] = [f"{label} {' '.join(map(str, ranks))}" for label, ranks in groups]
    return found


def _wait(parts: Parts) -> None:
    for replica in parts.replicas.values():
        replica.wait_for_weights()


def _written(parts: Parts) -> list[str]:
    """Return what this rank writes to a checkpoint: pieces and elements of each kind of tensor."""
    found: dict[str, list[int]] = defaultdict(list)
    for piece in saved_pieces(parts, saves_frozen(parts)):
        found[str(piece.kind)].append(piece.tensor.numel())
    return [f"writes {len(sizes)} x {kind}: {sum(sizes)} elements" for kind, sizes in found.items()]


def compressed(lines: Sequence[str]) -> list[str]:
    """Return lines with repeated runs of them once, below ``N x``."""
    text, at = [], 0
    while at < len(lines):
        period, times = _longest_repeat(lines, at)
        block = lines[at : at + period]
        if times == 1:
            text += block
        elif period == 1:
            text.append(f"{times} x {block[0]}")
        else:
            text += [f"{times} x", *(f"  {line}" for line in compressed(block))]
        at += period * times
    return text


def _longest_repeat(lines: Sequence[str], at: int) -> tuple[int, int]:
    """Return (lines, times) of the run at this place whose repeats save most lines."""
    best, saved = (1, 1), 0
    for period in range(1, (len(lines) - at) // 2 + 1):
        times = 1
        while lines[at : at + period] == lines[at + times * period : at + (times + 1) * period]:
            times += 1
        if (times - 1) * period > saved:
            best, saved = (period, times), (times - 1) * period
    return best


def golden_text(name: str, pool: RankPool) -> str:
    """Return the text of a case: ranks with the same lines together."""
    model, layout, sections = CASES[name]
    config = config_for(model, layout, sections)
    ranks = pool.run(observe, parse_layout(layout).size, config.model_dump_json())
    text = [f"{model} {layout}"]
    for section in ("groups", "step", "drift check", "norm", "save"):
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for rank, found in enumerate(ranks):
            alike[tuple(compressed(found[section]))].append(rank)
        for lines, same in alike.items():
            text += ["", f"{section}, rank {' '.join(map(str, same))}"]
            text += [f"  {line}" for line in lines]
    return "\n".join([*text, ""])


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, pool: RankPool) -> None:
    written = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert golden_text(name, pool) == written


def test_no_golden_file_is_forgotten() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.txt" for name in CASES}


def test_repeats_stand_once() -> None:
    assert compressed([*"abab", *"ccc", "d"]) == ["2 x", "  a", "  b", "3 x c", "d"]


if __name__ == "__main__":
    with RankPool(8) as ranks:
        for case in CASES:
            (GOLDEN / f"{case}.txt").write_text(golden_text(case, ranks), encoding="utf-8")
