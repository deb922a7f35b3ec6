"""Tokenised Hugging Face datasets on the disk as ``data.builder``, map-style and streamed.

    data.builder = "meshwright.data.huggingface:build"
    data.options = {path = "data/pages", length = 1024}         a folder of save_to_disk, or *.parquet, *.arrow files
    data.options.streaming = true                               read in order, resumed by the dataset's own state_dict

Nothing is downloaded, and no script of a dataset is run. A row becomes ``length`` tokens and their next tokens: longer
rows are cut, shorter ones padded with labels that do not count. Tokenise text beforehand (`datasets.map`), or in your
own builder and ``data.collate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.data.corpus import IGNORE

FILE_TYPES = {".parquet": "parquet", ".arrow": "arrow"}


class Columns(NamedTuple):
    """Conversion of a row to a sample."""

    tokens: str
    labels: str | None
    """Column of labels at the positions of their tokens, as in transformers; None: the tokens are the labels."""
    length: int

    def __call__(self, row: Mapping[str, Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return tokens (length,) and the label of the next position of each (length,), int64."""
        ids = torch.as_tensor(row[self.tokens], dtype=torch.int64)[: self.length + 1]
        following = ids if self.labels is None else torch.as_tensor(row[self.labels], dtype=torch.int64)
        following = following[1 : len(ids)]
        tokens = torch.zeros(self.length, dtype=torch.int64)
        labels = torch.full((self.length,), IGNORE, dtype=torch.int64)
        tokens[: len(ids)] = ids[: self.length]
        labels[: len(following)] = following
        return tokens, labels


class Rows:
    """Rows of a dataset by number."""

    def __init__(self, dataset: Any, columns: Columns) -> None:
        self.dataset, self.columns = dataset, columns

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.columns(self.dataset[number])


class RowStream:
    """Rows of a streamed dataset in order, with its state."""

    def __init__(self, dataset: Any, columns: Columns) -> None:
        self.dataset, self.columns = dataset, columns

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.columns(row) for row in self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: the order of a shuffle changes."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> Any:
        """Return the position in the dataset, as plain JSON."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore a position from :meth:`state_dict`."""
        self.dataset.load_state_dict(state)


def build(
    split: str,
    path: str,
    length: int,
    tokens: str = "input_ids",
    labels: str | None = None,
    streaming: bool = False,
    shards: int = 1,
) -> Rows | RowStream | None:
    """Open one split of tokenised rows.

    Args:
        path: folder of ``save_to_disk``, of one dataset or of one per split; or a folder with ``train*.parquet`` (or
            ``.arrow``) and ``validation*.parquet`` files.
        length: tokens of a sample.
        tokens: column of token ids.
        labels: column of labels, where they are not the tokens.
        streaming: read rows in order, instead of a shuffle over all of them.
        shards: pieces that a streamed dataset is read in, one after another.
    """
    datasets = _library()
    folder = Path(path)
    if "://" in path or not folder.is_dir():
        raise ValueError(f"path = {path!r} is no folder on this machine: download and tokenise the dataset before")
    if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
        found = datasets.load_from_disk(str(folder))
        if isinstance(found, datasets.DatasetDict):
            found = found.get(split)
        elif split != "train":
            return None
        if found is not None and streaming:
            found = found.to_iterable_dataset(num_shards=shards)
    else:
        files = sorted(file for file in folder.iterdir() if file.suffix in FILE_TYPES and file.name.startswith(split))
        kinds = {FILE_TYPES[file.suffix] for file in files}
        if len(kinds) > 1:
            raise ValueError(f"{folder} has {split} files of several kinds: {', '.join(sorted(kinds))}")
        found = _from_files(datasets, kinds.pop(), [str(file) for file in files], streaming) if files else None
    if found is None:
        if split == "train":
            raise ValueError(f"{folder} has no train split: save_to_disk of a DatasetDict, or train*.parquet files")
        return None
    names = [name for name in (tokens, labels) if name is not None and name not in (found.column_names or [])]
    if names:
        raise ValueError(f"{folder} has no column {names[0]!r}, only {', '.join(found.column_names or [])}")
    found = found.select_columns([name for name in (tokens, labels) if name is not None])  # others may name images
    columns = Columns(tokens, labels, length)
    return RowStream(found, columns) if streaming else Rows(found, columns)


def _from_files(datasets: Any, kind: str, files: list[str], streaming: bool) -> Any:
    """Open files with the library's own reader for their format, from the disk alone."""
    if kind == "arrow" and not streaming:
        return datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files])
    return datasets.load_dataset(kind, data_files=files, split="train", streaming=streaming)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("it needs the package datasets: pip install 'meshwright[datasets]'") from error
    return datasets
