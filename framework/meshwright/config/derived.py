"""Values that depend on the number of ranks: dp, the batch numbers, shard factors,
the number of processes to start.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshwright.config.batch import derive, phases
from meshwright.config.combinations.layout import Layout
from meshwright.config.combinations.sizes import EXPERT_RANKS, SHARDS, LayoutSizes
from meshwright.config.layout_rules import MAX_FORWARDS
from meshwright.config.schema import RunConfig
from meshwright.config.schemes import is_own_scheme
from meshwright.config.sections import Adapter, Batch, Model, Parallel, Run
from meshwright.config.training import Launch, Train
from meshwright.errors import ConfigError

MAX_RAMP_FORWARDS = 16 * MAX_FORWARDS
"""Maximal number of forwards in the schedules of all batch sizes of a ramp."""


def _wrong_product(dp: int, parallel: Parallel, world_size: int) -> str:
    size = dp * parallel.ranks_per_batch
    moves = [f"start {size} (launch.processes = {size}, or that many ranks of torchrun or srun)"]
    replicas, rest = divmod(world_size, parallel.ranks_per_batch)
    if rest == 0:
        moves.append(f'set parallel.dp = {replicas} or "auto"')
    else:
        moves.append(f"choose degrees whose product is {world_size}")
    return (
        f"dp {dp} x {parallel.named_ranks} = {size} ranks, but {world_size} were started:"
        f" {', or '.join(moves)}"
    )


def _no_whole_replicas(parallel: Parallel, world_size: int) -> str:
    one = parallel.ranks_per_batch
    near = [one * replicas for replicas in (world_size // one, world_size // one + 1) if replicas]
    return (
        f'parallel.dp = "auto": {parallel.named_ranks} = {one} ranks for one replica, but'
        f" {world_size} were started, "
        f"{world_size / one:.3g} replicas: start {' or '.join(map(str, near))}, or change"
        " parallel.pp, "
        f"parallel.cp or parallel.tp"
    )


def resolve(config: RunConfig, world_size: int | None = None) -> RunConfig:
    """Return the configuration with dp, the three batch numbers and ``launch.processes``
    as whole numbers. Idempotent.

    Args:
        config: The configuration as loaded.
        world_size: Number of ranks that were started, by any launcher. Default:
            :func:`default_world_size` on CPU.

    Raises:
        ConfigError: The product of the degrees is not ``world_size``, or the batch numbers do not
            fit this dp. The text contains the arithmetic.
    """
    if world_size is None:
        world_size = default_world_size(config.parallel, config.launch, 0)
    assert world_size >= 1, world_size
    parallel, dp = config.parallel, config.parallel.known_dp
    problems: list[ConfigError] = []
    if dp is None:
        dp, rest = divmod(world_size, parallel.ranks_per_batch)
        if rest:
            raise ConfigError("MW-CONFIG-003", _no_whole_replicas(parallel, world_size))
    elif dp * parallel.ranks_per_batch != world_size:
        problems.append(ConfigError("MW-CONFIG-004", _wrong_product(dp, parallel, world_size)))
    problems += find_rank_problems(parallel, dp)
    numbers = config.batch
    try:
        numbers = derive(config.batch, dp)
    except ConfigError as error:
        problems.append(error)
    num_stages = parallel.pp * config.pipeline.stages_per_rank
    if not problems and (wrong := _too_many_sizes(numbers, dp, num_stages)) is not None:
        problems.append(ConfigError("MW-CONFIG-064", wrong))
    if problems:
        raise ConfigError.join(problems)
    return config.replace(
        batch=numbers.model_dump(), parallel={"dp": dp}, launch={"processes": world_size}
    )


def _too_many_sizes(numbers: Batch, dp: int, num_stages: int) -> str | None:
    """Return the problem of a ramp with so many batch sizes that their schedules take minutes
    to build, or None.
    """
    sizes = []
    if numbers.ramp is not None:
        sizes = [phase.global_batch for phase in phases(numbers)]
    replicas = (numbers.micro_batch_size or 1) * dp
    forwards = sum(sizes) // replicas * num_stages
    if forwards <= MAX_RAMP_FORWARDS:
        return None
    return (
        f"batch.ramp = {list(numbers.ramp or ())} has {len(sizes):,} batch sizes, with {forwards:,}"
        f" forwards in their schedules: at most {MAX_RAMP_FORWARDS:,} are allowed; choose a larger"
        " increment"
    )


class BatchNumbers(NamedTuple):
    """The resolved batch: ``global_batch = micro_batch_size x chunks x dp``."""

    micro_batch_size: int
    chunks: int
    global_batch: int


def batch_numbers(batch: Batch, samples_seen: int | None = None) -> BatchNumbers:
    """Return the batch numbers of a resolved configuration.

    ``samples_seen``: samples before the step; None: the largest step of a batch-size ramp.
    """
    size, chunks, total = batch.micro_batch_size, batch.chunks, batch.global_batch
    assert size is not None and chunks is not None and total is not None
    if samples_seen is None or batch.ramp is None:
        return BatchNumbers(size, chunks, total)
    begun = [phase for phase in phases(batch) if phase.samples_seen <= samples_seen]
    of_step = begun[-1].global_batch
    return BatchNumbers(size, chunks * of_step // total, of_step)


def shard_factor(parallel: Parallel) -> int:
    """Return the number of shards of the optimizer state; 1: every replica has all of it.
    ``parallel``: of a resolved configuration.
    """
    if parallel.zero:
        return parallel.shard_factor or parallel.num_replicas
    return 1


def find_rank_problems(parallel: Parallel, dp: int) -> list[ConfigError]:
    """Return an error for each degree or factor that does not divide its ranks."""
    degrees = Layout(
        dp=dp, tp=parallel.tp, cp=parallel.cp, ep=parallel.ep, shard=parallel.shard_factor or 0
    )
    problems = []
    for rule in (SHARDS, EXPERT_RANKS):
        message = rule.find_problem(degrees, LayoutSizes())
        if message is not None:
            problems.append(ConfigError(rule.code, message))
    return problems


def expert_shard_factor(parallel: Parallel) -> int:
    """Return the number of shards of the experts' optimizer state (ZeRO-3: of their weights too),
    with parallel.ep > 1.

    It divides ``parallel.shard_factor`` and the dp x cp x tp / ep replicas of an expert.
    ``parallel``: of a resolved configuration.
    """
    return math.gcd(shard_factor(parallel), parallel.num_replicas * parallel.tp // parallel.ep)


def is_meant_for_gpu(device: str, dtype: str) -> bool:
    """Return whether defaults for a run with this ``train.device``
    and ``train.dtype`` are those for GPUs.

    It never depends on the machine: a laptop that plans, a launcher and a rank must derive the same
    layout. ``auto`` therefore depends on the dtype: a GPU for 16 bits, otherwise a CPU.
    """
    return device == "cuda" or (device == "auto" and dtype in ("bfloat16", "float16"))


def bucket_bytes(parallel: Parallel, train: Train) -> int:
    """Return the size of a gradient bucket, the bytes reduced in one message.
    ``parallel``: of a resolved configuration.

    NCCL needs far larger messages than gloo to reach its bandwidth.
    """
    if is_meant_for_gpu(train.device, train.dtype):
        smallest = 160 * 2**20
    else:
        smallest = 25 * 2**20
    return parallel.bucket_bytes or max(smallest, 4 * 2**20 * parallel.num_replicas)


def reduces_each_microbatch(parallel: Parallel) -> bool:
    """Return True if gradients are reduced over the replicas after each micro-batch,
    not once per step.
    """
    return parallel.zero >= 2 and parallel.reduce != "step" and shard_factor(parallel) > 1


def default_world_size(parallel: Parallel, launch: Launch, num_devices: int) -> int:
    """Return the number of local ranks to start.

    ``launch.processes`` when it is a number; else dp x pp x cp x tp. With dp = "auto": as many
    whole replicas as fit on the devices (on CPU: one).

    Args:
        parallel: Section of the configuration as loaded, and so ``launch``.
        num_devices: Number of accelerators that this run may use; 0 on CPU.

    Raises:
        ConfigError: There are more ranks than devices, without ``launch.share_devices``.
    """
    dp = parallel.known_dp
    one = parallel.ranks_per_batch
    named = parallel.named_ranks
    if launch.processes != "auto":
        size, source = launch.processes, "launch.processes"
    elif dp is not None:
        size, source = dp * one, f"dp {dp} x {named}"
    else:
        size, source = max(1, num_devices // one) * one, named
    if 0 < num_devices < size and not launch.share_devices:
        raise ConfigError(
            "MW-CONFIG-007",
            f"{source} = {size} ranks, but this machine has {num_devices}"
            f" device{'s' * (num_devices > 1)}: lower a "
            f"degree, start more machines with torchrun or srun, run on CPU with train.device ="
            f' "cpu", or let ranks '
            f"share devices to try a layout: launch.share_devices = true",
        )
    return size


def has_base_elsewhere(adapter: Adapter, model: Model) -> bool:
    """Return whether ``hf:DIRECTORY`` has the frozen base of adapters."""
    return adapter.rank > 0 and is_own_scheme(model.builder)


def leaves_out_base(adapter: Adapter, model: Model, run: Run) -> bool:
    """Return whether checkpoints hold only adapters: each start reads the base of ``hf:DIRECTORY``
    from there.

    With other builders the base may come from an imported checkpoint, and with ``run.start`` from
    anywhere: their checkpoints hold it too.
    """
    return has_base_elsewhere(adapter, model) and not run.start
