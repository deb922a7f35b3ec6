"""What the optimizer keeps, on the host: the same bits as without, where the memory is,
what is said of a full disk.
"""

from __future__ import annotations

import resource
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from meshwright.build import build
from meshwright.checkpoint import TensorKind
from meshwright.config import RunConfig, batch_numbers, parse
from meshwright.data_parallel.fsdp import FsdpLayers
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.optimizer.offload import HostMemory
from meshwright.parts import Parts
from meshwright.run.pieces import saved_pieces
from meshwright.step import take_step
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.data_parallel.apart import Apart
from tests.framework.verify.cases import LATER, model_config, size_for
from tests.support.errors import raises
from tests.support.marks import long_row, torture_row


def built(config_json: str) -> Parts:
    config = parse(config_json)
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    mesh = open_mesh(Grid(pp=parallel.pp, dp=parallel.dp, tp=parallel.tp), "cpu")
    return build(config, mesh, (open_verify_source(config, True), {}))


def trained(
    rank: int, world_size: int, config_json: str
) -> tuple[list[float], dict[tuple[TensorKind, str], torch.Tensor]]:
    """(losses of three steps, all that a checkpoint would have of this rank)."""
    parts = built(config_json)
    losses = [take_step(parts).loss for _ in range(3)]
    found = saved_pieces(parts)
    return losses, {(piece.kind, piece.info.name): piece.tensor.clone() for piece in found}


def config_for(
    text: str, dtype: str, *, name: str = "adamw", directory: Path | None = None
) -> RunConfig:
    layout = parse_layout(text)
    size = size_for(layout)
    config = model_config("gpt2", size)
    parallel = config.parallel.model_copy(
        update={"offload_directory": str(directory) if directory else None}
    )
    optimizer = config.optimizer.model_copy(update={"name": name, "block_size": 16})
    config = config.model_copy(update={"parallel": parallel, "optimizer": optimizer})
    return layout_config(config, layout, size.global_batch, dtype)


@pytest.mark.parametrize(
    ("layout", "dtype", "name", "in_files"),
    [
        torture_row("dp2,zero0", "float32", "adamw", False),
        long_row("dp2,pp2,zero1", "bfloat16", "adamw", True),
        LATER("dp4,zero1,shard2", "float32", "sgd", False),
        LATER("dp2,tp2,zero2,sequence", "bfloat16", "adamw", False),
        LATER("dp2,tp2,zero2,sequence", "bfloat16", "adamw", True),
        long_row("dp2,zero3", "float32", "sgd", False),
        ("dp2,zero2", "bfloat16", "lion", True),
        long_row("dp2,zero2", "bfloat16", "adamw8bit", True),
        long_row("dp4,zero3,shard2", "bfloat16", "adamw", True),
        LATER("dp4,zero3,shard2", "bfloat16", "adamw", False),
        LATER("dp2,pp2,zero3,zb_h1", "float64", "sgd", False),
        LATER("dp2,pp2,zero3,zb_h1", "float64", "sgd", True),
    ],
)
def test_it_is_the_same_run_bit_for_bit(
    layout: str, dtype: str, name: str, in_files: bool, tmp_path: Path, pool: RankPool
) -> None:
    """Losses, weights, masters and states."""
    plain = config_for(layout, dtype, name=name)
    offload = config_for(
        f"{layout},offload", dtype, name=name, directory=tmp_path if in_files else None
    )
    assert offload.parallel.offload and not plain.parallel.offload
    size = parse_layout(layout).size
    for theirs, ours in zip(
        pool.run(trained, size, plain.model_dump_json()),
        pool.run(trained, size, offload.model_dump_json()),
        strict=True,
    ):
        assert ours[0] == theirs[0]
        assert ours[1].keys() == theirs[1].keys()
        for key, tensor in theirs[1].items():
            assert torch.equal(ours[1][key], tensor), key
    assert not list(tmp_path.iterdir())


def trained_apart(
    rank: int, world_size: int, config_json: str
) -> tuple[list[float], dict[tuple[TensorKind, str], torch.Tensor], set[int]]:
    """Return the same where the host's memory is not the device's;
    and how often the gradient of a bucket was copied.
    """
    host = Apart()
    with mock.patch("meshwright.build.host_memory", return_value=host):
        losses, found = trained(rank, world_size, config_json)
    return losses, found, set(Counter(place for place, _ in host.brought).values())


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        torture_row("dp2,zero1", "float32"),
        ("dp2,zero2", "float32"),
        long_row("dp2,pp2,zero2,zb_h1", "bfloat16"),
        long_row("dp2,pp2,zero2,step", "float32"),
        torture_row("dp4,zero2,shard2", "bfloat16"),
        LATER("dp2,zero0", "bfloat16"),
        LATER("dp2,tp2,zero2,sequence", "bfloat16"),
    ],
)
def test_copies_beside_the_backward_have_all_of_the_gradient(
    layout: str, dtype: str, pool: RankPool
) -> None:
    """Of four micro-batches; none is posted too early, used before it is there, or made twice."""
    plain, offload = config_for(layout, dtype), config_for(f"{layout},offload", dtype)
    size = parse_layout(layout).size
    for theirs, ours in zip(
        pool.run(trained, size, plain.model_dump_json()),
        pool.run(trained_apart, size, offload.model_dump_json()),
        strict=True,
    ):
        assert ours[0] == theirs[0] and ours[1].keys() == theirs[1].keys()
        assert ours[2] == {3}
        for key, tensor in theirs[1].items():
            assert torch.equal(ours[1][key], tensor), key


