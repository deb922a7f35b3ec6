"""Megatron-LM's flags of models that meshwright does not have, by the feature that the error names."""

from __future__ import annotations

import re

from meshwright_interop.configs.flags import PROGRAM
from meshwright_interop.configs.source_keys import DropReason, DropRule, is_off
from meshwright_interop.configs.translation import Translation

OTHER = {
    "num-experts": "mixture of experts",
    "multi-latent-attention": "multi-latent attention",
    "mtp-use-repeated-layer": "one module of multi-token prediction for all depths",
    "quick-geglu": "a GELU with gates",
    "hybrid-override-pattern": "layers of several kinds",
    "hybrid-layer-pattern": "layers of several kinds",
    "heterogeneous-layers-config-path": "layers of several kinds",
    "heterogeneous-layers-config-encoded-json": "layers of several kinds",
    "linear-attention-freq": "linear attention",
    "experimental-attention-variant": "another kind of attention",
    "attention-output-gate": "a gate after the attention",
    "softmax-scale": "another scale of the attention's softmax",
    "apply-residual-connection-post-layernorm": "residuals taken after the norm",
    "window-attn-skip-freq": "a sliding window in some layers only",
    "no-rope-freq": "layers without positions",
    "qk-l2-norm": "an L2 norm of q and k without weights",
    "qk-clip": "clipped logits of the attention",
    "glu-linear-offset": "an offset in its gates",
    "activation-func-clamp-value": "clamped activations",
    "enable-mhc-connections": "several residual streams",
    "relative-attention-num-buckets": "relative positions",
    "encoder-num-layers": "an encoder in Megatron-LM's form",
    "spec": "custom layers",
}
"""Flags of models that no builder supports -> the feature, for the error message."""
MULTIMODAL = """
    language-model-type vision-* img-h img-w patch-dim pixel-shuffle max-num-tiles use-tiling use-thumbnail
    use-tile-tags freeze-lm freeze-vit freeze-LM freeze-ViT image-tag-type num-frames disable-vision-class-token
    add-class-token dataset-config prompt-path audio-* sound-* allow-missing-vision-projection-checkpoint
    decoder-seq-length language-model-checkpoint
"""
"""Patterns of flags of vision and audio models."""
SENTENCES = re.compile(r"_sentence(?![\w.])")
"""Suffix of a corpus that was split into sentences, which only BERT reads; its other flags are those of a GPT."""
GPT_PROGRAM = re.compile(r"(pretrain|train|finetune|run)_?(gpt|llama|qwen|mistral)[\w.-]*\.py")
"""Programs whose model is described by Megatron-LM's flags alone."""
OTHER_PROGRAM = re.compile(r"moe|vl|vision|audio|mamba|hybrid", re.IGNORECASE)
"""Parts of the names of programs that train other models."""


def refuse_others(translation: Translation) -> None:
    """Refuse the flags of models that no builder here makes: experts, vision and audio, layers of several kinds.

    Raises:
        ConfigError: the flags are those of another model.
    """
    program = translation.items.get(PROGRAM)
    several = DropRule(MULTIMODAL, DropReason.NONE)
    multimodal = next(
        (name for name in translation.items if several.matches(name) and not is_off(translation.items[name].value)),
        None,
    )
    if multimodal is not None:
        raise translation.unsupported_model(multimodal, "images, sound or several encoders")
    bert = next((name for name, item in translation.items.items() if _is_of_bert(name, item.value)), None)
    if bert is not None:
        raise translation.unsupported_model(bert, "the training of BERT")
    name = "" if program is None else program.key.rpartition("/")[2]
    is_other = GPT_PROGRAM.fullmatch(name) is None or OTHER_PROGRAM.search(name) is not None
    if name and is_other:
        raise translation.unsupported_model(
            PROGRAM, f"the architecture of {name} (only pretrain_gpt.py is read), whose code may override the flags"
        )
    provider = translation.text("model-provider")
    if provider not in (None, "gpt"):
        translation.refused.append(translation.unsupported_model("model-provider", f"the architecture {provider}"))
    for name, what in OTHER.items():
        if name == "softmax-scale" and translation.boolean("use-mup"):
            continue  # see megatron_mup.py
        if (
            translation.has(name)
            and not is_off(translation.value(name))
            and str(translation.value(name)) not in ("0", "False", "false")
        ):
            translation.refused.append(translation.unsupported_model(name, what))


def _is_of_bert(name: str, value: object) -> bool:
    """Return True for a flag of BERT's training, most of whose flags are also a GPT's."""
    if name == "data-path":
        return SENTENCES.search(str(value)) is not None
    return name.startswith("bert-") or (name == "tokenizer-type" and str(value).startswith("BertWordPiece"))
