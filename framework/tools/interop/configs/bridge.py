"""Translation of the ``run_config.yaml`` that Megatron-Bridge, and Megatron-LM since 2026, write into a checkpoint.

It holds every field of ``ConfigContainer``. A field becomes the flag of Megatron-LM with the same meaning; fields
without one are dropped with a reason, or refused. Source: ``megatron/bridge/training/config.py`` and megatron-core's
``transformer_config.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshwright.tools.interop.configs import megatron
from meshwright.tools.interop.configs.bridge_keys import FLAGS, INVERTED, REFUSED, REST, USUAL
from meshwright.tools.interop.configs.source_keys import SourceKey, is_off
from meshwright.tools.interop.configs.translation import Draft

OTHER_MODELS = re.compile(r"vl|vision|omni|audio|mamba|hybrid|t5|mimo|moe|asr|flux|diffusion", re.IGNORECASE)
"""Pattern in the class names of models other than a dense text decoder."""
TARGET = "model._target_"
ACTIVATION = "model.activation_func._target_"
ACTIVATIONS = {"squared_relu": "squared-relu", "fast_gelu": "openai-gelu", "openai_gelu": "openai-gelu"}
"""Function of the activation -> flag of Megatron-LM."""


def as_flags(items: Mapping[str, SourceKey]) -> dict[str, SourceKey]:
    """Return the items, with the names of Megatron-LM's flags where a field has one."""
    flags: dict[str, SourceKey] = {}
    for key, item in items.items():
        value = item.value
        if key in INVERTED:
            flags[INVERTED[key]] = item._replace(value=not value, text=item.written)
        elif key in FLAGS and value is not None and (FLAGS[key] not in flags or is_off(flags[FLAGS[key]].value)):
            flags[FLAGS[key]] = item
        else:
            flags[key] = item
    if "num-query-groups" in flags:
        flags["group-query-attention"] = flags["num-query-groups"]._replace(value=True)
    return flags


def translate(draft: Draft, ranks: int | None) -> None:
    """Translate all fields.

    Args:
        draft: the fields, by :func:`as_flags`; receives the meshwright keys.
        ranks: number of ranks of the whole job; None: unknown.

    Raises:
        ConfigError: meshwright has no such model.
    """
    if not draft.own_model:
        _model(draft)
    _blend(draft)
    _weight_decay(draft)
    own = draft.items.get("embedding-init-method-std")
    if own is not None and own.value == draft.value("init-method-std", 0.02):
        del draft.items["embedding-init-method-std"]  # filled in by megatron-core
    precision = draft.items.get("mixed_precision")
    if precision is not None and isinstance(precision.value, str):
        kind = "bf16" if "bf16" in precision.value else "fp16" if "fp16" in precision.value else "mixed_precision"
        draft.items.setdefault(kind, precision._replace(value=True))
        draft.read.add("mixed_precision")
    if draft.value("optimizer.decoupled_weight_decay") is False and not is_off(draft.value("weight-decay")):
        why = "the decay is part of the gradient there (Adam), and apart from it here (AdamW)"
        draft.refuse("optimizer.decoupled_weight_decay", why)
    _skip_usual(draft)
    for key, why in REFUSED.items():
        if draft.has(key) and key not in draft.read:
            draft.refuse(key, why)
    adapter = next((key for key in draft.items if key.partition(".")[0] == "peft" and draft.has(key)), None)
    if adapter is not None:
        why = "adapters are named by their targets here: import without it, then set adapter.rank, adapter.alpha and"
        draft.refuse(adapter, f"{why} adapter.targets, docs/adapters.md")
    megatron.translate(draft, ranks, REST)


def _model(draft: Draft) -> None:
    """Check the class of the model and its activation, and refuse what no dense decoder has.

    Raises:
        ConfigError: another model.
    """
    target = draft.text(TARGET) or ""
    if OTHER_MODELS.search(target.rpartition(".models.")[2]):
        raise draft.unsupported_model(TARGET, "images, sound, experts or layers of several kinds")
    draft.skip("model.mup_width_mult")  # follows from the hidden sizes
    gated = draft.boolean("model.gated_linear_unit")
    activation = (draft.text(ACTIVATION) or "").rpartition(".")[2]
    if gated and activation in ("silu", "swish"):
        draft.items["swiglu"] = draft.items["model.gated_linear_unit"]
    elif not gated and activation in ACTIVATIONS:
        draft.items[ACTIVATIONS[activation]] = draft.items[ACTIVATION]._replace(value=True)
    elif gated or activation not in ("", "gelu"):
        name = ACTIVATION if draft.has(ACTIVATION) else "model.gated_linear_unit"
        raise draft.unsupported_model(name, f"the activation {activation or 'of this file'}")
    draft.skip("model.activation_func.*")
    _positions(draft)


def _positions(draft: Draft) -> None:
    """Translate the scaling of rotary positions: a flag, or the four numbers of Llama 3.1's model class."""
    factor = draft.number("model.scale_factor")
    if factor is not None and factor != 1:
        draft.items["use-rope-scaling"] = draft.items["model.scale_factor"]._replace(value=True)
        draft.items["rope-scaling-factor"] = draft.items["model.scale_factor"]
        for name in ("low_freq_factor", "high_freq_factor"):
            draft.put(f"model.options.rope_{name}", draft.number(f"model.{name}"))
        draft.put("model.options.rope_original_length", draft.integer("model.old_context_len"))
        return
    scaling = draft.items.get("model.rope_scaling")
    if scaling is not None and scaling.value is True:
        draft.items["use-rope-scaling"] = scaling
        draft.read.add("model.rope_scaling")


def _weight_decay(draft: Draft) -> None:
    """Take the weight decay of the scheduler, which replaces the optimizer's in every step."""
    start, end = (draft.number(f"{name}-weight-decay") for name in ("start", "end"))
    if end is None:
        return
    if start is not None and start != end:
        draft.refuse("end-weight-decay", "the weight decay is constant here")
    own = draft.items.get("weight-decay")
    draft.items["weight-decay"] = draft.items["end-weight-decay"]
    draft.decide(
        f"optimizer.weight_decay = {end}: scheduler.end_weight_decay, which replaces "
        f"{own.written if own else 'the one of the optimizer'} in every step"
    )


def _blend(draft: Draft) -> None:
    """Translate the blend of corpora: lists of paths and of weights become words, as in ``--data-path``."""
    blend = draft.items.get("dataset.blend")
    if blend is None or not isinstance(blend.value, list) or not blend.value or "data-path" in draft.items:
        return
    paths, weights = blend.value[0], blend.value[1] if len(blend.value) > 1 else None
    if not isinstance(paths, list):
        return
    if weights is None and len(paths) == 1:
        words: object = paths[0]
    elif isinstance(weights, list) and len(weights) == len(paths):
        words = [word for weight, path in zip(weights, paths, strict=True) for word in (str(weight), path)]
    else:
        return
    draft.items["data-path"] = blend._replace(value=words)
    draft.read.add("dataset.blend")


def _skip_usual(draft: Draft) -> None:
    """Mark fields with their usual value as read, since the file lists every field of ``ConfigContainer``."""
    for key, usual in USUAL.items():
        if key in draft.items and (draft.items[key].value == usual or is_off(draft.items[key].value)):
            draft.read.add(key)
    for key, item in draft.items.items():
        if key not in draft.read and (is_off(item.value) or key.endswith((r"._target_", "._call_", "._args_"))):
            draft.skip(key)
