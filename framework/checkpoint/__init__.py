"""Checkpoints that any layout writes and any other reads. Nothing in one can run code.

    runs/demo/checkpoints/
      step-00000100/
        manifest.json               what is here: step, samples seen, seed, configuration, versions; for every tensor
                                    its global shape, dtype and pieces (file, key, offset per dim, shape)
        SHA256SUMS                  `sha256sum -c SHA256SUMS` verifies the checkpoint with nothing of ours installed
        pp0-tp0-00000.safetensors   plain safetensors; the key of a piece is the name of its tensor
        pp0-tp1-00000.safetensors
      .tmp-step-00000200-<attempt>/ a save under way, or one that died: never counts, removed at the next save
      broken-step-00000150-.../     was published, then damaged, and stood in the way of a save: kept for you to look at

`pp0-tp0` is a shard: what one rank wrote. Readers take file names from the manifest and see no meaning in them.
The name of a tensor is `<kind>/<parameter>`: `weights/block0.norm.weight`, `master/...` (float32 weights under bfloat16
ones), `exp_avg/...` and `exp_avg_sq/...` (AdamW's moments) or `momentum/...` (SGD's). A tensor cut over tensor
parallelism has one piece per cut; put each piece at its offset and the global tensor is whole. Padding is never
written. To read one without this package:

    manifest = json.load(open("manifest.json"))
    entry = manifest["tensors"]["weights/embedding.weight"]
    full = torch.empty(entry["shape"])
    for piece in entry["pieces"]:
        with safetensors.safe_open(piece["file"], framework="pt") as file:
            box = tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"]))
            full[box] = file.get_tensor(piece["key"])

A checkpoint appears by one rename of a directory whose every byte has been fsynced, and is never written into
afterwards. There is no "latest" pointer that could point at nothing: the newest directory that verifies is the latest.
"""

from meshwright.checkpoint.async_writer import Attempt, Behind, to_host
from meshwright.checkpoint.compatible import compatible
from meshwright.checkpoint.manifest import Head, Kind, Manifest
from meshwright.checkpoint.read import Candidate, Checkpoint, find, newest_valid, open_checkpoint
from meshwright.checkpoint.retention import prune
from meshwright.checkpoint.save import begin, publish
from meshwright.checkpoint.shard import Piece, ShardReport, write_shard

__all__ = [
    "Attempt",
    "Behind",
    "Candidate",
    "Checkpoint",
    "Head",
    "Kind",
    "Manifest",
    "Piece",
    "ShardReport",
    "begin",
    "compatible",
    "find",
    "newest_valid",
    "open_checkpoint",
    "prune",
    "publish",
    "to_host",
    "write_shard",
]
