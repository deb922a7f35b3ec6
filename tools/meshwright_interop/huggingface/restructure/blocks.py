"""Patterns of module names: entries that are equal in all blocks of a model become one entry,
``block*``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn


def merge_blocks(values_by_name: Mapping[str, Any], layers: nn.Module) -> dict[str, Any]:
    """Merge entries that are equal in all blocks that have the module: ``block0.x``,
    ``block1.x`` -> ``block*.x``.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values_by_name.items():
        groups.setdefault(_in_any_block(name), {})[name] = value
    present = Counter(_in_any_block(name) for name, _ in layers.named_modules())
    result: dict[str, Any] = {}
    for pattern, members in groups.items():
        values = list(members.values())
        is_common = len(members) >= present[pattern] and all(value == values[0] for value in values)
        result |= {pattern: values[0]} if is_common else members
    return result


def _in_any_block(name: str) -> str:
    """Return a module's name with the number of its block left out."""
    return re.sub(r"^block\d+\.", "block*.", name)
