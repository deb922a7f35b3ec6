"""Probe of the plain model, which is run twice and in parts,
to find hidden state and dependence between samples.

A layer that returns different numbers for the same samples has hidden random numbers or state, and
no layout could reproduce it. A layer whose numbers for a sample depend on the other samples makes
the micro-batch size a part of the
model: every layout must then use the run's own size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.config import RunConfig
from meshwright.config.combinations.features import Traits
from meshwright.data.sources import Source
from meshwright.errors import ModelError, UserError
from meshwright.pipeline.values import cast_floats
from meshwright.verify.reference import PlainRun

SAMPLES = 4
"""Number of samples in the first forward."""
PARTS = (2, 1)
"""Samples per forward in the runs in parts.
One size alone may by chance leave an expert's capacity unchanged.
"""
TOLERANCE = 1e-9
"""Relative distance, in float64, beyond which outputs differ;
rounding by another order of summation stays below it.
"""


class Output(NamedTuple):
    """Tensors that one call of a layer returned."""

    where: str
    leaves: list[Tensor]


def find_coupling(config: RunConfig, source: Source) -> str:
    """Return the first layer whose output for a sample depends on the rest of its micro-batch;
    "" if there is none.

    A model that does not run in plain torch returns ""; the reference run then raises the error for
    it.

    Raises:
        ModelError: a layer returns different numbers for the same samples.
    """
    try:
        run = PlainRun(config, source, torch.float64, SAMPLES)
        inputs, indices = source.read(range(SAMPLES))[0], torch.arange(SAMPLES)
        whole = outputs(run, inputs, indices)
        again = outputs(run, inputs, indices)
    except UserError:
        raise
    except Exception:
        return ""
    for first, second in zip(whole, again, strict=True):
        if any(map(_differ, first.leaves, second.leaves)):
            raise ModelError(
                "MW-VERIFY-008",
                f"{first.where} returns other numbers for the same samples: it draws random numbers"
                " or keeps state outside of parameters and buffers. Use nn.Dropout for noise, a"
                " buffer (register_buffer) for state",
            )
    for size in PARTS:
        for start in range(0, SAMPLES, size):
            coupling = _first_coupled(run, whole, inputs, indices, slice(start, start + size))
            if coupling:
                return coupling
    return ""


def _first_coupled(
    run: PlainRun, whole: list[Output], inputs: Any, indices: Tensor, rows: slice
) -> str:
    """Return the first layer whose output for the samples ``rows`` differs without the other
    samples, or "".
    """
    try:
        alone = outputs(run, tree_map(lambda leaf: leaf[rows], inputs), indices[rows])
    except Exception:  # the model needs the full number of samples, so they depend on each other
        return whole[-1].where
    for full, part in zip(whole, alone, strict=False):
        if any(
            _differ(_rows(a, b, rows), b) for a, b in zip(full.leaves, part.leaves, strict=True)
        ):
            return full.where
    return ""


def outputs(run: PlainRun, inputs: Any, sample_indices: Tensor) -> list[Output]:
    """Run one training forward and return each layer's output in order.
    Running buffers are restored afterwards.

    ``sample_indices``: (B,) int64, global.
    """
    recorded: list[Output] = []
    names = {
        layer: f"layer {name} ({type(layer).__name__})"
        for name, layer in run.layers.named_children()
    }

    def record(layer: nn.Module, _: Any, value: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        recorded.append(Output(names[layer], [leaf.detach().clone() for leaf in leaves]))

    hooks = [layer.register_forward_hook(record) for layer in names]
    before = {name: run.layers.get_buffer(name).clone() for name in run.running}
    try:
        with run.dropout.installed(), torch.no_grad():
            run.dropout.begin(sample_indices)
            run.layers(cast_floats(inputs, run.dtype))
    finally:
        for hook in hooks:
            hook.remove()
        for name, buffer in before.items():
            run.layers.get_buffer(name).copy_(buffer)
    return recorded


def _rows(whole: Tensor, part: Tensor, rows: slice) -> Tensor:
    """Return the rows of an output that belong to the samples ``rows``;
    all of it if dim 0 is not over samples.
    """
    if whole.dim() == 0 or part.dim() == 0 or whole.shape == part.shape or whole.shape[0] % SAMPLES:
        return whole
    each = whole.shape[0] // SAMPLES
    return whole[rows.start * each : rows.stop * each]


def _differ(a: Tensor, b: Tensor) -> bool:
    """Return True if two outputs differ by more than rounding. NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if not a.is_floating_point():
        return not torch.equal(a, b)
    scale = float(torch.nan_to_num(b).abs().max()) if b.numel() else 0.0
    return not torch.allclose(a, b, rtol=0.0, atol=TOLERANCE * max(scale, 1e-300), equal_nan=True)


def probe_coupling(traits: Traits, config: RunConfig, source: Source) -> Traits:
    """Run the model in plain torch, and return the traits with the layer in
    which samples depend on each other.

    Raises:
        ModelError: a layer returns different numbers for the same samples.
    """
    coupling = find_coupling(config, source)
    return traits._replace(
        coupling=coupling, couples_samples=traits.couples_samples or bool(coupling)
    )
