"""Opening of a chat template: it is compiled once, and its date is settled."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from meshwright.data import fingerprint as fingerprints
from meshwright.data.prepare.chat.bounded import BoundedRenderer, TemplateLimitError
from meshwright.data.prepare.chat.rendering import NO_DATE, RenderingError, now_to_the_second
from meshwright.data.prepare.chat.template import open_chat_template
from meshwright.data.prepare.work_folder import begun_request
from meshwright.errors import DataError


def open_chat(name: str, path: Path, tokenizer: Tokenizer, corpus: Path | None) -> BoundedRenderer:
    """Open a chat template, and compile it once to see that it is one.

    A template that writes the date gets that of the corpus, or of an earlier call.

    Args:
        name: "tokenizer", or a file.
        path: path of the ``tokenizer.json``.
        tokenizer: the tokenizer.
        corpus: the corpus whose date it writes; None: that of the moment.

    Raises:
        DataError: there is no such template, or it cannot be compiled within the limits.
    """
    template = open_chat_template(name, path)
    date = NO_DATE
    if template.is_dated:
        date = (None if corpus is None else _written_date(corpus)) or now_to_the_second()
    added = tokenizer.get_added_tokens_decoder().values()
    chat = BoundedRenderer(template, [token.content for token in added], date)
    try:
        chat.open()
    except (RenderingError, TemplateLimitError) as error:
        raise DataError(
            "MW-DATA-139",
            f"{template.path} is no chat template that can be used: {error}. Copy it again, or"
            " name another with --chat-template",
        ) from None
    finally:
        chat.close()  # workers start their own
    return chat


def _written_date(out: Path) -> str | None:
    """Return the date that the conversations in ``out`` have, or those of an earlier call."""
    try:
        known = fingerprints.read(out)
    except DataError:  # damaged: prepared again
        known = None
    if known is not None and known.prepared is not None:
        return known.prepared.chat_date
    begun = begun_request(out)
    return None if begun is None else begun.chat_date
