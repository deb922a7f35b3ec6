"""Every number of the configuration has bounds, and a checkpoint can hold it at either of them."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic.fields import FieldInfo

from meshwright.checkpoint import CheckpointMetadata
from meshwright.checkpoint.check import parse as parse_manifest
from meshwright.checkpoint.manifest import render
from meshwright.checkpoint.save import merge
from meshwright.config import Batch, RunConfig, dump, parse, resolve
from meshwright.config.batch import derive
from meshwright.config.keys import KEYS
from tests.support.errors import raises


def numbers_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> list[tuple[type, list[Any]]]:
    """(int or float, its constraints), as often as a type has them."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        flat = [
            each
            for item in more
            for each in (item.metadata if isinstance(item, FieldInfo) else [item])
        ]
        return numbers_of(inner, (*metadata, *flat))
    if annotation in (int, float):
        return [(annotation, list(metadata))]
    return [
        found
        for part in get_args(annotation)
        if not isinstance(part, int | str)
        for found in numbers_of(part)
    ]


def extremes(kind: type, constraints: list[Any]) -> tuple[float, float]:
    """Return the least and the greatest value that a number may have."""
    bounds = {type(each): each for each in constraints}
    step = bounds[MultipleOf].multiple_of if MultipleOf in bounds else 1
    if kind is float:
        least = bounds[Ge].ge if Ge in bounds else sys.float_info.min * sys.float_info.epsilon
        greatest = (
            bounds[Le].le if Le in bounds else 1 - 2**-53 if Lt in bounds else sys.float_info.max
        )
        return float(least), float(greatest)
    least = bounds[Ge].ge if Ge in bounds else bounds[Gt].gt + 1
    greatest = bounds[Le].le if Le in bounds else bounds[Lt].lt - 1
    return least, greatest // step * step


NUMERIC = {
    ".".join(key): found
    for key, field in KEYS.items()
    if (found := numbers_of(field.annotation, tuple(field.metadata)))
}


def test_every_whole_number_has_both_bounds() -> None:
    assert {"run.seed", "train.steps", "checkpoint.every", "parallel.bucket_bytes"} <= set(NUMERIC)
    for key, found in NUMERIC.items():
        for kind, constraints in found:
            kinds = {type(each) for each in constraints}
            assert kind is float or (kinds & {Ge, Gt} and kinds & {Le, Lt}), (
                f"{key} has no bound: {constraints}"
            )


@pytest.mark.parametrize("key", NUMERIC)
@pytest.mark.parametrize("which", [0, 1], ids=["least", "greatest"])
def test_a_checkpoint_holds_every_number_at_its_bounds(key: str, which: int) -> None:
    section, name = key.split(".")
    kind, constraints = NUMERIC[key][0]
    value: Any = extremes(kind, constraints)[which]
    value = (value,) * 3 if name == "ramp" else value
    value = (value, value) if name == "betas" else [value] if name == "balance" else value
    config = RunConfig.model_validate({section: {name: value}})
    assert parse(dump(config)) == config
    steps, batch = config.train.steps, config.batch.global_batch or 1
    head = CheckpointMetadata(
        step=steps,
        samples_seen=steps * batch,
        seed=config.run.seed,
        config=config.model_dump(mode="json"),
        data_fingerprint={},
        state={"tokens_seen": steps * batch, "optimizer_steps": steps, "skipped_in_a_row": 0},
    )
    manifest = parse_manifest(render(merge(head, [])), "manifest.json")
    assert manifest.seed == config.run.seed and manifest.config == json.loads(
        json.dumps(head.config)
    )
    with pytest.raises(ValueError):
        beyond = value[0] if isinstance(value, tuple | list) else value
        beyond = (beyond * 2 + 1) * 10 if which else -2  # dp = -1 is "auto"
        RunConfig.model_validate({section: {name: beyond}})


def test_the_greatest_run_has_a_cursor_that_a_manifest_holds() -> None:
    tree: dict[str, Any] = {
        "run": {"seed": 2**63 - 1},
        "train": {"steps": 10**9},
        "batch": {"global_batch": 10**9, "micro_batch_size": 10**6},
        "data": {"train": "corpus"},
    }
    config = resolve(RunConfig.model_validate(tree), 1)
    head = CheckpointMetadata(
        10**9, 10**18, 2**63 - 1, config.model_dump(mode="json"), {}, {"optimizer_steps": 10**9}
    )
    assert parse_manifest(render(merge(head, [])), "manifest.json").samples_seen == 10**18


@pytest.mark.parametrize(
    ("batch", "values"),
    [
        (Batch(micro_batch_size=10**6, chunks=10**6), ("global_batch", "1,000,000,000,000")),
        (Batch(micro_batch_size=1, global_batch=10**9), ("batch.chunks", "1,000,000,000")),
        (Batch(chunks=1, global_batch=10**9), ("batch.micro_batch_size",)),
    ],
)
def test_a_derived_batch_number_beyond_its_bound_is_refused(
    batch: Batch, values: tuple[str, ...]
) -> None:
    with raises("MW-CONFIG-002", *values):
        derive(batch, 1)
