"""Translation of the ``run_config.yaml`` that Megatron-Bridge, and Megatron-LM since 2026,
write into a checkpoint.

It holds every field of ``ConfigContainer``. A field becomes the flag of Megatron-LM with the same
meaning; fields without one are dropped with a reason, or refused. Source:
``megatron/bridge/training/config.py`` and megatron-core's ``transformer_config.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from meshwright_interop.configs import megatron
from meshwright_interop.configs.bridge_keys import FLAGS, INVERTED, RULES
from meshwright_interop.configs.source_keys import SourceKey, is_off
from meshwright_interop.configs.translation import Row, Translation

OTHER_MODELS = re.compile(
    r"vl|vision|omni|audio|mamba|hybrid|t5|mimo|moe|asr|flux|diffusion", re.IGNORECASE
)
"""Pattern in the class names of models other than a dense text decoder."""
TARGET = "model._target_"
ACTIVATION = "model.activation_func._target_"
ACTIVATIONS = {
    "squared_relu": "squared-relu",
    "fast_gelu": "openai-gelu",
    "openai_gelu": "openai-gelu",
}
"""Function of the activation -> flag of Megatron-LM."""
LLAMA31 = (
    Row("model.low_freq_factor", "model.options.rope_low_freq_factor", Translation.number),
    Row("model.high_freq_factor", "model.options.rope_high_freq_factor", Translation.number),
    Row("model.old_context_len", "model.options.rope_original_length", Translation.integer),
)
"""Scaling of rotary positions in Llama 3.1's model class, beside its factor."""
YARN = (
    Row("model.yarn_beta_fast", "model.options.rope_yarn.beta_fast", Translation.number, 32.0),
    Row("model.yarn_beta_slow", "model.options.rope_yarn.beta_slow", Translation.number, 1.0),
    Row(
        "model.yarn_correction_range_round_to_int",
        "model.options.rope_yarn.truncate",
        Translation.boolean,
        True,
    ),
)
"""Scaling by YaRN, beside its factor, original length and weights of the logarithm."""


def as_flags(items: Mapping[str, SourceKey]) -> dict[str, SourceKey]:
    """Return the items, with the names of Megatron-LM's flags where a field has one."""
    flags: dict[str, SourceKey] = {}
    for key, item in items.items():
        flag = FLAGS.get(key, key)
        is_first = flag not in flags or is_off(flags[flag].value)
        if key in INVERTED:
            flags[INVERTED[key]] = item._replace(value=not item.value, text=item.written)
        elif item.value is not None and is_first:
            flags[flag] = item
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
        _positions(translation)
    _blend(translation)
    _weight_decay(translation)
    _precision(translation)
    own_std = translation.items.get("embedding-init-method-std")
    if own_std is not None and own_std.value == translation.value("init-method-std", 0.02):
        del translation.items["embedding-init-method-std"]  # filled in by megatron-core
    for key, item in translation.items.items():
        if is_off(item.value) or key.endswith(("._target_", "._call_", "._args_")):
            translation.read.add(key)  # the file has every field
    megatron.translate(translation, ranks, RULES)


def _model(translation: Translation) -> None:
    """Check the class of the model, and translate its activation to flags.

    Raises:
        ConfigError: another model.
    """
    items, target = translation.items, translation.text(TARGET, "")
    if OTHER_MODELS.search(target.rpartition(".models.")[2]):
        what = "images, sound, experts or layers of several kinds"
        raise translation.unsupported_model(TARGET, what)
    gated = translation.boolean("model.gated_linear_unit")
    activation = translation.text(ACTIVATION, "").rpartition(".")[2]
    if gated and activation in ("silu", "swish"):
        items["swiglu"] = items["model.gated_linear_unit"]
    elif not gated and activation in ACTIVATIONS:
        items[ACTIVATIONS[activation]] = items[ACTIVATION]._replace(value=True)
    elif gated or activation not in ("", "gelu"):
        name = ACTIVATION if translation.has(ACTIVATION) else "model.gated_linear_unit"
        raise translation.unsupported_model(name, f"the activation {activation or 'of this file'}")
    translation.skip("model.activation_func.*")


