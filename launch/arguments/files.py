"""Commands for files on disk: corpora, configurations, checkpoints, models in other formats."""

from __future__ import annotations

from pathlib import Path

from meshwright.launch import commands
from meshwright.launch import data as corpora
from meshwright.launch.arguments.common import (
    Added,
    command,
    config_file,
    count,
    parse_count_from_0,
    size,
    text,
    trust_code,
)


def data(added: Added) -> None:
    of_data = command(
        added,
        "data",
        None,
        "turn text into tokens, and look at them",
        "Writes Megatron .bin/.idx pairs, split by document: `prepare` with a tokenizer that exists, from text, JSONL "
        "and parquet of any size; `stdlib` and `files` train a byte-level BPE tokenizer first. `show` prints what is "
        "there.",
        "meshwright data prepare pages/*.jsonl.gz --tokenizer ~/models/llama-3.1-8b --out data/pages\n"
        "  meshwright data show data/pages",
    )
    sources = of_data.add_subparsers(title="commands", dest="source", metavar="WHAT", required=True)
    _data_prepare(sources)
    _data_show(sources)
    verified = command(
        sources,
        "verify",
        corpora.verify,
        "every byte of a prepared corpus against its hashes",
        "Reads every file of a folder that `data prepare`, `stdlib` or `files` has written and compares its sha256 "
        "with fingerprint.json; exit code 1 when one differs. A run itself looks at sizes and a sample of each file.",
        "meshwright data verify data/pages",
    )
    verified.add_argument("place", type=Path, metavar="DIR", help="the folder of the corpus")
    stdlib = command(
        sources,
        "stdlib",
        commands.data_stdlib,
        "the source text of this Python's own library: no download",
        "Prepares the .py files of the running Python's standard library.",
        "meshwright data stdlib --out runs/data/stdlib --vocab-size 4096",
    )
    files = command(
        sources,
        "files",
        commands.data_files,
        "text files and folders of them",
        "A document per file; a folder stands for all files below it.",
        "meshwright data files notes/ book.txt --out runs/data/notes --vocab-size 8192",
    )
    files.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="text files, or folders of them")
    for parser in (stdlib, files):
        parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the corpus is written")
        parser.add_argument("--vocab-size", type=count, default=4096, metavar="N", help="default: 4096")
        parser.add_argument(
            "--validation-share", type=float, default=0.05, metavar="X", help="of the documents (default: 0.05)"
        )
        parser.add_argument("--replace", action="store_true", help="build anew over a corpus of other text or settings")


def _data_prepare(sources: Added) -> None:
    prepared = command(
        sources,
        "prepare",
        corpora.prepare,
        "text, JSONL and parquet of any size, with any tokenizer.json",
        "Reads files in their order (folders: all files below, sorted), encodes in parallel and writes "
        "train, validation and test as Megatron .bin/.idx pairs, each document in one of them. Killed at any moment, "
        "the same command goes on, and the result is byte for byte the same, for any number of workers.",
        "meshwright data prepare books/ pages.jsonl.gz --tokenizer ~/models/gpt2 --out data/books\n"
        "  meshwright data prepare crawl/*.parquet --text-key content --tokenizer tok/tokenizer.json --eod '</s>' \\\n"
        "      --validation-share 0.001 --test-share 0.001 --workers 32 --out data/crawl\n"
        "  meshwright data prepare chats.jsonl --format messages --tokenizer ~/models/qwen3-0.6b --out data/chats",
    )
    prepared.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="SOURCE",
        help=".jsonl (also .gz): a document per line; .parquet: per row; a folder; any other file: one text",
    )
    prepared.add_argument(
        "--tokenizer", type=Path, required=True, metavar="T", help="a tokenizer.json, or the folder of one"
    )
    prepared.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the corpus is written")
    prepared.add_argument(
        "--format",
        choices=["text", "pairs", "messages"],
        default="text",
        help="pairs (prompt, response) and messages (role, content) train on responses only (default: text)",
    )
    prepared.add_argument(
        "--text-key", default="text", type=text, metavar="KEY", help="of JSONL and parquet (default: text)"
    )
    prepared.add_argument(
        "--glob", action="append", default=[], metavar="PATTERN", help="of folders only such files; several times"
    )
    prepared.add_argument(
        "--eod",
        type=text,
        metavar="TOKEN",
        help="ends a document (default: eos_token of tokenizer_config.json, or a usual one)",
    )
    prepared.add_argument(
        "--bos", type=text, metavar="TOKEN", help="stands before each document (default: nothing does)"
    )
    for name, default in (("validation", 0.05), ("test", 0.0)):
        prepared.add_argument(
            f"--{name}-share", type=float, default=default, metavar="X", help=f"of the documents (default: {default})"
        )
    prepared.add_argument("--seed", type=int, default=1234, metavar="N", help="of the split (default: 1234)")
    prepared.add_argument("--workers", type=count, default=0, metavar="N", help="processes (default: one per core)")
    prepared.add_argument(
        "--skip-broken", action="store_true", help="leave out broken records, count them and list them in skipped.txt"
    )
    prepared.add_argument("--replace", action="store_true", help="build anew over a corpus of other text or settings")


