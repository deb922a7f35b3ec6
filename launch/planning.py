"""What ``meshwright plan`` and ``meshwright calibrate`` do with the words they were given."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from framework.config import RunConfig, load
from framework.config.given import read_overrides
from framework.config.toml import to_toml
from framework.errors import ConfigError
from framework.mesh.grid import Grid
from framework.mesh.mesh import open_mesh
from framework.planner.calibrate import Measured, measure_block, measure_device, measure_links
from framework.planner.choices import MICRO_BATCH_SIZES, MOST_CHUNKS, Choice, choices, divisors
from framework.planner.hardware import Hardware, Link, read_hardware
from framework.planner.page import page
from framework.planner.plan_text import chosen_config, describe
from framework.planner.profile import Practice
from framework.planner.search import BEST, Plan, search, usable_bytes
from framework.planner.sketch import Workbench
from framework.summary import memory

MOST_NODES_TRIED = 6
"""Doublings."""
FREE_BATCH = ("--batch.micro_batch_size=1", "--batch.chunks=none", "--parallel.dp=auto")
"""What of a configuration's own batch would hold against another number of samples."""
SEARCHED = {
    *(f"parallel.{key}" for key in ("pp", "tp", "zero", "shard_factor", "sequence", "offload", "tp_across_nodes")),
    *(f"pipeline.{key}" for key in ("schedule", "interleave", "schedule_file", "recompute", "recompute_layers")),
}
"""Keys that a search gives each layout itself."""


def plan(
    path: str,
    overrides: Sequence[str],
    cluster: str,
    nodes: int,
    devices_per_node: int | None,
    global_batch: int | None,
    out: Path | None,
    best: int | None,
) -> None:
    """The command.

    Raises:
        UserError: the configuration, the hardware, or that nothing fits, with the nearest thing that would work.
    """
    gc.disable()  # a search makes millions of small tuples, in no cycles
    writable(out, "--out")
    hardware = read_hardware(cluster)
    if devices_per_node is not None:
        hardware = hardware.model_copy(update={"devices_per_node": devices_per_node})
    _only_what_is_given(overrides)
    own = [] if global_batch is None else [*FREE_BATCH, f"--batch.global_batch={global_batch}"]
    config = bare(load(path, [*overrides, *own]), nodes * hardware.devices_per_node, global_batch)
    workbench = Workbench(config, practice_for(config, hardware))
    found = search(workbench, hardware, nodes, best=best or BEST)
    if not found.best and found.closest is not None:
        offloaded = search(workbench, hardware, nodes, best=best or BEST, offload=True)
        found = offloaded if offloaded.best or offloaded.closest is not None else found
    if not found.best:
        raise ConfigError(_nothing_fits(workbench, hardware, nodes, found))
    print(describe(workbench, found))
    if out is None:
        return
    chosen = chosen_config(found, config.run.name)
    first = f"# The first of {found.num_fitting:,} layouts of {path} on {nodes} x {hardware.devices_per_node} x "
    first += f"{hardware.name}: {found.best[0].choice}.\n# Predicted: {found.best[0].time.total:.4g} s a step, "
    first += f"{memory(found.best[0].peak_bytes)} on the fullest rank.\n\n"
    written = {"plan.toml": first + to_toml(chosen), "plan.html": page(workbench, found)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in written.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}): choose another place") from error
    print(f"\nwritten: {out / 'plan.toml'} (for `meshwright train`), {out / 'plan.html'}")


def writable(out: Path | None, word: str, *, folder: bool = True) -> None:
    """Refuse before long work a place that is taken. ``folder``: whether it is to be one, or a file.

    Raises:
        ConfigError: it is the other one, or lies below a file.
    """
    if out is None:
        return
    if out.exists() and out.is_dir() != folder:
        there, wanted = ("a file", "folder") if folder else ("a folder", "file")
        near = out.with_name(f"{out.stem}-plan") if folder else out / "this-machine.toml"
        raise ConfigError(f"{word} {out}: there is {there} of that name; name a {wanted}, such as {near}")
    below = next((each for each in out.parents if each.exists()), None)
    if below is not None and not below.is_dir():
        raise ConfigError(f"{word} {out}: {below} is a file, and nothing can lie below it: choose another place")


def _only_what_is_given(overrides: Sequence[str]) -> None:
    """Refuse words that would be without effect: what a search gives each layout itself.

    Raises:
        ConfigError: with all of them.
    """
    taken = sorted({given.key for given in read_overrides(overrides).given} & SEARCHED)
    if taken:
        keys = ", ".join(taken)
        raise ConfigError(
            f"command line: {keys}: a plan looks at every value of {'it' if len(taken) == 1 else 'these'} itself, and "
            f"what is said here would be without effect: leave it out (`meshwright dryrun` looks at one layout)"
        )


def practice_for(config: RunConfig, hardware: Hardware) -> Practice:
    """How this framework's own ranks run operations there."""
    return Practice(fused=config.train.compile, takes_everything=hardware.kind == "cuda")


