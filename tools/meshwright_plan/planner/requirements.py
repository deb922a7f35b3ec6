"""Requirements of the model itself on its layout, which a launch checks too: unsupported degrees,
running buffers.
"""

from __future__ import annotations

from meshwright.config import RunConfig
from meshwright.config.combinations.features import Traits, features_of
from meshwright.config.combinations.layout import Layout
from meshwright.config.combinations.refused import find_refused
from meshwright.config.combinations.sizes import EXPERT_GROUPS, EXPERT_RANKS, EXPERTS, LayoutSizes
from meshwright.data.sources import example
from meshwright.errors import UserError
from meshwright.mesh import Grid
from meshwright.model.buffers import BatchNorm
from meshwright.model.build import PlainModel
from meshwright.model.sync_batch_norm import synchronised
from meshwright.pipeline.plan import check_running, check_synchronised, describe_model
from meshwright.pipeline.values import MetaMicrobatch
from meshwright.tensor_parallel.check import check_supported
from meshwright_plan.planner.model_cache import ModelCache


def check_requirements(cache: ModelCache, config: RunConfig) -> None:
    """Raise :class:`ModelError` for a layout that the model rules out, as a launch does."""
    parallel, model = config.parallel, cache.model
    check_supported(
        config.model.builder,
        model.impossible,
        Grid.of(parallel.degrees),
        sequence=parallel.sequence,
    )
    _check_buffers(cache, config)


def combination_refusal(traits: Traits, layout: Layout) -> str:
    """Return why the degrees of a layout do not go with each other, or with the model; "" if they
    do.
    """
    row = find_refused(features_of(layout, traits))
    if row is not None:
        return f"{row.first} with {row.second}: {row.why}"
    sizes = LayoutSizes(experts=traits.experts)
    for division in (EXPERTS, EXPERT_RANKS, EXPERT_GROUPS):
        problem = division.find_problem(layout, sizes)
        if problem is not None:
            return problem
    return ""


def buffers_refusal(cache: ModelCache, config: RunConfig) -> str:
    """Return why the layout of ``config`` would change the model's running buffers (BatchNorm);
    "" if it does not.
    """
    parallel = config.parallel

    def find() -> str:
        try:
            _check_buffers(cache, config)
        except UserError as error:
            return error.message.splitlines()[0]
        return ""

    recompute = config.pipeline.recompute, *config.pipeline.recompute_layers
    return cache.cached(
        ("buffers", parallel.degrees[1:], parallel.ep, parallel.sequence, recompute), find
    )


def _check_buffers(cache: ModelCache, config: RunConfig) -> None:
    if has_synchronised(cache.model):
        balance, running = config.batch.balance, changed_buffers(cache)
        check_synchronised(config.parallel, balance, cache.model, running)
    if not changed_buffers(cache):
        return
    # each schedule runs a stage's forwards in order
    pipeline = {"schedule": "1f1b", "interleave": None}
    alone = config.replace(parallel={"pp": 1}, pipeline=pipeline)
    check_running(
        config.parallel,
        config.train.dtype,
        cache.model,
        changed_buffers(cache),
        cache.draw(alone.pipeline, alone.parallel.pp, alone.batch.chunks),
        cache.recomputed(config.pipeline),
    )


def changed_buffers(cache: ModelCache) -> list[str]:
    """Return the names of the buffers that a training forward changes."""

    def find() -> list[str]:
        if next(cache.model.layers.buffers(), None) is None:
            return []
        shapes = MetaMicrobatch(*example(cache.config.data, 1))
        config = cache.config
        return describe_model(
            cache.model,
            config.model.builder,
            shapes,
            recompute=config.pipeline.recompute,
            document_boundaries=config.data.document_boundaries,
        ).running

    return cache.cached("changed buffers", find)


def has_synchronised(model: PlainModel) -> bool:
    """Return True if dp x the micro-batch size is part of the model."""
    return any(True for _ in synchronised(model.layers))


def has_batch_norm(model: PlainModel) -> bool:
    """Return True if the micro-batch size is part of the model."""
    return any(isinstance(module, BatchNorm) for module in model.layers.modules())