def _data_show(sources: Added) -> None:
    shown = command(
        sources,
        "show",
        corpora.show,
        "samples of a corpus as text, with counts",
        "Prints what a model would be trained on: where documents begin, and dimmed (in a file: in braces) what does "
        "not count as label. Damaged files are named. Reads a few tokens of a corpus of any size.",
        "meshwright data show data/chats --samples 5\n"
        "  meshwright data show data/pages/validation --sequence-length 512 --packing documents",
    )
    shown.add_argument("place", type=Path, metavar="DIR", help="a prepared folder, or one .bin/.idx without its suffix")
    shown.add_argument("--samples", type=count, default=3, metavar="N", help="of each split (default: 3)")
    shown.add_argument("--sequence-length", type=count, default=256, metavar="S", help="tokens (default: 256)")
    shown.add_argument("--packing", choices=["stream", "documents"], default="stream", help="as data.packing has it")
    shown.add_argument("--tokenizer", type=Path, metavar="T", help="default: the tokenizer.json beside the corpus")


def config(added: Added) -> None:
    of_configs = command(
        added,
        "config",
        None,
        "read another framework's configuration; show what one of ours means",
        "Without torch, a device or the data.",
        "meshwright config show configs/demo.toml",
    )
    commands_of = of_configs.add_subparsers(title="commands", dest="what", metavar="WHAT", required=True)
    imported = command(
        commands_of,
        "import",
        commands.config_import,
        "one of torchtitan, nanotron or Megatron-LM as one of ours",
        "Reads torchtitan's TOML (job_config), nanotron's YAML, and Megatron-LM's flags, in a shell script (which is "
        "not run) or as they stand. Says what was decided, and each key that could not come along, with the reason. "
        "Keys of ours on the command line go on top. Without --out the file goes to stdout.",
        "meshwright config import llama3_8b.toml --from torchtitan --ranks 64 --out configs/imported.toml",
        takes_overrides=True,
    )
    imported.add_argument("file", metavar="FILE", type=Path, help="a .toml, a .yaml, or a script or list of flags")
    imported.add_argument(
        "--from", choices=("torchtitan", "nanotron", "megatron"), help="whose it is (default: by the end of its name)"
    )
    imported.add_argument("--ranks", type=count, metavar="N", help="of the whole job, where the file leaves dp open")
    imported.add_argument("--out", type=Path, metavar="FILE", help="a TOML file (default: on stdout)")
    imported.add_argument("--replace", action="store_true", help="write over a file that is there")
    shown = command(
        commands_of,
        "show",
        commands.config_show,
        "what a configuration comes to, and where each value comes from",
        "The file, the command line, a default, or what follows from the others for so many ranks.",
        "meshwright config show configs/demo.toml --parallel.tp=4 --parallel.pp=1",
        takes_overrides=True,
    )
    config_file(shown)
    shown.add_argument("--ranks", type=count, metavar="N", help="that would run it (default: what the degrees say)")
    shown.add_argument("--all", action="store_true", help="also what stands at its default")


