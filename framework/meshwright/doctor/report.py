"""Results of the check as text, and its link figures as a small TOML file that a planner reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from meshwright.doctor.facts import Facts
from meshwright.doctor.findings import Finding, gbit
from meshwright.doctor.links import AllReduceTiming, LinkMeasurement, by_node
from meshwright.system.atomic import write_atomic
from meshwright.terminal.format import format_size, format_table

MAX_LATENCY_SHARE = 0.05
"""Share of an all-reduce's time that latency may take; buckets should be large enough for it."""


def format_report(
    facts: Sequence[Facts],
    links: Sequence[LinkMeasurement],
    sums: Sequence[AllReduceTiming],
    findings: Sequence[Finding],
    bucket_bytes: int,
) -> str:
    """Return the whole report. ``bucket_bytes``: the configuration's ``parallel.bucket_bytes``."""
    first = facts[0]
    lines = ["  ".join(f"{name} {version}" for name, version in first.versions), ""]
    best = by_node(links)
    inside = {link.nodes[0]: link for link in links if link.nodes[0] == link.nodes[1]}
    rows: list[tuple[str, ...]] = [
        ("node", "ranks", "device", "memory", "free", "load", "clock", "disk", "within", "across")
    ]
    for host in dict.fromkeys(each.host for each in facts):
        of_host = [each for each in facts if each.host == host]
        speed = next(
            (each.write_bytes_per_s for each in of_host if each.write_bytes_per_s is not None), None
        )
        rows.append(
            (
                host,
                _ranks([each.rank for each in of_host]),
                of_host[0].device,
                f"{of_host[0].device_bytes / 2**30:.0f} GiB",
                f"{of_host[0].free_bytes / 2**30:.0f} GiB",
                f"{of_host[0].load:.1f} of {of_host[0].num_cpus}",
                f"{1e3 * of_host[0].clock_s:+.0f} ms",
                "-" if speed is None else f"{speed / 1e6:,.0f} MB/s",
                gbit(inside[host].bytes_per_s) if host in inside else "-",
                gbit(best[host]) if host in best else "-",
            )
        )
    lines += format_table(rows, "<<<>>>>>>>")
    across = [link for link in links if link.nodes[0] != link.nodes[1]]
    if across:
        lines += ["", *format_table(_pairs(across), "<>>")]
    if sums:
        lines += ["", *format_table(_sums(sums), "<<>>>"), *buckets_line(sums, bucket_bytes)]
    lines += ["", *(f"WRONG: {finding.text}" for finding in findings)]
    return "\n".join([*lines, *([] if findings else ["nothing is wrong"])])


def _pairs(across: Sequence[LinkMeasurement]) -> list[tuple[str, ...]]:
    return [
        ("between nodes", "one way", "latency"),
        *(
            (
                f"{link.nodes[0]} {link.nodes[1]}",
                gbit(link.bytes_per_s),
                f"{1e6 * link.latency_s:.0f} us",
            )
            for link in sorted(across)
        ),
    ]


def _sums(sums: Sequence[AllReduceTiming]) -> list[tuple[str, ...]]:
    return [
        ("all-reduce", "ranks", "8 bytes take", "4 MiB take", "each rank sends"),
        *(
            (
                each.axis,
                _ranks(each.ranks),
                f"{1e3 * each.latency_s:.2f} ms",
                f"{1e3 * each.seconds:.1f} ms",
                gbit(each.bus_bytes_per_s),
            )
            for each in sums
        ),
    ]


def buckets_line(sums: Sequence[AllReduceTiming], bucket_bytes: int) -> list[str]:
    """Return a line on the latency share of the gradient buckets,
    and on the smallest size that keeps it low enough.

    Larger buckets start their reduction later, so no larger size is advised. Empty without dp
    measurements.
    """
    dp = [each for each in sums if each.axis == "dp"]
    if not dp:
        return []
    worst = max(dp, key=lambda each: each.latency_share(bucket_bytes))
    sufficient = max(-(-each.bytes_for(MAX_LATENCY_SHARE) // 2**20) for each in dp) * 2**20
    line = (
        f"gradients in buckets of {format_size(bucket_bytes)}:"
        f" {worst.latency_share(bucket_bytes):.1%} of a sum over dp is latency;"
        f" {MAX_LATENCY_SHARE:.0%} with {format_size(sufficient)}"
    )
    advice = f": set parallel.bucket_bytes = {sufficient}" if sufficient > bucket_bytes else ""
    return ["", line + advice]


def _ranks(ranks: Sequence[int]) -> str:
    whole = list(range(ranks[0], ranks[-1] + 1))
    if len(ranks) > 1 and list(ranks) == whole:
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks))


def links_toml(links: Sequence[LinkMeasurement]) -> str:
    """Return the median figures inside nodes and across nodes as TOML;
    unmeasured ones are left out.
    """
    kinds = {
        "in_node": [link for link in links if link.nodes[0] == link.nodes[1]],
        "across_nodes": [link for link in links if link.nodes[0] != link.nodes[1]],
    }
    lines = [
        f"# measured by `meshwright doctor`, {time.strftime('%Y-%m-%d %H:%M')}; one way, medians"
    ]
    for name, found in kinds.items():
        if found:
            rate = statistics.median(link.bytes_per_s for link in found)
            latency = statistics.median(link.latency_s for link in found)
            lines += [
                "",
                f"[{name}]",
                f"bytes_per_s = {rate:.4g}",
                f"latency_s = {latency:.4g}",
                f"pairs = {len(found)}",
            ]
    return "\n".join(lines) + "\n"


def write_links(links: Sequence[LinkMeasurement], place: Path) -> None:
    """Write the link figures atomically."""
    write_atomic(place, links_toml(links), is_durable=False)
