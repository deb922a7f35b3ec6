"""Command ``meshwright plan``: search for layouts on a cluster, print them,
and write plan.toml and plan.html.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig, Train, given_keys, load, to_toml
from meshwright.config.sources import read_file
from meshwright.errors import ConfigError
from meshwright.system.atomic import write_out
from meshwright.terminal.format import format_size
from meshwright.terminal.output import put, tell
from meshwright_plan.commands.comparisons import answers, read_wanted
from meshwright_plan.commands.pins import (
    AXES,
    FIELDS,
    RECOMPUTED,
    HeldKeys,
    as_options,
    take_held,
)
from meshwright_plan.commands.sweeps import run_sweep
from meshwright_plan.picture.library import require_matplotlib
from meshwright_plan.planner.alignment import alignment_warnings
from meshwright_plan.planner.choice import Choice
from meshwright_plan.planner.choices import choices
from meshwright_plan.planner.hardware import Hardware, read_hardware
from meshwright_plan.planner.kernels import ExecutionOptions
from meshwright_plan.planner.model_cache import ModelCache
from meshwright_plan.planner.nearest import nearest, search_with_offload
from meshwright_plan.planner.page import page
from meshwright_plan.planner.plan import Plan, usable_bytes
from meshwright_plan.planner.requirements import has_batch_norm, has_synchronised
from meshwright_plan.planner.search import BEST
from meshwright_plan.planner.text import chosen_config, describe

MAX_DEVICES = 2**20
FREE_BATCH = ("--batch.micro_batch_size=1", "--batch.chunks=none", "--parallel.dp=auto")
"""Overrides that clear a configuration's own batch,
so that it cannot contradict another number of samples.
"""
SEARCHED = {
    "parallel.reduce",
    "parallel.tp_across_nodes",
    "pipeline.schedule_file",
    "launch.processes",
}
"""Keys that a search sets for each layout, and cannot hold."""


def plan(options: argparse.Namespace, overrides: list[str]) -> int:
    """Search for the best layouts of a configuration on a cluster, print them, and write the plan.

    Raises:
        UserError: an invalid configuration or hardware, or no layout fits; suggests options with
            which one does.
    """
    nodes, out = options.nodes, options.out
    wanted = read_wanted(options.why) if options.why is not None else {}
    gc.disable()  # a search creates millions of small tuples, without cycles
    if out is not None:
        require_matplotlib()
    hardware = read_hardware(options.cluster)
    if options.devices_per_node is not None:
        hardware = hardware.model_copy(update={"devices_per_node": options.devices_per_node})
    _check_devices("--nodes", nodes, hardware)
    for each in options.sweep_nodes or ():
        _check_devices("--sweep-nodes", each, hardware)
    held = take_held(overrides, {axis: getattr(options, axis) for axis in AXES})
    cache = _model_cache(options, overrides, held, hardware)
    check_skew(cache)
    warned = warn_of_alignment(cache, hardware, cache.config)
    if options.sweep_nodes or options.sweep_batch:
        return run_sweep(options, cache, hardware)
    found = search_with_offload(cache, hardware, nodes, options.best or BEST, settles=True)
    if not found.best:
        raise ConfigError(
            "MW-LAUNCH-038", _nothing_fits(cache, hardware, nodes, found, as_options(held))
        )
    put(
        "\n".join(
            [
                describe(cache, found, as_options(held)),
                *answers(options.config, overrides, wanted, cache, found),
            ]
        )
    )
    warn_of_alignment(cache, hardware, found.best[0].config, warned)
    if out is not None:
        best = found.best[0]
        header = (
            f"# The first of {found.num_fitting:,} layouts of {options.config} on {nodes} x"
            f" {hardware.devices_per_node} x {hardware.name}: {best.choice}.\n# Predicted:"
            f" {best.time.total:.4g} s a step, {format_size(best.peak_bytes)} on the fullest"
            " rank.\n\n"
        )
        html = page(cache, found)
        write_out(out / "plan.toml", header + to_toml(chosen_config(found, cache.config.run.name)))
        write_out(out / "plan.html", html)
        put(f"\nwritten: {out / 'plan.toml'} (for `meshwright train`), {out / 'plan.html'}")
    return 0


def _model_cache(
    options: argparse.Namespace, overrides: Sequence[str], held: HeldKeys, hardware: Hardware
) -> ModelCache:
    """Return the model and what a search holds.

    Raises:
        ConfigError: an override without effect, or an invalid configuration.
    """
    pins = held.pins
    given = {".".join(key): value for key, value in given_keys(held.others).items()}
    _check_overrides(given, hardware, options.global_batch)
    config = _on_device_of(
        hardware, _load_config(options.config, held.others, given, options.global_batch)
    )
    size = options.nodes * hardware.devices_per_node
    config = remove_layout(config, size, options.global_batch)
    config = config.replace(pipeline={"recompute_layers": held.recompute_layers})
    ep = pins.get("ep", 1)
    if isinstance(ep, int) and ep > 1 and hardware.devices_per_node % ep:
        config = config.replace(parallel={"ep_across_nodes": True})
    cache = ModelCache(
        config, execution_options(config.train, hardware), pins=pins, skew=options.skew
    )
    every = {".".join(key): value for key, value in given_keys(overrides).items()}
    if has_synchronised(cache.model):
        return cache.replaced(pins=pins | _own_samples_together(options.config, every))
    if has_batch_norm(cache.model):
        return cache.replaced(pins=pins | _own_micro_batch(options.config, every))
    return cache


def _check_devices(option: str, nodes: int, hardware: Hardware) -> None:
    """Raise :class:`ConfigError` for more devices than a search takes."""
    if nodes * hardware.devices_per_node > MAX_DEVICES:
        most = max(1, MAX_DEVICES // hardware.devices_per_node)
        raise ConfigError(
            "MW-LAUNCH-037",
            f"{option} {nodes} of {hardware.devices_per_node:,} devices each: a plan is for"
            f" {MAX_DEVICES:,} devices at most, such as {option} {most}",
        )


def check_skew(cache: ModelCache) -> None:
    """Refuse ``--skew``, the load of experts, for a model without experts.

    Raises:
        ConfigError: the load has no effect.
    """
    if cache.skew > 1 and not cache.traits.experts:
        raise ConfigError(
            "MW-LAUNCH-085",
            f"--skew {cache.skew:g} is the load of the busiest rank's experts, and the model's"
            " sharding_plan names no experts: leave it out",
        )


def _check_overrides(given: dict[str, Any], hardware: Hardware, global_batch: int | None) -> None:
    """Refuse overrides without effect: keys that a search sets, keys to hold in a table, a device
    that the cluster lacks, a batch given twice.

    Raises:
        ConfigError: lists all of them.
    """
    problems = []
    if searched := sorted(given.keys() & SEARCHED):
        problems.append(
            ConfigError(
                "MW-LAUNCH-039",
                f"command line: {', '.join(searched)}: a plan gives each layout its own value, so"
                f" this has no effect: leave {'it' if len(searched) == 1 else 'them'} out"
                " (--global-batch sets the samples of a step; `meshwright dryrun` examines one"
                " layout)",
            )
        )
    # a key by itself is taken already: only those of a table are left
    if in_table := sorted(given.keys() & {*FIELDS, RECOMPUTED}):
        problems.append(
            ConfigError(
                "MW-PLANNER-012",
                f"command line: {', '.join(in_table)} in a table, where a plan does not see what to"
                " hold: give each key by itself, such as --parallel.zero=3",
            )
        )
    if isinstance(given.get("pipeline.balance"), list):
        problems.append(
            ConfigError(
                "MW-LAUNCH-092",
                f"command line: pipeline.balance = {given['pipeline.balance']} is of one number of"
                " stages, and a plan has several: leave it out, or name a measure such as time",
            )
        )
    if given.get("train.device", "auto") not in ("auto", hardware.kind):
        problems.append(
            ConfigError(
                "MW-LAUNCH-040",
                f'command line: train.device = "{given["train.device"]}", and the devices of'
                f" {hardware.name} are {hardware.kind}: leave it out, or take another --cluster",
            )
        )
    if global_batch is not None and "batch.global_batch" in given:
        problems.append(
            ConfigError(
                "MW-LAUNCH-041",
                f"command line: batch.global_batch = {given['batch.global_batch']} and"
                f" --global-batch {global_batch} set the same number: leave one out",
            )
        )
    if problems:
        raise ConfigError.join(problems)


def _load_config(
    path: str, overrides: Sequence[str], given: dict[str, Any], global_batch: int | None
) -> RunConfig:
    """Load the configuration. Of its batch only the samples per step are kept,
    or None if it does not set them.

    ``given``: the keys of ``overrides`` with their values.
    """
    given = _with_keys_of_file(path, given)
    if global_batch is not None:
        return load(path, [*overrides, *FREE_BATCH, f"--batch.global_batch={global_batch}"])
    if given.get("batch.global_batch") is not None:
        return load(path, [*overrides, *FREE_BATCH])
    if {"batch.micro_batch_size", "batch.chunks"} <= given.keys():
        return load(path, overrides)
    return load(path, [*overrides, *FREE_BATCH, "--batch.global_batch=1"]).replace(
        batch={"global_batch": None}
    )


def _own_micro_batch(path: str, overrides: Mapping[str, Any]) -> dict[str, int]:
    """Return the configured samples of a micro-batch, which are part of a model with BatchNorm,
    as a pin.

    Warns where the configuration does not set them.
    """
    size = _with_keys_of_file(path, overrides).get("batch.micro_batch_size")
    if isinstance(size, int):
        return {"micro_batch_size": size}
    tell(
        "warning: the model has BatchNorm, whose statistics are those of a micro-batch: set"
        " batch.micro_batch_size"
    )
    return {}


def _own_samples_together(path: str, overrides: Mapping[str, Any]) -> dict[str, int]:
    """Return the configured dp x micro_batch_size, which is part of a model with nn.SyncBatchNorm,
    as a pin.

    Warns where the configuration does not set both.
    """
    given = _with_keys_of_file(path, overrides)
    size, dp = given.get("batch.micro_batch_size"), given.get("parallel.dp")
    if isinstance(size, int) and isinstance(dp, int):
        return {"samples_together": dp * size}
    tell(
        "warning: the model has nn.SyncBatchNorm, whose statistics are those of dp x"
        " micro_batch_size samples: set parallel.dp and batch.micro_batch_size in the file"
    )
    return {}


def _with_keys_of_file(path: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a configuration file sets, with those of the command line over them."""
    return {each.key: each.value for each in read_file(Path(path)).given} | dict(overrides)


