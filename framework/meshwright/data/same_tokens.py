"""Check that the corpora of a run, and ``data.tokenizer``, have the same token for each id."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from meshwright.data import fingerprint
from meshwright.data.tokenizer import TOKENIZER_FILE, load
from meshwright.errors import DataError


def check_same_tokens(prefixes: Iterable[Path], tokenizer: str | None) -> None:
    """Check the tokenizers beside corpora against each other and against the file ``tokenizer``.

    One may have more tokens than another, such as those of a chat format. A corpus without a
    fingerprint, or without its tokenizer beside it, is not compared.

    Raises:
        DataError: an id is one token of one tokenizer, and another token of another.
    """
    files = {} if tokenizer is None else {fingerprint.file_sha256(Path(tokenizer)): Path(tokenizer)}
    for prefix in prefixes:
        known, file = fingerprint.read(prefix.parent), prefix.with_name(TOKENIZER_FILE)
        sha256 = None if known is None else known.files.get(TOKENIZER_FILE)
        if sha256 is not None and file.is_file():
            files.setdefault(sha256, file)
    if len(files) < 2:
        return
    tokens: dict[int, tuple[str, Path]] = {}
    for file in files.values():
        for token, token_id in load(file).get_vocab(with_added_tokens=True).items():
            other, place = tokens.setdefault(token_id, (token, file))
            if other != token:
                raise DataError(
                    "MW-DATA-124",
                    f"the id {token_id} is the token {other!r} in {place} and {token!r} in {file}:"
                    " a run reads the tokens of one tokenizer; prepare all of its text with the"
                    " same one",
                )
