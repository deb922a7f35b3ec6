"""Values that depend on the number of ranks: dp, the batch numbers, shard factors, the number of processes to start."""

from __future__ import annotations

import math
from typing import NamedTuple

from meshwright.config import batch
from meshwright.config.layout_rules import MAX_FORWARDS
from meshwright.config.schema import RunConfig
from meshwright.config.sections import Batch, Parallel
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
    return f"dp {dp} x {parallel.named_ranks} = {size} ranks, but {world_size} were started: {', or '.join(moves)}"


def _no_whole_replicas(parallel: Parallel, world_size: int) -> str:
    one = parallel.ranks_per_batch
    near = [one * replicas for replicas in (world_size // one, world_size // one + 1) if replicas]
    return (
        f'parallel.dp = "auto": {parallel.named_ranks} = {one} ranks for one replica, but {world_size} were started, '
        f"{world_size / one:.3g} replicas: start {' or '.join(map(str, near))}, or change parallel.pp, "
        f"parallel.cp or parallel.tp"
    )


def resolve(config: RunConfig, world_size: int | None = None) -> RunConfig:
    """Return the configuration with dp, the three batch numbers and ``launch.processes`` as whole numbers. Idempotent.

    Args:
        config: The configuration as loaded.
        world_size: Number of ranks that were started, by any launcher. Default: :func:`default_world_size` on CPU.

    Raises:
        ConfigError: The product of the degrees is not ``world_size``, or the batch numbers do not fit this dp. The text
            contains the arithmetic.
    """
    if world_size is None:
        world_size = default_world_size(config, 0)
    assert world_size >= 1, world_size
    parallel, dp = config.parallel, config.parallel.known_dp
    problems: list[ConfigError] = []
    if dp is None:
        dp, rest = divmod(world_size, parallel.ranks_per_batch)
        if rest:
            raise ConfigError("MW-CONFIG-003", _no_whole_replicas(parallel, world_size))
    elif dp * parallel.ranks_per_batch != world_size:
        problems.append(ConfigError("MW-CONFIG-004", _wrong_product(dp, parallel, world_size)))
    factor, replicas = parallel.shard_factor, dp * parallel.cp
    if factor is not None and replicas % factor:
        choices = ", ".join(map(str, batch.divisors(replicas)))
        of = f"dp {dp}" + (f" x cp {parallel.cp}" if parallel.cp > 1 else "")
        problems.append(
            ConfigError(
                "MW-CONFIG-005", f"parallel.shard_factor = {factor} does not divide {of}: choose one of {choices}"
            )
        )
    try:
        check_expert_ranks(parallel, dp)
    except ConfigError as error:
        problems.append(error)
    numbers = config.batch
    try:
        numbers = batch.derive(config.batch, dp)
    except ConfigError as error:
        problems.append(error)
    if not problems and (wrong := _too_many_sizes(config, numbers, dp)) is not None:
        problems.append(ConfigError("MW-CONFIG-064", wrong))
    if problems:
        raise ConfigError.join(problems)
    return config.replace(batch=numbers.model_dump(), parallel={"dp": dp}, launch={"processes": world_size})


def _too_many_sizes(config: RunConfig, numbers: Batch, dp: int) -> str | None:
    """Return the problem of a ramp with so many batch sizes that their schedules take minutes to build, or None."""
    sizes = [phase.global_batch for phase in batch.phases(numbers)] if numbers.ramp is not None else []
    replicas = (numbers.micro_batch_size or 1) * dp
    forwards = sum(sizes) // replicas * config.parallel.pp * config.pipeline.stages_per_rank
    if forwards <= MAX_RAMP_FORWARDS:
        return None
    return (
        f"batch.ramp = {list(numbers.ramp or ())} has {len(sizes):,} batch sizes, with {forwards:,} forwards in their "
        f"schedules: at most {MAX_RAMP_FORWARDS:,} are allowed; choose a larger increment"
    )


class BatchNumbers(NamedTuple):
    """The resolved batch: ``global_batch = micro_batch_size x chunks x dp``."""

    micro_batch_size: int
    chunks: int
    global_batch: int


def batch_numbers(config: RunConfig, samples_seen: int | None = None) -> BatchNumbers:
    """Return the batch numbers of a resolved config.

    ``samples_seen``: samples before the step; None: the largest step of a batch-size ramp.
    """
    size, chunks, total = config.batch.micro_batch_size, config.batch.chunks, config.batch.global_batch
    assert size is not None and chunks is not None and total is not None
    if samples_seen is None or config.batch.ramp is None:
        return BatchNumbers(size, chunks, total)
    of_step = [each for each in batch.phases(config.batch) if each.samples_seen <= samples_seen][-1].global_batch
    return BatchNumbers(size, chunks * of_step // total, of_step)


def shard_factor(config: RunConfig) -> int:
    """Return the number of shards of the optimizer state; 1: every replica has all of it. ``config``: resolved."""
    return (config.parallel.shard_factor or config.parallel.num_replicas) if config.parallel.zero else 1


def check_expert_ranks(parallel: Parallel, dp: int) -> None:
    """Check that ``parallel.ep`` divides the ranks of a stage.

    Raises:
        ConfigError: names the degrees that do.
    """
    stage = dp * parallel.cp * parallel.tp
    if stage % parallel.ep:
        of = f"dp {dp} x " + (f"cp {parallel.cp} x " if parallel.cp > 1 else "") + f"tp {parallel.tp}"
        choices = ", ".join(str(each) for each in batch.divisors(stage) if each == 1 or each % parallel.tp == 0)
        raise ConfigError(
            "MW-CONFIG-077",
            f"parallel.ep = {parallel.ep} does not divide {of} = {stage}, the ranks of a stage: choose one of "
            f"{choices}",
        )


def expert_shard_factor(config: RunConfig) -> int:
    """Return the number of shards of the experts' optimizer state (ZeRO-3: of their weights too), with parallel.ep > 1.

    It divides ``parallel.shard_factor`` and the dp x cp x tp / ep replicas of an expert. ``config``: resolved.
    """
    parallel = config.parallel
    return math.gcd(shard_factor(config), parallel.num_replicas * parallel.tp // parallel.ep)


def is_meant_for_gpu(device: str, dtype: str) -> bool:
    """Return whether defaults for a run with this ``train.device`` and ``train.dtype`` are those for GPUs.

    It never depends on the machine: a laptop that plans, a launcher and a rank must derive the same layout. ``auto``
    therefore depends on the dtype: a GPU for 16 bits, otherwise a CPU.
    """
    return device == "cuda" or (device == "auto" and dtype in ("bfloat16", "float16"))


def bucket_bytes(config: RunConfig) -> int:
    """Return the size of a gradient bucket, the bytes reduced in one message. ``config``: resolved.

    NCCL needs far larger messages than gloo to reach its bandwidth.
    """
    smallest = 160 * 2**20 if is_meant_for_gpu(config.train.device, config.train.dtype) else 25 * 2**20
    return config.parallel.bucket_bytes or max(smallest, 4 * 2**20 * config.parallel.num_replicas)


def reduces_each_microbatch(config: RunConfig) -> bool:
    """Return True if gradients are reduced over the replicas after each micro-batch, not once per step."""
    return config.parallel.zero >= 2 and config.parallel.reduce != "step" and shard_factor(config) > 1


def default_world_size(config: RunConfig, num_devices: int) -> int:
    """Return the number of local ranks to start.

    ``launch.processes`` when it is a number; else dp x pp x cp x tp. With dp = "auto": as many whole replicas as fit on
    the devices (on CPU: one).

    Args:
        config: The configuration as loaded.
        num_devices: Number of accelerators that this run may use; 0 on CPU.

    Raises:
        ConfigError: There are more ranks than devices, without ``launch.share_devices``.
    """
    dp, one, named = config.parallel.known_dp, config.parallel.ranks_per_batch, config.parallel.named_ranks
    if config.launch.processes != "auto":
        size, source = config.launch.processes, "launch.processes"
    elif dp is not None:
        size, source = dp * one, f"dp {dp} x {named}"
    else:
        size, source = max(1, num_devices // one) * one, named
    if 0 < num_devices < size and not config.launch.share_devices:
        raise ConfigError(
            "MW-CONFIG-007",
            f"{source} = {size} ranks, but this machine has {num_devices} device{'s' * (num_devices > 1)}: lower a "
            f'degree, start more machines with torchrun or srun, run on CPU with train.device = "cpu", or let ranks '
            f"share devices to try a layout: launch.share_devices = true",
        )
    return size


def leaves_out_base(config: RunConfig) -> bool:
    """Return whether checkpoints hold only adapters, because each start reads the base from the directory of ``hf:``.

    With other builders the base may come from an imported checkpoint: their checkpoints hold it too.
    """
    return config.adapter.rank > 0 and config.model.builder.startswith("hf:")
