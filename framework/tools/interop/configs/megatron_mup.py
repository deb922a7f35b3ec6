"""Translation of Megatron-LM's ``--use-mup`` to the options ``mup_*`` of the models.

Both scale the matrices of the blocks alike: initial standard deviation 1/sqrt(m), learning rate 1/m with its minimum,
Adam's eps 1/m, for m = hidden size / base hidden size. Source: megatron-core's ``transformer_config.py`` and
``get_mup_config_overrides``.
"""

from __future__ import annotations

import math

from meshwright.tools.interop.configs.translation import Draft

SIZES = ("hidden-size", "num-attention-heads", "kv-channels")
FLAGS = ("mup-base-hidden-size", "mup-output-mult", "mup-base-head-dim", "mup-attn-scale-power", "softmax-scale")
SMALLEST = 1e-9
OTHER = "with {} it scales other rates there; muP here is AdamW's"
MTP = "modules of multi-token prediction have no muP here"
OWN_MUP = "a model of your own declares its learning-rate factors itself, as its attribute parameter_groups"


def mup(draft: Draft, hidden: int, heads: int) -> None:
    """Translate muP, if the file sets it. ``hidden``, ``heads``: the file's, or stand-ins for undefined variables."""
    if not draft.boolean("use-mup"):
        draft.skip("mup-*")  # without effect
        return
    has_modules, name = "model.options.mtp_layers" in draft.tree, draft.text("optimizer", "adam")
    if has_modules or name in ("sgd", "muon", "dist_muon"):
        draft.refuse("use-mup", MTP if has_modules else OTHER.format(name))
        draft.skip("mup-*", "softmax-scale")
        return
    base = draft.optional_count("mup-base-hidden-size") or hidden
    head_dim = draft.optional_count("kv-channels") or max(1, hidden // heads)
    base_head_dim = _base_head_dim(draft, head_dim)
    output = draft.number("mup-output-mult", 1.0, minimum=SMALLEST)
    embedding = draft.number("mup-embedding-mult", 1.0, minimum=SMALLEST)
    assert output is not None
    unset = next((name for name in (*SIZES, *FLAGS) if name in draft.unset), None)
    if unset is not None:
        draft.leave_open("model.options.mup_base_size", base, draft.why_missing(unset))
        draft.leave_open("model.options.mup_base_head_dim", base_head_dim, draft.why_missing(unset))
        draft.leave_open("model.options.mup_output_multiplier", 1.0, draft.why_missing(unset))
    else:
        draft.put("model.options.mup_base_size", base, "--use-mup")
        is_usual = math.isclose(base_head_dim, head_dim, rel_tol=1e-9)
        why = f"attention scores q k sqrt({base_head_dim:g}) / {head_dim}"
        draft.put("model.options.mup_base_head_dim", None if is_usual else base_head_dim, why)
        factor = output * hidden / base
        is_usual = output == 1 or math.isclose(factor, 1, rel_tol=1e-9)  # 1 stands for 1/m there
        draft.put("model.options.mup_output_multiplier", None if is_usual else factor, "--mup-output-mult times m")
    draft.put("model.options.mup_embedding_multiplier", None if embedding == 1 else embedding)
    if "mup-embedding-mult" in draft.unset:
        draft.leave_open("model.options.mup_embedding_multiplier", 1.0, draft.why_missing("mup-embedding-mult"))
    draft.skip("mup-*")


def _base_head_dim(draft: Draft, head_dim: int) -> float:
    """Return the size b of a head for which Megatron-LM's scale of the scores is sqrt(b) / head_dim."""
    scale = draft.number("softmax-scale", minimum=SMALLEST)
    if scale is None:
        base, power = (
            draft.number("mup-base-head-dim", 1.0, minimum=SMALLEST),
            draft.number("mup-attn-scale-power", 1.0),
        )
        assert base is not None and power is not None
        scale = math.sqrt(base) / head_dim**power
    return round((scale * head_dim) ** 2, 9)