class Mapped(NamedTuple):
    """Bytes of a rank."""

    in_files: int
    of_optimizer: int


def mapped(rank: int, world_size: int, config_json: str) -> Mapped:
    """What of this process's memory is the files of ``offload_directory``."""
    parts = built(config_json)
    take_step(parts)
    directory = parts.config.parallel.offload_directory
    assert directory is not None
    in_files = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"{directory}/offload-" in line:
            start, stop = line.split()[0].split("-")
            in_files += int(stop, 16) - int(start, 16)
    tensors = [bucket.master for replica in parts.replicas.values() for bucket in replica.buckets]
    states = tree_leaves(list(parts.optimizer.inner.state.values()))
    tensors += [state for state in states if isinstance(state, torch.Tensor) and state.dim()]
    return Mapped(in_files, sum(tensor.numel() * tensor.element_size() for tensor in tensors))


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_with_a_directory_the_memory_is_that_of_files(
    name: str, tmp_path: Path, pool: RankPool
) -> None:
    """Masters and both moments; rounded up to pages."""
    config = config_for("dp2,zero1,offload", "bfloat16", name=name, directory=tmp_path / "new")
    for found in pool.run(mapped, 2, config.model_dump_json()):
        assert found.of_optimizer <= found.in_files < found.of_optimizer + 4096 * 100
    assert not list((tmp_path / "new").iterdir())


def offloaded(rank: int, world_size: int, config_json: str) -> set[bool]:
    """Return whether torch keeps the shards of the weights on the host."""
    [replica] = built(config_json).replicas.values()
    return {
        of_torch.offload_to_cpu for unit in replica.fsdp.units() for of_torch in unit.fsdp_params
    }  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", ["dp2,zero3", "dp2,zero3,offload"])
def test_with_zero_3_the_weights_are_on_the_host_too(layout: str, pool: RankPool) -> None:
    """On a CPU that is the same memory: what torch was told is all that can be seen."""
    config = config_for(layout, "float32")
    assert pool.run(offloaded, 2, config.model_dump_json()) == 2 * [{config.parallel.offload}]


class CopyingLayers(FsdpLayers):
    """FSDP layers with the sums of CUDA: a reduced gradient is taken after each backward,
    after one wait for all.
    """

    waits = 0
    """Waits with a gradient to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copies_gradients = True

    def wait_for_host_copies(self) -> None:
        CopyingLayers.waits += any(each.sharded.grad is not None for each in self.parameters)


def trained_copying(
    rank: int, world_size: int, config_json: str
) -> tuple[list[float], dict[tuple[TensorKind, str], torch.Tensor], int]:
    """Return the same with gradients that are taken from FSDP, and the number of waits for them."""
    CopyingLayers.waits = 0
    with mock.patch("meshwright.data_parallel.fully_sharded.FsdpLayers", CopyingLayers):
        losses, found = trained(rank, world_size, config_json)
    return losses, found, CopyingLayers.waits


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        long_row("dp2,zero3", "float32"),
        LATER("dp4,zero3,shard2", "bfloat16"),
        LATER("dp2,pp2,zero3,zb_h1", "float64"),
        LATER("dp2,zero3,step", "bfloat16"),
    ],
)
def test_gradients_taken_from_fsdp_are_those_it_adds_in_place(
    layout: str, dtype: str, pool: RankPool
) -> None:
    """Of all micro-batches: one wait for each that reduces, and the same bits."""
    plain, offload = config_for(layout, dtype), config_for(f"{layout},offload", dtype)
    size = parse_layout(layout).size
    chunks = batch_numbers(offload.batch).chunks
    for theirs, ours in zip(
        pool.run(trained, size, plain.model_dump_json()),
        pool.run(trained_copying, size, offload.model_dump_json()),
        strict=True,
    ):
        assert ours[0] == theirs[0] and ours[1].keys() == theirs[1].keys()
        assert ours[2] == 3 * (1 if "step" in layout else chunks)
        for key, tensor in theirs[1].items():
            assert torch.equal(ours[1][key], tensor), key


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may become larger than a megabyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.usefixtures("small_files")
def test_no_room_is_said_at_once(tmp_path: Path) -> None:
    """Not by a signal in the middle of a step, when a page is written that has no place."""
    memory = HostMemory(torch.device("cpu"), tmp_path)
    assert memory.allocate(2**10, torch.float32).sum() == 0
    with raises("MW-OPTIM-002", "4,194,304"):
        memory.allocate(2**20, torch.float32)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises("MW-OPTIM-002", "file/below'", "Not a directory"):
        HostMemory(torch.device("cpu"), tmp_path / "file" / "below").allocate(8, torch.float32)
