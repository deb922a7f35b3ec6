"""Measured peak memory and bytes on the wire of small runs on CPU:
the oracle for tests of predictions.
"""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.build import build
from meshwright.config import RunConfig, parse, resolve
from meshwright.data.sources import example
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.step import take_step
from meshwright_launch.pool import RankPool


class Live(TorchDispatchMode):  # type: ignore[misc]
    """Dispatch mode that records the peak bytes of live storages,
    independent of the code of the dry run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.peak_bytes = 0

    def live_bytes(self) -> int:
        """Return the bytes of all storages that operations have made and that still live."""
        alive = [
            storage
            for storage in (reference() for reference in self.storages.values())
            if storage is not None
        ]
        return sum(storage.nbytes() for storage in alive)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        results = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return results


class Feed:
    """Source of random token ids in the shape of the configuration's samples."""

    def __init__(self, config: RunConfig) -> None:
        self.outlines = example(config.data, 2)

    def read(self, indices: Sequence[int]) -> tuple[Any, Tensor]:
        assert len(indices) == 2
        drawn = tree_map(lambda outline: torch.randint(1, 99, outline.shape), self.outlines)
        return drawn[0], drawn[1]


class Held(NamedTuple):
    """Measurements of one rank in its third step: peak of live bytes, bytes on the wire."""

    peak_bytes: int
    wire_bytes: float


def measure(rank: int, world_size: int, config_json: str) -> Held:
    """Run three steps of one rank, and measure the third."""
    config = parse(config_json)
    with Live() as live:
        parts = build(
            config, open_mesh(Grid.of(config.parallel.degrees), "cpu"), (Feed(config), {})
        )
        for _ in range(2):
            take_step(parts)
            for replica in parts.replicas.values():
                replica.wait_for_weights()
        gc.collect()
        gc.disable()
        live.peak_bytes = 0
        parts.mesh.traffic.reset()
        take_step(parts)
        gc.enable()
    return Held(
        live.peak_bytes, sum(counted.wire_bytes for counted in parts.mesh.traffic.counts.values())
    )


def larger(model: str, schedule: str = "1f1b", mtp_layers: int = 0, **parallel: Any) -> RunConfig:
    """Return a configuration that is large enough for scalars and padding to be negligible."""
    options: dict[str, Any] = {
        "vocab_size": 500,
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
    }
    if model == "llama":
        options |= {"num_kv_heads": 2, "ffn_size": 160, "mtp_layers": mtp_layers}
    sizes = [parallel.get(axis, 1) for axis in ("pp", "dp", "tp")]
    return resolve(
        RunConfig.model_validate(
            {
                "model": {"builder": f"meshwright_models.{model}:build", "options": options},
                "data": {"train": "in memory", "sequence_length": 48},
                "batch": {"micro_batch_size": 2, "chunks": 4},
                "parallel": {"bucket_bytes": 2**17, **parallel},
                "pipeline": {"schedule": schedule},
                "train": {"device": "cpu"},
            }
        ),
        math.prod(sizes),
    )


def with_muon(config: RunConfig, dtype: str, **options: int) -> RunConfig:
    """Return the configuration with Muon, short samples and large matrices:
    its peak is in the optimizer's step.
    """
    return config.replace(
        model={"options": config.model.options | {"hidden_size": 192, "num_layers": 2, **options}},
        data={"sequence_length": 8},
        optimizer={"name": "muon"},
        train={"dtype": dtype},
    )


RUNS = {
    "pp2": larger("gpt2", pp=2),
    "llama-zb_h1-zero2": larger("llama", "zb_h1", pp=2, dp=2, zero=2),
    "llama-tp2-zero2": larger("llama", dp=2, tp=2, zero=2),
    "llama-mtp-pp2-tp2": larger("llama", mtp_layers=2, pp=2, tp=2),
    "muon-pp2": larger("gpt2", pp=2).replace(optimizer={"name": "muon"}),
    "muon-tp2-zero2-step": with_muon(larger("llama", dp=2, tp=2, zero=2), "float32", ffn_size=512),
    "adafactor-tp2-zero2": larger("llama", dp=2, tp=2, zero=2).replace(
        optimizer={"name": "adafactor"}
    ),
    "muon-bfloat16-step": with_muon(larger("gpt2", dp=2), "bfloat16"),
}
"""Configurations whose measurements the tests of dryrun and plan share."""


def measured(pool: RankPool, config: RunConfig) -> list[Held]:
    """Return the measurements of each rank; cached,
    so that each configuration runs once per pool.
    """
    return _measured(pool, config.model_dump_json(), Grid.of(config.parallel.degrees).size)


@functools.cache
def _measured(pool: RankPool, config_json: str, size: int) -> list[Held]:
    found: list[Held] = pool.run(measure, size, config_json)
    return found
