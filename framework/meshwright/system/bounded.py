"""Bounded readers for files that may come from anywhere: regular files only, with limits on bytes,
depth and digits.

    FIFO, device, directory     refused before a byte is read (OSError, as for any file that cannot be read)
    too many bytes              OSError with EFBIG
    nested too deeply           ValueError, before a recursive parser sees the text
    integers of many digits     ValueError

Callers turn OSError and ValueError into their own message; :func:`read_json` does it for them. No
torch.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from meshwright.errors import UserError

MIB = 1 << 20
MAX_DEPTH = 100
"""Largest nesting depth of lists and tables."""
MAX_DIGITS = 4000
"""Maximum digits of one integer."""
MAX_FILE_BYTES = 256 * MIB
MAX_MANIFEST_BYTES = 1024 * MIB
MAX_LINE_BYTES = 64 * MIB
MAX_DOCUMENT_BYTES = 4096 * MIB
"""Largest text file that is one document, in bytes."""
MAX_TOML_BYTES = MIB

_LONG_INTEGER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_KEY = r"(?:\"[^\"\n]*+\"|'[^'\n]*+'|[\w-]++)"
_LONG_KEY = re.compile(rf"(?<![\w.-]){_KEY}(?:[ \t]*+\.[ \t]*+{_KEY}){{{MAX_DEPTH}}}")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path without links. Circular links stay, so that opening the path raises
    OSError; Path.resolve would raise RuntimeError.
    """
    return Path(os.path.realpath(path))


def why_unusable(path: Path, limit_bytes: int | None = None) -> str | None:
    """Return why ``path`` cannot be used for a file of meshwright's; None: it can,
    or nothing is there yet.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    kind = "a directory" if stat.S_ISDIR(found.st_mode) else kind_of(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        return f"is {kind}, and a regular file belongs there"
    if limit_bytes is not None and found.st_size > limit_bytes:
        return f"has {found.st_size:,} bytes, and such a file has at most {limit_bytes:,}"
    return None


def kind_of(mode: int) -> str:
    """Return the kind of a file that is neither regular nor a directory, such as ``a FIFO``."""
    return next((name for test, name in _KINDS if test(mode)), "no regular file")


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading. Never blocks on a FIFO without a writer.

    Raises:
        OSError: it cannot be opened, or is a FIFO, device, socket or directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(
                errno.EINVAL, f"{kind_of(mode)}, and a regular file is needed", os.fspath(path)
            )
        return io.BufferedReader(io.FileIO(descriptor, "rb"))
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | os.PathLike[str], limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file of at most ``limit_bytes``. Raises OSError."""
    with open_regular(path) as file:
        content = b""
        if os.fstat(file.fileno()).st_size <= limit_bytes:
            content = file.read(limit_bytes + 1)
        size = os.fstat(file.fileno()).st_size
    if content is None:  # a file of /proc that waits for news, read without blocking
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), os.fspath(path))
    if size > limit_bytes or len(content) > limit_bytes:
        raise OSError(
            errno.EFBIG,
            f"{size:,} bytes, and at most {limit_bytes:,} are read of such a file",
            os.fspath(path),
        )
    return content


def read_text(
    path: str | os.PathLike[str],
    limit_bytes: int = MAX_FILE_BYTES,
    *,
    encoding: str = "utf-8",
    errors: str = "strict",
) -> str:
    """Return the text of a regular file. Raises OSError, UnicodeDecodeError."""
    return read_bytes(path, limit_bytes).decode(encoding, errors)


