"""Compatibility of a checkpoint with the present configuration: changes that would alter the run are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from meshwright.checkpoint.manifest import Manifest
from meshwright.config.functions import current_name
from meshwright.config.keys import KEYS, split
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
    "batch.global_batch": "a step would have another number of samples than the learning-rate schedule expects; "
    "change micro_batch_size or chunks so that it stays, on any number of ranks",
    "batch.ramp": "a step would have another number of samples",
    "run.seed": "the order of samples and dropout would change",
    "optimizer.name": "the checkpoint has the state of another optimizer",
    "optimizer.builder": "the checkpoint has the state of another optimizer",
    "train.dtype": "rounding would differ from before",
}
"""Configuration fields or sections that must not change in a resumed run -> consequence of a change."""

REFUSED_AT_STEP_0 = ("model.builder", "model.options")
"""The only fields refused for a checkpoint of step 0 (an imported model): of it only the weights are used."""
FREE_AT_STEP_0 = {"model.options.dropout"}
"""Exceptions to REFUSED_AT_STEP_0: they affect no weight and no logit."""
FREE = {"model.options.mtp_loss_weight"}
"""Exceptions to REFUSED: a weight of the loss, which DeepSeek-V3 lowers within a run."""

SAMPLED = "sampled bytes"
"""Prefix in the data fingerprint: a hash of a sample of the corpus's bytes. Older checkpoints do not have it."""

LATER_STAGE = re.compile(r"from sample (\d{1,18}): ")
"""Prefix in the data fingerprint: a stage of the data, by its first sample. It may change until it has begun."""

WEIGHT = re.compile(r"(?<=\(weight )[^)]+(?=\)$)")
"""Weight of a mixture's corpus in the data fingerprint. Older checkpoints have six digits of it."""

INTERCHANGEABLE = {"optimizer.name": ("adamw", "adamw8bit")}
"""Field -> values that may replace each other, because their checkpoints contain the same tensors."""


def check_compatible(
    manifest: Manifest, config: Mapping[str, Any], data_fingerprint: Mapping[str, str], *, place: str = "the checkpoint"
) -> list[str]:
    """Return the allowed changes between the saved run and this one (layout, learning rate, ...), one line each.

    Paths of the corpus may change, its fingerprint may not.

    Args:
        manifest: Manifest of the checkpoint.
        config: Resolved configuration as JSON, ``RunConfig.model_dump(mode="json")``.
        data_fingerprint: Fingerprint of the present data, by name.
        place: Name of the checkpoint for the error.

    Raises:
        CheckpointError: Changes that are not allowed: every such field, with both values.
    """
    saved, now = _flat(manifest.config), _flat(json.loads(json.dumps(config)))
    if isinstance(builder := saved.get("model.builder"), str):
        saved["model.builder"] = current_name(builder)
    is_fresh = manifest.step == 0 and manifest.samples_seen == 0
    refused = {field: why for field, why in REFUSED.items() if field in REFUSED_AT_STEP_0 or not is_fresh}
    problems, differences, hashes = [], [], _saved_hashes(manifest, data_fingerprint)
    for path in sorted(saved.keys() | now.keys()):
        before = saved[path] if path in saved else _default(path)
        after = now.get(path, _ABSENT)
        if before == after:
            continue
        reason = next((why for field, why in refused.items() if path == field or path.startswith(f"{field}.")), None)
        if path in FREE or (is_fresh and path in FREE_AT_STEP_0):
            reason = None
        if reason is None or all(value in INTERCHANGEABLE.get(path, ()) for value in (before, after)):
            differences.append(f"{path}: {_show(before)} -> {_show(after)}")
        else:
            problems.append(f"{path} was {_show(before)} and is {_show(after)}: {reason}")
    for name in sorted(hashes.keys() | data_fingerprint.keys()) if not is_fresh else ():
        before, after = hashes.get(name, _ABSENT), data_fingerprint.get(name, _ABSENT)
        stage = LATER_STAGE.match(name)
        if stage is not None and int(stage[1]) >= manifest.samples_seen:
            continue
        if before is _ABSENT and name.startswith(SAMPLED):
            differences.append(
                f"data fingerprint {name!r}: the checkpoint has none; this time the bytes of the corpus cannot be "
                f"compared with those that it was trained on"
            )
        elif before != after:
            problems.append(
                f"data fingerprint {name!r} was {_show(before)} and is {_show(after)}: "
                f"the samples seen so far were others"
            )
    if problems:
        advice = "set these back to resume, or choose another run.name to start a new run"
        if is_fresh:
            advice = "set these back; or convert the model again, with these keys after `meshwright convert --from hf`"
        raise CheckpointError(
            "MW-CHECKPOINT-002",
            f"{place} (step {manifest.step}) cannot be resumed by this run:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + f"\n{advice}",
        )
    return differences


_ABSENT = object()


def _saved_hashes(manifest: Manifest, data_fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return the saved data fingerprint; weights that an older version rounded have all digits of its configuration."""
    found = dict(manifest.data_fingerprint)
    weights = re.findall(r'"weight": ([^,}]+)', json.dumps(manifest.config))
    for name in data_fingerprint.keys() - found.keys():
        exact = WEIGHT.search(name)
        if exact is not None and exact[0] in weights:
            rounded = WEIGHT.sub(f"{float(exact[0]):g}", name)
            if rounded in found:
                found[name] = found.pop(rounded)
    return found


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
    """Return the default of a key that an older checkpoint's configuration lacks: the saved run behaved like this."""
    field = KEYS.get(split(path))
    if field is None or field.is_required():
        return _ABSENT
    return json.loads(json.dumps(field.get_default(call_default_factory=True)))


def _show(value: Any) -> str:
    return "not set" if value is _ABSENT else json.dumps(value)
