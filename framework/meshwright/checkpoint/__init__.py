"""Checkpoints that any layout writes and any other layout reads. Their contents cannot run code.

    runs/demo/checkpoints/
      step-00000100/
        manifest.json               contents: step, samples seen, seed, configuration, versions; for every tensor
                                    its global shape, dtype and pieces (file, key, offset per dim,
                                    shape)
        SHA256SUMS                  `sha256sum -c SHA256SUMS` verifies the checkpoint without this package
        pp0-dp0-tp0-00000.safetensors
                                    plain safetensors; the key of a piece is the name of its tensor, with "/0",
                                    "/1", ... if a rank writes several boxes of it
        pp0-dp0-tp1-00000.safetensors
      .tmp-step-00000200-<attempt>/ a save in progress or a dead one: never read, removed at the
      next save
      broken-step-00000150-.../     damaged after publication, moved aside by a later save of this step for inspection

`pp0-dp0-tp0` is a shard, the files of one rank. Every rank writes its own boxes of each tensor,
without communication: its shard, divided over the ranks with copies of it (``Holders.saved_range``).
Readers take file names from the manifest and do not interpret them. The name of a tensor is
`<kind>/<parameter>`: `weights/block0.norm.weight`, `master/...` (float32 weights under bfloat16
ones), `exp_avg/...` and `exp_avg_sq/...` (AdamW's moments) or `momentum/...` (SGD's). The pieces at
their offsets form the global tensor. Padding is never written. To read one without this package:

    manifest = json.load(open("manifest.json"))
    entry = manifest["tensors"]["weights/embedding.weight"]
    full = torch.empty(entry["shape"])
    for piece in entry["pieces"]:
        with safetensors.safe_open(piece["file"], framework="pt") as file:
            box = tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"]))
            full[box] = file.get_tensor(piece["key"])

A checkpoint is published by one rename of a directory whose every byte has been fsynced. It is
never modified afterwards. There is no "latest" pointer that could dangle: the newest directory that
verifies is the latest.
"""

from meshwright.checkpoint.async_writer import AsyncWriter as AsyncWriter
from meshwright.checkpoint.async_writer import SaveAttempt as SaveAttempt
from meshwright.checkpoint.compatible import check_compatible as check_compatible
from meshwright.checkpoint.files import shard_name as shard_name
from meshwright.checkpoint.host_copy import HostSlab as HostSlab
from meshwright.checkpoint.manifest import CheckpointMetadata as CheckpointMetadata
from meshwright.checkpoint.manifest import Manifest as Manifest
from meshwright.checkpoint.manifest import TensorKind as TensorKind
from meshwright.checkpoint.read import Candidate as Candidate
from meshwright.checkpoint.read import CheckpointReader as CheckpointReader
from meshwright.checkpoint.read import find as find
from meshwright.checkpoint.read import first_sound as first_sound
from meshwright.checkpoint.read import has_checkpoint as has_checkpoint
from meshwright.checkpoint.read import newest_valid as newest_valid
from meshwright.checkpoint.read import open_checkpoint as open_checkpoint
from meshwright.checkpoint.retention import prune as prune
from meshwright.checkpoint.save import begin as begin
from meshwright.checkpoint.save import publish as publish
from meshwright.checkpoint.shard import TensorPiece as TensorPiece
from meshwright.checkpoint.shard import write_shard as write_shard
