"""Shares of the ranks in a checkpoint: each holder of a stage writes as many bytes as the others, and a
resume reads of the optimizer's states this rank's shard alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from meshwright.build import build
from meshwright.checkpoint import CheckpointReader, find, open_checkpoint
from meshwright.config import RunConfig, resolve
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.run.directory import run_directory
from meshwright.run.resume import resume
from meshwright.run.saving import Saver
from meshwright.step import take_step
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import MODELS, layout, run_config, size
from tests.support.marks import long_row

ALLOWANCE = 6000
"""Bytes: whole tensors of one rank (buffers), and elements that do not divide evenly."""


def saves_and_resumes(rank: int, world_size: int, config: RunConfig) -> dict[str, int]:
    """Take two steps, save and resume. Return the elements read by this rank, by kind of tensor."""
    config = resolve(config, world_size)
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    grid = Grid(pp=parallel.pp, dp=parallel.dp, cp=parallel.cp, tp=parallel.tp, ep=parallel.ep)
    parts = build(config, open_mesh(grid, "cpu"))
    for _ in range(2):
        take_step(parts)
    saver = Saver(parts, run_directory(config.run), lambda text: None)
    saver.start()
    saver.finish()

    counts: Counter[str] = Counter()
    read_piece = CheckpointReader._numbers

    def counted(self: CheckpointReader, part: Any, *what: Any) -> Tensor:
        found = read_piece(self, part, *what)
        counts[part.key.partition("/")[0]] += found.numel()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointReader, "_numbers", counted)
        resume(parts, run_directory(config.run), lambda text: None)
    close_mesh(parts.mesh)
    return dict(counts)


@pytest.mark.parametrize(
    ("model", "text", "times"),
    [
        ("gpt2", "dp4,zero0", 4),
        ("llama", "dp4,zero1,shard2", 2),
        long_row("gpt2", "dp2,zero3,tp2", 1),
        ("llama", "dp2,pp2", 1),
        long_row("llama", "cp2,dp2,zero2", 1),
        ("mixture", "dp4,ep2,zero1", 1),
    ],
)
def test_every_holder_writes_its_share(
    model: str, text: str, times: int, corpus: Path, tmp_path: Path, pool: RankPool
) -> None:
    """``times``: ranks with the same shard of the optimizer's states, which each reads once."""
    config = run_config(corpus, tmp_path, model=MODELS[model], parallel=layout(text))
    read = pool.run(saves_and_resumes, size(config), config)

    with open_checkpoint(find(run_directory(config.run))[0].path) as checkpoint:
        tensors = checkpoint.manifest.tensors
    written: dict[str, int] = defaultdict(int)
    total: Counter[str] = Counter()
    for name, entry in tensors.items():
        for piece in entry.pieces:
            numel = 1
            for length in piece.shape:
                numel *= length
            written[piece.file.rpartition("-")[0]] += numel * entry.dtype.as_torch.itemsize
            total[name.partition("/")[0]] += numel

    assert len(written) == size(config), "every rank writes"
    stages: dict[str, list[int]] = defaultdict(list)
    for shard, num_bytes in written.items():
        stages[shard.partition("-")[0]].append(num_bytes)
    for shares in stages.values():
        assert max(shares) - min(shares) <= ALLOWANCE, written

    elements = sum(each["exp_avg"] for each in read)
    # norms and biases, which every tp rank holds, are read by each of them
    allowance = 1.05 if "tp2" in text else 1.0
    assert times <= elements / total["exp_avg"] <= times * allowance
