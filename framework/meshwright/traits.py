"""Traits of a model and its samples: what decides which layouts it can have, and which reference
verify compares them with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.config import RunConfig
from meshwright.config.combinations.features import LAYOUT, Traits, settings_of
from meshwright.config.combinations.refused import find_excluding
from meshwright.context_parallel.cut import STARTS
from meshwright.context_parallel.plan import CORE
from meshwright.data.sources import example
from meshwright.expert_parallel.plan import expert_names
from meshwright.model.buffers import (
    couples_samples,
    coupling_modules,
    has_statistics,
    has_step_sums,
    owner_of,
    running_buffers,
)
from meshwright.model.build import PlainModel, configured_model
from meshwright.model.sync_batch_norm import synchronised
from meshwright.pipeline.plan import draw_functions_by_name
from meshwright.pipeline.values import MetaMicrobatch
from meshwright.placement.patterns import entries_for
from meshwright.seeding import SeededDropout
from meshwright.tensor_parallel.check import SPLITTING


def vocab_sizes(model: PlainModel) -> tuple[int, ...]:
    """Return the row count of each weight that the sharding plan cuts as a vocabulary."""
    sizes = set()
    for name, module in model.layers.named_modules():
        if "vocab" in entries_for(name, model.plan) and isinstance(
            getattr(module, "weight", None), Tensor
        ):
            sizes.add(int(module.weight.shape[0]))
    return tuple(sorted(sizes))


def _experts(model: PlainModel) -> tuple[int, ...]:
    """Return the numbers of experts of the layers, each once."""
    counts = set()
    for name in expert_names(model.layers, model.plan):
        module = model.layers.get_submodule(name)
        counts |= {whole.shape[0] for whole in module.parameters()}
    return tuple(sorted(counts))


def traits_of(config: RunConfig) -> Traits:
    """Build the model on meta and return its traits.

    Raises:
        UserError: the model or the samples cannot be built.
    """
    model, shapes = configured_model(config), MetaMicrobatch(*example(config.data, 2))
    inputs = shapes.cast(torch.float32).inputs
    draw_functions_by_name(model, inputs)
    try:
        running = running_buffers(model.layers, inputs)
    except Exception:  # the layouts' blueprints raise the error for it
        running = []
    return find_traits(config, model, shapes, running)


def find_traits(
    config: RunConfig, model: PlainModel, shapes: MetaMicrobatch, running: Sequence[str]
) -> Traits:
    """Return the traits of a model on meta, without running it.

    ``shapes``: of a micro-batch; ``running``: the buffers that a training forward changes.
    """
    trained = {
        model.canonical(n): p.numel() for n, p in model.layers.named_parameters() if p.requires_grad
    }
    owners = [owner for name in running if not has_step_sums(owner := owner_of(model.layers, name))]
    combined = [owner for owner in owners if not isinstance(owner, nn.SyncBatchNorm)]
    dropouts = [module for module in model.layers.modules() if isinstance(module, SeededDropout)]
    layers_of_ties = [{name.partition(".")[0] for name in names} for names in model.tied]
    return Traits(
        num_layers=len(model.layers),
        num_parameters=sum(trained.values()),
        has_plan=any(callable(kind) or kind in SPLITTING for kind in model.plan.values()),
        impossible=tuple(f"{name}: {why}" for name, why in model.impossible.items()),
        couples_samples=couples_samples(model.layers, running),
        has_running=not all(map(has_statistics, owners)),
        has_statistics=any(map(has_statistics, combined)),
        is_synchronised=any(True for _ in synchronised(model.layers)),
        couples_otherwise=bool(coupling_modules(model.layers, running)),
        has_scalar=any(p.dim() == 0 and p.requires_grad for p in model.layers.parameters()),
        is_tied=any(len(layers) > 1 for layers in layers_of_ties),
        has_dropout=any(dropout.p > 0 for dropout in dropouts),
        has_selective=bool(model.selective_recompute),
        vocab_sizes=vocab_sizes(model),
        has_documents=isinstance(shapes.inputs, dict) and STARTS in shapes.inputs,
        has_core=CORE in map(str, model.plan.values()),
        has_heads=bool(model.loss_heads),
        has_rows=shapes.labels.dim() > 1,
        experts=_experts(model),
        settings=settings_of(config),
    )


LACKS = ("no experts", "no selective parts")
"""Parts that a model need not have: a report does not name features that only these exclude."""
WITHIN = {"sequence": "tp", "cp documents": "cp", "cp heads": "cp"}
"""Feature -> the feature without which it means nothing."""


def left_out(traits: Traits) -> list[str]:
    """Return the features of layouts that the model, its samples or the configuration exclude, one
    sentence each.
    """
    reasons = list(traits.impossible)
    named = {reason.partition(":")[0] for reason in traits.impossible}
    for name in LAYOUT:
        row = find_excluding(name, traits)
        if row is None or row.second in LACKS or named & {name, WITHIN.get(name)}:
            continue
        reasons.append(f"{name}: {row.why}")
        named.add(name)
    if traits.is_synchronised:
        why = f"nn.SyncBatchNorm takes the statistics of all replicas{traits.of_coupling}"
        reasons.append(f"other products of dp and micro_batch_size: {why}")
    elif traits.couples_samples:
        why = f"the samples of a micro-batch depend on each other{traits.of_coupling}"
        reasons.append(f"other micro-batch sizes: {why}")
    return reasons
