"""Configuration names of Megatron-LM, torchtitan, nanotron, DeepSpeed and peft,
and their counterparts here.

Error messages suggest the counterparts. No key is accepted under a second name; of foreign values
only FSDP's four sharding strategies are. Case, dashes and underscores are ignored, so one line
covers ``--tensor-model-parallel-size`` and ``tensor_model_parallel_size``. A dotted name is looked
up whole first, then without its leading sections, so that ``model.hidden_size`` is found under
``hidden_size``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

_TABLES: dict[str, dict[str, str]] = tomllib.loads(
    (Path(__file__).parent / "tables" / "familiar.toml").read_text(encoding="utf-8")
)

SHARDING = MappingProxyType({"noshard": 0, "shardgradop": 2, "fullshard": 3, "hybridshard": 3})
"""FSDP's sharding strategies, folded -> ``parallel.zero``. The only foreign values accepted; a note
is printed for each.
"""


def fold(name: str) -> str:
    """Return a name in lower case without dashes and underscores, for comparison. Dots are kept."""
    return name.lower().replace("-", "").replace("_", "")


FAMILIAR = MappingProxyType(
    {fold(name): own_name_of for name, own_name_of in _TABLES["names"].items()}
)
"""Folded foreign name -> its counterpart: a key of this schema, perhaps with more text."""

FAMILIAR_VALUES = MappingProxyType(_TABLES["values"])
"""Folded foreign value -> value in this schema."""


def own_name_of(path: Sequence[str]) -> str | None:
    """Return the counterpart of a foreign key, e.g. ``("parallelism",
    "tensor_parallel_degree")`` -> "parallel.tp".
    """
    for start in range(len(path)):
        found = FAMILIAR.get(fold(".".join(path[start:])))
        if found is not None:
            return found
    return None
