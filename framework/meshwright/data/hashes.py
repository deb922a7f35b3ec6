"""Hashes of corpora in the data fingerprint of a run."""

from __future__ import annotations

from meshwright.data import fingerprint
from meshwright.data.corpus import Corpus
from meshwright.data.stages import StageBlend

SAMPLED = "sampled bytes"
"""Prefix of the entries in a data fingerprint that hash sampled blocks;
older checkpoints have none.
"""


def hashes_of(corpus: Corpus) -> dict[str, str]:
    """Return the hashes of one corpus."""
    known = fingerprint.read(corpus.prefix.parent)
    sampled = {SAMPLED: corpus.sampled_hash()}
    if known is None or corpus.known is None:
        return {"train_tokens": str(len(corpus.stream))} | sampled
    name, beside = corpus.prefix.name, corpus.prefix.with_name("tokenizer.json")
    hashes = {"train": known.sha256_of(f"{name}.bin")} | sampled
    hashes["tokenizer"] = (
        fingerprint.tokenizer_sha256(beside) if beside.is_file() else known.sha256_of(beside.name)
    )
    if corpus.mask:
        hashes["mask"] = known.sha256_of(f"{name}.mask")
    return hashes


def weight_text(weight: float) -> str:
    """Return a weight with six digits, or with all of them if it has more:
    the order of the samples depends on all.
    """
    rounded = f"{weight:g}"
    return rounded if float(rounded) == weight else repr(weight)


def hashes_of_stages(blend: StageBlend) -> dict[str, str]:
    """Return the hashes of each stage; names of later stages begin with ``from sample N``,
    the start of the stage.

    A checkpoint is compared in the stages that had begun when it was saved
    (checkpoint/compatible.py): later ones may still be added, moved or removed.
    """
    found: dict[str, str] = {}
    hashes = [hashes_of(corpus) for corpus in blend.corpora]
    for stage in blend.stages:
        begin = f"from sample {stage.first}: " if stage.first else ""
        for i, (index, weight) in enumerate(zip(stage.corpora, stage.weights, strict=True)):
            where = ""
            if stage.is_mixture:
                where = f" of {stage.key}[{i}] (weight {weight_text(weight)})"
            found |= {
                f"{begin}{name}{where or (begin and f' of {stage.key}')}": v
                for name, v in hashes[index].items()
            }
    return found