def lines(file: IO[bytes], limit_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Split an open file, plain or unpacked by gzip, into (line number from 1,
    line with its line feed).

    Raises:
        ValueError: a line of more than ``limit_bytes``; memory use is bounded by it.
    """
    for number in itertools.count(1):
        line = file.readline(limit_bytes + 1)
        if not line:
            return
        if len(line) > limit_bytes:
            raise ValueError(
                f"line {number} is longer than the {limit_bytes:,} bytes that are read of a line"
            )
        yield number, line


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Parse JSON. ``hooks``: those of :func:`json.loads`.

    Raises:
        ValueError: not JSON, not UTF-8, nested too deeply, or an integer of too many digits; with
            the place.
    """
    try:
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
            _check_depth(raw)
        return json.loads(text, **hooks)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(in_our_words(error, text)) from None


def read_json(
    path: Path, kind: type[UserError], limit_bytes: int = MAX_FILE_BYTES, advice: str = ""
) -> Any:
    """Return the JSON document in a file.

    Raises:
        UserError: an error of class ``kind``, with the path, the fault, its place and ``advice``.
    """
    try:
        return parse_json(read_bytes(path, limit_bytes))
    except OSError as error:
        raise kind(
            "MW-SYSTEM-001",
            f"{path}: cannot be read ({error.strerror or error}){advice and f'; {advice}'}",
        ) from None
    except ValueError as error:
        raise kind(
            "MW-SYSTEM-002", f"{path}: not valid JSON: {error}{advice and f'; {advice}'}"
        ) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: not TOML (tomllib.TOMLDecodeError), too long, nested too deeply, or an integer
            of too many digits.
    """
    if len(text) > MAX_TOML_BYTES:
        raise ValueError(
            f"{len(text):,} characters, and at most {MAX_TOML_BYTES:,} are read of TOML"
        )
    long_key = _LONG_KEY.search(text)
    if long_key is not None:
        raise ValueError(
            f"a key of more than {MAX_DEPTH} parts (at line {_line_of(text, long_key.start())},"
            " column 1)"
        )
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:
        raise ValueError(in_our_words(error, text)) from None
    check_values(document)
    return document


def check_values(document: Any) -> None:
    """Check that a parsed document is no deeper than MAX_DEPTH and its integers no longer
    than MAX_DIGITS.

    Raises:
        ValueError: a limit is exceeded; names the key.
    """
    waiting: list[tuple[Any, int, str]] = [(document, 0, "")]
    while waiting:
        value, depth, key = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep (below {key[:60]})")
        if isinstance(value, dict):
            waiting += [(inner, depth + 1, key or str(name)[:60]) for name, inner in value.items()]
        elif isinstance(value, list | tuple | set):
            waiting += [(inner, depth + 1, key) for inner in value]
        elif isinstance(value, int) and value.bit_length() > MAX_DIGITS * 10 // 3:
            raise ValueError(
                f"an integer of more than {MAX_DIGITS:,} digits" + (f" (in {key})" if key else "")
            )


def shortened(text: str, length: int = 200) -> str:
    """Return text for a message: whole, or its beginning and the number of characters."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text):,} characters)"


def abridge_words(text: str, length: int = 1000) -> str:
    """Return a message whose words have at most ``length`` characters:
    the value in it may be of any length.
    """
    return re.sub(rf"\S{{{length + 1},}}", lambda found: shortened(found[0], length // 2), text)


def _check_depth(raw: bytes) -> None:
    """Check the nesting of JSON without parsing it: brackets outside of strings, in one pass."""
    if b"\\" in raw:
        raw = re.sub(rb"\\.", b"", raw, flags=re.DOTALL)
    outside = b"".join(raw.translate(None, _NOT_STRUCTURE).split(b'"')[::2])
    if max(itertools.accumulate(map(_STEPS.__getitem__, outside)), default=0) > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")


def in_our_words(error: ValueError, text: str | bytes) -> str:
    """Return a message of this module for Python's too-many-digits error;
    other messages unchanged.
    """
    if "int_max_str_digits" not in str(error):
        return str(error)
    decoded = text if isinstance(text, str) else text.decode("utf-8", "replace")
    found = _LONG_INTEGER.search(decoded.replace("_", ""))
    where = ""
    if found and "_" not in decoded:
        where = f" (at line {_line_of(decoded, found.start())}, column 1)"
    return f"an integer of more than {MAX_DIGITS:,} digits{where}"


def _line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
