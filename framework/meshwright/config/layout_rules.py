"""Rules between keys of the layout: ranks, the batch, sharding, the partition into stages, devices."""

from __future__ import annotations

from meshwright.config import batch
from meshwright.config.keys import format_value
from meshwright.config.rules import Rule, non_defaults
from meshwright.config.schema import RunConfig

MAX_RANKS = 2**20
MAX_FORWARDS = 2**18
"""Most forwards in a step, pp x chunks x stages per rank: a schedule lists each of them."""


def _ranks(config: RunConfig) -> str | None:
    parallel, dp = config.parallel, config.parallel.known_dp or 1
    if dp * parallel.ranks_per_batch <= MAX_RANKS:
        return None
    return (
        f"dp {dp} x {parallel.named_ranks} = {dp * parallel.ranks_per_batch:,} ranks: at most {MAX_RANKS:,} are allowed"
    )


def _forwards(config: RunConfig) -> str | None:
    """Check the bound before a schedule is built; ``schedule.build`` checks it again for derived chunks."""
    pp, chunks, interleave = config.parallel.pp, config.batch.chunks or 1, config.pipeline.stages_per_rank
    if pp * chunks * interleave <= MAX_FORWARDS:
        return None
    return (
        f"pp {pp} x chunks {chunks} x interleave {interleave} = {pp * chunks * interleave:,} forwards in a step: at "
        f"most {MAX_FORWARDS:,} are allowed; lower batch.chunks, parallel.pp or pipeline.interleave"
    )


def _batch(config: RunConfig) -> str | None:
    return batch.find_problem(config.batch, config.parallel.known_dp)


