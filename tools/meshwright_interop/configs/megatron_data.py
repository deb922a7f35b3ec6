"""Translation of Megatron-LM's flags on the data: corpora, their weights, and the boundaries of documents."""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright_interop.configs.megatron_keys import INDEXED_CORPUS
from meshwright_interop.configs.source_keys import DropReason, is_variable
from meshwright_interop.configs.translation import Translation


def data(translation: Translation) -> None:
    """Translate the corpora, the length of a sample and the boundaries of documents.

    Raises:
        ConfigError: the file has no ``--seq-length``.
    """
    length = translation.optional_count("seq-length") or translation.optional_count("encoder-seq-length")
    if length is None:
        raise ConfigError(
            "MW-INTEROP-007",
            "the file has no --seq-length, which Megatron-LM requires: give a file with all flags of the run",
        )
    translation.put("data.sequence_length", length)
    name = "data-path" if translation.has("data-path") else "train-data-path"
    train, valid = _corpora(translation.value(name)), _corpora(translation.value("valid-data-path"))
    if train:
        translation.put("data.train", train)
    else:
        given = translation.items.get(name)
        reason = f"{given.written} is no path in the file" if given else translation.why_missing("data-path")
        translation.leave_open("data.train", "runs/data/corpus/train", reason)
        translation.drop(name, DropReason.BY_HAND, INDEXED_CORPUS)
    if isinstance(valid, str):
        translation.put("data.validation", valid)
        translation.put("train.validate_every", translation.integer("eval-interval", 1000) or 0)
        translation.put("train.validate_steps", translation.count("eval-iters", 100))
    elif translation.has("valid-data-path"):
        reason = f"{translation.items['valid-data-path'].written} is not the path of one .bin/.idx pair"
        translation.leave_open("data.validation", "runs/data/corpus/validation", reason)
        translation.drop("valid-data-path", DropReason.BY_HAND, "data.validation, the path of one .bin/.idx pair")
    _documents(translation)


def _documents(translation: Translation) -> None:
    """Translate the flags on document boundaries: positions, attention and labels across them."""
    resets = ("reset-position-ids", "reset-attention-mask")
    are_reset, masked = [translation.boolean(name) for name in resets], translation.boolean("eod-mask-loss")
    if all(are_reset) and not translation.own_model:
        reason = "positions and attention restart at each document"
        reason += "" if masked else "; its first token is no label either"
        translation.put("data.document_boundaries", True, reason)
        return
    for name in resets:
        translation.drop(
            name, DropReason.BY_HAND, "data.document_boundaries separates attention, positions and labels, all three"
        )
    if masked:
        translation.put("data.eod_mask_loss", True)


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
