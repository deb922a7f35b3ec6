"""Tokenised Hugging Face datasets on the disk as ``data.builder``, map-style and streamed.

    data.builder = "meshwright.data.huggingface:build"
    data.options = {path = "data/pages", length = 1024}         a folder of save_to_disk, or *.parquet, *.arrow files
    data.options.streaming = true                               read in order, resumed by the dataset's own state_dict

Nothing is downloaded, and no script of a dataset is run. A row becomes ``length`` tokens and their
next tokens: longer rows are cut, shorter ones padded with labels that do not count. Padding that a
tokenizer added is removed first, by the column ``attention_mask``. Columns that would change the
labels or the attention are read or refused, never ignored without a word. Tokenise text beforehand
(`datasets.map`), or in your own builder and ``data.collate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.data.corpus import IGNORE

MASK = "attention_mask"
LABEL_COLUMNS = ("labels", "completion_mask", "assistant_masks", "loss_mask")
"""Columns of transformers and TRL that choose the tokens that count as labels."""
BOUNDARY_COLUMNS = ("position_ids", "seq_lengths", "cu_seqlens", "seq_idx")
"""Columns of packed rows, whose documents do not attend to each other."""
FILE_TYPES = {".parquet": "parquet", ".arrow": "arrow"}


class Columns(NamedTuple):
    """Conversion of a row to a sample."""

    tokens: str
    labels: str | None
    """Column of labels at the positions of their tokens, as in transformers; None:
    the tokens are the labels.
    """
    mask: str | None
    """Column with 1 for each token and 0 for padding; None: rows have no padding."""
    length: int

    @property
    def names(self) -> list[str]:
        """Return the columns that are read."""
        return list(
            dict.fromkeys(
                name for name in (self.tokens, self.labels, self.mask) if name is not None
            )
        )

    def __call__(self, row: Mapping[str, Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return tokens (length,) and the label of the next position of each (length,), int64.

        Raises:
            ValueError: the columns of the row have different lengths, or its mask is no mask of
                padding.
        """
        ids = torch.as_tensor(row[self.tokens], dtype=torch.int64)
        following = ids
        if self.labels is not None:
            following = torch.as_tensor(row[self.labels], dtype=torch.int64)
        if len(following) != len(ids):
            raise ValueError(
                f"it has {len(ids)} {self.tokens} and {len(following)} {self.labels}: give each"
                " token one"
            )
        if self.mask is not None:
            kept = _unpadded(torch.as_tensor(row[self.mask], dtype=torch.int64), len(ids))
            ids, following = ids[kept], following[kept]
        ids = ids[: self.length + 1]
        following = following[1 : len(ids)]
        tokens = torch.zeros(self.length, dtype=torch.int64)
        labels = torch.full((self.length,), IGNORE, dtype=torch.int64)
        tokens[: len(ids)] = ids[: self.length]
        labels[: len(following)] = following
        return tokens, labels


def _unpadded(mask: Tensor, num_tokens: int) -> slice:
    """Return the tokens of a row without the padding before or after them, by their mask (T,)."""
    if len(mask) != num_tokens:
        raise ValueError(
            f"it has {num_tokens} tokens and a mask of {len(mask)}: give each token one"
        )
    ones = mask.nonzero().flatten()
    if not len(ones):
        return slice(0, 0)
    start, stop = int(ones[0]), int(ones[-1]) + 1
    if not bool((mask[start:stop] == 1).all()):
        raise ValueError(
            f"its {MASK} is not 1 for all tokens between the padding (numbers of packed documents,"
            " or gaps): write rows without padding, and leave the column out"
        )
    return slice(start, stop)


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
    ignore: Sequence[str] = (),
) -> Rows | RowStream | None:
    """Open one split of tokenised rows.

    Args:
        path: folder of ``save_to_disk``, of one dataset or of one per split; or a folder with
            ``train*.parquet`` (or ``.arrow``) and ``validation*.parquet`` files.
        length: tokens of a sample.
        tokens: column of token ids.
        labels: column of labels, where they are not the tokens.
        streaming: read rows in order, instead of a shuffle over all of them.
        shards: pieces that a streamed dataset is read in, one after another.
        ignore: columns of masks, labels and positions that are not read on purpose.
    """
    datasets = _library()
    folder = Path(path)
    if "://" in path or not folder.is_dir():
        raise ValueError(
            f"path = {path!r} is no folder on this machine: download and tokenise the dataset"
            " before"
        )
    if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
        found = datasets.load_from_disk(str(folder))
        if isinstance(found, datasets.DatasetDict):
            found = found.get(split)
        elif split != "train":
            return None
        if found is not None and streaming:
            found = found.to_iterable_dataset(num_shards=shards)
    else:
        files = sorted(
            file
            for file in folder.iterdir()
            if file.suffix in FILE_TYPES and file.name.startswith(split)
        )
        kinds = {FILE_TYPES[file.suffix] for file in files}
        if len(kinds) > 1:
            raise ValueError(
                f"{folder} has {split} files of several kinds: {', '.join(sorted(kinds))}"
            )
        found = None
        if files:
            found = _from_files(datasets, kinds.pop(), [str(file) for file in files], streaming)
    if found is None:
        if split == "train":
            raise ValueError(
                f"{folder} has no train split: save_to_disk of a DatasetDict, or train*.parquet"
                " files"
            )
        return None
    names = [
        name
        for name in (tokens, labels)
        if name is not None and name not in (found.column_names or [])
    ]
    if names:
        raise ValueError(
            f"{folder} has no column {names[0]!r}, only {', '.join(found.column_names or [])}"
        )
    columns = _columns(found.column_names or [], Columns(tokens, labels, MASK, length), ignore)
    found = found.select_columns(columns.names)  # others may name images
    return RowStream(found, columns) if streaming else Rows(found, columns)


def _columns(present: Sequence[str], asked: Columns, ignore: Sequence[str]) -> Columns:
    """Return the columns to read. Raises ValueError:
    one is not read that would change the labels or the attention.
    """
    mask = MASK if MASK in present and MASK not in ignore else None
    unread = [name for name in present if name not in (asked.tokens, asked.labels, *ignore)]
    chooses = next((name for name in LABEL_COLUMNS if name in unread), None)
    if chooses is not None and asked.labels is None:
        raise ValueError(
            f"the dataset has a column {chooses!r}, which says what counts as a label, and it is"
            " not read: name a column of labels (options.labels, -100 where none counts), or"
            f" options.ignore = [{chooses!r}] to train on all tokens"
        )
    bounds = next((name for name in BOUNDARY_COLUMNS if name in unread), None)
    if bounds is not None:
        raise ValueError(
            f"the dataset has a column {bounds!r}, of documents that are packed into rows, and it"
            f" is not read: write one document per row, or options.ignore = [{bounds!r}] to let"
            " tokens attend across documents"
        )
    return asked._replace(mask=mask)


def _from_files(datasets: Any, kind: str, files: list[str], streaming: bool) -> Any:
    """Open files with the library's own reader for their format, from the disk alone."""
    if kind == "arrow" and not streaming:
        return datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files])
    return datasets.load_dataset(kind, data_files=files, split="train", streaming=streaming)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("it needs the package datasets: pip install datasets") from error
    return datasets
