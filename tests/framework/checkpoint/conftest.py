"""A small model's state, and layouts that cut it: what the tests of this folder save and read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint import (
    CheckpointMetadata,
    TensorKind,
    TensorPiece,
    begin,
    publish,
    write_shard,
)
from meshwright.checkpoint.files import final_directory
from meshwright.parameters import ParameterInfo, Slice

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.weight": (10, 6),  # the vocabulary: no tp of 3, 4 or 7 divides it
    "block0.mlp.up.weight": (24, 6),
    "block0.mlp.down.weight": (6, 24),
    "block0.norm.weight": (6,),
    "block0.scale": (),
}
CUT_DIMS = {"embedding.weight": 0, "block0.mlp.up.weight": 0, "block0.mlp.down.weight": 1}

KINDS = [TensorKind(name) for name in ("weights", "master", "exp_avg", "exp_avg_sq", "momentum")]
State = dict[tuple[TensorKind, str], Tensor]


class Fake:
    """What the layers above hand to this room, made by hand;
    a layout is a tensor-parallel degree.
    """

    def info(self, name: str, tp: int, tp_rank: int) -> ParameterInfo:
        dim = CUT_DIMS.get(name)
        if tp == 1 or dim is None:
            return ParameterInfo(name, SHAPES[name])
        size = SHAPES[name][dim]
        padded = -(-size // tp)
        start = min(tp_rank * padded, size)
        return ParameterInfo(
            name, SHAPES[name], Slice(dim, start, min(start + padded, size), padded)
        )

    def infos(self, tp: int, tp_rank: int) -> list[ParameterInfo]:
        return [self.info(name, tp, tp_rank) for name in SHAPES]

    def state(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> State:
        generator = torch.Generator().manual_seed(seed)
        full: State = {}
        for kind in KINDS:
            for name, shape in SHAPES.items():
                numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
                full[kind, name] = numbers.to(
                    dtype if kind == TensorKind.WEIGHTS else torch.float32
                )
        return full

    def pieces(self, state: State, tp: int, tp_rank: int) -> Iterator[TensorPiece]:
        """A tp rank's pieces, given in one buffer that is reused,
        as one that gathers bucket by bucket would.
        """
        for (kind, name), full in state.items():
            info = self.info(name, tp, tp_rank)
            if info.slice is None and tp_rank > 0:
                continue
            buffer = info.take(full)
            yield TensorPiece(kind, info, info.unpadded(buffer))
            buffer.fill_(torch.nan)

    def head(self, step: int) -> CheckpointMetadata:
        return CheckpointMetadata(
            step=step,
            samples_seen=8 * step,
            seed=1234,
            config={"train": {"dtype": "bfloat16"}, "optimizer": {"eps": 1e-8}},
            data_fingerprint={"train": "aa", "tokenizer": "bb"},
            state={"optimizer_steps": step},
        )

    def save(
        self,
        run: Path,
        step: int,
        *,
        tp: int = 1,
        state: State | None = None,
        max_file_bytes: int = 800,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> Path:
        """Save as ``tp`` ranks would, in the order of the steps, without ranks. ``extra``:
        more scalar state.
        """
        state = self.state(step) if state is None else state
        temporary = begin(run, step, "a1")
        for tp_rank in range(tp):
            write_shard(
                temporary,
                f"pp0-tp{tp_rank}",
                self.pieces(state, tp, tp_rank),
                max_file_bytes=max_file_bytes,
            )
        final = final_directory(run, step)
        publish(
            temporary,
            final,
            self.head(step)._replace(state={"optimizer_steps": step} | dict(extra)),
        )
        return final


@pytest.fixture(scope="session")
def fake() -> Fake:
    return Fake()
