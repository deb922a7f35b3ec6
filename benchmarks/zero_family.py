"""ZeRO stages and shard factors: memory, bytes on the wire and time, against formulas,
DDP and FSDP2.

    python benchmarks/zero_family.py [--only memory|wire|time|limit] [--repeats 5] [--steps 3] [--out FILE]

    memory  live bytes of a rank at rest, by category, counted in storages, against the formula, in
    bfloat16 (P: the
            parameters of the rank, N: the shard factor):

                      weights   gradients   optimizer                   the ZeRO paper, with gradients of two bytes
            ZeRO-0    2 P       4 P         12 P                        16 P
            ZeRO-1    2 P       4 P         12 P / N                    4 P + 12 P / N
            ZeRO-2    2 P       4 P / N     12 P / N                    2 P + 14 P / N
            ZeRO-3    4 P / N   4 P / N     8 P / N                     16 P / N

            With offload the optimizer's bytes are on the host, 12 P / N; with ZeRO-3 all are, 16 P
            / N. SGD keeps 8 P / N, AdamW in 8 bits 6.03 P / N of the matrices.
            Gradients are summed in float32, whatever the model's dtype. The peak of a step is
            printed besides.
    wire    bytes of a step over the replicas, in float32: by formula, by the mesh's counters and by the observer
    time    on dp=8, two in turns: against DDP with replicated AdamW, and against bare FSDP2
    limit   a model under a memory limit per process that stops DDP, but not ZeRO and offload

Exit code 1: a category is off by more than 2 %, bytes on the wire differ, losses differ, a bar of
time is missed, or the limit does not stop DDP alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import ctypes
import resource
import shlex
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from contenders import Contender, Ours, TorchLoop, ddp, fsdp2
from measure import RankTimes, race
from observe import Observer
from report import Pair, conclude, environment, ratio_row
from rich.console import Console
from rich.table import Table
from task import BUILDER, SEED, Samples, adamw, model_options, run_config
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import meshwright.tensor_parallel.megatron
import meshwright_models.gpt2
from meshwright.build import build
from meshwright.config import RunConfig
from meshwright.mesh import Grid
from meshwright.mesh.mesh import Mesh, open_mesh
from meshwright.model.build import build_model
from meshwright.parts import Parts
from meshwright.step import take_step
from meshwright_launch.pool import RankError, RankPool

TIMEOUT_S = 1800.0
SAME_BYTES = 0.02
"""Tolerance of the relative difference, for the padding of buckets and of rows."""
SHORT = 32
"""Tokens per sequence where memory is measured."""
PARTS = ("memory", "wire", "time", "limit")
CATEGORIES = ("weights", "gradients", "optimizer", "host")
BUCKET_BYTES = 2**20
"""Bucket size where memory is measured: a larger model has dozens of buckets,
this one only one of the default size.
"""


class Layout(NamedTuple):
    """Degrees, sharding and optimizer of a contender."""

    dp: int
    pp: int
    tp: int
    zero: int
    factor: int
    """Value of parallel.shard_factor."""
    reduce: str | None = None
    offload: bool = False
    optimizer: str = "adamw"

    def __str__(self) -> str:
        axes = " x ".join(
            f"{axis}={n}"
            for axis, n in (("dp", self.dp), ("pp", self.pp), ("tp", self.tp))
            if n > 1
        )
        shared = f", in groups of {self.factor}" if self.zero and self.factor < self.dp else ""
        once, offload = ", reduced once" if self.reduce else "", ", offload" if self.offload else ""
        optimizer = f", {self.optimizer}" if self.optimizer != "adamw" else ""
        return f"{axes}: ZeRO-{self.zero}{shared}{once}{offload}{optimizer}"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp

    @property
    def shards(self) -> int:
        """Number of shards of the optimizer state."""
        return self.factor if self.zero else 1


def family(dp: int, pp: int, tp: int) -> list[Layout]:
    """Return all ZeRO stages and shard factors of one mesh."""
    factors = [factor for factor in (dp, dp // 2, 2) if factor > 1]
    found = [Layout(dp, pp, tp, 0, 1)]
    found += [
        Layout(dp, pp, tp, zero, factor) for zero in (1, 2, 3) for factor in dict.fromkeys(factors)
    ]
    return [*found, *(Layout(dp, pp, tp, zero, dp, offload=True) for zero in (1, 3))]


MESHES = ((8, 1, 1), (4, 2, 1), (4, 1, 2))
LAYOUTS = [layout for mesh in MESHES for layout in family(*mesh)]
OPTIMIZERS = [
    Layout(8, 1, 1, zero, 8, optimizer=name) for name in ("sgd", "adamw8bit") for zero in (1, 3)
]


def config_for(layout: Layout, dtype: str) -> RunConfig:
    """Return the task of all benchmarks, in this layout."""
    config = run_config(layout.dp, layout.pp, layout.tp, zero=layout.zero)
    factor = layout.factor if layout.zero else None
    parallel = {"shard_factor": factor, "reduce": layout.reduce, "offload": layout.offload}
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=parallel),
            "train": config.train.model_copy(update={"dtype": dtype}),
            "optimizer": config.optimizer.model_copy(update={"name": layout.optimizer}),
        }
    )


class RankMemory(NamedTuple):
    """Memory of one rank, with the numbers that the formula needs."""

    parameters: int
    num_eight_bit: int
    """Number of ``parameters`` whose optimizer state is in 8 bits."""
    measured: dict[str, int]
    """Bytes by category, at rest."""
    at_rest: int
    """All live bytes at rest."""
    peak: int
    """Peak of live bytes in a step."""


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return {address of a storage: its bytes} for these tensors;
    views of one storage count once.
    """
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }


