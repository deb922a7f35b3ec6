"""Compatibility of a checkpoint with the present configuration:
changes that would alter the run are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from meshwright.checkpoint.manifest import Manifest
from meshwright.config.functions import current_name
from meshwright.config.keys import KEYS, split
from meshwright.config.optimizers import OPTIMIZERS
from meshwright.config.schemes import is_own_scheme
from meshwright.errors import CheckpointError

REFUSED = {
    "model.builder": "it is another model",
    "model.options": "it is another model",
    "adapter.rank": "the checkpoint has other adapters",
    "adapter.targets": "the checkpoint has other adapters",
    "adapter.dora": "the checkpoint has other adapters",
    "adapter.alpha": "the trained adapters would count more or less than before",
    "data.sequence_length": "the same text would become other samples",
    "data.packing": "the same text would become other samples",
    "data.builder": "the samples seen so far were others",
    "data.task": "the same text would become other samples",
    "batch.global_batch": (
        "a step would have another number of samples than the learning-rate schedule expects; "
        "change micro_batch_size or chunks so that it stays, on any number of ranks"
    ),
    "batch.ramp": "a step would have another number of samples",
    "run.seed": "the order of samples and dropout would change",
    "optimizer.name": "the checkpoint has the state of another optimizer",
    "optimizer.builder": "the checkpoint has the state of another optimizer",
    "train.dtype": "rounding would differ from before",
}
"""Configuration fields or sections that must not change
in a resumed run -> consequence of a change.
"""

REFUSED_AT_STEP_0 = ("model.builder", "model.options")
"""The only fields refused for a checkpoint of step 0 (an imported model):
of it only the weights are used.
"""
FREE_AT_STEP_0 = {"model.options.dropout"}
"""Exceptions to REFUSED_AT_STEP_0: they affect no weight and no logit."""
FREE = {"model.options.mtp_loss_weight"}
"""Exceptions to REFUSED: a weight of the loss, which DeepSeek-V3 lowers within a run."""

SAMPLED = "sampled bytes"
"""Prefix in the data fingerprint: a hash of a sample of the corpus's bytes.
Older checkpoints do not have it.
"""

LATER_STAGE = re.compile(r"from sample (\d{1,18}): ")
"""Prefix in the data fingerprint: a stage of the data, by its first sample.
It may change until it has begun.
"""


def check_compatible(
    manifest: Manifest,
    config: Mapping[str, Any],
    data_fingerprint: Mapping[str, str],
    *,
    place: str = "the checkpoint",
) -> list[str]:
    """Return the allowed changes between the saved run and this one (layout, learning rate, ...),
    one line each.

    Paths of the corpus may change, its fingerprint may not.

    Args:
        manifest: Manifest of the checkpoint.
        config: Resolved configuration as JSON, ``RunConfig.model_dump(mode="json")``.
        data_fingerprint: Fingerprint of the present data, by name.
        place: Name of the checkpoint for the error.

    Raises:
        CheckpointError: Changes that are not allowed: every such field, with both values.
    """
    is_fresh = manifest.step == 0 and manifest.samples_seen == 0
    refused, allowed = _changed_keys(manifest.config, config, is_fresh=is_fresh)
    if not is_fresh:
        changed_data, not_compared = _changed_data(manifest, data_fingerprint)
        refused += changed_data
        allowed += not_compared
    if not refused:
        return allowed
    advice = "set these back to resume, or choose another run.name to start a new run"
    if is_fresh:
        advice = (
            "set these back; or convert the model again, with these keys after `meshwright"
            " convert --from hf`"
        )
    raise CheckpointError(
        "MW-CHECKPOINT-002",
        f"{place} (step {manifest.step}) cannot be resumed by this run:\n"
        + "\n".join(f"  {change}" for change in refused)
        + f"\n{advice}",
    )


def _changed_keys(
    saved_config: Mapping[str, Any], config: Mapping[str, Any], *, is_fresh: bool
) -> tuple[list[str], list[str]]:
    """Return the refused and the allowed changes of keys, one line each."""
    saved, now = _flat(saved_config), _flat(json.loads(json.dumps(config)))
    if isinstance(builder := saved.get("model.builder"), str):
        saved["model.builder"] = current_name(builder)
    refused: list[str] = []
    allowed: list[str] = []
    for path in sorted(saved.keys() | now.keys()):
        before = saved[path] if path in saved else _default(path)
        after = now.get(path, _ABSENT)
        if before == after:
            continue
        reason = _reason_to_refuse(path, is_fresh=is_fresh)
        if path == "run.start" and (before is None) != (after is None) and _has_base(saved):
            reason = "its checkpoints hold the base of the adapters, and those without it do not"
        is_alike = path == "optimizer.name" and _have_same_states(before, after)
        if reason is None or is_alike:
            allowed.append(f"{path}: {_show(before)} -> {_show(after)}")
        else:
            refused.append(f"{path} was {_show(before)} and is {_show(after)}: {reason}")
    return refused, allowed


def _has_base(saved: Mapping[str, Any]) -> bool:
    """Return whether ``run.start`` decides if checkpoints hold the base of adapters."""
    builder = saved.get("model.builder")
    return bool(saved.get("adapter.rank")) and isinstance(builder, str) and is_own_scheme(builder)


def _have_same_states(*names: Any) -> bool:
    """Return whether checkpoints of these optimizers contain the same tensors."""
    specs = [OPTIMIZERS[name] for name in names if name in OPTIMIZERS]
    states = {(spec.states, spec.matrix_states, spec.saved_only) for spec in specs}
    return len(specs) == len(names) and len(states) == 1


def _reason_to_refuse(path: str, *, is_fresh: bool) -> str | None:
    """Return the consequence of a change of a key, or None if it may change."""
    if path in FREE or (is_fresh and path in FREE_AT_STEP_0):
        return None
    for field in REFUSED_AT_STEP_0 if is_fresh else REFUSED:
        if path == field or path.startswith(f"{field}."):
            return REFUSED[field]
    return None


def _changed_data(
    manifest: Manifest, data_fingerprint: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the changes of the data that the run has read, and notes on what the checkpoint has
    no hash of, one line each.
    """
    saved = manifest.data_fingerprint
    changes: list[str] = []
    notes: list[str] = []
    for name in sorted(saved.keys() | data_fingerprint.keys()):
        before, after = saved.get(name, _ABSENT), data_fingerprint.get(name, _ABSENT)
        stage = LATER_STAGE.match(name)
        if stage is not None and int(stage[1]) >= manifest.samples_seen:
            continue
        if before is _ABSENT and name.startswith(SAMPLED):
            notes.append(
                f"data fingerprint {name!r}: the checkpoint has none; this time the bytes of the"
                " corpus cannot be compared with those that it was trained on"
            )
        elif before != after:
            changes.append(
                f"data fingerprint {name!r} was {_show(before)} and is {_show(after)}: "
                "the samples seen so far were others"
            )
    return changes, notes


_ABSENT = object()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: ``{"a": {"b": 1}}`` -> ``{"a.b": 1}``. Lists are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _default(path: str) -> Any:
    """Return the default of a key that an older checkpoint's configuration lacks:
    the saved run behaved like this.
    """
    field = KEYS.get(split(path))
    if field is None or field.is_required():
        return _ABSENT
    return json.loads(json.dumps(field.get_default(call_default_factory=True)))


def _show(value: Any) -> str:
    return "not set" if value is _ABSENT else json.dumps(value)
