"""Commands ``meshwright plan`` and ``meshwright calibrate``."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.config import RunConfig, given_keys, load, to_toml
from meshwright.config.sources import read_file
from meshwright.errors import ConfigError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.system.atomic import check_place, write_out
from meshwright.terminal.format import format_size
from meshwright.terminal.output import put
from meshwright.tools.picture.library import require_matplotlib
from meshwright.tools.planner.calibrate import DeviceRates, measure_block, measure_device, measure_links
from meshwright.tools.planner.hardware import Hardware, Link, Message, read_hardware
from meshwright.tools.planner.kernels import ExecutionOptions
from meshwright.tools.planner.model_cache import ModelCache
from meshwright.tools.planner.nearest import nearest, search_with_offload
from meshwright.tools.planner.page import page
from meshwright.tools.planner.plan import Plan, usable_bytes
from meshwright.tools.planner.search import BEST
from meshwright.tools.planner.text import chosen_config, describe

MOST_DEVICES = 2**20
FREE_BATCH = ("--batch.micro_batch_size=1", "--batch.chunks=none", "--parallel.dp=auto")
"""Overrides that clear a configuration's own batch, so that it cannot contradict another number of samples."""
SEARCHED = {
    *(f"parallel.{key}" for key in ("pp", "dp", "tp", "zero", "shard_factor", "sequence", "reduce", "offload")),
    *(f"pipeline.{key}" for key in ("schedule", "interleave", "schedule_file", "recompute", "recompute_layers")),
    *("parallel.tp_across_nodes", "batch.micro_batch_size", "batch.chunks", "launch.processes"),
}
"""Keys that a search sets for each layout."""


class PlanOptions(NamedTuple):
    """Options of the command; None leaves one to the hardware's file or the configuration."""

    cluster: str
    """Name of a hardware file of meshwright, or the path of one."""
    nodes: int
    devices_per_node: int | None
    global_batch: int | None
    out: Path | None
    """Directory for plan.toml and plan.html."""
    best: int | None
    """Number of layouts to list."""