def _on_device_of(hardware: Hardware, config: RunConfig) -> RunConfig:
    """Return the configuration on the cluster's device:
    it decides how stages are cut and where ``train`` will run.
    """
    if config.train.device == hardware.kind or (
        hardware.kind == "cuda" and config.train.device == "auto"
    ):
        return config
    return config.replace(train={"device": hardware.kind})


def execution_options(train: Train, hardware: Hardware) -> ExecutionOptions:
    """Return the options with which ranks of this framework run operations on that hardware."""
    on_gpu = hardware.kind == "cuda"
    return ExecutionOptions(
        fused=train.compile is True,
        fuses_any_attention=on_gpu,
        norm_kernel=on_gpu,
        groups_experts=on_gpu,
    )


def warn_of_alignment(
    cache: ModelCache, hardware: Hardware, config: RunConfig, warned: Sequence[str] = ()
) -> list[str]:
    """Print each warning of :func:`alignment_warnings` that is not in ``warned``;
    return all of them.
    """
    found = alignment_warnings(cache, hardware, config)
    for line in found:
        if line not in warned:
            tell(f"warning: {line}")
    return found


def remove_layout(config: RunConfig, size: int, global_batch: int | None) -> RunConfig:
    """Return the configuration without its layout, since a search sets each degree.

    Raises:
        ConfigError: the number of samples per step is not given.
    """
    batch, dp = config.batch, config.parallel.known_dp
    samples = global_batch or batch.global_batch
    if samples is None and batch.micro_batch_size and batch.chunks and dp is not None:
        samples = batch.micro_batch_size * batch.chunks * dp
    if samples is None:
        raise ConfigError(
            "MW-LAUNCH-042",
            "batch.global_batch is not set, and all layouts must take the same number of samples"
            f" per step: set it with --global-batch, such as {16 * size}",
        )
    pipeline: dict[str, object] = {"schedule": "1f1b", "interleave": None, "schedule_file": None}
    return config.replace(
        batch={"micro_batch_size": 1, "chunks": samples, "global_batch": samples},
        parallel=dict.fromkeys(("pp", "dp", "cp", "tp", "ep", "zero"), 1)
        | {
            "sequence": False,
            "shard_factor": None,
            "reduce": None,
        },
        pipeline=pipeline | {"recompute": "none", "recompute_layers": ["*"]},
    )


