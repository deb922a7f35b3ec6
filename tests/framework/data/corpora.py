"""Small tokenizers, files to prepare, and what is in a prepared corpus,
read as naively as can be.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshwright.data.prepare.finish import Outcome
from meshwright.data.prepare.preparation import Options, prepare
from meshwright.data.splits import SPLITS, SplitRule

END = "</s>"


def bytes_tokenizer(folder: Path, *, config: dict[str, Any] | None = None, end: str = END) -> Path:
    """A token for each byte, and one that ends: any text comes back, and its length is known."""
    vocab = {
        symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_lines(
    path: Path, records: Sequence[Any], *, ending: str = "\n", last: str = "\n"
) -> Path:
    """Return a JSON value per line."""
    text = ending.join(json.dumps(record, ensure_ascii=False) for record in records) + (
        last if records else ""
    )
    raw = text.encode()
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
    return path


def made(out: Path, tokenizer: Path, *sources: Path, **changes: Any) -> Outcome:
    """Prepare with blocks so small that all that can happen at their edges happens."""
    usual = {
        "num_workers": 1,
        "block_bytes": 64,
        "validation_share": 0.0,
        "split": SplitRule.DOCUMENTS,
    }
    return prepare(Options(sources, tokenizer, out, **{**usual, **changes}))


def documents_in(out: Path) -> dict[str, list[str]]:
    """Return the texts of each split, by Megatron's own reader,
    each seen to end with the end of document.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    found = {}
    for split in SPLITS:
        if not (out / f"{split}.idx").exists():
            continue
        dataset = IndexedDataset(str(out / split))
        assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
        found[split] = []
        for i in range(len(dataset)):
            ids = np.asarray(dataset[i]).tolist()
            assert ids[-1] == end and end not in ids[:-1]
            found[split].append(tokenizer.decode(ids[:-1]))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