def checkpoint(added: Added) -> None:
    of_checkpoints = command(
        added,
        "checkpoint",
        None,
        "what a run has saved, and whether it is sound",
        "Reads checkpoints of any layout without starting a rank, and changes none.",
        "meshwright checkpoint verify runs/demo",
    )
    commands_of = of_checkpoints.add_subparsers(title="commands", dest="what", metavar="WHAT", required=True)
    listed = command(
        commands_of,
        "list",
        commands.checkpoint_list,
        "a line for each",
        "Step, samples seen, the layout that saved it, tensors, files, bytes. What is missing or cut short is named; "
        "every byte is read by `verify`.",
        "meshwright checkpoint list runs/demo",
    )
    verified = command(
        commands_of,
        "verify",
        commands.checkpoint_verify,
        "read every byte and hold it against its hash",
        "All checkpoints of a run, or one. Exit code 1 when a file is not what was written.",
        "meshwright checkpoint verify runs/demo --step 120",
    )
    shown = command(
        commands_of,
        "show",
        commands.checkpoint_show,
        "what is in one",
        "The newest of a run, or that of --step: what it is of, and its tensors.",
        "meshwright checkpoint show runs/demo --tensor embedding.tokens.weight",
    )
    shown.add_argument("--tensor", metavar="NAME", help="only this parameter, with its pieces and their files")
    resharded = command(
        commands_of,
        "reshard",
        commands.checkpoint_reshard,
        "rewrite one as another layout would have saved it",
        "Reads the newest checkpoint of a run, or that of --step, and writes it into another run directory, which "
        "`meshwright train` goes on from: a file or more for each rank of the new layout, or one in all. Any layout "
        "reads any checkpoint without it. Only parallel.*, pipeline.*, run.name and run.directory may change.",
        "meshwright checkpoint reshard runs/demo --out runs/one-file --parallel.pp=1 --parallel.tp=1",
        takes_overrides=True,
    )
    resharded.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run directory to be written")
    trust_code(resharded)
    for parser in (listed, verified, shown, resharded):
        parser.add_argument("place", type=Path, metavar="RUN", help="a run directory, or one of its checkpoints/step-*")
        if parser is not listed:
            parser.add_argument("--step", type=parse_count_from_0, metavar="N", help="the checkpoint of this step")


def convert(added: Added) -> None:
    parser = command(
        added,
        "convert",
        commands.convert,
        "bring a model of Hugging Face's form, or take one away in it",
        "GPT-2, Llama (2, 3, 3.1), Mistral, Qwen2, Qwen3 and T5. --from writes a new run directory, which `meshwright "
        "train` fine-tunes from these weights on any layout, and `meshwright sample` writes with; keys of the "
        "configuration may follow. --to writes the newest checkpoint of a run, or that of --step, as transformers, "
        "vLLM and lm-eval open it. One tensor at a time, the same bits both ways; no network, nothing is unpickled.",
        "meshwright convert --from hf models/Llama-3.1-8B runs/llama --data.train=runs/data/mine/train\n"
        "  meshwright train runs/llama/config.toml --parallel.tp=8\n"
        "  meshwright convert runs/llama --to hf models/mine --dtype bfloat16",
        takes_overrides=True,
    )
    parser.add_argument(
        "place",
        type=Path,
        metavar="RUN",
        help="the run directory to be written; with --to a run, or a checkpoints/step-*",
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--from", dest="source", nargs=2, metavar=("hf", "PATH"), help="a directory to read")
    direction.add_argument("--to", dest="target", nargs=2, metavar=("hf", "PATH"), help="a directory to be written")
    parser.add_argument("--step", type=parse_count_from_0, metavar="N", help="with --to: the checkpoint of this step")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        help="with --to: of the tensors (default: as saved; float32 of a bfloat16 run: its master weights)",
    )
    parser.add_argument(
        "--shard-size", type=size, metavar="SIZE", help="with --to: of a file, as in 500MB or 2GiB (default: 5GB)"
    )
    parser.usage = f"{parser.prog} (--from hf PATH RUN | RUN --to hf PATH) [options] [--section.key=value ...]"
