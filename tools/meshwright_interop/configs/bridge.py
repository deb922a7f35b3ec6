"""Translation of the ``run_config.yaml`` that Megatron-Bridge, and Megatron-LM since 2026, write into a checkpoint.

It holds every field of ``ConfigContainer``. A field becomes the flag of Megatron-LM with the same meaning; fields
without one are dropped with a reason, or refused. Source: ``megatron/bridge/training/config.py`` and megatron-core's
``transformer_config.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshwright_interop.configs import megatron
from meshwright_interop.configs.bridge_keys import FLAGS, INVERTED, REFUSED, REST, USUAL
from meshwright_interop.configs.source_keys import SourceKey, is_off
from meshwright_interop.configs.translation import Translation

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


def translate(translation: Translation, ranks: int | None) -> None:
    """Translate all fields.

    Args:
        translation: the fields, by :func:`as_flags`; receives the meshwright keys.
        ranks: number of ranks of the whole job; None: unknown.

    Raises:
        ConfigError: meshwright has no such model.
    """
    if not translation.own_model:
        _model(translation)
    _blend(translation)
    _weight_decay(translation)
    own = translation.items.get("embedding-init-method-std")
    if own is not None and own.value == translation.value("init-method-std", 0.02):
        del translation.items["embedding-init-method-std"]  # filled in by megatron-core
    precision = translation.items.get("mixed_precision")
    if precision is not None and isinstance(precision.value, str):
        kind = "bf16" if "bf16" in precision.value else "fp16" if "fp16" in precision.value else "mixed_precision"
        translation.items.setdefault(kind, precision._replace(value=True))
        translation.read.add("mixed_precision")
    if translation.value("optimizer.decoupled_weight_decay") is False and not is_off(translation.value("weight-decay")):
        why = "the decay is part of the gradient there (Adam), and apart from it here (AdamW)"
        translation.refuse("optimizer.decoupled_weight_decay", why)
    _skip_usual(translation)
    for key, why in REFUSED.items():
        if translation.has(key) and key not in translation.read:
            translation.refuse(key, why)
    adapter = next((key for key in translation.items if key.partition(".")[0] == "peft" and translation.has(key)), None)
    if adapter is not None:
        why = "adapters are named by their targets here: import without it, then set adapter.rank, adapter.alpha and"
        translation.refuse(adapter, f"{why} adapter.targets, docs/adapters.md")
    megatron.translate(translation, ranks, REST)


def _model(translation: Translation) -> None:
    """Check the class of the model and its activation, and refuse what no dense decoder has.

    Raises:
        ConfigError: another model.
    """
    target = translation.text(TARGET) or ""
    if OTHER_MODELS.search(target.rpartition(".models.")[2]):
        raise translation.unsupported_model(TARGET, "images, sound, experts or layers of several kinds")
    translation.skip("model.mup_width_mult")  # follows from the hidden sizes
    gated = translation.boolean("model.gated_linear_unit")
    activation = (translation.text(ACTIVATION) or "").rpartition(".")[2]
    if gated and activation in ("silu", "swish"):
        translation.items["swiglu"] = translation.items["model.gated_linear_unit"]
    elif not gated and activation in ACTIVATIONS:
        translation.items[ACTIVATIONS[activation]] = translation.items[ACTIVATION]._replace(value=True)
    elif gated or activation not in ("", "gelu"):
        name = ACTIVATION if translation.has(ACTIVATION) else "model.gated_linear_unit"
        raise translation.unsupported_model(name, f"the activation {activation or 'of this file'}")
    translation.skip("model.activation_func.*")
    _positions(translation)


def _positions(translation: Translation) -> None:
    """Translate the scaling of rotary positions: a flag, or the four numbers of Llama 3.1's model class."""
    factor = translation.number("model.scale_factor")
    if factor is not None and factor != 1:
        translation.items["use-rope-scaling"] = translation.items["model.scale_factor"]._replace(value=True)
        translation.items["rope-scaling-factor"] = translation.items["model.scale_factor"]
        for name in ("low_freq_factor", "high_freq_factor"):
            translation.put(f"model.options.rope_{name}", translation.number(f"model.{name}"))
        translation.put("model.options.rope_original_length", translation.integer("model.old_context_len"))
        return
    scaling = translation.items.get("model.rope_scaling")
    if scaling is not None and scaling.value is True:
        translation.items["use-rope-scaling"] = scaling
        translation.read.add("model.rope_scaling")


def _weight_decay(translation: Translation) -> None:
    """Take the weight decay of the scheduler, which replaces the optimizer's in every step."""
    start, end = (translation.number(f"{name}-weight-decay") for name in ("start", "end"))
    if end is None:
        return
    if start is not None and start != end:
        translation.refuse("end-weight-decay", "the weight decay is constant here")
    own = translation.items.get("weight-decay")
    translation.items["weight-decay"] = translation.items["end-weight-decay"]
    translation.decide(
        f"optimizer.weight_decay = {end}: scheduler.end_weight_decay, which replaces "
        f"{own.written if own else 'the one of the optimizer'} in every step"
    )


def _blend(translation: Translation) -> None:
    """Translate the blend of corpora: lists of paths and of weights become words, as in ``--data-path``."""
    blend = translation.items.get("dataset.blend")
    if blend is None or not isinstance(blend.value, list) or not blend.value or "data-path" in translation.items:
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
    translation.items["data-path"] = blend._replace(value=words)
    translation.read.add("dataset.blend")


def _skip_usual(translation: Translation) -> None:
    """Mark fields with their usual value as read, since the file lists every field of ``ConfigContainer``."""
    for key, usual in USUAL.items():
        if key in translation.items and (translation.items[key].value == usual or is_off(translation.items[key].value)):
            translation.read.add(key)
    for key, item in translation.items.items():
        if key not in translation.read and (is_off(item.value) or key.endswith((r"._target_", "._call_", "._args_"))):
            translation.skip(key)
