"""Checkpoints in an object store: a real S3 server, writers as threads of this process."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import (
    AsyncWriter,
    HostSlab,
    SaveAttempt,
    find,
    has_checkpoint,
    in_store,
    newest_valid,
    open_checkpoint,
    prune,
)
from meshwright.system import store
from meshwright.system.store import StoreAccess, StorePath
from tests.framework.checkpoint.conftest import Fake, State
from tests.support.errors import raises
from tests.support.object_store import ObjectStore, Request

RUN = StorePath("s3://bucket/prefix/demo")
TP = 2
NAMES = frozenset(f"pp0-tp{rank}" for rank in range(TP))


class Saving:
    """A save of two ranks in progress."""

    def __init__(
        self,
        fake: Fake,
        step: int,
        attempt: str = "a1",
        timeout_s: float = 20,
        ranks: Iterable[int] = range(TP),
        tried: Iterable[str] = (),
    ) -> None:
        self.attempt = SaveAttempt(
            RUN,
            fake.head(step),
            attempt,
            NAMES,
            max_file_bytes=800,
            upload_timeout_s=timeout_s,
            tried=frozenset(tried),
        )
        self.state = fake.state(step)
        self.writers = [AsyncWriter() for _ in range(TP)]
        for rank in ranks:
            self.start(fake, rank)

    def start(self, fake: Fake, rank: int) -> None:
        pieces = HostSlab().copy(fake.pieces(self.state, TP, rank))
        self.writers[rank].start(self.attempt, f"pp0-tp{rank}", pieces, is_first=rank == 0)

    def wait(self) -> str | None:
        """Return the first problem; None: it is published."""
        while not self.writers[0].is_share_done() and not any(w.failed() for w in self.writers):
            time.sleep(0.01)
        problem = next((w.problem for w in self.writers if w.problem is not None), None)
        for writer in self.writers:
            if problem is not None:
                writer.abandon()
            writer.end()
        return problem


def save(fake: Fake, step: int, attempt: str = "a1") -> State:
    saving = Saving(fake, step, attempt)
    assert saving.wait() is None
    return saving.state


def check_read(fake: Fake, place: Path | StorePath, state: State, tp: int = 3) -> None:
    """Read every tensor on another layout, and compare it."""
    with open_checkpoint(place) as checkpoint:
        for (kind, name), full in state.items():
            for rank in range(tp):
                info = fake.info(name, tp, rank)
                found = checkpoint.read(kind, info)
                assert found is not None and torch.equal(found, info.take(full)), (kind, name)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PAUSE_S", (0.05, 0.2))


def test_a_step_is_read_on_another_layout(s3: ObjectStore, fake: Fake) -> None:
    state = save(fake, 3)
    (found,) = find(RUN)
    assert found.step == 3 and str(found.path) == f"{RUN}/step-00000003"
    newest = newest_valid(RUN)
    assert newest is not None and newest.manifest.step == 3
    check_read(fake, found.path, state)


def test_what_is_written_last_publishes(s3: ObjectStore, fake: Fake) -> None:
    save(fake, 3)
    written = [each.key for each in s3.proxy.requests if each.what == "PUT"]
    assert written[0] == "prefix/demo/.tmp-step-00000003-a1/attempt.json", "before any file"
    assert written[-2:] == [
        f"prefix/demo/step-00000003/{n}" for n in ("SHA256SUMS", "manifest.json")
    ]
    names = [key.rpartition("/")[2] for key in s3.all_keys()]
    assert "pp0-tp1-a1-00000.safetensors" in names and len(names) == len(set(names))
    assert not any(".tmp-" in key for key in s3.all_keys()), "the reports are removed"


@pytest.mark.long
def test_copies_are_checkpoints_on_both_sides(s3: ObjectStore, fake: Fake, tmp_path: Path) -> None:
    """As ``aws s3 cp --recursive`` makes them."""
    state = save(fake, 3)
    here = tmp_path / "checkpoints" / "step-00000003"
    here.mkdir(parents=True)
    for key in s3.all_keys():
        (here / key.rpartition("/")[2]).write_bytes(s3.get(key))
    newest = newest_valid(tmp_path)
    assert newest is not None and newest.path == here
    check_read(fake, here, state)
    local = fake.save(tmp_path, 5, tp=2)
    for path in local.iterdir():
        s3.put(f"prefix/other/{local.name}/{path.name}", path.read_bytes())
    newest = newest_valid(StorePath("s3://bucket/prefix/other"))
    assert newest is not None and newest.manifest.step == 5
    check_read(fake, newest.path, fake.state(5))


def test_an_unpublished_step_is_no_checkpoint(s3: ObjectStore, fake: Fake) -> None:
    save(fake, 3)
    s3.proxy.fault = lambda request: (
        "deny" if request.key.endswith("manifest.json") and request.what == "PUT" else None
    )
    problem = Saving(fake, 6).wait()
    assert problem is not None and "step-00000006" in problem
    s3.proxy.fault = lambda request: None
    assert any("step-00000006/pp0-tp0" in key for key in s3.all_keys())
    assert [each.step for each in find(RUN)] == [3] and not has_checkpoint(RUN, above=3)


def test_an_object_of_another_size_is_not_published(s3: ObjectStore, fake: Fake) -> None:
    file = "prefix/demo/step-00000003/pp0-tp1-a1-00000.safetensors"

    def shorten(request: Request) -> None:
        if request.key.endswith("pp0-tp1.shard.json") and request.what == "PUT":
            s3.put(file, b"short")

    s3.proxy.fault = shorten
    problem = Saving(fake, 3).wait()
    assert problem is not None and "MW-CHECKPOINT-024" in problem and "5 are on the disk" in problem
    assert find(RUN) == []


@pytest.mark.long
def test_a_listing_has_no_file_of_a_step(s3: ObjectStore, fake: Fake) -> None:
    for step in (1, 2, 3):
        save(fake, step)
    for number in range(30):
        s3.put(f"prefix/demo/step-00000002/more-{number}", b"x")
        s3.put(f"prefix/other/{number}", b"x")
    s3.proxy.requests.clear()
    assert [each.step for each in find(RUN)] == [3, 2, 1]
    assert s3.proxy.counts() == {"LIST": 1, "HEAD": 3}


def test_two_attempts_of_a_step_do_not_mix(s3: ObjectStore, fake: Fake) -> None:
    s3.proxy.fault = lambda request: "deny" if "pp0-tp1-a1" in request.key else None
    assert "pp0-tp1-a1-00000.safetensors" in str(Saving(fake, 3, "a1").wait())
    before = [key for key in s3.all_keys() if "-a1-" in key]
    assert before
    state = save(fake, 3, "b2")
    check_read(fake, RUN / "step-00000003", state)
    assert not any("-a1-" in key for key in s3.all_keys()), "the dead attempt's files are removed"
    manifest = json.loads(s3.get("prefix/demo/step-00000003/manifest.json"))
    assert all("-b2-" in name for name in manifest["files"])


def test_a_rank_may_be_earlier_than_the_first(s3: ObjectStore, fake: Fake) -> None:
    """Its files are no leftovers, although the first rank removes those of dead attempts then."""
    saving = Saving(fake, 3, ranks=[1])
    while not any("pp0-tp1.shard.json" in key for key in s3.all_keys()):
        time.sleep(0.01)
    saving.start(fake, 0)
    assert saving.wait() is None
    check_read(fake, RUN / "step-00000003", saving.state)


@pytest.mark.long
def test_leftovers_go_with_the_next_saves(s3: ObjectStore, fake: Fake) -> None:
    """The mark of a dead attempt goes when nothing of it was found: a late request is removed too."""
    s3.proxy.fault = lambda request: "deny" if "pp0-tp1-a1" in request.key else None
    assert Saving(fake, 3).wait() is not None
    s3.proxy.fault = lambda request: None
    s3._direct("POST", "/bucket/prefix/demo/step-00000003/pp0-tp0-a1-00007.safetensors?uploads")
    save(fake, 4, "b2")
    assert not any("-a1-" in key for key in s3.all_keys()) and s3.uploads() == []
    s3.put("prefix/demo/step-00000003/pp0-tp1-a1-00000.safetensors", b"late")
    save(fake, 5, "c3")
    assert any(".tmp-step-00000003-a1" in key for key in s3.all_keys())
    assert not any("step-00000003/pp0" in key for key in s3.all_keys())
    save(fake, 6, "d4")
    assert not any(".tmp-" in key or "-a1-" in key for key in s3.all_keys())


@pytest.mark.long
def test_leftovers_of_a_published_step_stay_where_they_are_named(
    s3: ObjectStore, fake: Fake
) -> None:
    """The writer died after the manifest, before it removed its mark."""
    state = save(fake, 3)
    s3.put("prefix/demo/.tmp-step-00000003-a1/attempt.json", b"{}")
    s3.put("prefix/demo/step-00000003/pp0-tp1-a1-00099.safetensors", b"not in the manifest")
    save(fake, 4, "b2")
    check_read(fake, RUN / "step-00000003", state)
    assert not any("00099" in key for key in s3.all_keys())


def test_retention_deletes_the_manifest_first(s3: ObjectStore, fake: Fake) -> None:
    for step in (2, 4, 5, 6):
        save(fake, step)
    s3.proxy.requests.clear()
    gone = prune(RUN, keep_last=2, keep_every=4)
    assert [each.step for each in gone] == [2]
    assert [each.step for each in find(RUN)] == [6, 5, 4]
    assert not any("step-00000002" in key for key in s3.all_keys())
    assert not any(each.what == "GET" and "safetensors" in each.key for each in s3.proxy.requests)
    assert s3.proxy.counts()["DELETE"] == 3, "manifest, files, mark"


@pytest.mark.long
def test_the_requests_of_a_save(s3: ObjectStore, fake: Fake) -> None:
    """Those that docs/checkpoints.md counts: 2 ranks, keep_last = 2, one step goes."""
    for step in (1, 2, 3, 4):
        s3.proxy.requests.clear()
        save(fake, step)
        prune(RUN, keep_last=2)
    files = len(
        [each for each in s3.proxy.requests if "safetensors" in each.key and each.what == "PUT"]
    )
    found = s3.proxy.counts()
    assert found["PUT"] == 2 + files + 2 + 2 + 1, (
        "marks, files, reports, manifest; a deletion's mark"
    )
    assert found["GET"] == 2 + 2 * 2 and found["HEAD"] == 1 + 3, found
    assert found["DELETE"] == 1 + 3, "the reports; manifest, files and mark of a deletion"
    assert found["LIST"] <= 12, found


@pytest.mark.long
def test_half_a_deletion_is_finished(s3: ObjectStore, fake: Fake) -> None:
    for step in (2, 4):
        save(fake, step)
    deletes = iter(range(9))

    def second_fails(request: Request) -> str | None:
        return "deny" if request.what == "DELETE" and next(deletes) == 1 else None

    s3.proxy.fault = second_fails
    with pytest.raises(OSError, match="do not allow"):
        prune(RUN, keep_last=1)
    s3.proxy.fault = lambda request: None
    assert [each.step for each in find(RUN)] == [4]
    assert any("step-00000002/pp0" in key for key in s3.all_keys())
    prune(RUN, keep_last=1)
    assert not any("step-00000002" in key for key in s3.all_keys())


@pytest.mark.long
@pytest.mark.parametrize("way", ["stall", "frozen"])
def test_a_stuck_upload_is_named_and_given_up(s3: ObjectStore, fake: Fake, way: str) -> None:
    save(fake, 3)
    if way == "stall":
        s3.proxy.fault = lambda request: "stall" if "pp0-tp1-b2" in request.key else None
    else:
        s3.freeze()
    start_s = time.monotonic()
    problem = Saving(fake, 4, "b2", timeout_s=1.5).wait()
    assert problem is not None and time.monotonic() - start_s < 4
    assert "no answer in 1.5 s" in problem and "MW-CHECKPOINT-034" in problem
    assert "pp0-tp1-b2-00000.safetensors" in problem or way == "frozen"
    s3.thaw()
    s3.proxy.fault = lambda request: None
    time.sleep(0.3)
    assert [each.step for each in find(RUN)] == [3]
    save(fake, 5, "c3")


@pytest.mark.long
def test_an_answer_that_is_lost_after_publication(s3: ObjectStore, fake: Fake) -> None:
    """The store has the manifest and the writer gave up: its files stay, and the step counts."""
    saving = Saving(fake, 3)
    while not s3.proxy.counts()["PUT"]:
        time.sleep(0.01)
    s3.proxy.fault = lambda request: None
    assert saving.wait() is None
    s3.put("prefix/demo/.tmp-step-00000003-a1/attempt.json", b"{}")  # as if abandoned there
    save(fake, 4, "b2")
    check_read(fake, RUN / "step-00000003", saving.state)


@pytest.mark.long
def test_many_faults_that_pass(s3: ObjectStore, fake: Fake) -> None:
    draw = random.Random(3)
    kinds = ["throttle", "broken", "drop", *[None] * 5]
    s3.proxy.fault = lambda request: draw.choice(kinds)
    state = save(fake, 3)
    check_read(fake, RUN / "step-00000003", state)
    newest = newest_valid(RUN)
    assert newest is not None and newest.manifest.step == 3


@pytest.mark.long
def test_a_sound_step_is_not_overwritten(s3: ObjectStore, fake: Fake) -> None:
    state = save(fake, 3)
    assert "MW-CHECKPOINT-037" in str(Saving(fake, 3, "b2").wait())
    check_read(fake, RUN / "step-00000003", state)


@pytest.mark.long
def test_a_damaged_step_is_saved_again(
    s3: ObjectStore, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    save(fake, 3)
    damage(s3, "step-00000003/pp0-tp1-a1-00000.safetensors")
    with raises("MW-CHECKPOINT-015", "pp0-tp1-a1-00000.safetensors"):
        newest_valid(RUN, warn=lambda text: None)
    state = save(fake, 3, "b2")
    check_read(fake, RUN / "step-00000003", state)
    assert "does not verify" in capsys.readouterr().err
    save(fake, 4, "c3")  # removes what b2 has left
    assert "prefix/demo/step-00000003/broken-manifest-b2.json" in s3.all_keys()


@pytest.mark.long
def test_a_manifest_that_came_meanwhile_is_not_set_aside(s3: ObjectStore, fake: Fake) -> None:
    """Another job saves the step while its damaged files are verified."""
    save(fake, 3)
    damage(s3, "step-00000003/pp0-tp1-a1-00000.safetensors")

    def publish(request: Request) -> None:
        if request.key.endswith("pp0-tp1-a1-00000.safetensors") and request.what == "GET":
            s3.put("prefix/demo/step-00000003/manifest.json", b"of another job")

    s3.proxy.fault = publish
    assert "MW-CHECKPOINT-038" in str(Saving(fake, 3, "b2").wait())
    assert s3.get("prefix/demo/step-00000003/manifest.json") == b"of another job"
    assert not any("broken" in key for key in s3.all_keys())


def test_what_a_dead_save_left_keeps_no_other_from_saving(
    s3: ObjectStore, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even where nothing may be removed; its mark stays. Other marks go."""
    dead = "prefix/demo/.tmp-step-00000001-d1/attempt.json"
    s3.put(dead, b"{}")
    s3.put("prefix/demo/.tmp-step-00000002-d2/attempt.json", b"{}")
    s3.put("prefix/demo/step-00000001/pp0-tp0-d1-00000.safetensors", b"x")
    denied = iter(["deny"])
    s3.proxy.fault = lambda request: next(denied, None) if request.what == "DELETE" else None
    state = save(fake, 3)
    check_read(fake, RUN / "step-00000003", state)
    assert "files of a dead save cannot be removed now" in capsys.readouterr().err
    assert dead in s3.all_keys() and not any("-d2" in key for key in s3.all_keys())


