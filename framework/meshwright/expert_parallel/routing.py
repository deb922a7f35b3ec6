"""Routing as data: the expert ids of each step are recorded to a file, or replayed from one.

    record     choice of the router --> copied, by sample and position --> one file for each step
    replay     file --> ids of this rank's tokens --> router's weights for these ids, from its own scores

A router takes part if it calls its attribute ``route_ids`` (meshwright_models/router.py), which the
hooks here replace. Sample
indices come from the current micro-batch, as for dropout masks, and positions from the router's ``own_tokens``. So
the file is the same for every layout, and any layout can replay it. Recomputed forwards are not
recorded, and replay the same ids.

Shapes: B samples of a micro-batch, G of a step; n of a sample's S tokens on this rank; k experts of
a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.current import CurrentMicrobatch
from meshwright.errors import ConfigError
from meshwright.expert_parallel.routing_file import (
    Fingerprint,
    RoutingFile,
    TableShape,
    compact_dtype,
    write_file,
)
from meshwright.mesh.comm import Group


def find_routers(layers: nn.Module) -> dict[str, Any]:
    """Return the routers of a model that take part in recording and replay, by name."""
    found = {
        name: each
        for name, each in layers.named_modules()
        if callable(getattr(each, "route_ids", None))
    }
    return {name: each for name, each in found.items() if hasattr(each, "routing")}


def check_routers(builder: str, layers: nn.Module, experts: list[str]) -> None:
    """Check that every module of experts (``experts``: their names)
    has a router that takes part in its layer.

    Raises:
        ConfigError: one has none, or one router is used at two places of the model.
    """
    routers = find_routers(layers)
    having = {name.partition(".")[0] for name in routers}
    without = [name for name in experts if name.partition(".")[0] not in having]
    if without or not routers:
        place = f"the layer of {without[0]}" if without else "the model"
        raise ConfigError(
            "MW-EP-008",
            f"{builder}: a routing is recorded and replayed by a router's function route_ids;"
            f" {place} has no such router: leave --routing out, or write the router as"
            ' docs/mixture-of-experts.md has it ("Routing as data")',
        )
    names = [
        name
        for name, each in layers.named_modules(remove_duplicate=False)
        if each in routers.values()
    ]
    if len(names) > len(routers):
        raise ConfigError(
            "MW-EP-009",
            f"{builder}: one router is used at several places of the model ({', '.join(names)}),"
            " and a recording holds one choice for each token: leave --routing out",
        )


class RoutingPlan(NamedTuple):
    """Directories to record to and to replay from; None: off."""

    record: Path | None = None
    replay: Path | None = None
    fingerprint: Fingerprint = {}


NO_ROUTING = RoutingPlan()
"""The plan of a run that neither records nor replays."""


class RankTokens(NamedTuple):
    """Tokens that this rank's routers see, and the ranks that see the others."""

    length: int
    """Tokens of a sample."""
    current: CurrentMicrobatch
    """State of the current micro-batch, with its sample indices."""
    device: torch.device = torch.device("cpu")
    world: Group | None = None
    """All ranks; None: one process."""
    adds: bool = True
    """False on ranks whose tokens another rank contributes (tensor parallelism without sequence
    parallelism).
    """


