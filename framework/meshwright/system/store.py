"""Object stores by fsspec: paths such as ``s3://bucket/prefix``, and requests with a deadline, retries
and errors that name no secret. No torch.

    s3://bucket/key       S3 and compatible stores; the extra ``s3``. Long objects are multipart uploads
    gs:// az://           whatever fsspec opens (gcsfs, adlfs); an object is one request of the library
    file:// memory://     the same calls on a folder, or in this process alone: for tests

Credentials and the endpoint come from the environment or the files of the vendor (AWS_PROFILE,
AWS_ENDPOINT_URL, ...), never from a path. A library's text may hold a signed URL or a key, so that no
such text is passed on: an error has the store's code of it, the HTTP status and the path.

NOTE [requests that hang]: a server that stops reading keeps a connection open for ever, and libraries
time out the wait for an answer alone. Every request runs on fsspec's event loop, where its deadline
cancels it and closes its connection. A try takes a part of that time, so that a lost connection is
tried again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import os
import random
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import ConfigError, UnreadableError
from meshwright.system.bounded import shortened

PACKAGES = {"s3": "meshwright[s3]", "gs": "gcsfs", "az": "adlfs", "file": "", "memory": ""}
"""Scheme -> what pip installs for it."""
FORM = re.compile(
    r"(s3|gs|az|memory)://[A-Za-z0-9][A-Za-z0-9._-]*(/[\w.=+,-]+)*/?|file://(/[\w.=+,-]+)+/?",
    flags=re.ASCII,
)
PART_BYTES = 16 * 2**20
"""Bytes of a part; an object of fewer is one request."""
PARTS_AT_ONCE = 4
READ_BYTES = 8 * 2**20
"""Bytes of a range while an object is read from its beginning to its end."""
READS_AT_ONCE = 2
LIMIT_S = 120.0
"""Deadline of a request outside of a save, with its retries."""
TRIES = 5
"""The first try may take this fraction of the deadline; each next one twice the time before."""
PAUSE_S = 0.5, 30.0
"""First and longest pause between tries; each is twice the one before, times a random number."""
ABORT_S = 30.0
"""Deadline for the removal of an upload that has failed, which nobody waits for."""
HINTS = {
    "AccessDenied": "the credentials do not allow it",
    "403": "the credentials do not allow it",
    "InvalidAccessKeyId": "the store does not accept this key: check the AWS credentials",
    "SignatureDoesNotMatch": "the secret does not fit its key: check the AWS credentials",
    "ExpiredToken": "the credentials have expired: renew them",
    "NoCredentialsError": "no credentials: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret",
    "ProfileNotFound": "AWS_PROFILE names no profile",
    "NoSuchBucket": "there is no such bucket",
    "InvalidBucketName": "there can be no such bucket",
    "RequestTimeTooSkewed": "the clock of this machine is wrong: set it, by NTP",
    "QuotaExceeded": "the store is full",
}
"""Answers after which another try is in vain -> their meaning."""
PASSING = {"BadDigest", "IncompleteBody", "RequestTimeout"}
"""Answers with HTTP 400 to a request that was damaged on its way, and is made again."""
_making = threading.Lock()
_jitter = random.Random()  # the global generator belongs to the run


class StorePath(NamedTuple):
    """Path in an object store, with the part of ``pathlib.Path`` that checkpoints use."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    @property
    def scheme(self) -> str:
        """Scheme, such as s3."""
        return self.url.partition("://")[0]

    @property
    def name(self) -> str:
        """Last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """The path above."""
        return StorePath(self.url.rpartition("/")[0])

    @property
    def bucket_and_key(self) -> tuple[str, str]:
        """Bucket, and the name of the object in it."""
        bucket, _, key = self.url.partition("://")[2].partition("/")
        return bucket, key

    def is_file(self) -> bool:
        """Return True if there is an object. Raises UnreadableError: the store does not answer."""
        with self._as_unreadable():
            return StoreAccess().size(self) is not None

    def is_dir(self) -> bool:
        """Return True if objects lie below. Raises UnreadableError: the store does not answer."""
        with self._as_unreadable():
            return bool(StoreAccess().names(self))

    @contextlib.contextmanager
    def _as_unreadable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnreadableError(
                "MW-SYSTEM-013", f"{self}: cannot be read: {error.strerror}"
            ) from error


Place = Path | StorePath
"""Path on a file system or in an object store."""


def parse_place(text: str | os.PathLike[str]) -> Place:
    """Return the path that a text names.

    Raises:
        ConfigError: a URL of another form.
    """
    text = os.fspath(text)
    if "://" not in text:
        return Path(text)
    if not FORM.fullmatch(text) or any(part in (".", "..") for part in text.split("/")):
        # what stands before an @ or after a colon may be a key
        shown = text.partition("://")[0] + "://..." if re.search(r"//.*[@:?]", text) else text
        raise ConfigError(
            "MW-SYSTEM-011",
            f"{shortened(shown)}: is no path in an object store: give s3://BUCKET/PREFIX (or gs://,"
            " az://) of letters, digits and ._=+,- without credentials, which come from the"
            " environment",
        )
    return StorePath(text.rstrip("/"))


def check_local(path: object, option: str) -> None:
    """Check that what is written there is no path in an object store. ``option`` names it.

    Raises:
        ConfigError: it is.
    """
    found = re.match(rf"({'|'.join(PACKAGES)}):/", str(path))
    if found is not None:
        raise ConfigError(
            "MW-SYSTEM-014",
            f"{option} {path}: is in an object store, and this is written to a file system: name a"
            " directory, and copy it from there",
        )


class StoreError(OSError):
    """Request that an object store did not fulfil, after retries."""

    def __init__(self, reason: str, path: StorePath, *, is_passing: bool = True) -> None:
        super().__init__(errno.EIO, reason, str(path))
        self.is_passing = is_passing
        """True if another try may succeed."""


def file_system(scheme: str) -> Any:
    """Return fsspec's file system of a scheme.

    Raises:
        ConfigError: its package is not installed.
    """
    with _making:
        return _file_system(scheme, os.getpid())  # its event loop does not survive a fork


@functools.lru_cache
def _file_system(scheme: str, pid: int) -> Any:
    import fsspec

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":
        # tries are counted here, and a shorter limit on the answer is that of a try
        options["config_kwargs"] = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 10,
            "read_timeout": 600,
            "max_pool_connections": 32,
        }
    if scheme == "file":
        options["auto_mkdir"] = True
    try:
        system = fsspec.filesystem(scheme, **options)
        system.retries = 1  # of s3fs; as above
        return system
    except ImportError:
        raise ConfigError(
            "MW-SYSTEM-012",
            f"{scheme}:// needs a package that is not installed: pip install '{PACKAGES[scheme]}'",
        ) from None


def own_error(error: BaseException, path: StorePath) -> OSError:
    """Return an error of a library in our words: its text may hold a key or a signed URL."""
    code, status = _answer_of(error)
    if code in ("404", "NoSuchKey", "NoSuchUpload") or (
        not code and isinstance(error, FileNotFoundError)
    ):
        return FileNotFoundError(errno.ENOENT, "is missing", str(path))
    name = code or type(error).__name__
    hint = HINTS.get(name)
    if hint is None and isinstance(error, PermissionError):
        hint = HINTS["AccessDenied"]
    answer = f"{name}, HTTP {status}" if status else name
    is_refused = status is not None and 400 <= status < 500 and status not in (408, 409, 429)
    text = f"{hint} ({answer})" if hint else f"the store did not answer as it should ({answer})"
    is_passing = code in PASSING or (hint is None and not is_refused)
    return StoreError(text, path, is_passing=is_passing)


def _answer_of(error: BaseException) -> tuple[str, int | None]:
    """Return the store's code of an error and the HTTP status, where it has answered."""
    found: BaseException | None = error
    for _ in range(5):
        response = getattr(found, "response", None)
        if isinstance(response, dict):
            code = str(response.get("Error", {}).get("Code", ""))
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            is_plain = re.fullmatch(r"[A-Za-z0-9]{1,64}", code) is not None
            return code if is_plain else "", status if isinstance(status, int) else None
        found = None if found is None else found.__cause__
    return "", None


