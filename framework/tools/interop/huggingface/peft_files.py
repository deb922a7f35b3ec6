"""Settings of adapters that both imports from peft accept, and the run directory that they write."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint import CheckpointMetadata, TensorPiece, begin, publish, write_shard
from meshwright.checkpoint.files import final_directory
from meshwright.config import RunConfig, resolve, to_toml, write_snapshot
from meshwright.errors import ModelError
from meshwright.tools.interop.huggingface.adapters import CONFIG

ONLY_VALUES: dict[str, Any] = {"bias": "none", "modules_to_save": None, "layer_replication": None}
ONLY_VALUES |= {"rank_pattern": {}, "alpha_pattern": {}, "target_parameters": None, "lora_bias": False}
"""Keys of adapter_config.json with the only value that is imported."""


class AdapterSettings(NamedTuple):
    """Settings of all adapters of a file."""

    rank: int
    factor: float
    """Factor on an adapter's output: alpha / rank, or alpha / rank^0.5 with ``use_rslora``."""
    dropout: float
    dora: bool
    """True if each module has a vector of magnitudes, ``lora_magnitude_vector``."""

    @property
    def kinds(self) -> set[str]:
        """Endings of the tensors of a module."""
        return {"A", "B", *["magnitude_vector"] * self.dora}


class ImportedAdapter(NamedTuple):
    """Imported adapters: the checkpoint of step 0, the run's configuration, the number of targets."""

    path: Path
    config: RunConfig
    num_targets: int


def settings_of(fields: Mapping[str, Any], source: Path) -> AdapterSettings:
    """Return the settings of adapters from the fields of peft's configuration in ``source``.

    Raises:
        ModelError: the adapters are not plain LoRA.
    """
    problems = [f"peft_type = {json.dumps(fields.get('peft_type'))}"] if fields.get("peft_type") != "LORA" else []
    for key, value in ONLY_VALUES.items():
        if fields.get(key, value) != value and (fields[key] or value):
            problems.append(f"{key} = {json.dumps(fields[key])}")
    rank, alpha, dropout = fields.get("r"), fields.get("lora_alpha"), fields.get("lora_dropout") or 0.0
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float) and alpha > 0):
        problems.append(f"r = {json.dumps(rank)} with lora_alpha = {json.dumps(alpha)}")
    if problems:
        raise ModelError(
            "MW-INTEROP-104", f"{source / CONFIG}: {', '.join(problems)}: only LoRA of one rank and scale is imported"
        )
    assert isinstance(rank, int) and isinstance(alpha, int | float)
    factor = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    return AdapterSettings(rank, factor, dropout, bool(fields.get("use_dora")))


def write_run(run: Path, config: RunConfig, pieces: Iterable[TensorPiece], comment: str) -> None:
    """Write a run directory: config.toml below ``comment``, its snapshot, ``pieces`` as the checkpoint of step 0."""
    resolved = resolve(config)
    shard = begin(run, 0, secrets.token_hex(4))
    write_shard(shard, "pp0-tp0", pieces, copied=True)
    state = {"tokens_seen": 0, "optimizer_steps": 0, "skipped_in_a_row": 0}
    head = CheckpointMetadata(0, 0, resolved.run.seed, resolved.model_dump(mode="json"), {}, state)
    publish(shard, final_directory(run, 0), head)
    write_snapshot(run, resolved)
    (run / "config.toml").write_text(f"# {comment}: training starts from them.\n\n{to_toml(config)}")
