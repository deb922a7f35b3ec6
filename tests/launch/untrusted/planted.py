"""Runs and checkpoints as a stranger would make them: sound files, right hashes,
and a builder that is not ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import (
    CheckpointMetadata,
    TensorKind,
    TensorPiece,
    begin,
    publish,
    write_shard,
)
from meshwright.checkpoint.files import final_directory
from meshwright.config import RunConfig, resolve, write_snapshot
from meshwright.parameters import ParameterInfo
from meshwright.system.packages import OWN_PACKAGES

CANARY = "canary"
"""The file that a payload makes in the working directory."""
MODULE = (
    f'open("{CANARY}", "w").close()\n\n\ndef build(**options):\n    open("{CANARY}", "w").close()\n'
)


def planted(run: Path, **sections: dict[str, Any]) -> Path:
    """Return a run directory with a checkpoint of step 2, its resolved.json and its config.toml."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": run.name, "directory": str(run.parent)},
        "data": {"train": "runs/data/none/train", "sequence_length": 8},
        "batch": {"micro_batch_size": 1, "global_batch": 1},
        "train": {"device": "cpu", "steps": 2},
    }
    for section, keys in sections.items():
        tree.setdefault(section, {}).update(keys)
    config = RunConfig.model_validate(tree)
    config = resolve(config)
    temporary = begin(run, 2, "a1")
    info = ParameterInfo("0.weight", (2, 2))
    write_shard(temporary, "pp0-tp0", [TensorPiece(TensorKind.WEIGHTS, info, torch.zeros(2, 2))])
    saved = config.model_dump(mode="json")
    publish(
        temporary,
        final_directory(run, 2),
        CheckpointMetadata(
            2, 2, config.run.seed, saved, {}, {"optimizer_steps": 2, "tokens_seen": 16}
        ),
    )
    write_snapshot(run, config)
    return run


def payloads(folder: Path) -> None:
    """Modules in the working directory, alone and in packages named like ours,
    that make the canary when imported.
    """
    (folder / "payload.py").write_text(MODULE)
    for package in ("theirs", "models", "framework", "launch", "tools", "configs", *OWN_PACKAGES):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(MODULE)
        (folder / package / "payload.py").write_text(MODULE)
    (folder / "bare").mkdir()
    (folder / "bare" / "payload.py").write_text(MODULE)
