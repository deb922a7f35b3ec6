"""Complete check on one rank of a job, and its outcome."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig, bucket_bytes, resolve
from meshwright.doctor.connectivity import judge_reach, try_links
from meshwright.doctor.facts import gather_facts
from meshwright.doctor.findings import Finding, judge
from meshwright.doctor.links import measure_all_reduces, measure_links
from meshwright.doctor.report import format_report, write_links
from meshwright.errors import CommunicationError, ConfigError, MissingRanksError, UserError
from meshwright.mesh import Grid
from meshwright.mesh.mesh import close_mesh, environment_rank, open_mesh, open_store
from meshwright.run.directory import run_directory
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import MAX_TOML_BYTES, parse_toml, read_text
from meshwright.system.process import GiveUp, end_process, ignore_signals
from meshwright.terminal.output import put

TIMEOUT_S = 120.0
"""Seconds that a rank waits for another one; a rank that takes longer counts as absent."""
NOTICE_S = 5.0
"""Seconds that rank 0 waits for the other ranks to see that there are findings."""
LINKS = "links.toml"
BAD_NODES = "bad-nodes"
"""File with a value for Slurm's ExcNodeList, which a job script passes on;
empty if no node is bad.
"""


class UnfitMachineError(UserError):
    """Error that lists the faults a run would suffer from, and the nodes to leave out."""

    exit_code = 3


def nodes_of(findings: list[Finding]) -> list[str]:
    """Return the nodes to leave out, each once."""
    return list(dict.fromkeys(node for finding in findings for node in finding.nodes))


def write_bad_nodes(findings: list[Finding], directory: Path) -> None:
    """Write the nodes to leave out for the job script;
    a link of that name in a received run is replaced.
    """
    write_atomic(directory / BAD_NODES, ",".join(nodes_of(findings)), is_durable=False)


def unfit(findings: list[Finding]) -> UnfitMachineError:
    """Build the error that lists the findings and the nodes to leave out."""
    nodes = nodes_of(findings)
    exclude = f"; exclude these nodes (--exclude): {','.join(nodes)}" if nodes else ""
    many = f"{len(findings)} thing{'s are' if len(findings) > 1 else ' is'} wrong"
    return UnfitMachineError(
        "MW-DOCTOR-002", f"{many}: {'; '.join(finding.text for finding in findings)}{exclude}"
    )


def run_rank(config: RunConfig, give_up: GiveUp = end_process) -> None:
    """Run the check on one rank; rank 0 prints the report. Every rank calls it; blocks.

    Raises:
        UnfitMachineError: on rank 0, if there is any finding.
    """
    _, world_size, _ = environment_rank()
    config = resolve(config, world_size)
    grid = Grid.of(config.parallel.degrees)
    directory = run_directory(config.run)
    store, is_connected = _rendezvous(grid, directory)
    if not is_connected:
        return
    across = {"tp_across_nodes": True, "ep_across_nodes": True}
    mesh = open_mesh(grid, config.train.device, timeout_s=TIMEOUT_S, store=store, **across)
    if mesh.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
    facts = gather_facts(mesh, directory)
    links = measure_links(mesh)
    sums = measure_all_reduces(mesh)
    expected = expected_of(Path(config.launch.cluster)) if config.launch.cluster else None
    findings = judge(facts, links, expected_bytes_per_s=expected)
    if mesh.rank == 0:
        put(
            format_report(
                facts, links, sums, findings, bucket_bytes(config.parallel, config.train)
            ),
            flush=True,
        )
        if not any(each.disk_problem for each in facts):
            write_links(links, directory / LINKS)
            write_bad_nodes(findings, directory)
            put(f"\nlink figures: {directory / LINKS}", flush=True)
    rank = mesh.rank
    ignore_signals()
    close_mesh(mesh)
    if findings and rank == 0:
        raise unfit(findings)


def _rendezvous(grid: Grid, directory: Path) -> tuple[Any, bool]:
    """Wait until all ranks have joined, and check that nodes can connect to each other; blocks.

    Returns:
        (store, is_connected). The store is None under an elastic agent, which owns it; links are
        then not checked. With False, this rank has to exit: rank 0 reports the findings.

    Raises:
        UnfitMachineError: on rank 0, a rank is absent or a link is dead, and nothing more can be
            measured. On another rank, rank 0 is unreachable and has reported nothing.
    """
    rank, world_size, local_rank = environment_rank()
    try:
        store = open_store(grid, TIMEOUT_S)
        if store is None:
            return None, True
        findings = judge_reach(try_links(store, rank, local_rank, world_size, TIMEOUT_S))
        if not findings:
            return store, True
        if rank != 0:
            store.add("noticed", 1)
    except MissingRanksError as error:
        store, findings = None, [Finding(error.message, error.nodes)]
        if rank != 0:  # a running rank 0 would have reported before
            raise unfit(findings) from None
    except CommunicationError:
        if rank == 0:
            raise
    ignore_signals()
    if rank != 0:
        return None, False
    directory.mkdir(parents=True, exist_ok=True)
    write_bad_nodes(findings, directory)
    _wait_for_others(store, world_size)
    raise unfit(findings)


def _wait_for_others(store: Any, world_size: int) -> None:
    """Wait until the other ranks have seen the findings, at most ``NOTICE_S``:
    the store ends with this process.
    """
    deadline_s = time.monotonic() + NOTICE_S
    while (
        store is not None
        and store.add("noticed", 0) < world_size - 1
        and time.monotonic() < deadline_s
    ):
        time.sleep(0.05)


def expected_of(cluster: Path) -> float | None:
    """Return the rate of links across nodes in a cluster's TOML, ``[across_nodes] bytes_per_s``;
    None if it is missing.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        found = parse_toml(read_text(cluster, MAX_TOML_BYTES)).get("across_nodes", {})
        rate = found.get("bytes_per_s") if isinstance(found, dict) else None
        return float(rate) if rate is not None else None
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise ConfigError("MW-DOCTOR-003", f"{cluster}: cannot be read: {error}") from None