def plan(path: str, overrides: Sequence[str], options: PlanOptions) -> None:
    """Search for the best layouts of a configuration on a cluster, print them, and write the plan.

    Raises:
        UserError: an invalid configuration or hardware, or nothing fits; then with the nearest that would work.
    """
    nodes, global_batch, out = options.nodes, options.global_batch, options.out
    gc.disable()  # a search creates millions of small tuples, without cycles
    check_place(out, folder=True, example="plan")
    if out is not None:
        require_matplotlib()
    hardware = read_hardware(options.cluster)
    if options.devices_per_node is not None:
        hardware = hardware.model_copy(update={"devices_per_node": options.devices_per_node})
    if nodes * hardware.devices_per_node > MOST_DEVICES:
        most = max(1, MOST_DEVICES // hardware.devices_per_node)
        raise ConfigError(
            "MW-LAUNCH-037",
            f"--nodes {nodes} of {hardware.devices_per_node:,} devices each: a plan is for {MOST_DEVICES:,} devices at "
            f"most, such as --nodes {most}",
        )
    _only_what_has_effect(overrides, hardware, global_batch)
    config = _on_device_of(hardware, _loaded(path, overrides, global_batch))
    config = remove_layout(config, nodes * hardware.devices_per_node, global_batch)
    cache = ModelCache(config, execution_options(config, hardware))
    found = search_with_offload(cache, hardware, nodes, options.best or BEST)
    if not found.best:
        raise ConfigError("MW-LAUNCH-038", _nothing_fits(cache, hardware, nodes, found))
    put(describe(cache, found))
    if out is None:
        return
    chosen = chosen_config(found, config.run.name)
    first = f"# The first of {found.num_fitting:,} layouts of {path} on {nodes} x {hardware.devices_per_node} x "
    first += f"{hardware.name}: {found.best[0].choice}.\n# Predicted: {found.best[0].time.total:.4g} s a step, "
    first += f"{format_size(found.best[0].peak_bytes)} on the fullest rank.\n\n"
    written = {"plan.toml": first + to_toml(chosen), "plan.html": page(cache, found)}
    for name, text in written.items():
        write_out(out / name, text)
    put(f"\nwritten: {out / 'plan.toml'} (for `meshwright train`), {out / 'plan.html'}")


def _only_what_has_effect(overrides: Sequence[str], hardware: Hardware, global_batch: int | None) -> None:
    """Refuse arguments without effect: keys that a search sets, a device that the cluster lacks, a batch given twice.

    Raises:
        ConfigError: lists all of them.
    """
    values = {".".join(key): value for key, value in given_keys(overrides).items()}
    problems = []
    if taken := sorted(values.keys() & SEARCHED):
        problems.append(
            ConfigError(
                "MW-LAUNCH-039",
                f"command line: {', '.join(taken)}: a plan gives each layout its own, and what is said here would be "
                f"without effect: leave {'it' if len(taken) == 1 else 'them'} out (--global-batch says how many "
                f"samples a step has; `meshwright dryrun` looks at one layout)",
            )
        )
    if values.get("train.device", "auto") not in ("auto", hardware.kind):
        problems.append(
            ConfigError(
                "MW-LAUNCH-040",
                f'command line: train.device = "{values["train.device"]}", and the devices of {hardware.name} are '
                f"{hardware.kind}: leave it out, or take another --cluster",
            )
        )
    if global_batch is not None and "batch.global_batch" in values:
        problems.append(
            ConfigError(
                "MW-LAUNCH-041",
                f"command line: batch.global_batch = {values['batch.global_batch']} and --global-batch {global_batch} "
                f"say the same: leave one out",
            )
        )
    if problems:
        raise ConfigError.join(problems)


def _loaded(path: str, overrides: Sequence[str], global_batch: int | None) -> RunConfig:
    """Load the configuration; keep only the samples per step of its batch, or none if it does not give them."""
    given = {".".join(key): value for key, value in given_keys(overrides).items()}
    given = {each.key: each.value for each in read_file(Path(path)).given} | given
    if global_batch is not None:
        return load(path, [*overrides, *FREE_BATCH, f"--batch.global_batch={global_batch}"])
    if given.get("batch.global_batch") is not None:
        return load(path, [*overrides, *FREE_BATCH])
    if {"batch.micro_batch_size", "batch.chunks"} <= given.keys():
        return load(path, overrides)
    config = load(path, [*overrides, *FREE_BATCH, "--batch.global_batch=1"])
    return config.model_copy(update={"batch": config.batch.model_copy(update={"global_batch": None})})


def _on_device_of(hardware: Hardware, config: RunConfig) -> RunConfig:
    """Return the configuration on the cluster's device: it decides how stages are cut and where ``train`` will run."""
    if config.train.device == hardware.kind or (hardware.kind == "cuda" and config.train.device == "auto"):
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"device": hardware.kind})})


def execution_options(config: RunConfig, hardware: Hardware) -> ExecutionOptions:
    """Return how ranks of this framework run operations on that hardware."""
    on_gpu = hardware.kind == "cuda"
    return ExecutionOptions(fused=config.train.compile, fuses_any_attention=on_gpu, norm_kernel=on_gpu)