def held_bytes(parts: Parts) -> dict[str, int]:
    """Return the bytes of each category at rest, counted in storages."""
    weights: list[Tensor] = []
    gradients: list[Tensor] = []
    optimizer: list[Tensor] = []
    for stage in parts.executor.stages.values():
        for parameter in stage.layers.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            weights.append(local.detach())
            if parameter.grad is not None:
                gradient = parameter.grad
                gradients.append(gradient.to_local() if hasattr(gradient, "to_local") else gradient)
    for replica in parts.replicas.values():
        for bucket in replica.buckets:
            gradients.append(bucket.shard_gradient)
            optimizer.append(bucket.master)
    for state in parts.optimizer.inner.state.values():
        optimizer += [
            leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.dim() > 0
        ]
    own = storages(weights)
    found = {"weights": own, "gradients": storages(gradients), "optimizer": storages(optimizer)}
    found["optimizer"] = {at: size for at, size in found["optimizer"].items() if at not in own}
    held = {category: sum(sizes.values()) for category, sizes in found.items()} | {"host": 0}
    parallel = parts.config.parallel
    for category in CATEGORIES[0 if parallel.zero == 3 else 2 : 3] if parallel.offload else ():
        held["host"] += held[category]
        held[category] = 0
    return held


class ShortSamples(Samples):
    """Samples of SHORT tokens: memory at rest does not depend on the length,
    and bfloat16 is slow on a CPU.
    """

    def rows(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, labels), both (count, SHORT)."""
        tokens, labels = super().rows(first, count)
        return tokens[:, :SHORT].contiguous(), labels[:, :SHORT].contiguous()


def measure_memory(rank: int, world_size: int, layout: Layout) -> RankMemory:
    """Measure this rank's memory at rest after two steps, and its peak in a third."""
    with Observer() as observer:
        config = config_for(layout, "bfloat16")
        data = config.data.model_copy(update={"sequence_length": SHORT})
        parallel = config.parallel.model_copy(update={"bucket_bytes": BUCKET_BYTES})
        config = config.model_copy(update={"data": data, "parallel": parallel})
        parts = build(
            config,
            open_mesh(Grid(pp=layout.pp, dp=layout.dp, tp=layout.tp), "cpu"),
            (ShortSamples(), {}),
        )
        for _ in range(2):
            _step(parts)
        at_rest = observer.live_bytes()
        observer.restart()
        _step(parts)
    buckets = [bucket for replica in parts.replicas.values() for bucket in replica.buckets]
    numbers = [
        (bucket.kind.is_eight_bit, sum(place.stop - place.start for place in bucket.slots))
        for bucket in buckets
    ]
    num_eight_bit = sum(number for narrow, number in numbers if narrow)
    parameters = sum(number for _, number in numbers)
    return RankMemory(parameters, num_eight_bit, held_bytes(parts), at_rest, observer.peak_bytes)


