"""Translation of Megatron-LM's flags on Muon, whose update is that of NVIDIA's ``emerging_optimizers``.

momentum         the same: a running mean, and Nesterov's
scale, m x n     spectral: max(m, n)^0.5, shape_scaling: max(1, m/n)^0.5, unit_rms_norm: (m/n)^0.5; x extra factor
Newton-Schulz    of whole matrices, or with tp of each rank's part ("blockwise")
"""

from __future__ import annotations

from meshwright.tools.interop.configs.translation import Draft

SCALES = {("spectral", 0.2): "match_rms_adamw", ("shape_scaling", 1.0): "spectral"}
"""Scale and extra factor there -> ``optimizer.scale``, the same function of the sides."""


def muon(draft: Draft) -> None:
    """Translate the flags of Muon, and refuse those of another update."""
    draft.put("optimizer.name", "muon")
    if draft.has("muon-momentum"):
        draft.put("optimizer.muon_momentum", draft.number("muon-momentum"))
    else:
        draft.guess("optimizer.muon_momentum", 0.95, "the default is 0.9 or 0.95 there, by version")
    nesterov = [draft.boolean(name) for name in ("muon-nesterov", "muon-use-nesterov")]
    draft.put("optimizer.nesterov", any(nesterov))
    draft.put("optimizer.ns_steps", draft.count("muon-num-ns-steps", 5))
    scale, factor = draft.text("muon-scale-mode", "spectral"), draft.number("muon-extra-scale-factor", 1.0)
    own = SCALES.get((str(scale), factor or 0.0))
    draft.put("optimizer.scale", own, f"{scale} x {factor} there")
    if own is None:
        name = "muon-extra-scale-factor" if scale in ("spectral", "shape_scaling") else "muon-scale-mode"
        why = f"{scale} x {factor} is no scale here: spectral x 0.2 is match_rms_adamw, shape_scaling x 1 is spectral"
        draft.refuse(name, f"{why}. The factor is on the update alone, not on the decay")
    if not draft.boolean("muon-split-qkv", True) or draft.boolean("muon-no-split-qkv"):
        name = "muon-no-split-qkv" if draft.has("muon-no-split-qkv") else "muon-split-qkv"
        draft.refuse(name, "q, k and v are a matrix each here, in the fused weight too")
    if (
        draft.text("muon-tp-mode", "blockwise") == "blockwise"
        and (draft.integer("tensor-model-parallel-size") or 1) > 1
    ):
        draft.refuse("muon-tp-mode", "a matrix is orthogonalised as a whole here, not each tp rank's part of it")
    if draft.text("muon-scalar-optimizer", "adam") != "adam":
        draft.refuse("muon-scalar-optimizer", "AdamW steps all that is no matrix here")
    coefficients = draft.text("muon-coefficient-type", "quintic")
    if coefficients != "simple":
        draft.decide(f"Newton-Schulz has Jordan's coefficients here, and the sets of {coefficients!r} there")
    if draft.boolean("swiglu") and not draft.boolean("muon-split-fc1"):
        draft.decide("gate and up are a matrix each here, and one there")
    draft.skip("muon-fp32-matmul-prec", "muon-split-*")
