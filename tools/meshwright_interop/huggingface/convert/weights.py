"""Weights of a Hugging Face directory under the names of a family, checked against the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from meshwright.config import Train
from meshwright.errors import ModelError
from meshwright_interop.huggingface.convert.family import Family
from meshwright_interop.huggingface.files import CONFIG, INDEX, SINGLE
from meshwright_interop.huggingface.rules import Shape, TensorMapping
from meshwright_interop.huggingface.source import SafetensorsDirectory, open_source


def open_weights(path: Path) -> SafetensorsDirectory:
    """Open the safetensors weights of a directory.

    Raises:
        ModelError: there are no weights, only pickled ones, or damaged ones.
    """
    source = open_source(path)
    if source is None:
        raise ModelError(
            "MW-INTEROP-034",
            f"{path} has neither {SINGLE} nor {INDEX}: the weights are missing; get them too",
        )
    return source


def with_prefix(source: SafetensorsDirectory, family: Family) -> SafetensorsDirectory:
    """Add the family's prefix to tensor names of a bare model, such as the released GPT-2,
    saved without head class.
    """
    names = source.tensors
    if not family.prefix or any(name.startswith(family.prefix) for name in names):
        return source
    renamed = {
        name if name in family.unprefixed else f"{family.prefix}{name}": stored
        for name, stored in names.items()
    }
    return SafetensorsDirectory(source.path, renamed)


def rename_tied_weights(
    source: SafetensorsDirectory, rules: Sequence[TensorMapping]
) -> SafetensorsDirectory:
    """Rename each tied weight that the files hold only under a second name to its first name."""
    tensors = dict(source.tensors)
    for rule in rules:
        others = [name for name in rule.same_as if name in tensors]
        if others and rule.theirs[0] not in tensors:
            tensors[rule.theirs[0]] = tensors.pop(others[0])
    return SafetensorsDirectory(source.path, tensors)


def has_own_head(source: SafetensorsDirectory) -> bool:
    """Return True if the files have a head (``lm_head``)
    that differs from the embedding (``shared``).
    """
    if "lm_head.weight" not in source.tensors or "shared.weight" not in source.tensors:
        return False
    head, shared = source.tensors["lm_head.weight"], source.tensors["shared.weight"]
    return head.shape != shared.shape or not torch.equal(
        source.read("lm_head.weight"), source.read("shared.weight")
    )


def other_architecture(family: Family, what: str) -> ModelError:
    """Build the error for options of which the files have no weights."""
    return ModelError(
        "MW-INTEROP-141",
        f"{what}: the weights are those of {family.architecture}; leave out the options that change"
        " the architecture",
    )


def check_tensors(
    source: SafetensorsDirectory,
    family: Family,
    rules: Sequence[TensorMapping],
    shapes: Mapping[str, Shape],
) -> None:
    """Check that the files hold exactly the tensors of the model. ``shapes``:
    meshwright name -> global shape.

    Raises:
        ModelError: the problems, a line each with file and tensor; at most 20.
    """
    differing = sorted({rule.ours for rule in rules} ^ shapes.keys())
    if differing:
        raise other_architecture(
            family, f"model.options make other parameters, first {differing[0]}"
        )
    source.check(
        rules,
        shapes,
        lambda name: any(fnmatchcase(name, pattern) for pattern in family.left_out),
        family.architecture,
        f"the weights and {CONFIG} do not belong together, or a file is missing; nothing is"
        " written",
    )


def dtype_notes(
    source: SafetensorsDirectory, rules: Sequence[TensorMapping], train: Train
) -> list[str]:
    """Return notes on mixed element types, and on float16 weights:
    the imported run trains in another dtype.
    """
    counted = Counter(source.tensors[name].dtype for rule in rules for name in rule.theirs)
    notes = []
    if len(counted) > 1:
        counts = ", ".join(f"{number:,} {dtype}" for dtype, number in counted.most_common())
        notes.append(
            f"tensors of several element types ({counts}): each is kept as it is, and trained in"
            " train.dtype = "
            f'"{train.dtype}"'
        )
        for rule in rules:
            mixed = sorted({source.tensors[name].dtype for name in rule.theirs})
            if len(mixed) > 1:
                notes.append(
                    f"{', '.join(rule.theirs)} are one tensor here, in the wider of"
                    f" {' and '.join(mixed)}"
                )
    elif "F16" in counted and train.dtype != "float16":
        notes.append(
            f'the weights are F16: they are kept, and trained in train.dtype = "{train.dtype}"'
        )
    return notes
