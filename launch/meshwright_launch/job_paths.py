"""Paths of a configuration that a job will read, looked for on the machine that submits it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.config import RunConfig
from meshwright.config.functions import directory_of
from meshwright.config.sections import WeightedCorpus
from meshwright.run.directory import AT_STEP
from meshwright.terminal.output import abridge

DATASETS = "meshwright.data.huggingface:build"
"""Builder of samples whose option ``path`` is a folder."""


def missing_paths(config: RunConfig) -> str | None:
    """Return a warning that names the paths which are not visible here; None: all are.

    It is no error: they may be visible on the nodes of the job alone.
    """
    missing = [f"{key} = {path!r}" for key, path in _paths(config) if not _is_there(path)]
    if not missing:
        return None
    return (
        f"nothing is there on this machine: {abridge(missing)}. The job needs it at the same path"
        " on all its nodes: prepare or mount it there, or correct the key; if the nodes have it,"
        " all is well"
    )


def _is_there(path: str) -> bool:
    """Return True if a file, a folder, or a ``.bin/.idx`` pair has this path."""
    try:
        return any(Path(f"{path}{suffix}").exists() for suffix in ("", ".bin", ".idx"))
    except (OSError, ValueError):
        return False


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and the path of each input of the job."""
    yield from _corpora("data.train", config.data.train)
    for index, stage in enumerate(config.data.stages):
        yield from _corpora(f"data.stages[{index}].train", stage.train)
    builder, path = config.data.builder or "", config.data.options.get("path")
    if builder == DATASETS and isinstance(path, str) and path:
        yield "data.options.path", path
    if (directory := directory_of(config.model.builder)) is not None:
        yield "model.builder", str(directory)
    others = {
        "data.tokenizer": config.data.tokenizer,
        "pipeline.schedule_file": config.pipeline.schedule_file,
        "launch.cluster": config.launch.cluster,
    }
    yield from ((key, path) for key, path in others.items() if path)
    for name, each in config.data.validation_sets.items():
        yield f"data.validation{name and f'.{name}'}", each.path
    for given in config.run.starts:
        at_step = AT_STEP.fullmatch(given)
        is_step = at_step is not None and not _is_there(given)
        yield "run.start", at_step["run"] if is_step and at_step is not None else given


def _corpora(key: str, train: str | list[WeightedCorpus]) -> Iterator[tuple[str, str]]:
    """Yield the paths of a corpus, or of a mixture of several."""
    if isinstance(train, str):
        if train:
            yield key, train
        return
    for corpus in train:
        yield f"{key}.path", corpus.path
