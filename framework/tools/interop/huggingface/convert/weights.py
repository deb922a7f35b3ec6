"""Weights of a Hugging Face directory under the names of a family, checked against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from meshwright.config import RunConfig
from meshwright.errors import CheckpointError
from meshwright.tools.interop.huggingface.convert.family import Family
from meshwright.tools.interop.huggingface.files import (
    CONFIG,
    DTYPES,
    INDEX,
    SINGLE,
)
from meshwright.tools.interop.huggingface.rules import TensorMapping
from meshwright.tools.interop.huggingface.source import SafetensorsDirectory, open_source, pickled_files


def open_weights(path: Path) -> SafetensorsDirectory:
    """Open the safetensors weights of a directory.

    Raises:
        CheckpointError: there are no weights, or only pickled ones.
    """
    source = open_source(path)
    if source is not None:
        return source
    found = pickled_files(path)
    if not found:
        raise CheckpointError(
            "MW-INTEROP-034", f"{path} has neither {SINGLE} nor {INDEX}: the weights are missing; get them too"
        )
    raise CheckpointError(
        "MW-INTEROP-035",
        f"{path} has its weights in pickled files only ({', '.join(found[:3])}), which can run code when they are "
        f'opened: they are not read. Where you trust them, write them as safetensors first: python -c "from '
        f"transformers import AutoModelForCausalLM as M; M.from_pretrained('{path}').save_pretrained('{path}-safe')\" "
        f"(AutoModelForSeq2SeqLM for T5), copy the tokenizer's files there, and convert that directory",
    )


def with_prefix(source: SafetensorsDirectory, family: Family) -> SafetensorsDirectory:
    """Add the family's prefix to tensor names of a bare model, such as the released GPT-2, saved without head class."""
    names = source.tensors
    if not family.prefix or any(name.startswith(family.prefix) for name in names):
        return source
    renamed = {
        name if name in family.unprefixed else f"{family.prefix}{name}": stored for name, stored in names.items()
    }
    return SafetensorsDirectory(source.path, renamed)


def under_first_names(source: SafetensorsDirectory, rules: Sequence[TensorMapping]) -> SafetensorsDirectory:
    """Rename each tied weight that the files hold only under a second name to its first name."""
    found = dict(source.tensors)
    for rule in rules:
        others = [name for name in rule.same_as if name in found]
        if others and rule.theirs[0] not in found:
            found[rule.theirs[0]] = found.pop(others[0])
    return SafetensorsDirectory(source.path, found)


def has_own_head(source: SafetensorsDirectory) -> bool:
    """Return True if the files have a head (``lm_head``) that differs from the embedding (``shared``)."""
    if "lm_head.weight" not in source.tensors or "shared.weight" not in source.tensors:
        return False
    head, shared = source.tensors["lm_head.weight"], source.tensors["shared.weight"]
    return head.shape != shared.shape or not torch.equal(source.read("lm_head.weight"), source.read("shared.weight"))


def check_tensors(
    source: SafetensorsDirectory, family: Family, rules: Sequence[TensorMapping], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that the files hold exactly the tensors of the model, with its shapes and supported element types.

    Raises:
        CheckpointError: the problems, a line each with file and tensor; at most 20.
    """
    assert {rule.ours for rule in rules} == shapes.keys(), sorted({rule.ours for rule in rules} ^ shapes.keys())
    there, known = source.tensors, set()
    problems = []
    for rule in rules:
        for name, shape in rule.shapes(shapes[rule.ours]).items():
            known.add(name)
            if name not in there:
                problems.append(f"{source.path}: tensor {name} {list(shape)} is in none of the files")
            elif there[name].shape != shape:
                problems.append(
                    f"{there[name].file}: tensor {name} has shape {list(there[name].shape)}, {CONFIG} asks for "
                    f"{list(shape)}"
                )
            elif there[name].dtype not in DTYPES:
                problems.append(
                    f"{there[name].file}: tensor {name} is of {there[name].dtype}: only {', '.join(DTYPES)} are read; "
                    f"take the weights before they were quantised"
                )
        known.update(rule.same_as)
        problems += source.apart(rule.theirs[0], rule.same_as)
    for name, stored in there.items():
        if name not in known and not any(fnmatchcase(name, pattern) for pattern in family.left_out):
            problems.append(f"{stored.file}: tensor {name} {list(stored.shape)} is not of a {family.architecture}")
    if problems:
        more = f"\nand {len(problems) - 20} more" if problems[20:] else ""
        raise CheckpointError(
            "MW-INTEROP-037",
            "\n".join(problems[:20])
            + more
            + f"\nthe weights and {CONFIG} do not belong together, or a file is missing; nothing is written",
        )


def dtype_notes(source: SafetensorsDirectory, rules: Sequence[TensorMapping], config: RunConfig) -> list[str]:
    """Return notes on the treatment of mixed element types, and of float16, which is no training dtype."""
    counted = source.dtypes(name for rule in rules for name in rule.theirs)
    notes = []
    if len(counted) > 1:
        said = ", ".join(f"{number:,} {dtype}" for dtype, number in counted.most_common())
        notes.append(
            f"tensors of several element types ({said}): each is kept as it is, and trained in train.dtype = "
            f'"{config.train.dtype}"'
        )
        for rule in rules:
            mixed = sorted({source.tensors[name].dtype for name in rule.theirs})
            if len(mixed) > 1:
                notes.append(f"{', '.join(rule.theirs)} are one tensor here, in the wider of {' and '.join(mixed)}")
    elif "F16" in counted:
        notes.append(
            f'the weights are F16, which is not trained in: they are kept, and trained in "{config.train.dtype}"'
        )
    return notes
