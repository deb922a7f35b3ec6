"""Translation of Megatron-LM's flags on the data: corpora, their weights, and the boundaries of documents."""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.tools.interop.configs.megatron_keys import INDEXED_CORPUS
from meshwright.tools.interop.configs.source_keys import DropReason, is_variable
from meshwright.tools.interop.configs.translation import Draft


def data(draft: Draft) -> None:
    """Translate the corpora, the length of a sample and the boundaries of documents.

    Raises:
        ConfigError: the file has no ``--seq-length``.
    """
    length = draft.optional_count("seq-length") or draft.optional_count("encoder-seq-length")
    if length is None and "seq-length" in draft.unset:
        draft.leave_open("data.sequence_length", 1024, draft.why_missing("seq-length"))
    elif length is None:
        raise ConfigError(
            "MW-INTEROP-007",
            "the file has no --seq-length, which Megatron-LM requires: give a file with all flags of the run",
        )
    draft.put("data.sequence_length", length)
    name = "data-path" if draft.has("data-path") else "train-data-path"
    train, valid = _corpora(draft.value(name)), _corpora(draft.value("valid-data-path"))
    if train:
        draft.put("data.train", train)
    else:
        given = draft.items.get(name)
        reason = f"{given.written} is no path in the file" if given else draft.why_missing("data-path")
        draft.leave_open("data.train", "runs/data/corpus/train", reason)
        draft.drop(name, DropReason.BY_HAND, INDEXED_CORPUS)
    if isinstance(valid, str):
        draft.put("data.validation", valid)
        draft.put("train.validate_every", draft.integer("eval-interval", 1000) or 0)
        draft.put("train.validate_steps", draft.count("eval-iters", 100))
    elif draft.has("valid-data-path"):
        reason = f"{draft.items['valid-data-path'].written} is not the path of one .bin/.idx pair"
        draft.leave_open("data.validation", "runs/data/corpus/validation", reason)
        draft.drop("valid-data-path", DropReason.BY_HAND, "data.validation, the path of one .bin/.idx pair")
    _documents(draft)


def _documents(draft: Draft) -> None:
    """Translate the flags on document boundaries: positions, attention and labels across them."""
    resets = ("reset-position-ids", "reset-attention-mask")
    are_reset, masked = [draft.boolean(name) for name in resets], draft.boolean("eod-mask-loss")
    if all(are_reset) and not draft.own_model:
        reason = "positions and attention restart at each document"
        reason += "" if masked else "; its first token is no label either"
        draft.put("data.document_boundaries", True, reason)
        return
    for name in resets:
        draft.drop(
            name, DropReason.BY_HAND, "data.document_boundaries separates attention, positions and labels, all three"
        )
    if masked:
        draft.put("data.eod_mask_loss", True)


def _corpora(value: object) -> str | list[dict[str, object]] | None:
    """Parse a data path: one path, or several ``{path, weight}``; None if it is missing or of another form."""
    words = value if isinstance(value, list) else [value]
    if len(words) == 1:
        return str(words[0]) if _is_path(words[0]) else None
    weights, paths = [_weight(word) for word in words[::2]], words[1::2]
    if len(words) % 2 or not all(weights) or not all(map(_is_path, paths)):
        return None
    if len(paths) == 1:
        return str(paths[0])
    return [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]


def _weight(word: object) -> float | None:
    """Parse a finite number above 0; None if it is none."""
    try:
        weight = float(str(word))
    except ValueError:
        return None
    return weight if 0 < weight < float("inf") else None


def _is_path(value: object) -> bool:
    return isinstance(value, str) and not is_variable(value) and "<" not in value and value != "MOCK"