def _step(parts: Parts) -> None:
    take_step(parts)
    for replica in parts.replicas.values():
        replica.wait_for_weights()


def formula(layout: Layout, held: RankMemory) -> dict[str, float]:
    """Return the expected bytes by category in bfloat16, without padding."""
    p, n = float(held.parameters), layout.shards
    states = {
        "adamw": 8 * p,
        "sgd": 4 * p,
        "adamw8bit": 8 * p - (8 - 2 * (1 + 4 / 256)) * held.num_eight_bit,
    }
    kept = states[layout.optimizer]
    if layout.zero == 3:
        all_here = (4 * p / n, 4 * p / n, kept / n, 0.0)
        on_the_host = (0.0, 0.0, 0.0, (8 * p + kept) / n)
        return dict(zip(CATEGORIES, on_the_host if layout.offload else all_here, strict=True))
    kept = (4 * p + kept) / n
    optimizer = (0.0, kept) if layout.offload else (kept, 0.0)
    return dict(
        zip(CATEGORIES, (2 * p, 4 * p / (n if layout.zero == 2 else 1), *optimizer), strict=True)
    )


def memory(pool: RankPool, console: Console) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure every layout; return the rows, each of the rank farthest from the formula,
    and the problems.
    """
    table = Table(
        "bytes a rank holds at rest, bfloat16",
        *CATEGORIES,
        "formula",
        "all",
        "off",
        "highest in a step",
    )
    rows, problems = [], []
    for layout in (*LAYOUTS, *OPTIMIZERS):
        found: list[RankMemory] = pool.run(measure_memory, layout.size, layout, timeout_s=TIMEOUT_S)
        worst = max(found, key=lambda held: _off(layout, held))
        expected, off = formula(layout, worst), _off(layout, worst)
        rows.append({"layout": str(layout), "formula": expected, "off": off, **worst._asdict()})
        total = sum(worst.measured.values())
        table.add_row(
            str(layout),
            *(f"{worst.measured[category]:,}" for category in CATEGORIES),
            f"{sum(expected.values()):,.0f}",
            f"{total:,}",
            f"{off:.2%}",
            f"{max(held.peak for held in found):,}",
        )
        if off > SAME_BYTES:
            problems.append(
                f"{layout}: a category is {off:.1%} off its formula: {worst.measured}, not"
                f" {expected}"
            )
    console.print(table)
    return rows, problems


def _off(layout: Layout, held: RankMemory) -> float:
    """Return the largest relative difference of a category from its formula."""
    expected = formula(layout, held)
    return max(
        abs(held.measured[category] - expected[category]) / (expected[category] or 1.0)
        for category in CATEGORIES
    )


# -------------------------------------------------------------------------------------------------------------
# the wire


class WireBytes(NamedTuple):
    """Bytes that one rank puts on the wire in one step, with the numbers that the formula needs."""

    elements: int
    """Elements of this rank's buckets."""
    shared: int
    """Elements of weights that several layers of the stage share:
    ZeRO-3 gathers them once per step.
    """
    over_replicas: float
    """Bytes of the collectives over the replicas, by the mesh's counters."""
    by_us: float
    """Bytes of all collectives and messages, by the mesh's counters."""
    from_below: float
    """The same by the observer, which sees the calls of torch."""


