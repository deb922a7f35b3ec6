"""Axes of a job, and the keys that have an effect only where an axis has several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.config.keys import format_value
from meshwright.config.schema import RunConfig
from meshwright.config.sections import Parallel


class AxisOption(NamedTuple):
    """Key of ``[parallel]`` that has no effect, and is refused, where its axis has one rank."""

    code: str
    effect: str
    """Its effect, and the next move where it has none, for the message."""
    key: str


class LayoutAxis(NamedTuple):
    """Axis of a job: its degree is ``parallel.NAME``, its word in a layout ``NAME`` and a number."""

    name: str
    parts: str
    """Parts of the job that its ranks split among them."""
    options: tuple[AxisOption, ...] = ()


AXES = (
    LayoutAxis("dp", "samples of a step"),
    LayoutAxis("pp", "layers of the model"),
    LayoutAxis(
        "tp",
        "features and heads of a layer",
        (
            AxisOption(
                "MW-CONFIG-040",
                "it splits the sequence over the tensor-parallel ranks; set parallel.tp to 2 or"
                " more, or --parallel.sequence=false",
                "sequence",
            ),
            AxisOption(
                "MW-CONFIG-044",
                "it allows a tensor-parallel group on several nodes; set parallel.tp to 2 or more,"
                " or --parallel.tp_across_nodes=false",
                "tp_across_nodes",
            ),
        ),
    ),
    LayoutAxis(
        "cp",
        "tokens of a sample",
        (
            AxisOption(
                "MW-CONFIG-084",
                "it orders the tokens of the context-parallel ranks; set parallel.cp to 2 or more,"
                " or leave it out",
                "cp_order",
            ),
            AxisOption(
                "MW-CONFIG-085",
                "it chooses what the context-parallel ranks exchange; set parallel.cp to 2 or more,"
                " or leave it out",
                "cp_exchange",
            ),
            AxisOption(
                "MW-CONFIG-086",
                "it groups the heads whose keys the context-parallel ranks gather; set parallel.cp"
                " to 2 or more, or leave it out",
                "cp_head_groups",
            ),
        ),
    ),
    LayoutAxis(
        "ep",
        "experts of a layer",
        (
            AxisOption(
                "MW-CONFIG-087",
                "it allows an expert-parallel group on several nodes; set parallel.ep to 2 or more,"
                " or leave it out",
                "ep_across_nodes",
            ),
        ),
    ),
)


WHOLE_SAMPLES = ("--parallel.cp=1", "--parallel.ep=1")
"""Overrides without context and expert parallelism:
every rank has whole samples and all experts.
"""


def find_option_problem(config: RunConfig, axis: LayoutAxis, option: AxisOption) -> str | None:
    """Return the problem of an option that is set where its axis has one rank, or None."""
    value = getattr(config.parallel, option.key)
    if getattr(config.parallel, axis.name) != 1 or value == _default(option):
        return None
    return (
        f"parallel.{option.key} = {format_value(value)} has no effect with parallel.{axis.name} = 1:"
        f" {option.effect}"
    )


def drop_unused_options(parallel: dict[str, Any], changed: Mapping[tuple[str, ...], Any]) -> None:
    """Delete from a saved ``[parallel]`` the options that an override has left without effect,
    in place.

    An override that sets a degree to 1 leaves its options to their defaults, unless the overrides
    set these too.

    ``changed``: the overrides by key.
    """
    for axis in AXES:
        if changed.get(("parallel", axis.name)) != 1:
            continue
        for option in axis.options:
            if ("parallel", option.key) not in changed:
                del parallel[option.key]


def without_unused_options(parallel: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``[parallel]`` with the options of axes of one rank at their defaults."""
    unused = {
        option.key: _default(option)
        for axis in AXES
        if parallel[axis.name] == 1
        for option in axis.options
    }
    return {**parallel, **unused}


def _default(option: AxisOption) -> Any:
    return Parallel.model_fields[option.key].get_default()