def _processes(config: RunConfig) -> str | None:
    processes, dp = config.launch.processes, config.parallel.known_dp
    one, named = config.parallel.ranks_per_batch, config.parallel.named_ranks
    if processes == "auto":
        return None
    if dp is None:
        if processes % one == 0:
            return None
        near = [one * i for i in (processes // one, processes // one + 1) if i]
        return (
            f"launch.processes = {processes} is not a multiple of {named} = {one}, the ranks of one "
            f"replica: set {' or '.join(map(str, near))}"
        )
    if processes == dp * one:
        return None
    return (
        f"launch.processes = {processes}, but dp {dp} x {named} = {dp * one} ranks: leave "
        f'launch.processes out, or set parallel.dp = "auto"'
    )


def _devices(config: RunConfig) -> str | None:
    named = f"launch.devices = {format_value(config.launch.devices)} names"
    devices = config.launch.devices.split(",") if config.launch.devices else []
    if config.train.device == "cpu" and config.launch.share_devices:
        return 'launch.share_devices = true is for GPUs, and train.device is "cpu": leave one out'
    if config.train.device == "cpu" and devices:
        return f'{named} GPUs, and train.device is "cpu": leave one out'
    twice = next((each for at, each in enumerate(devices) if each in devices[:at]), None)
    if twice is not None:
        return f"{named} device {twice} twice: each rank needs its own"
    return None


def _sequence(config: RunConfig) -> str | None:
    if not config.parallel.sequence or config.parallel.tp > 1:
        return None
    return (
        "parallel.sequence = true has no effect with parallel.tp = 1: it splits the sequence over the tensor-parallel "
        "ranks; set parallel.tp to 2 or more, or --parallel.sequence=false"
    )


def _context(config: RunConfig) -> str | None:
    cp, length = config.parallel.cp, config.data.sequence_length
    if cp == 1 and (others := non_defaults(config.parallel, "cp_order", "cp_exchange", "cp_head_groups")):
        return f"parallel.{others[0]} has no effect with parallel.cp = 1: set parallel.cp to 2 or more, or leave it out"
    if config.parallel.cp_exchange == "heads" and config.parallel.cp_head_groups is not None:
        return (
            f"parallel.cp_head_groups = {config.parallel.cp_head_groups} has no effect with "
            f'parallel.cp_exchange = "heads", which gathers no keys: leave one out'
        )
    if cp == 1 or config.data.builder is not None:
        return None
    if config.parallel.cp_order == "documents" and not config.data.document_boundaries:
        return (
            'parallel.cp_order = "documents" deals the tokens by the documents of each sample, and '
            "data.document_boundaries = false: set it to true, or use another order"
        )
    if length % cp == 0:
        return None
    nearest = " or ".join(str(near) for near in (length // cp * cp, (length // cp + 1) * cp) if near)
    return (
        f"data.sequence_length = {length} cannot be cut into parallel.cp = {cp} equal parts: use {nearest}, or another "
        f"parallel.cp"
    )


def _experts(config: RunConfig) -> str | None:
    parallel = config.parallel
    if parallel.ep == 1:
        return (
            "parallel.ep_across_nodes = true has no effect with parallel.ep = 1: set parallel.ep, or leave it out"
            if parallel.ep_across_nodes
            else None
        )
    if parallel.ep % parallel.tp:
        return (
            f"parallel.ep = {parallel.ep} is not a multiple of parallel.tp = {parallel.tp}: experts are shared by "
            f"whole tensor-parallel groups; set parallel.ep to 1 or to a multiple of {parallel.tp}"
        )
    if parallel.tp > 1 and not parallel.sequence:
        return (
            f"parallel.ep = {parallel.ep} with parallel.tp = {parallel.tp} needs parallel.sequence = true, so that "
            f"each rank sends tokens of its own to the experts: set it, or parallel.tp = 1"
        )
    if config.optimizer.name == "adafactor":
        return (
            f'optimizer.name = "adafactor" steps whole parameters, and parallel.ep = {parallel.ep} cuts experts: set '
            f"parallel.ep = 1, or choose another optimizer"
        )
    return None


def _shard_factor(config: RunConfig) -> str | None:
    factor = config.parallel.shard_factor
    if factor is None or factor == 1 or config.parallel.zero:
        return None
    return (
        f"parallel.shard_factor = {factor} has no effect with parallel.zero = 0, which shards nothing: set "
        f"parallel.zero = 1, or leave it out"
    )


def _reduce(config: RunConfig) -> str | None:
    parallel = config.parallel
    if parallel.reduce != "microbatch" or (parallel.zero >= 2 and parallel.shard_factor != 1):
        return None
    keeps = "shard_factor = 1" if parallel.zero >= 2 else f"zero = {parallel.zero}"
    return (
        f'parallel.reduce = "microbatch" saves nothing with parallel.{keeps}, which keeps the whole gradient: set '
        f"parallel.zero = 2 with two shards or more, or leave it out"
    )


def _offload(config: RunConfig) -> str | None:
    if config.parallel.offload_directory is None or config.parallel.offload:
        return None
    return (
        f"parallel.offload_directory = {format_value(config.parallel.offload_directory)} has no effect without "
        f"parallel.offload = true: set it, or leave the directory out"
    )


def _across_nodes(config: RunConfig) -> str | None:
    if not config.parallel.tp_across_nodes or config.parallel.tp > 1:
        return None
    return (
        "parallel.tp_across_nodes = true has no effect with parallel.tp = 1: set parallel.tp to 2 or more, or "
        "--parallel.tp_across_nodes=false"
    )


def _balance(config: RunConfig) -> str | None:
    balance, pp, interleave = config.pipeline.balance, config.parallel.pp, config.pipeline.stages_per_rank
    if isinstance(balance, str) or config.pipeline.schedule_file is not None or len(balance) == pp * interleave:
        return None
    stages = f"parallel.pp = {pp}" + (f" with pipeline.interleave = {interleave}" if interleave > 1 else "")
    return (
        f"pipeline.balance = {format_value(balance)} names the layers of {len(balance)} stages, but {stages}: give "
        f'{pp * interleave} number{"s" * (pp * interleave > 1)}, or balance by "time", "parameters" or "layers"'
    )


LAYOUT_RULES = (
    Rule("MW-CONFIG-034", _ranks, ("parallel.dp", "parallel.pp", "parallel.cp", "parallel.tp")),
    Rule("MW-CONFIG-035", _forwards, ("parallel.pp", "batch.chunks", "pipeline.schedule", "pipeline.interleave")),
    Rule("MW-CONFIG-037", _batch, ("batch.micro_batch_size", "batch.chunks", "batch.global_batch", "parallel.dp")),
    Rule("MW-CONFIG-038", _processes, ("launch.processes", "parallel.dp", "parallel.pp", "parallel.tp")),
    Rule("MW-CONFIG-039", _devices, ("launch.devices", "launch.share_devices", "train.device")),
    Rule("MW-CONFIG-040", _sequence, ("parallel.sequence", "parallel.tp")),
    Rule(
        "MW-CONFIG-069",
        _context,
        (
            "parallel.cp",
            "parallel.cp_order",
            "parallel.cp_exchange",
            "parallel.cp_head_groups",
            "data.sequence_length",
            "data.document_boundaries",
        ),
    ),
    Rule(
        "MW-CONFIG-076",
        _experts,
        ("parallel.ep", "parallel.tp", "parallel.sequence", "parallel.ep_across_nodes", "optimizer.name"),
    ),
    Rule("MW-CONFIG-041", _shard_factor, ("parallel.shard_factor", "parallel.zero")),
    Rule("MW-CONFIG-042", _reduce, ("parallel.reduce", "parallel.zero")),
    Rule("MW-CONFIG-043", _offload, ("parallel.offload_directory", "parallel.offload")),
    Rule("MW-CONFIG-044", _across_nodes, ("parallel.tp_across_nodes", "parallel.tp")),
    Rule("MW-CONFIG-045", _balance, ("pipeline.balance", "parallel.pp")),
)