def measure_wire(rank: int, world_size: int, layout: Layout) -> WireBytes:
    """Measure this rank's bytes on the wire in a step, after one that warms up."""
    with Observer() as observer:
        mesh = open_mesh(Grid(pp=layout.pp, dp=layout.dp, tp=layout.tp), "cpu")
        parts = build(config_for(layout, "float32"), mesh, (Samples(), {}))
        _step(parts)
        mesh.traffic.reset()
        observer.restart()
        _step(parts)
    counted = {key: wire_bytes for key, (_, wire_bytes) in mesh.traffic.counts.items()}
    buckets = [bucket for replica in parts.replicas.values() for bucket in replica.buckets]
    uses = Counter(
        id(parameter)
        for stage in parts.executor.stages.values()
        for _, parameter in stage.layers.named_parameters(remove_duplicate=False)
    )
    return WireBytes(
        sum(bucket.numel for bucket in buckets),
        sum(
            b.numel
            for b in buckets
            if any(uses[id(place.member.parameter)] > 1 for place in b.slots)
        ),
        sum(wire_bytes for (name, _), wire_bytes in counted.items() if name.startswith("dp")),
        sum(counted.values()),
        sum(observer.wire_bytes.values()),
    )


def formula_of_wire(layout: Layout, found: WireBytes, chunks: int) -> float:
    """Return the bytes that a rank sends over its replicas in a step.

    M: bytes of its gradients in float32, n shards, r copies. ZeRO-0: 2 M (r-1)/r. Sharded: M
        (n-1)/n for each
    reduce-scatter among neighbours and each all-gather of weights, and once in a step 2 M/n (r-1)/r
    across the groups. ZeRO-3 gathers weights that modules share once in a step.
    """
    m, n, r = 4.0 * found.elements, layout.shards, layout.dp // layout.shards
    sums = chunks if layout.zero >= 2 and layout.reduce is None else 1
    gatherings = 2 * chunks if layout.zero == 3 else 1
    if n == 1:
        return 2 * m * (r - 1) / r
    once = (2 * chunks - 1) * 4.0 * found.shared if layout.zero == 3 else 0.0
    return ((sums + gatherings) * m - once) * (n - 1) / n + 2 * m / n * (r - 1) / r