def test_retention_keeps_what_was_just_published(s3: ObjectStore, fake: Fake) -> None:
    """A newer step that a resume has skipped has the right sizes, and is none of those to keep."""
    for step in (2, 4, 9):
        save(fake, step)
    damage(s3, "step-00000009/pp0-tp1-a1-00000.safetensors")
    gone = prune(RUN, keep_last=1, published=4)
    assert [each.step for each in gone] == [2]
    assert [each.step for each in find(RUN)] == [9, 4]


def test_a_deletion_that_has_not_begun_is_none(s3: ObjectStore, fake: Fake) -> None:
    """Its mark is there and the manifest too: retention decides anew."""
    state = save(fake, 3)
    mark = "prefix/demo/.tmp-step-00000003-deleted/attempt.json"
    s3.put(mark, b"{}")
    save(fake, 4, "b2")
    check_read(fake, RUN / "step-00000003", state)
    assert mark not in s3.all_keys()


def test_a_step_that_is_published_without_an_answer(s3: ObjectStore, fake: Fake) -> None:
    """The manifest's answer is lost until the save is given up: the next try finds its own step."""
    s3.proxy.fault = lambda request: (
        "lose" if request.key.endswith("3/manifest.json") and request.what == "PUT" else None
    )
    assert "manifest.json" in str(Saving(fake, 3, timeout_s=1).wait())
    s3.proxy.fault = lambda request: None
    again = Saving(fake, 3, "b2", tried=["a1"])
    assert again.wait() is None and again.writers[0].take_published() is not None
    check_read(fake, RUN / "step-00000003", again.state)
    assert "MW-CHECKPOINT-037" in str(Saving(fake, 3, "c3", tried=["a2"]).wait())


