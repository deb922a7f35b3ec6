"""Files made to do harm: refused before anything is believed, and nothing in them is ever run.

Their hashes all agree, as whoever forges a checkpoint can make them agree.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import Manifest, TensorKind, find, newest_valid, open_checkpoint, prune
from meshwright.errors import CheckpointError
from meshwright.run.resume import saved_count
from tests.framework.checkpoint.conftest import KINDS
from tests.support.errors import raises

pytestmark = pytest.mark.fault(
    row="hostile files: pickles, headers, paths, links, names, shapes: refused, nothing run"
)


def forge(
    path: Path, change: Callable[[dict[str, Any]], Any] | None = None, text: bytes | None = None
) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    if change is not None:
        change(manifest)
    text = json.dumps(manifest).encode() if text is None else text
    (path / "manifest.json").write_bytes(text)
    lines = [f"{hashlib.sha256(text).hexdigest()}  manifest.json\n"]
    lines += [f"{file['sha256']}  {name}\n" for name, file in sorted(manifest["files"].items())]
    (path / "SHA256SUMS").write_text("".join(lines))


def weight(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["tensors"]["weights/embedding.weight"]


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop(weight(manifest)["pieces"][0]["file"])
        for entry in manifest["tensors"].values():
            for piece in entry["pieces"]:
                piece["file"] = name if piece["file"] not in manifest["files"] else piece["file"]

    return change


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "parent": (rename_file("../../outside.safetensors"), "should match pattern"),
    "absolute": (rename_file("/etc/passwd"), "should match pattern"),
    "hidden": (rename_file(".tmp.safetensors"), "should match pattern"),
    "newline": (rename_file("a.safetensors\n"), "should match pattern"),
    "unlisted": (
        lambda m: weight(m)["pieces"][0].update(file="other.safetensors"),
        "no size and hash",
    ),
    "gap": (lambda m: weight(m)["pieces"].pop(), "the pieces hold 30 of the 60"),
    "twice": (lambda m: weight(m)["pieces"].append(weight(m)["pieces"][0]), "used twice"),
    "beyond": (lambda m: weight(m)["pieces"][0].update(offset=[8, 0]), "exceeds"),
    "negative": (
        lambda m: weight(m)["pieces"][0].update(offset=[-5, 0]),
        "greater than or equal to 0",
    ),
    "nan": (lambda m: weight(m).update(shape=[float("nan"), 6]), "NaN"),
    "float": (lambda m: weight(m).update(shape=[10.5, 6]), "valid integer"),
    "text": (lambda m: m.update(step="1"), "valid integer"),
    "dims": (lambda m: weight(m)["pieces"][0].update(offset=[0]), "do not have the 2 dims"),
    "dtype": (lambda m: weight(m).update(dtype="object"), "'F64'"),
    "kind": (lambda m: m["tensors"].update({"pickle/x": weight(m) | {"pieces": []}}), "pickle/x"),
    "unknown key": (lambda m: m.update(run="rm -rf"), "[Ee]xtra"),
    "version": (lambda m: m.update(version=2), "format version 2, this meshwright reads version 1"),
    "format": (lambda m: m.update(format="other"), "not a manifest"),
    "huge": (lambda m: weight(m).update(shape=[2**60, 6]), "weights/embedding.weight.*less than"),
    "huge product": (lambda m: weight(m).update(shape=[2**59, 2**59]), r"2\^60 elements"),
    "beyond floats": (lambda m: weight(m).update(shape=[10**400, 6]), "weights/embedding.weight"),
    "negative size": (lambda m: weight(m).update(shape=[-10, 6]), "greater than or equal to 0"),
    "true": (lambda m: weight(m).update(shape=[True, 6]), "valid integer"),
    "null": (lambda m: weight(m).update(shape=[None, 6]), "valid integer"),
    "float piece": (lambda m: weight(m)["pieces"][0].update(shape=[5.0, 6]), "valid integer"),
    "nan offset": (lambda m: weight(m)["pieces"][0].update(offset=[float("nan"), 0]), "NaN"),
    "infinite state": (lambda m: m["state"].update(optimizer_steps=float("inf")), "Infinity"),
    "negative bytes": (
        lambda m: next(iter(m["files"].values())).update(size=-1),
        "greater than or equal to 0",
    ),
    "folder": (rename_file("inner/shard.safetensors"), "should match pattern"),
    "backslash": (rename_file("..\\shard.safetensors"), "should match pattern"),
    "nul": (rename_file("a\0.safetensors"), "should match pattern"),
    "pickle": (rename_file("weights.pkl"), "should match pattern"),
    "no size": (lambda m: m["files"].clear(), "no size and hash"),
    "number as section": (
        lambda m: m["config"].update(model=5),
        r"config\.model = 5, which must be a table",
    ),
    "list as section": (
        lambda m: m["config"].update(adapter=[1]),
        r"config\.adapter = \[1\], which must be a table",
    ),
    "null as section": (
        lambda m: m["config"].update(batch=None),
        r"config\.batch = None, which must be a table",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(tmp_path: Path, fake: Any, name: str) -> None:
    change, message = HOSTILE[name]
    path = fake.save(tmp_path, 1, tp=2)
    forge(path)
    open_checkpoint(path).verify()  # the forging itself is not what is refused
    forge(path, change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def as_a_run_saves(manifest: dict[str, Any]) -> None:
    """Ten steps of eight samples, the last two of them skipped."""
    manifest.update(
        samples_seen=8 * manifest["step"],
        config={
            "run": {"seed": manifest["seed"]},
            "batch": {"global_batch": 8},
            "data": {"sequence_length": 32, "task": "causal", "builder": None},
            "watch": {"on_nonfinite": "skip", "most_skipped": 3},
        },
        state={"optimizer_steps": 8, "skipped_in_a_row": 2, "tokens_seen": 10 * 8 * 32},
    )


CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "the cursor moved on": (lambda m: m.update(samples_seen=88), "samples_seen = 88"),
    "the cursor set back": (lambda m: m.update(samples_seen=0), "samples_seen = 0"),
    "another seed": (lambda m: m.update(seed=7), "run.seed = 1234"),
    "more steps taken": (lambda m: m["state"].update(optimizer_steps=11), "optimizer_steps = 11"),
    "more skipped": (lambda m: m["state"].update(skipped_in_a_row=3), "skipped_in_a_row = 3"),
    "more than allowed": (
        lambda m: m["state"].update(skipped_in_a_row=4, optimizer_steps=6),
        "watch.most_skipped",
    ),
    "skipped by a run that stops": (
        lambda m: m["config"]["watch"].update(on_nonfinite="stop"),
        "skipped_in_a_row = 2",
    ),
    "more tokens": (lambda m: m["state"].update(tokens_seen=2561), "tokens_seen = 2561"),
    "no number": (lambda m: m["state"].update(skipped_in_a_row="2"), "skipped_in_a_row = '2'"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_counts_that_contradict_each_other_are_refused(
    tmp_path: Path, fake: Any, name: str
) -> None:
    """The one before is taken, and the warning has both numbers."""
    change, value = CONTRADICTIONS[name]
    fake.save(tmp_path, 9)
    path = fake.save(tmp_path, 10)
    forge(path, as_a_run_saves)
    open_checkpoint(path).verify()
    forge(path, change)
    with raises("MW-CHECKPOINT-009", value):
        open_checkpoint(path)
    warned: list[str] = []
    found = newest_valid(tmp_path, warn=warned.append)
    assert found is not None and found.manifest.step == 9 and len(warned) == 1


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b"\xff\xfe{", b"[]", b"null", b'{"format": 1, "format": 2}']
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, fake: Any, text: bytes) -> None:
    path = fake.save(tmp_path, 1)
    forge(path, text=text)
    with raises(("MW-CHECKPOINT-005", "MW-CHECKPOINT-006"), "manifest.json"):
        open_checkpoint(path)


def test_duplicate_names_are_refused(tmp_path: Path, fake: Any) -> None:
    path = fake.save(tmp_path, 1)
    text = (path / "manifest.json").read_bytes()
    forge(path, text=text.replace(b'"step": 1', b'"step": 1, "step": 1'))
    with raises("MW-CHECKPOINT-005", "manifest.json", "'step'"):
        open_checkpoint(path)
    forge(path, text=text.replace(b'"weights/block0.scale": {', b'"weights/embedding.weight": {'))
    with raises("MW-CHECKPOINT-005", "manifest.json", "'weights/embedding.weight'"):
        open_checkpoint(path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path, fake: Any) -> None:
    """Each file has all of it: which one would count?"""
    path = fake.save(tmp_path, 1, max_file_bytes=2**20)
    other = path / "pp9-tp9-00000.safetensors"
    shutil.copyfile(path / "pp0-tp0-00000.safetensors", other)

    def twice(manifest: dict[str, Any]) -> None:
        manifest["files"][other.name] = manifest["files"]["pp0-tp0-00000.safetensors"]
        weight(manifest)["pieces"].append(weight(manifest)["pieces"][0] | {"file": other.name})

    forge(path, twice)
    with raises("MW-CHECKPOINT-009", "weights/embedding.weight", "pp9-tp9-00000.safetensors"):
        open_checkpoint(path)


def test_a_symlink_in_the_place_of_a_file_is_refused(tmp_path: Path, fake: Any) -> None:
    path = fake.save(tmp_path, 1)
    for file in sorted(path.iterdir()):
        outside = file.rename(tmp_path / "outside")
        file.symlink_to(outside)
        with raises(("MW-CHECKPOINT-014", "MW-CHECKPOINT-021"), file.name):
            open_checkpoint(path)
        file.unlink()
        outside.rename(file)
    open_checkpoint(path).verify()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04cposix\nsystem\n(S'false'\ntR.".ljust(64),  # a pickle
        (2**40).to_bytes(8, "little") + b"{}".ljust(56),  # a header of a terabyte
        (8).to_bytes(8, "little") + b"{}      ".ljust(56),  # no tensor of that name
    ],
)
def test_a_forged_shard_is_refused_on_reading(tmp_path: Path, fake: Any, content: bytes) -> None:
    path = fake.save(tmp_path, 1, max_file_bytes=2**20)
    (path / "pp0-tp0-00000.safetensors").write_bytes(content)
    file = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(path, lambda m: m["files"].update({"pp0-tp0-00000.safetensors": file}))
    checkpoint = open_checkpoint(path)
    with raises("MW-CHECKPOINT-020", "pp0-tp0-00000.safetensors"):
        checkpoint.read(TensorKind.WEIGHTS, fake.info("embedding.weight", 1, 0))


def test_a_shard_of_another_shape_or_dtype_is_refused_on_reading(tmp_path: Path, fake: Any) -> None:
    path = fake.save(tmp_path, 1)
    swapped = ("weights/block0.norm.weight", "weights/block0.scale")

    def swap(manifest: dict[str, Any]) -> None:
        manifest["tensors"][swapped[0]]["dtype"] = "F16"

    forge(path, swap)
    with raises("MW-CHECKPOINT-019", "BF16[6]", "F16[6]"):
        open_checkpoint(path).read(TensorKind.WEIGHTS, fake.info("block0.norm.weight", 1, 0))


SHARD = "pp0-tp0-00000.safetensors"


class Harm:
    """Unpickled, it makes a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


