"""The one door to ``transformers``: imported late, told to stay offline, and its quirks that a pipeline meets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from meshwright.errors import ModelError

_WHOLE_ROWS: ContextVar[bool] = ContextVar("whole_rows", default=False)


def library() -> Any:
    """The package ``transformers``, told to open no connection.

    Raises:
        ModelError: it is not installed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, by processes that we start too
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
        from transformers import masking_utils
    except ImportError as error:
        raise ModelError(
            f"a model of Hugging Face needs transformers 5 ({error}): pip install 'meshwright[hf]'"
        ) from error
    if not hasattr(masking_utils.find_packed_sequence_indices, "unpacked"):
        _install(masking_utils)
    return transformers


def _install(masking_utils: Any) -> None:
    """transformers looks at positions, as numbers, to see whether a row holds several documents: on meta there are no
    numbers, and on a GPU each layer would wait for them. Within :func:`whole_rows` the answer is known."""
    unpacked = masking_utils.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        if _WHOLE_ROWS.get() or position_ids.is_meta:
            return None
        return unpacked(position_ids)  # type: ignore[no-any-return]

    find_packed_sequence_indices.unpacked = unpacked  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


@contextmanager
def whole_rows(are_whole: bool = True) -> Iterator[None]:
    """Within: each row is one sequence, from its first position to its last."""
    token = _WHOLE_ROWS.set(are_whole)
    try:
        yield
    finally:
        _WHOLE_ROWS.reset(token)
