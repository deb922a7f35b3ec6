"""Input files of a preparation: the named files, and the files below named folders,
without hidden ones.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import DataError
from meshwright.system.bounded import real_path

_ENDINGS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".parquet": "rows",
    ".pq": "rows",
}


class FileForm(Enum):
    """Forms of files: one document, a document per line, a document per row."""

    TEXT = "text"
    LINES = "lines"
    ROWS = "rows"


class InputFile(NamedTuple):
    """One file to read, with its size and modification time when it was listed."""

    path: Path
    kind: FileForm
    num_bytes: int
    mtime_ns: int

    @property
    def is_gzipped(self) -> bool:
        """True if the file is compressed by gzip."""
        return self.path.suffix == ".gz"

    def has_changed(self) -> bool:
        """Return True if the file has changed since it was listed."""
        try:
            stat = self.path.stat()
        except OSError:
            return True
        return (stat.st_size, stat.st_mtime_ns) != (self.num_bytes, self.mtime_ns)


def list_files(
    sources: Sequence[Path], globs: Sequence[str] = (), out: Path | None = None
) -> list[InputFile]:
    """List the input files in the order of ``sources``; of a folder all files that match a pattern,
    sorted by path.

    Hidden files in folders are skipped, and so are the files in ``out``, the folder of the corpus.

    Raises:
        DataError: a source without files, a broken link, a file listed twice, or a file type that
            cannot be read.
    """
    files: list[InputFile] = []
    corpus = None if out is None else real_path(out)
    for source in sources:
        if source.is_dir():
            below = [
                path
                for path in files_below(source)
                if corpus is None or corpus not in real_path(path).parents
            ]
            matching = [
                path for path in below if not globs or _matches(path.relative_to(source), globs)
            ]
            if not matching:
                what = "it has no files"
                if below:
                    what = f"none of its {len(below)} files fits --glob {' '.join(globs)}"
                raise DataError("MW-DATA-052", f"{source}: {what}: name another folder or pattern")
            files += [_input_file(path, in_folder=True) for path in matching]
        elif source.is_file():
            files.append(_input_file(source))
        else:
            raise DataError(
                "MW-DATA-053",
                f"there is no file or folder {source}: name .txt, .jsonl, .parquet files or"
                " folders",
            )
    path, times = Counter(real_path(file.path) for file in files).most_common(1)[0]
    if times > 1:
        raise DataError(
            "MW-DATA-054",
            f"{path} is given {times} times, which would repeat its documents: give it once",
        )
    return files


def _matches(path: Path, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(path.as_posix(), glob) or fnmatchcase(path.name, glob) for glob in globs)


def _input_file(path: Path, *, in_folder: bool = False) -> InputFile:
    """Classify a file by its suffix (of a link: the link's own).
    Below a folder a .json file is plain text.
    """
    path = path.absolute()
    inner = path.with_suffix("") if path.suffix == ".gz" else path
    kind = _ENDINGS.get(inner.suffix.lower(), "text")
    if kind == "json" and in_folder:
        kind = "text"
    if kind == "json":
        raise DataError(
            "MW-DATA-055",
            f"{path} is one JSON document: write it as .jsonl, an object on each line (`jq -c '.[]'"
            " a.json > a.jsonl`)",
        )
    if kind == "rows" and path != inner:
        raise DataError(
            "MW-DATA-056",
            f"{path}: parquet has its own compression, and is not read from .gz: gunzip it",
        )
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError("MW-DATA-057", f"cannot read {path}: {error.strerror or error}") from error
    return InputFile(path, FileForm(kind), stat.st_size, stat.st_mtime_ns)


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted by path, without hidden files and folders.

    Links are followed, except links to a folder that contains them.

    Raises:
        DataError: a folder cannot be read, or a link is broken.
    """
    found: list[Path] = []
    for above, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        place = Path(above)
        folders[:] = [
            name for name in folders if not name.startswith(".") and not _leads_back(place / name)
        ]
        for path in (place / name for name in names if not name.startswith(".")):
            if path.is_file():
                found.append(path)
            elif path.is_symlink():
                raise DataError(
                    "MW-DATA-045",
                    f"{path} is a broken link to {path.readlink()}, and its text would be missing:"
                    " repair or remove it",
                )
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise DataError(
        "MW-DATA-046", f"cannot read the folder {error.filename}: {error.strerror or error}"
    ) from error


def _leads_back(folder: Path) -> bool:
    return folder.is_symlink() and real_path(folder.parent).is_relative_to(real_path(folder))
