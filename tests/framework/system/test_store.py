"""Requests to an object store: deadlines, tries, and errors without a secret, on a real S3 server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from meshwright.errors import ConfigError
from meshwright.system import store
from meshwright.system.store import StoreAccess, StoreError, StorePath, parse_place
from tests.support.errors import raises
from tests.support.object_store import KEY, SECRET, ObjectStore, Request

RUN = StorePath("s3://bucket/runs/demo")
MIB = 2**20


def test_an_object_comes_back(s3: ObjectStore) -> None:
    access, path = StoreAccess(), RUN / "step-00000001" / "x"
    data = os.urandom(18 * MIB)
    size, digest = access.upload(path, [data[: 7 * MIB], memoryview(data)[7 * MIB :]])
    assert size == len(data) and access.size(path) == size
    assert len(digest) == 64 and s3.proxy.counts()["part"] == 2
    assert b"".join(access.chunks(path, size)) == data
    assert access.read(path, 5, 9 * MIB) == data[5 : 9 * MIB]
    assert access.names(RUN) == {"step-00000001": None}
    assert access.names(path.parent) == {"x": size}


def test_a_small_object_is_one_request(s3: ObjectStore) -> None:
    StoreAccess().upload(RUN / "x", [b"abc", b"def"])
    assert s3.proxy.counts() == {"PUT": 1} and s3.get("runs/demo/x") == b"abcdef"


def test_what_is_missing(s3: ObjectStore) -> None:
    access = StoreAccess()
    assert access.size(RUN) is None and access.names(RUN) == {}
    assert s3.proxy.counts() == {"HEAD": 1, "LIST": 1}, "no listing of what is above"
    with pytest.raises(FileNotFoundError):
        access.read(RUN / "x", 0, 3)
    access.remove([RUN / "x"])


def test_a_listing_has_one_level(s3: ObjectStore) -> None:
    for name in ("a/1", "a/2", "b/c/3", "4"):
        s3.put(f"runs/demo/{name}", b"x")
    s3.proxy.requests.clear()
    assert StoreAccess().names(RUN) == {"a": None, "b": None, "4": 1}
    (request,) = s3.proxy.requests
    assert request.query["delimiter"] == "/" and request.query["prefix"] == "runs/demo/"


def once(fault: str, times: int) -> Callable[[Request], str | None]:
    left = [fault] * times
    return lambda request: left.pop() if left else None


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", ["throttle", "drop", "broken", "stall", "lose", "digest", "timeout"]
)
def test_a_fault_that_passes_is_tried_again(
    s3: ObjectStore, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PAUSE_S", (0.05, 0.1))
    s3.proxy.fault = once(fault, 2)
    StoreAccess(5).put(RUN / "x", b"abc")
    assert s3.get("runs/demo/x") == b"abc" and len(s3.proxy.requests) == 3


@pytest.mark.parametrize(
    ("fault", "words"),
    [("skew", "clock of this machine"), ("deny", "credentials do not allow it")],
)
def test_a_fault_that_stays_is_named_at_once(s3: ObjectStore, fault: str, words: str) -> None:
    s3.proxy.fault = lambda request: fault
    with pytest.raises(StoreError, match=words) as error:
        StoreAccess(60).put(RUN / "x", b"abc")
    assert len(s3.proxy.requests) == 1 and error.value.filename == str(RUN / "x")
    assert not error.value.is_passing


def test_no_text_of_the_library_is_passed_on(s3: ObjectStore) -> None:
    """The server repeats the key in its message, and a library's error has the URL."""
    texts = []
    for fault in ("deny", "drop"):
        s3.proxy.fault = lambda request, fault=fault: fault  # type: ignore[misc]
        for call in (lambda a: a.put(RUN / "x", b"abc"), lambda a: a.read(RUN / "x", 0, 3)):
            with pytest.raises(StoreError) as error:
                call(StoreAccess(0.3))
            texts.append(repr(error.value) + str(error.value) + str(error.value.strerror))
            assert error.value.__cause__ is None and error.value.__suppress_context__
    assert not any(KEY in text or SECRET in text or s3.proxy.url in text for text in texts), texts


@pytest.mark.long
@pytest.mark.parametrize("way", ["a part", "the server"])
def test_a_stuck_upload_ends_at_its_deadline(s3: ObjectStore, way: str) -> None:
    def stall(request: Request) -> str | None:
        return "stall" if request.query.get("partNumber") == "2" else None

    if way == "a part":
        s3.proxy.fault = stall
    else:
        s3.freeze()
    start_s = time.monotonic()
    with pytest.raises(StoreError, match="no answer in 2 s"):
        StoreAccess(2).upload(RUN / "x", [bytes(40 * MIB)])
    assert time.monotonic() - start_s < 4
    s3.thaw()
    s3.proxy.fault = lambda request: None
    end_s = time.monotonic() + 10
    while (
        s3.uploads() and time.monotonic() < end_s
    ):  # what the server reads late is removed by name
        StoreAccess().abort_uploads(RUN, "x")
        time.sleep(0.1)
    assert s3.all_keys() == [] and s3.uploads() == []


