"""Translation of Megatron-LM's ``--use-mup`` to the options ``mup_*`` of the models.

Both scale the matrices of the blocks alike: initial standard deviation 1/sqrt(m), learning rate 1/m with its minimum,
Adam's eps 1/m, for m = hidden size / base hidden size. Source: megatron-core's ``transformer_config.py`` and
``get_mup_config_overrides``.
"""

from __future__ import annotations

import math

from meshwright_interop.configs.translation import Translation

SMALLEST = 1e-9
OTHER = "with {} it scales other rates there; muP here is AdamW's"
MTP = "modules of multi-token prediction have no muP here"
OWN_MUP = "a model of your own declares its learning-rate factors itself, as its attribute parameter_groups"


def mup(translation: Translation, hidden: int, heads: int) -> None:
    """Translate muP, if the file sets it. ``hidden``, ``heads``: the hidden size and the number of heads."""
    if not translation.boolean("use-mup"):
        translation.skip("mup-*")  # without effect
        return
    has_modules, name = "model.options.mtp_layers" in translation.tree, translation.text("optimizer", "adam")
    if has_modules or name in ("sgd", "muon", "dist_muon"):
        translation.refuse("use-mup", MTP if has_modules else OTHER.format(name))
        translation.skip("mup-*", "softmax-scale")
        return
    base = translation.optional_count("mup-base-hidden-size") or hidden
    head_dim = translation.optional_count("kv-channels") or max(1, hidden // heads)
    base_head_dim = _base_head_dim(translation, head_dim)
    output = translation.number("mup-output-mult", 1.0, minimum=SMALLEST)
    embedding = translation.number("mup-embedding-mult", 1.0, minimum=SMALLEST)
    assert output is not None
    translation.put("model.options.mup_base_size", base, "--use-mup")
    is_usual = math.isclose(base_head_dim, head_dim, rel_tol=1e-9)
    why = f"attention scores q k sqrt({base_head_dim:g}) / {head_dim}"
    translation.put("model.options.mup_base_head_dim", None if is_usual else base_head_dim, why)
    factor = output * hidden / base
    is_usual = output == 1 or math.isclose(factor, 1, rel_tol=1e-9)  # 1 stands for 1/m there
    translation.put("model.options.mup_output_multiplier", None if is_usual else factor, "--mup-output-mult times m")
    translation.put("model.options.mup_embedding_multiplier", None if embedding == 1 else embedding)
    translation.skip("mup-*")


def _base_head_dim(translation: Translation, head_dim: int) -> float:
    """Return the size b of a head for which Megatron-LM's scale of the scores is sqrt(b) / head_dim."""
    scale = translation.number("softmax-scale", minimum=SMALLEST)
    if scale is None:
        base, power = (
            translation.number("mup-base-head-dim", 1.0, minimum=SMALLEST),
            translation.number("mup-attn-scale-power", 1.0),
        )
        assert base is not None and power is not None
        scale = math.sqrt(base) / head_dim**power
    return round((scale * head_dim) ** 2, 9)