def bare(config: RunConfig, size: int, global_batch: int | None) -> RunConfig:
    """The configuration without its layout: a search gives each degree itself.

    Raises:
        ConfigError: it does not say how many samples a step has.
    """
    batch, dp = config.batch, config.parallel.dp
    samples = global_batch or batch.global_batch
    if samples is None and batch.micro_batch_size and batch.chunks and isinstance(dp, int) and dp > 0:
        samples = batch.micro_batch_size * batch.chunks * dp
    if samples is None:
        raise ConfigError(
            "batch.global_batch is not given: a layout is looked for that takes the same samples in each step; "
            f"say how many with --global-batch, {16 * size} for one"
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


def _nothing_fits(workbench: Workbench, hardware: Hardware, nodes: int, found: Plan) -> list[str]:
    """What is nearest, and what would work."""
    samples = workbench.config.batch.global_batch or 1
    where = f"{nodes:,} x {hardware.devices_per_node} {hardware.name}"
    if found.closest is None:
        broken = found.rejected[0].rule if found.rejected else "no degrees divide the devices"
        works = [*_other_batch(workbench, hardware, nodes, samples), *_fewer_devices(workbench, hardware, nodes)]
        would = f"{' or '.join(works)} would do" if works else "take another number of devices, or of samples"
        return [f"no layout of {samples:,} samples a step keeps the rules on {where}; {broken}", would]
    needed, choice = found.closest
    more = _more_nodes(workbench, hardware, nodes)
    lines = [
        f"no layout fits {where}, not with recomputation and the optimizer on the host either: the closest, {choice}, "
        f"needs {memory(needed)} of a device, and {memory(usable_bytes(hardware))} may be used"
    ]
    if more := _more_nodes(workbench, hardware, nodes):
        return [*lines, f"it fits on {more} nodes (--nodes {more})"]
    return [*lines, "take shorter sequences, a smaller model or larger devices: more nodes alone do not help"]


def _other_batch(workbench: Workbench, hardware: Hardware, nodes: int, samples: int) -> list[str]:
    """The numbers of samples below and above that some layout takes."""
    size = nodes * hardware.devices_per_node
    found = []
    for numbers in (range(samples - 1, max(0, samples - size) - 1, -1), range(samples + 1, samples + size + 1)):
        near = next((each for each in numbers if each and _keeps_rules(workbench, hardware, nodes, each)), None)
        found += [] if near is None else [f"--global-batch {near}"]
    most = size * MOST_CHUNKS * max(MICRO_BATCH_SIZES)
    if not found and most < samples and _keeps_rules(workbench, hardware, nodes, most):
        return [f"--global-batch {most}"]
    return found


def _fewer_devices(workbench: Workbench, hardware: Hardware, nodes: int) -> list[str]:
    """The most devices below that some layout takes."""
    samples = workbench.config.batch.global_batch or 1
    for fewer in range(nodes - 1, 0, -1):
        if _keeps_rules(workbench, hardware, fewer, samples):
            return [f"--nodes {fewer}"]
    for devices in reversed(divisors(hardware.devices_per_node)[:-1]):
        if _keeps_rules(workbench, hardware.model_copy(update={"devices_per_node": devices}), 1, samples):
            return [f"--nodes 1 --devices-per-node {devices}"]
    return []


def _keeps_rules(workbench: Workbench, hardware: Hardware, nodes: int, samples: int) -> bool:
    config = bare(workbench.config, nodes * hardware.devices_per_node, samples)
    other = dataclasses.replace(workbench, config=config)
    other.__dict__["model"] = workbench.model
    return any(isinstance(each, Choice) for each in choices(other, hardware, nodes))


def _more_nodes(workbench: Workbench, hardware: Hardware, nodes: int) -> int | None:
    for more in (nodes * 2**doublings for doublings in range(1, MOST_NODES_TRIED + 1)):
        if any(search(workbench, hardware, more, best=1, offload=offload).best for offload in (False, True)):
            return int(more)
    return None


def calibrate(out: Path, ranks: int) -> None:
    """Measure this machine and write what it is, for ``--cluster``."""
    from framework.planner.calibrate import cores, put_together, to_toml
    from launch.pool import RankPool

    writable(out, "--out", folder=False)
    with RankPool(max(2, ranks)) as pool:
        measured = pool.run(measure_alone, min(cores(), ranks), timeout_s=600)
        links = pool.run(measure_together, max(2, min(cores(), ranks)), timeout_s=600)[0]
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found = put_together(measured, links, memory_bytes, ranks)
        shares = pool.run(measure_whole, min(cores(), ranks), found, timeout_s=600)
    found = found.model_copy(update={"whole_share": sorted(shares)[len(shares) // 2]})
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"# Measured by `meshwright calibrate`.\n\n{to_toml(found)}", encoding="utf-8")
    largest, link = found.products[-1], found.node_link
    print(
        f"{found.name}: products reach {largest.per_s / 1e9:,.1f} GFLOP/s on a core, copies "
        f"{found.memory_bytes_per_s / 1e9:,.1f} GB/s; an operation takes {found.operation_s * 1e6:.1f} us besides; "
        f"links {link.bytes_per_s / 1e9:,.2f} GB/s, {link.latency_s * 1e6:.0f} us\nwritten: {out}"
    )


def measure_alone(rank: int, world_size: int) -> dict[str, Measured]:
    """One process of as many as there are cores, all at once."""
    torch.set_num_threads(1)
    return {str(dtype).removeprefix("torch."): measure_device(dtype) for dtype in (torch.float32, torch.bfloat16)}


def measure_whole(rank: int, world_size: int, hardware: Hardware) -> float:
    """One process of as many as there are cores, all at once."""
    torch.set_num_threads(1)
    return measure_block(hardware)


def measure_together(rank: int, world_size: int) -> dict[str, Link]:
    """One process of those that talk."""
    torch.set_num_threads(1)
    mesh = open_mesh(Grid(1, world_size, 1), "cpu")
    return measure_links(mesh.dp)
