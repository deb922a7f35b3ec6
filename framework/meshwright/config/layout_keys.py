"""Overrides of a saved layout, and keys of ``[parallel]`` that go with a degree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WHOLE_SAMPLES = ("--parallel.cp=1", "--parallel.ep=1")
"""Overrides without context and expert parallelism: every rank has whole samples and all experts."""
KEYS_OF_DEGREE = {
    "tp": ("sequence", "tp_across_nodes"),
    "cp": ("cp_order", "cp_exchange", "cp_head_groups"),
    "ep": ("ep_across_nodes",),
}
"""Degree of ``[parallel]`` -> keys that have no effect, and are refused, where it is 1."""


def drop_unused_keys(parallel: dict[str, Any], changed: Mapping[tuple[str, ...], Any]) -> None:
    """Delete from a saved ``[parallel]`` the keys that an override has left without effect, in place.

    ``changed``: the overrides by key. One that sets a degree to 1 leaves its keys to their defaults, unless the
    overrides set these too.
    """
    for degree, keys in KEYS_OF_DEGREE.items():
        for key in keys if changed.get(("parallel", degree)) == 1 else ():
            if ("parallel", key) not in changed:
                del parallel[key]