def go_over(run: Path, fake: Any) -> str:
    """Return all that is done with the checkpoints of a run; what was said against them."""
    said = []
    try:
        found = newest_valid(run, warn=said.append)
        assert found is not None
        for kind, info in itertools.product(KINDS, fake.infos(1, 0)):
            found.read(kind, info)
    except CheckpointError as error:
        said.append(str(error))
    with contextlib.suppress(CheckpointError):
        open_checkpoint(find(run)[0].path).read(
            TensorKind.WEIGHTS, fake.info("embedding.weight", 1, 0)
        )
    return "\n".join(said)


@pytest.mark.parametrize(
    "slot", ["manifest.json", "SHA256SUMS", SHARD, "extra.pkl", "extra.pt", "extra.safetensors"]
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_is_never_run(tmp_path: Path, fake: Any, slot: str, zipped: bool) -> None:
    """In any place, bare or as torch.save packs it: refused by name, or not looked at."""
    path, witness = fake.save(tmp_path, 1, max_file_bytes=2**20), tmp_path / "harm"
    buffer = io.BytesIO()
    if zipped:
        torch.save(Harm(witness), buffer)
    else:
        pickle.dump(Harm(witness), buffer)
    content = buffer.getvalue()
    pickle.loads(pickle.dumps(Harm(witness)))
    witness.rmdir()  # it would have worked
    (path / slot).write_bytes(content)
    if slot == "manifest.json":
        (path / "SHA256SUMS").write_text(f"{hashlib.sha256(content).hexdigest()}  manifest.json\n")
    elif slot == SHARD:
        file = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        forge(path, lambda m: m["files"].update({SHARD: file}))
    said = go_over(tmp_path, fake)
    assert slot in said if not slot.startswith("extra") else said == ""
    assert not witness.exists()


def with_header(text: bytes, length: int | None = None, size: int = 4096) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(size)


def one(**changes: Any) -> bytes:
    """Return a header whose tensor is that of the manifest, but for the changes."""
    entry = {"dtype": "BF16", "shape": [10, 6], "data_offsets": [0, 120]} | changes
    return json.dumps({"weights/embedding.weight": entry}).encode()


SHARDS: dict[str, bytes] = {
    "length of 2^63": with_header(one(), 2**63),
    "length of 2^64 - 1": with_header(one(), 2**64 - 1),
    "length beyond the file": with_header(one(), 10**5),
    "no header": b"",
    "deep": with_header(b"[" * 100_000),
    "nan": with_header(one(shape=[float("nan"), 6])),
    "negative": with_header(one(shape=[-10, 6])),
    "float": with_header(one(shape=[10.5, 6])),
    "huge": with_header(one(shape=[2**62, 6])),
    "overflow": with_header(one(shape=[2**33, 2**33])),
    "too large": with_header(one(shape=[10**25, 6])),
    "offsets beyond": with_header(one(data_offsets=[0, 2**40])),
    "offsets back": with_header(one(data_offsets=[120, 0])),
    "another shape": with_header(one(shape=[6, 10]), size=120),
    "another dtype": with_header(one(dtype="F16"), size=120),
    "unknown dtype": with_header(one(dtype="object")),
    "twice": with_header(one()[:-1] + b", " + one(data_offsets=[120, 240])[1:], size=240),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_with_a_hostile_header_is_refused(tmp_path: Path, fake: Any, name: str) -> None:
    put_in_place(tmp_path, fake, SHARDS[name])


def test_a_header_of_200_megabytes_is_refused(tmp_path: Path, fake: Any) -> None:
    """All of it there, and JSON: the tensor, and then spaces."""
    put_in_place(tmp_path, fake, with_header(one().ljust(200_000_000), size=120))


def put_in_place(run: Path, fake: Any, content: bytes) -> None:
    """Refused with its name, when it is read at the latest."""
    path = fake.save(run, 1, max_file_bytes=2**20)
    (path / SHARD).write_bytes(content)
    file = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(path, lambda m: m["files"].update({SHARD: file}))
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()  # the hashes agree
        with raises(("MW-CHECKPOINT-019", "MW-CHECKPOINT-020"), SHARD):
            checkpoint.read(TensorKind.WEIGHTS, fake.info("embedding.weight", 1, 0))


@pytest.mark.parametrize("what", ["directory", "link to a directory", "fifo", "dangling link"])
def test_what_is_no_file_is_refused(tmp_path: Path, fake: Any, what: str) -> None:
    path = fake.save(tmp_path, 1)
    for file in sorted(path.iterdir()):
        kept = file.read_bytes()
        file.unlink()
        if what == "directory":
            file.mkdir()
        elif what == "fifo":
            os.mkfifo(file)  # whoever opened it would wait for ever
        else:
            file.symlink_to(tmp_path if "to a" in what else tmp_path / "nowhere")
        with raises(("MW-CHECKPOINT-014", "MW-CHECKPOINT-021"), file.name):
            open_checkpoint(path)
        file.rmdir() if what == "directory" else file.unlink()
        file.write_bytes(kept)
    open_checkpoint(path).verify()


def test_a_link_in_the_place_of_a_checkpoint_is_refused_and_never_followed(
    tmp_path: Path, fake: Any
) -> None:
    """Neither read, nor, when its time has come, deleted behind the link."""
    run = tmp_path / "run"
    elsewhere = fake.save(tmp_path / "other", 5)
    for step in (10, 20):
        fake.save(run, step)
    for step in (5, 30):
        (run / "checkpoints" / f"step-{step:08}").symlink_to(elsewhere)
    (run / "checkpoints" / ".tmp-step-00000040-a1").symlink_to(elsewhere)
    (run / "checkpoints" / ".tmp-step-00000050-a1").write_text("no directory")
    with raises("MW-CHECKPOINT-010", "step-00000005"):
        open_checkpoint(run / "checkpoints" / "step-00000005")
    warnings: list[str] = []
    found = newest_valid(run, warn=warnings.append)
    assert (
        found is not None
        and found.manifest.step == 20
        and "step-00000030: is a symbolic link" in warnings[0]
    )
    assert [gone.step for gone in prune(run, 1, warn=warnings.append)] == [10, 5]
    fake.save(run, 40)  # goes over what the dead have left
    left = {path.name for path in (run / "checkpoints").iterdir()}
    assert left == {"step-00000020", "step-00000030", "step-00000040"}
    open_checkpoint(elsewhere).verify()


@pytest.mark.parametrize("value", ["absent", None, "7", 1.5, float("inf"), True, -1, [3]])
def test_numbers_of_the_state_are_whole(value: Any) -> None:
    state = {} if value == "absent" else {"optimizer_steps": value}
    with raises("MW-RUN-019", "step 3", "state.optimizer_steps"):
        saved_count(Manifest.model_construct(step=3, state=state), "optimizer_steps")
    assert (
        saved_count(
            Manifest.model_construct(step=3, state={"optimizer_steps": 7}), "optimizer_steps"
        )
        == 7
    )
