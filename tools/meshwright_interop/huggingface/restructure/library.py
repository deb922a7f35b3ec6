"""The only import of ``transformers``: late and offline,
with a patch for its detection of packed sequences.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from meshwright.errors import ModelError

_WHOLE_ROWS: ContextVar[bool] = ContextVar("whole_rows", default=False)


def import_transformers() -> Any:
    """Import and return the package ``transformers`` in offline mode, patched by :func:`_install`.

    Raises:
        ModelError: it is not installed.
    """
    os.environ["HF_HUB_OFFLINE"] = (
        "1"  # read at the import of huggingface_hub, in child processes too
    )
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
        from transformers import masking_utils
    except ImportError as error:
        raise ModelError(
            "MW-INTEROP-080",
            f"a model of Hugging Face needs transformers 5 ({error}): pip install transformers",
        ) from error
    if not hasattr(masking_utils.find_packed_sequence_indices, "unpacked"):
        _install(transformers, masking_utils)
    return transformers


def _install(transformers: Any, masking_utils: Any) -> None:
    """Replace the function with which transformers detects several documents
    in one row of positions.

    The original reads the values of the positions. On meta there are none, and on a GPU each call
    would synchronise. The replacement returns None (no packing) within :func:`whole_rows` and on
    meta, without reading values.
    """
    unpacked = masking_utils.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        if _WHOLE_ROWS.get() or position_ids.is_meta:
            return None
        return unpacked(position_ids)  # type: ignore[no-any-return]

    find_packed_sequence_indices.unpacked = unpacked  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
    warning = "warn_if_padding_and_no_attention_mask"  # reads the ids' values, for a warning alone
    setattr(transformers.PreTrainedModel, warning, lambda *_: None)


def register_experts(name: str, function: Any) -> None:
    """Register a computation of modules of experts (``experts_implementation``) in transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, function)


def rotary_parameters(kind: str) -> Any:
    """Return transformers' function of the frequencies and the scale of a ``rope_type``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[kind]


def weight_loading() -> Any:
    """Return transformers' module that reads and writes weights."""
    from transformers import core_model_loading

    return core_model_loading


def conversions_of(model: Any, *, add_legacy: bool = True) -> list[Any]:
    """Return transformers' mapping from files to a model, in its order; with ``add_legacy`` also
    the old names of any model, at the end.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model, add_legacy=add_legacy))


def register_attention(name: str, attention: Any, mask: Any) -> None:
    """Register an attention (``attn_implementation``), and the creation of its masks,
    in transformers.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)


def mask_function_of(implementation: str) -> Any:
    """Return transformers' function that creates the masks of an attention."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS[implementation]


@contextmanager
def whole_rows(are_whole: bool = True) -> Iterator[None]:
    """Declare for the block that each row of positions is one sequence; ``are_whole`` = False:
    it may hold several.
    """
    token = _WHOLE_ROWS.set(are_whole)
    try:
        yield
    finally:
        _WHOLE_ROWS.reset(token)
