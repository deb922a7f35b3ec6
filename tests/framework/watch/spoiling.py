"""One number of one rank made NaN, as a fault or a bad sample would;
and what the ranks then say and hold.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.build import build
from meshwright.config import RunConfig, parse
from meshwright.errors import NonFiniteError
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import Mesh, close_mesh, open_mesh
from meshwright.optimizer import read_states
from meshwright.parts import Parts
from meshwright.step import take_step
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.verify.cases import VOCAB_SIZE, config_of, model_config, size_for

GLOBAL_BATCH = 8
LENGTH = 8
LIMIT_S = 240.0
"""For all ranks of one test, on a busy machine."""


def config_for(
    layout: str, *, builder: str = "", dtype: str = "float32", steps: int = 10, **watch: Any
) -> RunConfig:
    """Return a tiny GPT-2 (or what ``builder`` builds) on random tokens,
    in buckets so small that there are several.
    """
    laid_out = parse_layout(layout)
    options = {"vocab_size": VOCAB_SIZE}
    config = (
        config_of(builder, options, LENGTH) if builder else model_config("gpt2", size_for(laid_out))
    )
    tree = layout_config(config, laid_out, GLOBAL_BATCH, dtype).model_dump()
    tree["parallel"]["bucket_bytes"] = 4096
    tree["train"]["steps"] = steps
    tree["watch"].update(watch)
    return RunConfig.model_validate(tree)


class Spoil(NamedTuple):
    """What becomes NaN on one rank, whenever this sample of a step goes through."""

    what: str
    """``output`` of a module, ``gradient`` of a parameter, or ``weight``."""
    rank: int
    name: str
    sample: int = 0
    """Of the step's 8: its global index modulo 8."""
    times: int = 10**6
    """How often at most."""
    value: float = float("nan")


def opened(config_json: str) -> tuple[RunConfig, Mesh]:
    """Return the configuration and its mesh."""
    config = parse(config_json)
    parallel = config.parallel
    assert isinstance(parallel.dp, int)
    return config, open_mesh(Grid.of(parallel.degrees), "cpu")


def parts_for(config: RunConfig, mesh: Mesh) -> Parts:
    """This rank's parts, on random tokens."""
    return build(config, mesh, (open_verify_source(config, True), {}))


def spoil(parts: Parts, spec: Spoil) -> Callable[[], None]:
    """Put it in, on the rank that it is for; what is returned takes it out."""
    if parts.mesh.rank != spec.rank:
        return lambda: None
    if spec.what == "output":
        return _spoil_output(parts, spec)
    place, bucket = next(
        (place, bucket)
        for replica in parts.replicas.values()
        for bucket in replica.buckets
        for place in bucket.slots
        if place.member.info.name == spec.name
    )
    if spec.what == "gradient":
        return _spoil_gradient(parts, spec, bucket.leaf(place))
    for replica in parts.replicas.values():
        replica.wait_for_weights()
    element = (bucket.master if bucket.flat is None else bucket.flat)[place.start]
    before = element.clone()
    element.fill_(spec.value)

    def restore() -> None:
        element.copy_(before)

    return restore


def _spoil_output(parts: Parts, spec: Spoil) -> Callable[[], None]:
    left = [spec.times]

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        samples = parts.blueprint.model.current.sample_indices
        assert samples is not None
        rows = (samples % GLOBAL_BATCH == spec.sample).nonzero().flatten().tolist()
        if not rows or not left[0]:
            return None
        left[0] -= 1
        output = output.clone()
        output[rows[0], -1, 0] = spec.value
        return output

    modules = [dict(stage.layers.named_modules()) for stage in parts.executor.stages.values()]
    return (
        next(found[spec.name] for found in modules if spec.name in found)
        .register_forward_hook(hook)
        .remove
    )


def _spoil_gradient(parts: Parts, spec: Spoil, parameter: Tensor) -> Callable[[], None]:
    size = parts.config.batch.micro_batch_size
    assert size is not None
    chunks = parts.blueprint.schedule.chunks
    left, num_calls = [spec.times], [0]

    def hook(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # a backward in halves brings it later
            return None
        num_calls[0] += 1
        if (num_calls[0] - 1) % chunks != spec.sample // size % chunks or not left[0]:
            return None
        left[0] -= 1
        gradient = gradient.clone()
        gradient.view(-1)[0] = spec.value
        return gradient

    removed: Callable[[], None] = parameter.register_hook(hook).remove  # type: ignore[no-untyped-call]
    return removed


def held(parts: Parts) -> list[Tensor]:
    """Return all that a step changes on this rank: weights, masters, moments, running buffers."""
    found = list(parts.running().values())
    index = 0
    for replica in parts.replicas.values():
        replica.wait_for_weights()
        for bucket in replica.buckets:
            states, _ = read_states(parts.optimizer, index)
            index += 1
            found += [bucket.master, *states.values()]
            if bucket.flat is not None:
                found.append(bucket.flat)
    return [tensor.clone() for tensor in found]


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    """NaN where NaN was, too."""
    pairs = zip(one, other, strict=True)
    return all(
        torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)) for a, b in pairs
    )


def taken(parts: Parts) -> str | None:
    """Take a step; return the message of the error that it ended in."""
    try:
        take_step(parts)
    except NonFiniteError as error:
        return str(error)
    return None


def size_of(config: RunConfig) -> int:
    """Number of ranks."""
    assert isinstance(config.parallel.dp, int)
    return Grid.of(config.parallel.degrees).size


def messages_rank(
    rank: int, world_size: int, config_json: str, specs: list[Spoil]
) -> list[tuple[str | None, bool]]:
    """Take one step, then one with each of these spoilt; return the message,
    and whether all was left as it was. One after all.
    """
    config, mesh = opened(config_json)
    parts = parts_for(config, mesh)
    assert taken(parts) is None
    found: list[tuple[str | None, bool]] = []
    for spec in specs:
        undo = spoil(parts, spec)
        before = held(parts)
        message = taken(parts)
        found.append((message, same_bits(before, held(parts)) and parts.state.step == 1))
        undo()
    assert taken(parts) is None and parts.state.optimizer_steps == 2, "sound again"
    close_mesh(mesh)
    return found


def messages(pool: RankPool, config: RunConfig, specs: list[Spoil]) -> list[str]:
    """What was said of each, the same on every rank; no rank has taken the step."""
    ranks: list[list[tuple[str | None, bool]]] = pool.run(
        messages_rank, size_of(config), config.model_dump_json(), specs, timeout_s=LIMIT_S
    )
    found = []
    for spec, told in zip(specs, zip(*ranks, strict=True), strict=True):
        texts = {message for message, _ in told}
        assert len(texts) == 1 and None not in texts, (spec, texts)
        assert all(unchanged for _, unchanged in told), spec
        found.append(str(texts.pop()))
    return found


def quiet(text: str) -> None:
    """Who listens to nothing."""


def checkpoints_in(directory: Path) -> list[str]:
    """Return the names of what was saved."""
    return sorted(path.name for path in directory.glob("step-*"))