def wire(pool: RankPool, console: Console) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure every layout, and compare the sums over the ranks;
    return the rows and the problems.
    """
    table = Table(
        "bytes on the wire over the replicas, all ranks, one step",
        "by formula",
        "counted by us",
        "",
    )
    rows, problems = [], []
    layouts = [layout for layout in LAYOUTS if not layout.offload]
    layouts += (Layout(*mesh, zero, mesh[0], "step") for mesh in MESHES for zero in (2, 3))
    for layout in layouts:
        found: list[WireBytes] = pool.run(measure_wire, layout.size, layout, timeout_s=TIMEOUT_S)
        batch = config_for(layout, "float32").batch
        assert batch.chunks is not None
        expected = sum(formula_of_wire(layout, rank, batch.chunks) for rank in found)
        counted = sum(rank.over_replicas for rank in found)
        from_below = all(abs(rank.by_us - rank.from_below) < 1.0 for rank in found)
        equal = abs(counted - expected) < 1.0 and from_below
        rows.append(
            {
                "layout": str(layout),
                "formula": expected,
                "counted": counted,
                "from_below": from_below,
            }
        )
        table.add_row(
            str(layout), f"{expected:,.0f}", f"{counted:,.0f}", "equal" if equal else "DIFFERENT"
        )
        if not equal:
            problems.append(
                f"{layout}: bytes on the wire: formula {expected}, counted {counted}, below"
                f" {from_below}"
            )
    console.print(table)
    return rows, problems


# -------------------------------------------------------------------------------------------------------------
# the time

CONTENDERS: dict[str, Any] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    **{f"ours, ZeRO-{zero}": partial(Ours, 8, 1, 1, zero=zero) for zero in (0, 1, 2, 3)},
    "ours, ZeRO-1, offload": partial(Ours, 8, 1, 1, parallel={"offload": True}),
    "ours, ZeRO-1, 8 bits": partial(Ours, 8, 1, 1, optimizer={"name": "adamw8bit"}),
}
PAIRS = [
    Pair("ours, ZeRO-1", "DDP", bar=1.0),
    Pair("ours, ZeRO-3", "FSDP2", bar=1.0),
    *(Pair(f"ours, ZeRO-{zero}", "DDP") for zero in (0, 2, 3)),
    Pair("ours, ZeRO-2", "FSDP2"),
    Pair("ours, ZeRO-1, offload", "ours, ZeRO-1"),
    Pair("ours, ZeRO-1, 8 bits", "ours, ZeRO-1"),
]


def times(
    pool: RankPool, console: Console, repeats: int, steps: int
) -> tuple[dict[str, Any], list[str]]:
    """Time each pair of contenders in turns; only two are built at once,
    to leave caches and memory to them.
    """
    table = Table(
        "dp=8, median [least .. most]",
        "throughput (higher: better)",
        "CPU s (lower: better)",
        "bar",
    )
    rows, problems = [], []
    losses: dict[str, list[float]] = {}
    for pair in PAIRS:
        both = {name: CONTENDERS[name] for name in (pair.theirs, pair.ours)}
        ranks: list[RankTimes] = pool.run(race, 8, both, repeats, steps, timeout_s=TIMEOUT_S)
        row = ratio_row(ranks, pair)
        rows.append(row)
        bar = (
            ""
            if row["bar"] is None
            else f"<= {row['bar']:.2f} {'met' if row['bar_met'] else 'MISSED'}"
        )
        table.add_row(
            f"{pair.ours} / {pair.theirs}", str(row["throughput_ratio"]), str(row["cpu_ratio"]), bar
        )
        if row["bar_met"] is False:
            problems.append(
                f"{pair.ours} / {pair.theirs}: CPU {row['cpu_ratio']} is above {row['bar']}"
            )
        for name in both:
            of_ranks = [rank.shown[name] for rank in ranks]
            losses[name] = [
                statistics.fmean(shown.loss for shown in each)
                for each in zip(*of_ranks, strict=True)
            ]
    console.print(table)
    for name, found in losses.items():
        most = 1e-3 if "8 bits" in name else 2e-6
        if max(abs(a / b - 1) for a, b in zip(found, losses["DDP"], strict=True)) > most:
            problems.append(f"{name} computes another loss than DDP: {found}, {losses['DDP']}")
    return {"ratios": rows, "losses": losses}, problems


# ------------------------------------------------------------------------------------------------------------
# the limit

LARGE = {"hidden_size": 512, "num_layers": 8}
"""Options of the large model: 27 million parameters. 16 bytes of each are 439 MB,
an eighth of that is 55 MB.
"""
ALLOWED = 480 * 2**20
"""Bytes that a process may allocate in addition to those before the model is built."""
M_MMAP_THRESHOLD = -3
CASES: dict[str, dict[str, object]] = {
    "DDP": {},
    **{f"ZeRO-{zero}": {"zero": zero} for zero in (1, 2, 3)},
    "ZeRO-0, offload to files": {"zero": 0, "offload": True},
}
"""Contender -> keys of [parallel]. Files are not memory of a process:
the kernel may write them out at any time.
"""


def losses_under_limit(rank: int, world_size: int, who: str, files: str) -> list[float]:
    """Return the losses of three steps with RLIMIT_DATA set.
    An error on one rank ends the others.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**18)  # otherwise glibc keeps freed memory
    mesh = open_mesh(Grid(dp=world_size), "cpu")
    mesh.world.barrier()
    before = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (before + ALLOWED, hard))
    keys = CASES[who] | ({"offload_directory": files} if "files" in who else {})
    contender = large_ddp() if who == "DDP" else LargeOurs(mesh, world_size, keys)
    return [contender.step().loss for _ in range(3)]