@pytest.mark.parametrize("text", [b"[]", b"{"])
def test_a_report_that_is_none(s3: ObjectStore, fake: Fake, text: bytes) -> None:
    s3.put("prefix/demo/.tmp-step-00000003-a1/pp0-tp1.shard.json", text)
    saving = Saving(fake, 3, ranks=[0])
    saving.writers[1]._share.done.set()
    assert "MW-CHECKPOINT-039" in str(saving.wait()) and find(RUN) == []


def damage(s3: ObjectStore, name: str) -> None:
    data = bytearray(s3.get(f"prefix/demo/{name}"))
    data[-1] ^= 1
    s3.put(f"prefix/demo/{name}", bytes(data))


@pytest.mark.long
def test_each_damage_is_named(s3: ObjectStore, fake: Fake) -> None:
    save(fake, 3)
    place, file = RUN / "step-00000003", "pp0-tp0-a1-00001.safetensors"
    whole = s3.get(f"prefix/demo/step-00000003/{file}")
    damage(s3, f"step-00000003/{file}")
    with raises("MW-CHECKPOINT-016", file):
        open_checkpoint(place).verify()
    s3.put(f"prefix/demo/step-00000003/{file}", whole[:-1])
    with raises("MW-CHECKPOINT-014", f"{len(whole) - 1} bytes"):
        open_checkpoint(place)
    s3.delete(f"prefix/demo/step-00000003/{file}")
    with raises("MW-CHECKPOINT-014", "is missing"):
        open_checkpoint(place)
    s3.put("prefix/demo/step-00000003/SHA256SUMS", b"0" * 64)
    with raises("MW-CHECKPOINT-011"):
        open_checkpoint(place)


