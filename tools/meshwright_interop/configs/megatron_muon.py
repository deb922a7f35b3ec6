"""Translation of Megatron-LM's flags on Muon, whose update is that of NVIDIA's ``emerging_optimizers``.

momentum         the same: a running mean, and Nesterov's
scale, m x n     spectral: max(m, n)^0.5, shape_scaling: max(1, m/n)^0.5, unit_rms_norm: (m/n)^0.5; x extra factor
Newton-Schulz    of whole matrices, or with tp of each rank's part ("blockwise")
"""

from __future__ import annotations

from meshwright_interop.configs.translation import Translation

SCALES = {("spectral", 0.2): "match_rms_adamw", ("shape_scaling", 1.0): "spectral"}
"""Scale and extra factor there -> ``optimizer.scale``, the same function of the sides."""


def muon(translation: Translation) -> None:
    """Translate the flags of Muon, and refuse those of another update."""
    translation.put("optimizer.name", "muon")
    if translation.has("muon-momentum"):
        translation.put("optimizer.muon_momentum", translation.number("muon-momentum"))
    else:
        translation.guess("optimizer.muon_momentum", 0.95, "the default is 0.9 or 0.95 there, by version")
    nesterov = [translation.boolean(name) for name in ("muon-nesterov", "muon-use-nesterov")]
    translation.put("optimizer.nesterov", any(nesterov))
    translation.put("optimizer.ns_steps", translation.count("muon-num-ns-steps", 5))
    scale, factor = translation.text("muon-scale-mode", "spectral"), translation.number("muon-extra-scale-factor", 1.0)
    own = SCALES.get((str(scale), factor or 0.0))
    translation.put("optimizer.scale", own, f"{scale} x {factor} there")
    if own is None:
        name = "muon-extra-scale-factor" if scale in ("spectral", "shape_scaling") else "muon-scale-mode"
        why = f"{scale} x {factor} is no scale here: spectral x 0.2 is match_rms_adamw, shape_scaling x 1 is spectral"
        translation.refuse(name, f"{why}. The factor is on the update alone, not on the decay")
    if not translation.boolean("muon-split-qkv", True) or translation.boolean("muon-no-split-qkv"):
        name = "muon-no-split-qkv" if translation.has("muon-no-split-qkv") else "muon-split-qkv"
        translation.refuse(name, "q, k and v are a matrix each here, in the fused weight too")
    if (
        translation.text("muon-tp-mode", "blockwise") == "blockwise"
        and (translation.integer("tensor-model-parallel-size") or 1) > 1
    ):
        translation.refuse("muon-tp-mode", "a matrix is orthogonalised as a whole here, not each tp rank's part of it")
    if translation.text("muon-scalar-optimizer", "adam") != "adam":
        translation.refuse("muon-scalar-optimizer", "AdamW steps all that is no matrix here")
    coefficients = translation.text("muon-coefficient-type", "quintic")
    if coefficients != "simple":
        translation.decide(f"Newton-Schulz has Jordan's coefficients here, and the sets of {coefficients!r} there")
    if translation.boolean("swiglu") and not translation.boolean("muon-split-fc1"):
        translation.decide("gate and up are two matrices here, and one in Megatron-LM")
    translation.skip("muon-fp32-matmul-prec", "muon-split-*")
