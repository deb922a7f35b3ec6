"""Tokens per second of `meshwright data prepare` against Megatron's own way
and Hugging Face datasets' map.

    python benchmarks/data_prepare.py [--copies 6] [--workers 2] [--repeats 5] [--datasets-python
    PYTHON] [--out FILE]

The text is the standard library's sources, --copies times over, as JSONL. The tokenizer is a
byte-level BPE of 32,000 tokens trained on it. Each contender is a fresh process that reads the same
file with the same number of workers, in turns; imports are not timed. Seconds are those of the
wall, of all CPUs (the least disturbed by other work on the machine), and of the one process that
writes: it limits how many workers still help. The output of ours and of Megatron's way is compared
byte for byte. ``--datasets-python``: an interpreter that has `datasets` and `transformers`, if this
one has not.

ours        meshwright.data.prepare.preparation, as the command line calls it (split of documents off: one train.bin)
megatron    as tools/preprocess_data.py of Megatron-LM: a pool that maps over lines, 32 at a time, with the tokenizer of
            transformers that its HuggingFaceTokenizer calls; lists of ids go to one
            IndexedDatasetBuilder
bare        the same with `tokenizers` itself, as fast as that way can be
datasets    load_dataset("json"), then map in batches of 1,000; it leaves Arrow files, not a .bin
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
END = "<|endoftext|>"


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


@contextmanager
def timed(found: dict[str, Any]) -> Iterator[None]:
    """Measure the seconds of a block and store them in ``found``: wall, all CPUs,
    and the process that writes.
    """
    before = time.perf_counter(), cpu_s(), time.process_time()
    yield
    after = time.perf_counter(), cpu_s(), time.process_time()
    names = ("wall_s", "cpu_s", "writer_cpu_s")
    found |= {name: end - begin for name, begin, end in zip(names, before, after, strict=True)}


def ours(source: Path, tokenizer: Path, out: Path, workers: int) -> dict[str, Any]:
    from meshwright.data.prepare.preparation import Options, prepare

    found: dict[str, Any] = {}
    with timed(found):
        made = prepare(Options([source], tokenizer, out, validation_share=0.0, num_workers=workers))
    return found | {"tokens": made.fingerprint.splits["train"].tokens}


class Encode:
    """Encoder as in Megatron: created in the parent, with a tokenizer in each worker."""

    encode_ids: Callable[[str], list[int]]
    end: int

    def __init__(self, tokenizer: Path, bare: bool) -> None:
        self.tokenizer, self.bare = tokenizer, bare

    def initializer(self) -> None:
        if self.bare:
            from tokenizers import Tokenizer

            loaded = Tokenizer.from_file(str(self.tokenizer))
            loaded.encode_special_tokens = True
            Encode.encode_ids = lambda text: loaded.encode(text, add_special_tokens=False).ids  # type: ignore[assignment]
            Encode.end = loaded.token_to_id(END)
        else:
            from transformers import PreTrainedTokenizerFast

            fast = PreTrainedTokenizerFast(tokenizer_file=str(self.tokenizer))
            Encode.encode_ids = lambda text: fast(text).input_ids  # type: ignore[assignment]
            Encode.end = fast.convert_tokens_to_ids(END)

    def encode(self, line: str) -> tuple[list[int], list[int], int]:
        text = json.loads(line)["text"]
        ids = Encode.encode_ids(text)
        if ids:
            ids.append(Encode.end)
        return ids, [len(ids)], len(line)


def megatron(
    source: Path, tokenizer: Path, out: Path, workers: int, *, bare: bool = False
) -> dict[str, Any]:
    import numpy as np

    from meshwright.data.indexed import megatron_indexed_dataset

    if not bare:
        import transformers  # noqa: F401
    module = megatron_indexed_dataset()
    out.mkdir(parents=True)
    found: dict[str, Any] = {}
    tokens = 0
    with timed(found):
        encoder = Encode(tokenizer, bare)
        with source.open(encoding="utf-8") as lines:
            pool = multiprocessing.get_context("fork").Pool(
                workers, initializer=encoder.initializer
            )
            builder = module.IndexedDatasetBuilder(str(out / "train.bin"), dtype=np.uint16)
            for ids, lengths, _ in pool.imap(encoder.encode, lines, 32):
                builder.add_document(ids, lengths)
                tokens += len(ids)
            pool.close()
            pool.join()
        builder.finalize(str(out / "train.idx"))
    return found | {"tokens": tokens}


def datasets(source: Path, tokenizer: Path, out: Path, workers: int) -> dict[str, Any]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from datasets import load_dataset  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    end = fast.convert_tokens_to_ids(END)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = fast(
            batch["text"], return_attention_mask=False, return_token_type_ids=False
        ).input_ids
        return {"input_ids": [[*each, end] for each in ids]}

    found: dict[str, Any] = {}
    with timed(found):
        loaded = load_dataset("json", data_files=str(source), split="train", cache_dir=str(out))
        mapped = loaded.map(
            encode,
            batched=True,
            num_proc=workers,
            remove_columns=["text"],
            load_from_cache_file=False,
        )
    return found | {
        "tokens": sum(len(ids) for batch in mapped.iter(1000) for ids in batch["input_ids"])
    }


CONTENDERS: dict[str, Callable[[Path, Path, Path, int], dict[str, Any]]] = {
    "ours": ours,
    "megatron": megatron,
    "bare": lambda source, tokenizer, out, workers: megatron(
        source, tokenizer, out, workers, bare=True
    ),
    "datasets": datasets,
}


def make_task(folder: Path, copies: int) -> tuple[Path, Path, int]:
    """Write the task's files; return the JSONL, the tokenizer.json, and the bytes of text."""
    from meshwright.data import tokenizer
    from meshwright.data.prepare import sources

    source = sources.stdlib()
    texts = [document.text() for document in source.documents]
    tokenizer.train(texts, 32_000).save(str(folder / "tokenizer.json"))
    with (folder / "text.jsonl").open("w", encoding="utf-8") as stream:
        for _ in range(copies):
            stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return (
        folder / "text.jsonl",
        folder / "tokenizer.json",
        copies * sum(len(text.encode()) for text in texts),
    )