class LargeOurs(Ours):
    """Contender: this framework with the large model."""

    def __init__(self, mesh: Mesh, dp: int, keys: dict[str, object]) -> None:
        config = run_config(dp)
        model = config.model.model_copy(update={"options": {**model_options(tied=True), **LARGE}})
        parallel = config.parallel.model_copy(update=keys)
        self.mesh = mesh
        self.parts = build(
            config.model_copy(update={"model": model, "parallel": parallel}),
            mesh,
            (Samples(), {}),
        )


def large_ddp() -> Contender:
    """Build the large model under DDP, whole on each rank."""
    options: dict[str, Any] = {**model_options(tied=True), **LARGE}
    layers, weights = meshwright_models.gpt2.build(**options), build_model(BUILDER, options, SEED)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            parameter.copy_(weights.initial(name))
    model = DistributedDataParallel(layers)
    return TorchLoop(model, adamw(model.parameters()), dist.get_rank(), dist.get_world_size())


def limit(console: Console) -> tuple[list[dict[str, Any]], list[str]]:
    """Run each contender in new ranks, since one that the limit stops leaves its peers waiting."""
    table = Table(f"a model under a limit of {ALLOWED / 2**20:.0f} MiB for each of 8 processes", "")
    rows, problems = [], []
    for who in CASES:
        stopped, losses = None, None
        with RankPool(8) as pool, tempfile.TemporaryDirectory() as files:
            try:
                found = pool.run(losses_under_limit, 8, who, files, timeout_s=TIMEOUT_S)
                losses = [statistics.fmean(step) for step in zip(*found, strict=True)]
            except RankError as error:
                stopped = next(
                    (line for line in str(error).splitlines() if "memory" in line), str(error)[:200]
                )
        rows.append({"who": who, "stopped": stopped, "losses": losses})
        table.add_row(
            who, stopped or f"trains: losses {', '.join(f'{loss:.4f}' for loss in losses or ())}"
        )
    console.print(table)
    if rows[0]["stopped"] is None or "memory" not in str(rows[0]["stopped"]):
        problems.append(f"DDP was not stopped by the limit: {rows[0]}")
    problems += [
        f"did not train under the limit: {row}" for row in rows[1:] if row["losses"] is None
    ]
    return rows, problems


def main() -> int:
    """Run, print and write; return 1 if there is a problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="may be given several times")
    parser.add_argument(
        "--repeats", type=int, default=5, help="turns of every contender (default 5)"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps in one turn (default 3)")
    parser.add_argument(
        "--out", type=Path, help="JSON file (default benchmarks/results/<date>-zero-family.json)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    meshwright.tensor_parallel.megatron.load_mappings(
        torch.device("cpu")
    )  # its import takes seconds: once, before the fork
    console = Console(width=150)
    report: dict[str, Any] = {
        "environment": environment(
            shlex.join(["python", "benchmarks/zero_family.py", *sys.argv[1:]])
        ),
        "task": {
            "builder": BUILDER,
            "options": model_options(tied=True),
            "large": LARGE,
            "allowed": ALLOWED,
        },
    }
    where = report["environment"]
    console.print(
        f"torch {where['torch']}, {where['cpu']}, {where['cores']} cores, {where['date']}",
        highlight=False,
    )
    wanted = arguments.only or PARTS
    problems: list[str] = []
    with RankPool(8) as pool:
        parts: dict[str, Any] = {
            "memory": partial(memory, pool, console),
            "wire": partial(wire, pool, console),
            "time": partial(times, pool, console, arguments.repeats, arguments.steps),
        }
        for name in [name for name in PARTS if name in wanted and name in parts]:
            report[name], found = parts[name]()
            problems += found
    if "limit" in wanted:
        report["limit"], found = limit(console)
        problems += found
    report["problems"] = problems
    return conclude("zero-family", arguments.out, report, console)


if __name__ == "__main__":
    sys.exit(main())
