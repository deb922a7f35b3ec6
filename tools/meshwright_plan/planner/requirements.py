"""Requirements of the model itself on its layout, which a launch checks too: unsupported degrees, running buffers."""

from __future__ import annotations

from meshwright.config import RunConfig
from meshwright.data.sources import example
from meshwright.errors import UserError
from meshwright.mesh import Grid
from meshwright.model.buffers import BatchNorm
from meshwright.model.build import PlainModel
from meshwright.pipeline.plan import check_running, describe_model
from meshwright.pipeline.values import MetaMicrobatch
from meshwright.tensor_parallel.check import check_supported
from meshwright_plan.planner.model_cache import ModelCache


def check_requirements(cache: ModelCache, config: RunConfig) -> None:
    """Raise :class:`ModelError` for a layout that the model rules out, as a launch does."""
    parallel, model = config.parallel, cache.model
    check_supported(config.model.builder, model.impossible, Grid(*parallel.degrees), sequence=parallel.sequence)
    _check_buffers(cache, config)


def buffers_refusal(cache: ModelCache, config: RunConfig) -> str:
    """Return why the layout of ``config`` would change the model's running buffers (BatchNorm); "" if it does not."""
    parallel = config.parallel

    def find() -> str:
        try:
            _check_buffers(cache, config)
        except UserError as error:
            return error.message.splitlines()[0]
        return ""

    recompute = config.pipeline.recompute, *config.pipeline.recompute_layers
    return cache.cached(("buffers", parallel.degrees[1:], parallel.ep, parallel.sequence, recompute), find)


def _check_buffers(cache: ModelCache, config: RunConfig) -> None:
    if not changed_buffers(cache):
        return
    pipeline = {"schedule": "1f1b", "interleave": None}  # each schedule runs a stage's forwards in order
    alone = config.replace(parallel={"pp": 1}, pipeline=pipeline)
    check_running(config, cache.model, changed_buffers(cache), cache.draw(alone), cache.recomputed(config))


def changed_buffers(cache: ModelCache) -> list[str]:
    """Return the names of the buffers that a training forward changes."""

    def find() -> list[str]:
        if next(cache.model.layers.buffers(), None) is None:
            return []
        shapes = MetaMicrobatch(*example(cache.config, 1))
        return describe_model(cache.config, cache.model, shapes).running

    return cache.cached("changed buffers", find)


def has_batch_norm(model: PlainModel) -> bool:
    """Return True if the micro-batch size is part of the model."""
    return any(isinstance(module, BatchNorm) for module in model.layers.modules())