def _never() -> bool:
    return False


class StoreAccess:
    """Requests to object stores. All of them block, and raise OSError in our words."""

    def __init__(self, limit_s: float = LIMIT_S, should_stop: Callable[[], bool] = _never) -> None:
        """Set the deadline of each call, ``limit_s``; in :meth:`upload` that of the whole object.
        ``should_stop`` ends a call early, with an OSError.
        """
        self._limit_s, self._should_stop = limit_s, should_stop

    def size(self, path: StorePath) -> int | None:
        """Return the bytes of an object; None: there is none."""
        bucket, key = path.bucket_and_key
        try:
            if path.scheme == "s3":  # its `info` lists what is below, if it finds nothing
                return int(
                    self._call_s3(path, "head_object", Bucket=bucket, Key=key)["ContentLength"]
                )
            found = self._call(path, "info")
        except FileNotFoundError:
            return None
        return int(found["size"]) if found.get("type") == "file" else None

    def names(self, path: StorePath) -> dict[str, int | None]:
        """Return the names directly below a path, with their bytes; None for what has more below.
        One request for each thousand of them.
        """
        try:
            if path.scheme == "s3":  # its `ls` lists the path above too, if it finds nothing
                rows = self._call(path, "lsdir")
            else:
                rows = self._call(path, "ls", detail=True)
        except FileNotFoundError:
            return {}
        named = {str(row["name"]).rstrip("/").rpartition("/")[2]: row for row in rows}
        return {
            name: int(row["size"] or 0) if row.get("type") == "file" else None
            for name, row in named.items()
        }

    def read(self, path: StorePath, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of an object."""
        return self._checked(path, start, stop, self._wait(self._start_read(path, start, stop)))

    def read_all(self, path: StorePath, limit_bytes: int) -> bytes:
        """Return an object of at most ``limit_bytes``."""
        size = self.size(path)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "is missing", str(path))
        if size > limit_bytes:
            reason = f"{size:,} bytes, and at most {limit_bytes:,} are read"
            raise StoreError(reason, path, is_passing=False)
        return self.read(path, 0, size) if size else b""

    def chunks(self, path: StorePath, size: int) -> Iterator[bytes]:
        """Yield an object from its beginning to its end; the next ranges are on their way."""
        starts = range(0, size, READ_BYTES)
        waiting: deque[tuple[int, int, Future[Any]]] = deque()
        for start in (*starts, *[None] * READS_AT_ONCE):
            if start is not None:
                stop = min(start + READ_BYTES, size)
                waiting.append((start, stop, self._start_read(path, start, stop)))
            if waiting and (start is None or len(waiting) > READS_AT_ONCE):
                first, last, future = waiting.popleft()
                yield self._checked(path, first, last, self._wait(future))

    def put(self, path: StorePath, content: bytes) -> None:
        """Write a small object, all or nothing."""
        self._call(path, "pipe_file", content)

    def upload(self, path: StorePath, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
        """Write an object, all or nothing. Return its size and the sha256 of the intended bytes.

        Raises:
            OSError: also after the deadline. What was sent is removed, if the store answers.
        """
        end_s = time.monotonic() + self._limit_s
        counted = _Counted(chunks)
        parts = counted.parts()
        first = list(itertools.islice(parts, 2))
        if len(first) == 2 and path.scheme == "s3":
            self._upload_parts(path, itertools.chain(first, parts), end_s)
        else:
            self._call(path, "pipe_file", b"".join([*first, *parts]))
        return counted.size, counted.digest.hexdigest()

    def remove(self, paths: Iterable[StorePath]) -> None:
        """Remove objects. A missing one is none to remove."""
        left = list(paths)
        while left:
            some, left = left[:1000], left[1000:]
            if some[0].scheme == "s3":
                self._remove_from_s3(some)
                continue
            for path in some:
                with contextlib.suppress(FileNotFoundError):
                    self._call(path, "rm_file")

    def abort_uploads(self, path: StorePath, containing: str) -> int:
        """Remove the parts of unfinished uploads below a path whose name has ``containing``.
        Return their number.
        """
        if path.scheme != "s3":
            return 0
        bucket, key = path.bucket_and_key
        found = self._call_s3(path, "list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/")
        uploads = [
            each
            for each in found.get("Uploads", [])
            if each["Key"].startswith(f"{key}/") and containing in each["Key"]
        ]
        for each in uploads:
            named = {"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]}
            with contextlib.suppress(FileNotFoundError):
                self._call_s3(path, "abort_multipart_upload", **named)
        return len(uploads)

    def check(self, path: StorePath, warn: Callable[[str], None]) -> None:
        """Write, read, list and remove a small object below a path. Without the right to remove
        objects or uploads a run can save: that is a warning.

        Raises:
            OSError: what a save needs is impossible.
        """
        probe = path / f".tmp-probe-{secrets.token_hex(4)}"
        self.put(probe, b"probe")
        self.read(probe, 0, 5)
        self.names(path)
        try:
            self.remove([probe])
            self.abort_uploads(path, probe.name)
        except OSError as error:
            warn(
                f"{path}: what is removed there stays, old checkpoints and what dead saves leave:"
                f" {error.strerror}"
            )

    # -- requests

    def _upload_parts(self, path: StorePath, parts: Iterable[bytes], end_s: float) -> None:
        bucket, key = path.bucket_and_key
        place = {"Bucket": bucket, "Key": key}
        found = self._call_s3(path, "create_multipart_upload", **place)
        place["UploadId"] = found["UploadId"]
        waiting: deque[Future[Any]] = deque()
        tags: list[str] = []
        size = 0
        try:
            for number, body in enumerate(parts, 1):
                size += len(body)
                if len(waiting) == PARTS_AT_ONCE:
                    tags.append(self._wait(waiting.popleft())["ETag"])
                options = {**place, "PartNumber": number, "Body": body}
                waiting.append(self._start_s3(path, "upload_part", options, end_s))
            while waiting:
                tags.append(self._wait(waiting.popleft())["ETag"])
            listed = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(tags, 1)]
            options = {**place, "MultipartUpload": {"Parts": listed}}
            try:
                self._wait(self._start_s3(path, "complete_multipart_upload", options, end_s))
            except FileNotFoundError:
                # a try before has completed it, and its answer was lost
                if self.size(path) != size:
                    raise
        except BaseException:
            for future in waiting:
                future.cancel()
            # nobody waits for it: the next start removes what is left
            end_s = time.monotonic() + ABORT_S
            StoreAccess(ABORT_S)._start_s3(path, "abort_multipart_upload", place, end_s)
            raise

    def _remove_from_s3(self, paths: list[StorePath]) -> None:
        bucket = paths[0].bucket_and_key[0]
        named = [{"Key": path.bucket_and_key[1]} for path in paths]
        listed = {"Objects": named, "Quiet": True}
        found = self._call_s3(paths[0], "delete_objects", Bucket=bucket, Delete=listed)
        for each in found.get("Errors", [])[:1]:
            code = str(each.get("Code", ""))
            hint = HINTS.get(code, "the store did not remove it")
            raise StoreError(f"cannot be removed: {hint}", paths[0], is_passing=False)

    def _call_s3(self, path: StorePath, method: str, **options: Any) -> Any:
        return self._wait(self._start_s3(path, method, options, time.monotonic() + self._limit_s))

    def _start_s3(
        self, path: StorePath, method: str, options: dict[str, Any], end_s: float
    ) -> Future[Any]:
        system = file_system("s3")
        return self._start(path, lambda: system._call_s3(method, **options), end_s)

    def _start_read(self, path: StorePath, start: int, stop: int) -> Future[Any]:
        system = file_system(path.scheme)
        if not system.async_impl:
            return self._now(path, lambda: system.cat_file(path.url, start=start, end=stop))
        end_s = time.monotonic() + self._limit_s
        return self._start(path, lambda: system._cat_file(path.url, start=start, end=stop), end_s)

    def _call(self, path: StorePath, method: str, *args: Any, **options: Any) -> Any:
        """Call a function of fsspec's file system with a path."""
        system = file_system(path.scheme)
        if not system.async_impl:
            function = getattr(system, method)
            return self._wait(self._now(path, lambda: function(path.url, *args, **options)))
        function = getattr(system, f"_{method}")
        end_s = time.monotonic() + self._limit_s
        return self._wait(self._start(path, lambda: function(path.url, *args, **options), end_s))

    def _now(self, path: StorePath, function: Callable[[], Any]) -> Future[Any]:
        """Call a function that blocks and fails at once, of a file system without a network."""
        self._check_wanted()
        future: Future[Any] = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(own_error(error, path))
        return future

    def _start(
        self, path: StorePath, make: Callable[[], Awaitable[Any]], end_s: float
    ) -> Future[Any]:
        """Start a request on the event loop: see NOTE [requests that hang]."""
        import asyncio  # not at the start of every command

        self._check_wanted()
        loop = file_system(path.scheme).loop
        tried = _try_until(make, path, end_s, self._limit_s)
        return asyncio.run_coroutine_threadsafe(tried, loop)

    def _wait(self, future: Future[Any]) -> Any:
        while not future.done():
            with contextlib.suppress(TimeoutError):
                return future.result(0.1)
            try:
                self._check_wanted()
            except OSError:
                future.cancel()
                raise
        return future.result()

    def _check_wanted(self) -> None:
        """Raise OSError if the caller was given up: no request of it begins any more."""
        if self._should_stop():
            raise OSError(errno.ECANCELED, "was given up")

    @staticmethod
    def _checked(path: StorePath, start: int, stop: int, found: bytes) -> bytes:
        if len(found) != stop - start:
            raise StoreError(f"{len(found):,} bytes came of {stop - start:,}", path)
        return found


async def _try_until(
    make: Callable[[], Awaitable[Any]], path: StorePath, end_s: float, limit_s: float
) -> Any:
    """Make a request until it succeeds, cannot succeed, or its time is over."""
    import asyncio

    try_s, pause_s = limit_s / TRIES, PAUSE_S[0]
    problem: OSError = StoreError(f"no answer in {limit_s:g} s", path)
    while True:
        left_s = end_s - time.monotonic()
        try:
            return await asyncio.wait_for(make(), min(try_s, left_s))
        except TimeoutError:
            pass  # what the store has answered before says more
        except Exception as error:
            problem = own_error(error, path)
            if not isinstance(problem, StoreError) or not problem.is_passing:
                raise problem from None
        if time.monotonic() + pause_s >= end_s:
            raise problem from None
        await asyncio.sleep(pause_s * _jitter.uniform(0.7, 1.0))
        try_s, pause_s = 2 * try_s, min(2 * pause_s, PAUSE_S[1])


class _Counted:
    """Chunks of an object on their way: hashed, counted and put together to parts."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks = chunks
        self.digest = hashlib.sha256()
        self.size = 0

    def parts(self) -> Iterator[bytes]:
        """Yield parts of PART_BYTES, the last one shorter."""
        part = bytearray()
        for chunk in self._chunks:
            self.digest.update(chunk)
            self.size += len(chunk)
            view = memoryview(chunk)
            while len(view):
                room = PART_BYTES - len(part)
                part += view[:room]
                view = view[room:]
                if len(part) == PART_BYTES:
                    yield bytes(part)
                    part = bytearray()
        if part:
            yield bytes(part)