def _nothing_fits(
    cache: ModelCache, hardware: Hardware, nodes: int, found: Plan, options: Sequence[str]
) -> str:
    """Return the text of the error: the layout closest to fitting,
    and options with which some layout fits. ``options``: what the user holds.
    """
    box = f"{nodes:,} x {hardware.devices_per_node} {hardware.name}"
    held = " and ".join(options)
    where = f"{box} with {held}" if held else box
    if found.closest is not None:
        needed, choice = found.closest
        problem = (
            f"no layout fits {where}{_savings_tried(cache)}: the closest, {choice}, needs at least"
            f" {format_size(needed)} of a device, and {format_size(usable_bytes(hardware))} may be"
            " used"
        )
    elif held and not found.num_choices and _is_free_to_choose(cache, hardware, nodes):
        together = " together" if len(options) > 1 else ""
        problem = f"no layout of the search has {held}{together} on {box}{_only_rule(cache, found)}"
    else:
        broken = found.rejected[0].rule if found.rejected else "no degrees divide the devices"
        samples = f"{cache.config.batch.global_batch:,} samples a step"
        problem = f"no layout of {samples} keeps the rules on {where}: {broken}"
    if works := nearest(cache, hardware, nodes, found):
        return f"{problem}\nwhat works: {', or '.join(works)}"
    if held:
        return f"{problem}\nleave out {held}"
    return problem if found.closest is None else f"{problem}\ntake a smaller model"


def _savings_tried(cache: ModelCache) -> str:
    """Return the words on what the search has varied to save memory: what is held is not tried."""
    tried = [] if "recompute" in cache.pins else ["recompute"]
    if "offload" not in cache.pins and not cache.config.optimizer.spec.needs_full_weights:
        tried.append("the optimizer on the host")
    return f", even with {' and '.join(tried)}" if tried else ""


def _is_free_to_choose(cache: ModelCache, hardware: Hardware, nodes: int) -> bool:
    """Return True if some layout keeps the rules without what the user holds."""
    of_model = {name: cache.pins[name] for name in ("samples_together",) if name in cache.pins}
    free = choices(cache.replaced(pins=of_model), hardware, nodes)
    return any(isinstance(each, Choice) for each in free)


def _only_rule(cache: ModelCache, found: Plan) -> str:
    """Return the rule that all layouts with the held values break; of several, none is the reason.

    The search meets degrees of tp across nodes on its way, whatever else is held.
    """
    is_on_the_way = "tp across nodes" if "tp" not in cache.pins else "-"
    rules = {each.rule for each in found.rejected if not each.rule.startswith(is_on_the_way)}
    return f": {rules.pop()}" if len(rules) == 1 else ""