def test_a_call_is_given_up(s3: ObjectStore) -> None:
    s3.proxy.fault = lambda request: "stall"
    start_s = time.monotonic()
    access = StoreAccess(60, lambda: time.monotonic() - start_s > 0.3)
    with pytest.raises(OSError, match="given up"):
        access.upload(RUN / "x", [bytes(40 * MIB)])
    assert time.monotonic() - start_s < 3


def test_a_call_that_was_given_up_begins_no_request(s3: ObjectStore, tmp_path: object) -> None:
    access = StoreAccess(60, lambda: True)
    for path in (RUN / "x", StorePath(f"file://{tmp_path}/x")):
        with pytest.raises(OSError, match="given up"):
            access.put(path, b"abc")
        assert StoreAccess().size(path) is None
    assert s3.proxy.counts() == {"HEAD": 1}


def test_a_completed_upload_whose_answer_is_lost(
    s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next try gets NoSuchUpload: the object has the size, and that is success."""
    monkeypatch.setattr(store, "PAUSE_S", (0.05, 0.1))
    faults = iter(["lose", "gone"])
    s3.proxy.fault = lambda request: next(faults) if request.what == "complete" else None
    size, _ = StoreAccess(20).upload(RUN / "x", [bytes(17 * MIB)])
    assert s3.proxy.counts()["complete"] == 2 and StoreAccess().size(RUN / "x") == size


def test_an_upload_that_somebody_removed_is_no_success(s3: ObjectStore) -> None:
    s3.proxy.fault = lambda request: "gone" if request.what == "complete" else None
    with pytest.raises(FileNotFoundError):
        StoreAccess(20).upload(RUN / "x", [bytes(17 * MIB)])


@pytest.mark.parametrize("what", ["DELETE", "uploads"])
def test_the_check_needs_no_right_to_remove(s3: ObjectStore, what: str) -> None:
    s3.proxy.fault = lambda request: "deny" if request.what == what else None
    warnings: list[str] = []
    StoreAccess().check(RUN, warnings.append)
    assert len(warnings) == 1 and "credentials do not allow it" in warnings[0]
    s3.proxy.fault = lambda request: "deny" if request.what == "LIST" else None
    with pytest.raises(StoreError):
        StoreAccess().check(RUN, warnings.append)


def test_uploads_of_others_are_not_aborted(s3: ObjectStore) -> None:
    for key in ("runs/demo/a-1", "runs/demo/b-2", "runs/demolition/a-1"):
        s3._direct("POST", f"/bucket/{key}?uploads")
    assert StoreAccess().abort_uploads(RUN, "a-") == 1
    assert s3.uploads() == ["runs/demo/b-2", "runs/demolition/a-1"]


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIAKEY:SECRET@bucket/x",
        "s3://AKIAKEY@bucket",
        "s3://bucket/x?X-Amz-Signature=SECRET",
        "s3://SECRET:x/y",
        "s3://bucket/../x",
        "s3://bucket//x",
        "s3://bucket/a*",
        "s3://",
        "ftp://bucket/x",
        "s3://bucket/x\n",
        "s3://bucket/é",
    ],
)
def test_other_urls_are_refused(text: str) -> None:
    with raises("MW-SYSTEM-011") as error:
        parse_place(text)
    assert not any(word in str(error.value) for word in ("SECRET", "AKIAKEY"))


def test_paths() -> None:
    path = parse_place("s3://bucket/a/b/")
    assert isinstance(path, StorePath)
    assert (str(path), path.name, str(path.parent)) == ("s3://bucket/a/b", "b", "s3://bucket/a")
    assert (path / "c").bucket_and_key == ("bucket", "a/b/c")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(*args: object, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    store._file_system.cache_clear()
    monkeypatch.setattr(fsspec, "filesystem", missing)
    with raises("MW-SYSTEM-012", "pip install 'meshwright[s3]'") as error:
        StoreAccess().size(RUN)
    assert isinstance(error.value, ConfigError)


def test_other_file_systems(tmp_path: object) -> None:
    access, folder = StoreAccess(), StorePath(f"file://{tmp_path}/a")
    assert access.names(folder) == {} and access.size(folder / "x") is None
    access.upload(folder / "x", [bytes(20 * MIB)])
    access.put(folder / "b" / "y", b"abc")
    assert access.names(folder) == {"x": 20 * MIB, "b": None}
    assert access.read(folder / "b" / "y", 1, 3) == b"bc"
    access.remove([folder / "x", folder / "z"])
    assert access.names(folder) == {"b": None}
