"""Lines of text files as a stream: resumed by its state, and encoded by a collate function."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset


class Lines(IterableDataset[str]):
    """The lines of files, one after another; nobody has counted them."""

    def __init__(self, files: list[str]) -> None:
        self.files, self.file, self.line = files, 0, 0

    def __iter__(self) -> Iterator[str]:
        while self.file < len(self.files):
            lines = Path(self.files[self.file]).read_text(encoding="utf-8").splitlines()
            while self.line < len(lines):
                self.line += 1  # before yield: the state counts the line that is given out
                yield lines[self.line - 1]
            self.file, self.line = self.file + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last line that was given out, as plain JSON."""
        return {"file": self.file, "line": self.line}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a place."""
        self.file, self.line = state["file"], state["line"]


def build(split: str, train: str, validation: str) -> Lines:
    """Return the lines of the Markdown files of a folder, in the order of their names."""
    folder = Path(train if split == "train" else validation)
    return Lines(sorted(str(file) for file in folder.glob("*.md")))


def collate(lines: list[str], length: int = 32) -> tuple[Tensor, Tensor]:
    """Return bytes (B, length) and the byte after each (B, length);
    -100 past the end of a line does not count.
    """
    ids = torch.zeros(len(lines), length + 1, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, line in enumerate(lines):
        text = torch.tensor(list((line + "\n").encode()[: length + 1]))
        ids[row, : len(text)] = labels[row, : len(text)] = text
    return ids[:, :-1], labels[:, 1:]
