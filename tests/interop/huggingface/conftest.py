"""Models of transformers on the disk, each written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.interop.huggingface import theirs


class Written(NamedTuple):
    """A model of theirs: where its library has written it, and the model."""

    path: Path
    model: Any


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Written]:
    """``written(case, dtype)``: in several files of at most 20 kB, with a tokenizer.
    Not to be changed.
    """
    pytest.importorskip("transformers")
    made: dict[tuple[str, torch.dtype], Written] = {}

    def write(name: str, dtype: torch.dtype = torch.float32) -> Written:
        if (name, dtype) not in made:
            path = tmp_path_factory.mktemp("theirs") / "model"
            made[name, dtype] = Written(
                path, theirs.write(name, path, shard_size="20KB", dtype=dtype)
            )
        return made[name, dtype]

    return write


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some documents of random tokens of the vocabulary that all cases have."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("corpus")
    draw = torch.Generator().manual_seed(3)
    for split in ("train", "validation"):
        builder = IndexedDatasetBuilder(str(folder / f"{split}.bin"), dtype=np.uint16)
        for _ in range(20):
            builder.add_document(torch.randint(1, theirs.VOCAB, (40,), generator=draw), [40])
        builder.finalize(str(folder / f"{split}.idx"))
    return folder