def run(name: str, python: str, words: list[str]) -> dict[str, Any]:
    """Run one contender in a fresh process;
    return the result that its last line of output contains.
    """
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, str(Path(__file__)), "--contender", name, *words],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(options: argparse.Namespace) -> None:
    """Run all contenders in turns; print a table and write JSON."""
    names = [name for name in CONTENDERS if name != "datasets" or options.datasets_python]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="data-prepare-", dir=options.scratch) as place:
        folder = Path(place)
        source, tokenizer, text_bytes = make_task(folder, options.copies)
        for repeat in range(options.repeats):
            for name in names[:: 1 if repeat % 2 == 0 else -1]:
                out = folder / name
                shutil.rmtree(out, ignore_errors=True)
                python = options.datasets_python if name == "datasets" else sys.executable
                words = [str(source), str(tokenizer), str(out), str(options.workers)]
                rows[name].append(run(name, python, words))
                print(f"{name:<9} {rows[name][-1]}", file=sys.stderr, flush=True)
            same = {
                ending: (
                    (folder / f"ours/train.{ending}").read_bytes()
                    == (folder / f"bare/train.{ending}").read_bytes()
                )
                for ending in ("bin", "idx")
            }
            # after each turn, so that an interrupted benchmark has results
            tell(options, rows, text_bytes, same)


def tell(
    options: argparse.Namespace, rows: dict[str, list[dict[str, Any]]], text_bytes: int, same: Any
) -> None:
    """Print the table and write the JSON file."""
    result: dict[str, Any] = {
        "environment": {
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": "python benchmarks/data_prepare.py " + " ".join(sys.argv[1:]),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg(),
        },
        "task": {"text_bytes": text_bytes, "copies": options.copies, "workers": options.workers},
        "same_bytes_as_megatron": same,
        "tokens": {name: sorted({row["tokens"] for row in found}) for name, found in rows.items()},
        "rows": rows,
        "ratios": {},
    }
    kinds = ("wall_s", "cpu_s", "writer_cpu_s")
    print(
        f"\n{text_bytes / 1e6:.1f} MB of text, {options.workers} workers, medians of"
        f" {len(rows['ours'])} turns"
    )
    print(
        f"{'':<9} {'tokens/s':>10} {'per CPU s':>10} {'of writer':>10}   ours is so many times as"
        " fast, by each of them"
    )
    for name, found in rows.items():
        ratios = {
            kind: [
                theirs[kind] / mine[kind] for theirs, mine in zip(found, rows["ours"], strict=True)
            ]
            for kind in kinds
        }
        result["ratios"][name] = {
            kind: [statistics.median(r), min(r), max(r)] for kind, r in ratios.items()
        }
        rate = [statistics.median(row["tokens"] / row[kind] for row in found) for kind in kinds]
        told = "   ".join(
            f"{statistics.median(r):.2f} [{min(r):.2f} .. {max(r):.2f}]" for r in ratios.values()
        )
        print(f"{name:<9} {rate[0]:>10,.0f} {rate[1]:>10,.0f} {rate[2]:>10,.0f}   {told}")
    print(f"the same bytes as Megatron's: {same}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    if sys.argv[1:2] == ["--contender"]:
        name, source, tokenizer, out, workers = sys.argv[2:]
        print(json.dumps(CONTENDERS[name](Path(source), Path(tokenizer), Path(out), int(workers))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--copies", type=int, default=6, help="of the standard library (default: 6)"
    )
    parser.add_argument("--workers", type=int, default=2, help="of each contender (default: 2)")
    parser.add_argument("--repeats", type=int, default=5, help="turns (default: 5)")
    parser.add_argument(
        "--datasets-python", metavar="PYTHON", help="an interpreter with datasets and transformers"
    )
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where files are written"
    )
    day = datetime.now().date().isoformat()
    parser.add_argument("--out", type=Path, default=RESULTS / f"{day}-data-prepare.json")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