def _positions(translation: Translation) -> None:
    """Translate the scaling of rotary positions: a flag,
    or the four numbers of Llama 3.1's model class.
    """
    items, factor = translation.items, translation.number("model.scale_factor")
    if factor is not None and factor != 1:
        items["use-rope-scaling"] = items["model.scale_factor"]._replace(value=True)
        items["rope-scaling-factor"] = items["model.scale_factor"]
        translation.put_rows(LLAMA31)
    elif translation.value("model.rope_scaling") is True:
        items["use-rope-scaling"] = items["model.rope_scaling"]
    if translation.text("position-embedding-type") == "yarn":
        _yarn(translation)


def _yarn(translation: Translation) -> None:
    """Translate YaRN's scaling, of rotary positions on all features of a head.

    Raises:
        ConfigError: a number without which megatron-core has no scaling is missing, or only a part
            of a head is rotated.
    """
    items, position = translation.items, "position-embedding-type"
    factor = translation.number("model.yarn_rotary_scaling_factor", minimum=1.0)
    length = translation.count("model.yarn_original_max_position_embeddings")
    if factor is None or length is None:
        what = "YaRN's positions without a factor and an original length"
        raise translation.unsupported_model(position, what)
    if translation.number("rotary-percent") not in (None, 1.0):
        what = "YaRN's positions on a part of a head"
        raise translation.unsupported_model("rotary-percent", what)
    items[position] = items[position]._replace(value="rope")
    translation.put("model.options.rope_yarn.factor", factor)
    translation.put("model.options.rope_yarn.original_length", length)
    translation.put_rows(YARN)
    weights = [
        translation.number(f"model.yarn_{name}", minimum=0.0)
        for name in ("mscale", "mscale_all_dim")
    ]
    if None not in weights:  # otherwise 1 + 0.1 log factor, as here
        on_rotation, on_scores = (
            1 + 0.1 * (weight or 0.0) * math.log(factor) for weight in weights
        )
        why = "the quotient of yarn_mscale's and yarn_mscale_all_dim's, of which one may be 0"
        key = "model.options.rope_yarn.attention_factor"
        translation.put(key, on_rotation / on_scores, why)


def _weight_decay(translation: Translation) -> None:
    """Take the weight decay of the scheduler, which replaces the optimizer's in every step."""
    start, end = (translation.number(f"{name}-weight-decay") for name in ("start", "end"))
    is_coupled = translation.value("optimizer.decoupled_weight_decay") is False
    if end is not None:
        own = translation.items.get("weight-decay")
        translation.items["weight-decay"] = translation.items["end-weight-decay"]
        translation.decide(
            f"optimizer.weight_decay = {end}: scheduler.end_weight_decay, which replaces "
            f"{own.written if own else 'the one of the optimizer'} in every step"
        )
        if start not in (None, end):
            translation.refuse("end-weight-decay", "the weight decay is constant here")
    if is_coupled and not is_off(translation.value("weight-decay")):
        why = "the decay is part of the gradient there (Adam), and apart from it here (AdamW)"
        translation.refuse("optimizer.decoupled_weight_decay", why)


def _precision(translation: Translation) -> None:
    """Translate the name of a mixed precision, such as "bf16_mixed", to a flag."""
    precision = translation.items.get("mixed_precision")
    if precision is None or not isinstance(precision.value, str):
        return
    for flag in ("bf16", "fp16"):
        if flag in precision.value:
            translation.items.setdefault(flag, precision._replace(value=True))
            translation.read.add("mixed_precision")
            return


def _blend(translation: Translation) -> None:
    """Translate the blend of corpora: lists of paths and of weights become words,
    as in ``--data-path``.
    """
    blend = translation.items.get("dataset.blend")
    if blend is None or "data-path" in translation.items:
        return
    if not isinstance(blend.value, list) or not blend.value:
        return
    paths, weights = blend.value[0], blend.value[1] if len(blend.value) > 1 else None
    if isinstance(paths, list) and weights is None and len(paths) == 1:
        words = paths
    elif isinstance(paths, list) and isinstance(weights, list) and len(weights) == len(paths):
        pairs = zip(weights, paths, strict=True)
        words = [word for weight, path in pairs for word in (str(weight), path)]
    else:
        return
    translation.items["data-path"] = blend._replace(value=words)
    translation.read.add("dataset.blend")