def remove_layout(config: RunConfig, size: int, global_batch: int | None) -> RunConfig:
    """Return the configuration without its layout, since a search sets each degree.

    Raises:
        ConfigError: the number of samples per step is not given.
    """
    batch, dp = config.batch, config.parallel.dp
    samples = global_batch or batch.global_batch
    if samples is None and batch.micro_batch_size and batch.chunks and isinstance(dp, int) and dp > 0:
        samples = batch.micro_batch_size * batch.chunks * dp
    if samples is None:
        raise ConfigError(
            "MW-LAUNCH-042",
            "batch.global_batch is not given: a layout is looked for that takes the same samples in each step; "
            f"say how many with --global-batch, {16 * size} for one",
        )
    parallel = {"pp": 1, "tp": 1, "dp": 1, "sequence": False, "zero": 1, "shard_factor": None, "reduce": None}
    pipeline: dict[str, object] = {"schedule": "1f1b", "interleave": None, "schedule_file": None}
    pipeline |= {"recompute": "none", "recompute_layers": ["*"]}
    return config.model_copy(
        update={
            "batch": batch.model_copy(update={"micro_batch_size": 1, "chunks": samples, "global_batch": samples}),
            "parallel": config.parallel.model_copy(update=parallel),
            "pipeline": config.pipeline.model_copy(update=pipeline),
        }
    )


def _nothing_fits(cache: ModelCache, hardware: Hardware, nodes: int, found: Plan) -> str:
    """Return the text of the error: the layout closest to fitting, and what would work."""
    where = f"{nodes:,} x {hardware.devices_per_node} {hardware.name}"
    if found.closest is None:
        broken = found.rejected[0].rule if found.rejected else "no degrees divide the devices"
        said = f"no layout of {cache.config.batch.global_batch:,} samples a step keeps the rules on {where}: {broken}"
    else:
        needed, choice = found.closest
        said = (
            f"no layout fits {where}, not with recomputation and the optimizer on the host either: the closest, "
            f"{choice}, needs {format_size(needed)} of a device or more, and "
            f"{format_size(usable_bytes(hardware))} may be used"
        )
    works = nearest(cache, hardware, nodes, found)
    return f"{said}\n" + (f"what works: {', or '.join(works)}" if works else "take a smaller model")


def calibrate(out: Path, ranks: int) -> None:
    """Measure this machine and write it as a hardware file for ``--cluster``."""
    from meshwright.launch.pool import RankPool
    from meshwright.tools.planner.calibrate import build_hardware, cores, to_toml

    check_place(out, folder=False, example="this-machine.toml")
    with RankPool(max(2, ranks)) as pool:
        measured = pool.run(measure_core, min(cores(), ranks), timeout_s=600)
        links = pool.run(measure_all_links, max(2, min(cores(), ranks)), timeout_s=600)[0]
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found = build_hardware(measured, links, memory_bytes, ranks)
        shares = pool.run(measure_block_share, min(cores(), ranks), found, timeout_s=600)
    found = found.model_copy(update={"whole_share": sorted(shares)[len(shares) // 2]})
    write_out(out, f"# Measured by `meshwright calibrate`.\n\n{to_toml(found)}")
    largest, link = found.products[-1], found.node_link
    put(
        f"{found.name}: products reach {largest.per_s / 1e9:,.1f} GFLOP/s on a core, copies "
        f"{found.memory_bytes_per_s / 1e9:,.1f} GB/s; an operation takes {found.operation_s * 1e6:.1f} us besides; "
        f"links {link.bytes_per_s / 1e9:,.2f} GB/s, {link.latency_s * 1e6:.0f} us\nwritten: {out}"
    )


def measure_core(rank: int, world_size: int) -> dict[str, DeviceRates]:
    """Measure this rank's core in float32 and bfloat16, while the other ranks do the same."""
    torch.set_num_threads(1)
    return {str(dtype).removeprefix("torch."): measure_device(dtype) for dtype in (torch.float32, torch.bfloat16)}


def measure_block_share(rank: int, world_size: int, hardware: Hardware) -> float:
    """Return the share (0..1) of the rates in ``hardware`` that a whole block reaches, with all ranks busy at once."""
    torch.set_num_threads(1)
    return measure_block(hardware)


def measure_all_links(rank: int, world_size: int) -> dict[Message, Link]:
    """Measure the links between all ranks. Collective over dp."""
    torch.set_num_threads(1)
    mesh = open_mesh(Grid(1, world_size, 1), "cpu")
    return measure_links(mesh.dp)
