"""Stopped and gone on with at random steps over the end of an epoch:
each sample once in each epoch, none twice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.build import build
from meshwright.config import RunConfig, batch_numbers, resolve
from meshwright.data.prepare.stdlib import prepare_files
from meshwright.data.sources import open_sources
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.run.directory import run_directory
from meshwright.run.resume import resume
from meshwright.step import take_step
from meshwright_launch.pool import RankPool
from tests.end_to_end.driving import Recording, layout, run_config, save, size

RESUMES = 20
LAYOUTS = ["", "dp2", "dp4,zero2,shard2", "dp2,pp2,zero3", "pp2", "dp2,tp2", "tp2"]


@pytest.fixture(scope="module")
def short_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few dozen samples, no two alike."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "texts").mkdir()
    for number in range(8):
        words = " ".join(f"{number}.{word}" for word in range(100))
        (folder / "texts" / f"{number}.txt").write_text(words)
    prepare_files([folder / "texts"], folder / "prepared", vocab_size=300, validation_share=0.1)
    return folder / "prepared"


def some_steps(
    rank: int, world_size: int, config: RunConfig, steps: int
) -> tuple[int, dict[int, tuple[Any, Any]]]:
    """Go on, take some steps, save; the samples in one epoch, and those that this rank has read,
    by index.
    """
    config = resolve(config, world_size)
    assert isinstance(config.parallel.dp, int)
    mesh = open_mesh(
        Grid(pp=config.parallel.pp, dp=config.parallel.dp, tp=config.parallel.tp), "cpu"
    )
    feed = Recording(*open_sources(config)[0])
    feed.seen = {}
    parts = build(config, mesh, (feed, {}))
    resume(parts, run_directory(config.run), lambda text: None)
    for _ in range(steps):
        take_step(parts)
    save(parts, str(run_directory(config.run)))
    close_mesh(mesh)
    return feed.order.num_samples, feed.seen


@pytest.mark.torture(row="20 random resumes over an epoch's edge")
def test_no_sample_is_left_out_or_seen_twice(
    short_corpus: Path,
    tmp_path: Path,
    pool: RankPool,
    seed: int,
    record_property: Callable[[str, Any], None],
) -> None:
    draw = random.Random(seed)
    seen: dict[int, tuple[Any, Any]] = {}
    num_samples = steps = 0
    for _ in range(RESUMES + 1):
        config = run_config(short_corpus, tmp_path, parallel=layout(draw.choice(LAYOUTS)))
        some = draw.randint(1, 5)
        answers = pool.run(some_steps, size(config), config, some)
        num_samples = answers[0][0]
        new = {index: sample for _, found in answers for index, sample in found.items()}
        assert not new.keys() & seen.keys(), "seen before the stop, and again after it"
        seen |= new
        steps += some
    global_batch = batch_numbers(resolve(config, size(config)).batch).global_batch
    assert sorted(seen) == list(range(steps * global_batch))
    epochs = len(seen) // num_samples
    assert epochs >= 1, "no edge was passed"
    texts = [str(seen[index]) for index in range(len(seen))]
    for epoch in range(epochs):
        counted = Counter(texts[epoch * num_samples : (epoch + 1) * num_samples])
        assert len(counted) == num_samples, "a sample came twice in an epoch"
    record_property(
        "noted",
        f"{RESUMES} resumes over {epochs} edges: 0 duplicated, 0 skipped of {len(seen)} samples",
    )
