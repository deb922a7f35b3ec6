"""Files made to do harm: refused before anything is believed, and nothing in them is ever run.

Their hashes all agree, as whoever forges a checkpoint can make them agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint import Kind, open_checkpoint
from framework.errors import CheckpointError


def forge(path: Path, change: Callable[[dict[str, Any]], Any] | None = None, text: bytes | None = None) -> None:
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
    "unlisted": (lambda m: weight(m)["pieces"][0].update(file="other.safetensors"), "no size and hash"),
    "gap": (lambda m: weight(m)["pieces"].pop(), "the pieces hold 30 of the 60"),
    "twice": (lambda m: weight(m)["pieces"].append(weight(m)["pieces"][0]), "used twice"),
    "beyond": (lambda m: weight(m)["pieces"][0].update(offset=[8, 0]), "reaches beyond"),
    "negative": (lambda m: weight(m)["pieces"][0].update(offset=[-5, 0]), "greater than or equal to 0"),
    "nan": (lambda m: weight(m).update(shape=[float("nan"), 6]), "NaN"),
    "float": (lambda m: weight(m).update(shape=[10.5, 6]), "valid integer"),
    "text": (lambda m: m.update(step="1"), "valid integer"),
    "dims": (lambda m: weight(m)["pieces"][0].update(offset=[0]), "have not the 2 dims"),
    "dtype": (lambda m: weight(m).update(dtype="object"), "'F64'"),
    "kind": (lambda m: m["tensors"].update({"pickle/x": weight(m) | {"pieces": []}}), "pickle/x"),
    "unknown key": (lambda m: m.update(run="rm -rf"), "[Ee]xtra"),
    "version": (lambda m: m.update(version=2), "format version 2, this meshwright reads version 1"),
    "format": (lambda m: m.update(format="other"), "not a manifest"),
    "no size": (lambda m: m["files"].clear(), "no size and hash"),
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


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe{", b"[]", b"null", b'{"format": 1, "format": 2}'])
def test_what_is_no_manifest_is_refused(tmp_path: Path, fake: Any, text: bytes) -> None:
    path = fake.save(tmp_path, 1)
    forge(path, text=text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_checkpoint(path)


def test_duplicate_names_are_refused(tmp_path: Path, fake: Any) -> None:
    path = fake.save(tmp_path, 1)
    text = (path / "manifest.json").read_bytes()
    forge(path, text=text.replace(b'"step": 1', b'"step": 1, "step": 1'))
    with pytest.raises(CheckpointError, match="'step' stands there twice"):
        open_checkpoint(path)


def test_a_symlink_in_the_place_of_a_file_is_refused(tmp_path: Path, fake: Any) -> None:
    path = fake.save(tmp_path, 1)
    for file in sorted(path.iterdir()):
        outside = file.rename(tmp_path / "outside")
        file.symlink_to(outside)
        with pytest.raises(CheckpointError, match=f"{file.name}: is missing \\(or no regular file\\)"):
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
    with pytest.raises(CheckpointError, match=r"pp0-tp0-00000\.safetensors.*cannot be read"):
        checkpoint.read(Kind.WEIGHTS, fake.info("embedding.weight", 1, 0))


def test_a_shard_of_another_shape_or_dtype_is_refused_on_reading(tmp_path: Path, fake: Any) -> None:
    path = fake.save(tmp_path, 1)
    swapped = ("weights/block0.norm.weight", "weights/block0.scale")

    def swap(manifest: dict[str, Any]) -> None:
        manifest["tensors"][swapped[0]]["dtype"] = "F16"

    forge(path, swap)
    with pytest.raises(CheckpointError, match=r"BF16\[6\] in the file and F16\[6\] in the manifest"):
        open_checkpoint(path).read(Kind.WEIGHTS, fake.info("block0.norm.weight", 1, 0))