def test_names_of_a_listing_are_checked(s3: ObjectStore, fake: Fake) -> None:
    save(fake, 3)
    for name in (
        "step-3",
        "step-0000000009",
        "step-00000009x",
        ".tmp-step-00000003-../x",
        "..",
        "~",
    ):
        s3.put(f"prefix/demo/{name}/manifest.json", b"{}")
    s3.put("prefix/demo/step-00000008", b"an object, no folder")
    assert [each.step for each in find(RUN)] == [3]
    access = StoreAccess()
    before = sorted(s3.all_keys())
    in_store.remove_leftovers(RUN, access)
    assert sorted(s3.all_keys()) == before, "only marks of our form are leftovers"


def test_a_manifest_that_is_too_long_is_not_read(
    s3: ObjectStore, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(fake, 3)
    monkeypatch.setattr("meshwright.checkpoint.read.MAX_MANIFEST_BYTES", 100)
    s3.proxy.requests.clear()
    with raises("MW-CHECKPOINT-022"):
        open_checkpoint(RUN / "step-00000003")
    assert "GET" not in s3.proxy.counts()


@pytest.mark.long
def test_a_store_that_is_away_is_not_taken_for_an_empty_one(
    s3: ObjectStore, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreAccess.__init__, "__defaults__", (3, store._never))
    assert not has_checkpoint(RUN)
    s3.proxy.fault = lambda request: "drop"
    with raises("MW-CHECKPOINT-036", str(RUN)):
        find(RUN)
    with raises("MW-CHECKPOINT-036"):
        open_checkpoint(RUN / "step-00000003")
    assert has_checkpoint(RUN), "it may have one"


def test_a_rank_reads_what_it_needs(s3: ObjectStore, fake: Fake, tmp_path: Path) -> None:
    """A quarter of the rows of a large tensor, a quarter of its bytes."""
    from meshwright.checkpoint import TensorKind, TensorPiece, begin, publish, write_shard
    from meshwright.parameters import ParameterInfo, Slice

    full = torch.randn(4096, 512)
    temporary = begin(tmp_path, 1, "a1")
    info = ParameterInfo("block0.weight", (4096, 512))
    write_shard(temporary, "pp0", iter([TensorPiece(TensorKind.WEIGHTS, info, full)]))
    final = tmp_path / "checkpoints" / "step-00000001"
    publish(temporary, final, fake.head(1))
    for path in final.iterdir():
        s3.put(f"prefix/demo/{final.name}/{path.name}", path.read_bytes())
    s3.proxy.requests.clear()
    mine = ParameterInfo("block0.weight", (4096, 512), Slice(0, 1024, 2048, 1024))
    with open_checkpoint(RUN / final.name) as checkpoint:
        found = checkpoint.read(TensorKind.WEIGHTS, mine)
    assert found is not None and torch.equal(found, full[1024:2048])
    spans = [
        int(b) - int(a) + 1
        for each in s3.proxy.requests
        if each.what == "GET" and "safetensors" in each.key and each.range
        for a, b in [each.range.removeprefix("bytes=").split("-")]
    ]
    assert sum(spans) <= full.nbytes / 4 + 2 * in_store.BLOCK_BYTES, spans


@pytest.fixture
def memory_run() -> Iterator[StorePath]:
    import fsspec

    yield StorePath("memory://bucket/demo")
    fsspec.filesystem("memory").store.clear()


def test_another_file_system_goes_the_same_way(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "RUN", StorePath(f"file://{tmp_path}/demo"))
    for step in (1, 2, 3):
        state = save(fake, step)
    assert [each.step for each in prune(RUN, keep_last=1)] == [2, 1]
    check_read(fake, RUN / "step-00000003", state)