class RoutingHooks:
    """Recorder, or replayer, of the choices of this rank's routers. Without either,
    routers stay as they are.

    Args:
        layers: layers of this rank, under their names in the whole model.
        whole: the whole model, which may lie on meta.
    """

    def __init__(
        self, plan: RoutingPlan, layers: Sequence[nn.Module], whole: nn.Module, tokens: RankTokens
    ) -> None:
        self._plan = plan
        self._tokens = tokens
        self._world = tokens.world
        self._current, self._length = tokens.current, tokens.length
        self._shapes = {name: _shape_of(router) for name, router in find_routers(whole).items()}
        self._entries: dict[str, list[_Entry]] = {}
        self._file: RoutingFile | None = None
        self._samples = range(0)
        self._is_open = False
        self._rows: tuple[Tensor | None, list[int]] = None, []
        self._given: dict[str, Tensor] = {}
        for each in layers if plan != NO_ROUTING else ():
            for name, router in find_routers(each).items():
                router.route_ids = partial(self._route, name, router)
                router.route_kept = partial(self._keep, name, router)

    @contextmanager
    def during(self, key: str, samples: range, *, is_needed: bool = True) -> Iterator[None]:
        """Record or replay the forwards within the context, of these global sample indices,
        as the file ``key``.

        ``is_needed``: raise if a replay has no such file; False: the routers then choose.
        """
        replay = self._plan.replay
        if is_needed or replay is None or path_of(replay, key).exists():
            self.begin(key, samples)
            yield
            self.end(key)
        else:
            yield

    def begin(self, key: str, samples: range) -> None:
        """Begin a pass over these global sample indices, all those of a global batch.

        Raises:
            ConfigError: there is no file to replay, or it does not fit.
        """
        self._samples, self._is_open = samples, True
        self._entries = {name: [] for name in self._shapes}
        if self._plan.replay is not None:
            self._file = RoutingFile(path_of(self._plan.replay, key), self._fingerprint())

    def end(self, key: str) -> str | None:
        """End the pass; rank 0 writes a recording. Return why it could not be written, or None.
        Collective; blocks.
        """
        self._is_open, self._file, self._given = False, None, {}
        if self._plan.record is None:
            return None
        self._check_complete()
        shapes = {
            name: TableShape(each.dtype, (len(self._samples), self._length, each.top_k))
            for name, each in self._shapes.items()
        }
        tables = (self._summed(name, each) for name, each in shapes.items())
        reason = None
        if self._world is None or self._world.rank == 0:
            try:
                write_file(path_of(self._plan.record, key), shapes, tables, self._fingerprint())
            except OSError as error:
                reason = error.strerror or str(error)
        for _ in tables:  # all ranks join the remaining all-reduces
            pass
        self._entries = {}
        return reason

    def _fingerprint(self) -> Fingerprint:
        return {
            **self._plan.fingerprint,
            "samples": f"{self._samples.start} to {self._samples.stop - 1}",
        }

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _route(self, name: str, router: Any, ids: Tensor) -> Tensor:
        """Return the chosen ids, (B, n, k) or (B n, k), or those of the file; record them.
        Replaces ``route_ids``.
        """
        if not self._is_open or ids.is_meta:
            return ids
        samples, chosen = self._current.sample_indices, ids
        assert samples is not None
        ids = ids.view(len(samples), -1, ids.shape[-1])
        if self._file is not None:
            given = self._read(name, router, ids)
            self._given[name] = given
            ids = torch.where(given >= 0, given % self._shapes[name].num_experts, ids)
        if self._plan.record is not None and not self._current.is_recompute:
            positions = router.own_tokens(
                torch.arange(self._length, device=ids.device).expand(len(ids), -1)
            )
            self._entries[name].append(_Entry(samples, positions, ids.to(self._shapes[name].dtype)))
        return chosen if self._file is None else ids.view_as(chosen)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _keep(self, name: str, router: Any, is_kept: Tensor) -> Tensor:
        """Return the choices within capacity, (B, n, k) bool, or the file's; record them.
        Replaces ``route_kept``.
        """
        if not self._is_open or is_kept.is_meta:
            return is_kept
        if self._file is not None:
            given = self._given[name]
            num_experts = self._shapes[name].num_experts
            is_kept = torch.where(given >= 0, given < num_experts, is_kept)
        if self._plan.record is not None and not self._current.is_recompute:
            ids = self._entries[name][-1].ids
            ids += (~is_kept).to(ids.dtype) * self._shapes[name].num_experts
        return is_kept

    def _read(self, name: str, router: Any, ids: Tensor) -> Tensor:
        """Read the ids of this rank's tokens, (B, n, k). On CUDA the host synchronises,
        once per micro-batch.
        """
        samples = self._current.sample_indices
        assert samples is not None and self._file is not None
        if self._rows[0] is not samples:
            self._rows = samples, [index - self._samples.start for index in samples.tolist()]
        shape = (self._length, ids.shape[-1])
        whole = self._file.read(name, self._rows[1], shape, self._shapes[name].num_ids)
        given: Tensor = router.own_tokens(whole.to(ids.device))
        return given

    def _check_complete(self) -> None:
        """Check that each router has recorded each token of the pass once.
        Collective over the world; blocks.

        Raises:
            ConfigError: one has not; on every rank.
        """
        rows = [
            sum(entry.positions.numel() for entry in self._entries[name]) * self._tokens.adds
            for name in self._shapes
        ]
        counts = torch.tensor(rows, dtype=torch.int64, device=self._tokens.device)
        if self._world is not None:
            self._world.all_reduce(counts).wait()
        expected = len(self._samples) * self._length
        for name, count in zip(self._shapes, counts.tolist(), strict=True):
            if count != expected:
                raise ConfigError(
                    "MW-EP-010",
                    f"{name} chose experts for {count:,} tokens in a step of {len(self._samples)}"
                    f" samples of {self._length} tokens: only a router that sees each token once"
                    " can be recorded",
                )

    def _summed(self, name: str, shape: TableShape) -> Tensor:
        """All-reduce the ids of a router to (G, S, k) on the CPU. Collective over the world;
        blocks.

        Wire: 2 M (n-1)/n bytes, M bytes of all ids, n ranks.
        """
        whole = torch.zeros(shape.shape, dtype=shape.dtype, device=self._tokens.device)
        for samples, positions, ids in self._entries[name] if self._tokens.adds else ():
            whole[(samples.to(ids.device) - self._samples.start).unsqueeze(1), positions] = ids
        if self._world is not None:
            # all ranks but one have zero in each byte
            self._world.all_reduce(whole.view(torch.uint8)).wait()
        return whole.cpu()


class _Entry(NamedTuple):
    """Choices of one router in one micro-batch."""

    samples: Tensor
    """(B,) int64, global."""
    positions: Tensor
    """(B, n) int64, positions in the sample."""
    ids: Tensor
    """(B, n, k), in the dtype of the file."""


class _Shape(NamedTuple):
    """Sizes of a router, and the dtype of its ids in a file."""

    num_experts: int
    top_k: int
    num_ids: int
    """E; 2 E with a capacity, for the choices that are beyond it."""
    dtype: torch.dtype


def _shape_of(router: Any) -> _Shape:
    routing = router.routing
    num_ids = routing.num_experts * (2 if getattr(routing, "capacity_factor", 0.0) > 0 else 1)
    return _Shape(routing.num_experts, routing.top_k, num_ids, compact_dtype(num_ids))


def path_of(directory: Path, key: str) -> Path:
    """Return the path of the recorded routing of a pass."""
    return directory / f"{key}.safetensors"
