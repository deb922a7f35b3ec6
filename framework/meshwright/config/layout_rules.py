"""Rules between numbers of the layout: ranks, the batch, the partition into stages, devices."""

from __future__ import annotations

from meshwright.config import batch
from meshwright.config.keys import format_value
from meshwright.config.rules import Rule
from meshwright.config.schema import RunConfig

MAX_RANKS = 2**20
MAX_FORWARDS = 2**18
"""Most forwards in a step, pp x chunks x stages per rank: a schedule lists each of them."""


def _ranks(config: RunConfig) -> str | None:
    parallel, dp = config.parallel, config.parallel.known_dp or 1
    if dp * parallel.ranks_per_batch <= MAX_RANKS:
        return None
    return (
        f"dp {dp} x {parallel.named_ranks} = {dp * parallel.ranks_per_batch:,} ranks: at most"
        f" {MAX_RANKS:,} are allowed"
    )


def _forwards(config: RunConfig) -> str | None:
    """Check the bound before a schedule is built;
    ``schedule.build`` checks it again for derived chunks.
    """
    pp = config.parallel.pp
    chunks = config.batch.chunks or 1
    interleave = config.pipeline.stages_per_rank
    if pp * chunks * interleave <= MAX_FORWARDS:
        return None
    return (
        f"pp {pp} x chunks {chunks} x interleave {interleave} = {pp * chunks * interleave:,}"
        f" forwards in a step: at most {MAX_FORWARDS:,} are allowed; lower batch.chunks,"
        " parallel.pp or pipeline.interleave"
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
            f"launch.processes = {processes} is not a multiple of {named} = {one}, the ranks of one"
            f" replica: set {' or '.join(map(str, near))}"
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
    twice = next((each for at, each in enumerate(devices) if each in devices[:at]), None)
    if twice is not None:
        return f"{named} device {twice} twice: each rank needs its own"
    return None


def _balance(config: RunConfig) -> str | None:
    balance = config.pipeline.balance
    pp = config.parallel.pp
    interleave = config.pipeline.stages_per_rank
    if (
        isinstance(balance, str)
        or config.pipeline.schedule_file is not None
        or len(balance) == pp * interleave
    ):
        return None
    stages = f"parallel.pp = {pp}" + (
        f" with pipeline.interleave = {interleave}" if interleave > 1 else ""
    )
    return (
        f"pipeline.balance = {format_value(balance)} names the layers of {len(balance)} stages, but"
        f" {stages}: give "
        f'{pp * interleave} number{"s" * (pp * interleave > 1)}, or balance by "time", "parameters"'
        ' or "layers"'
    )


LAYOUT_RULES = (
    Rule("MW-CONFIG-034", _ranks, ("parallel.dp", "parallel.pp", "parallel.cp", "parallel.tp")),
    Rule(
        "MW-CONFIG-035",
        _forwards,
        ("parallel.pp", "batch.chunks", "pipeline.schedule", "pipeline.interleave"),
    ),
    Rule(
        "MW-CONFIG-037",
        _batch,
        ("batch.micro_batch_size", "batch.chunks", "batch.global_batch", "parallel.dp"),
    ),
    Rule(
        "MW-CONFIG-038",
        _processes,
        ("launch.processes", "parallel.dp", "parallel.pp", "parallel.tp"),
    ),
    Rule("MW-CONFIG-039", _devices, ("launch.devices",)),
    Rule("MW-CONFIG-045", _balance, ("pipeline.balance", "parallel.pp")),
)
