"""Commands for files on disk: corpora, configurations, models in other formats."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright_launch.arguments.common import (
    Added,
    command,
    config_file,
    count,
    output,
    part,
    rank_count,
    seed,
    text,
    trust_code,
    whole,
)

MAX_WORKERS, MAX_SHOWN = 1024, 10_000
"""Maximum numbers of processes, and of printed samples."""
MAX_VOCABULARY = 10**7


def data(added: Added) -> None:
    of_data = command(
        added,
        "data",
        None,
        "tokenize text into a corpus, or print a corpus",
        "Writes Megatron .bin/.idx pairs of training and validation. `prepare` uses an existing"
        " tokenizer, on text, JSONL and parquet of any size; `stdlib` and `files` train a"
        " byte-level BPE tokenizer. `show` prints samples.",
        "meshwright data prepare pages/*.jsonl.gz --tokenizer ~/models/llama-3.1-8b --out"
        " data/pages\n  meshwright data show data/pages",
    )
    sources = of_data.add_subparsers(title="commands", dest="source", metavar="WHAT", required=True)
    _data_prepare(sources)
    _data_show(sources)
    _data_verify(sources)
    _data_stdlib(sources)
    _data_files(sources)


def _split_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split",
        choices=["auto", "documents", "position"],
        default="auto",
        help=(
            "whole documents in each split, or the ends of the documents for validation and test "
            "(default: position for fewer than 1,000 documents)"
        ),
    )


def _record_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the form of the records, and their keys."""
    parser.add_argument(
        "--format",
        choices=["text", "pairs", "messages"],
        default="text",
        help=(
            "pairs (prompt, response) and messages (role, content) train on responses only"
            " (default: text)"
        ),
    )
    parser.add_argument(
        "--text-key",
        type=text,
        metavar="KEY",
        help="field of JSONL, column of parquet (default: text)",
    )
    for name in ("prompt", "response"):
        parser.add_argument(
            f"--{name}-key",
            type=text,
            metavar="KEY",
            help=f"field or column of pairs (default: {name})",
        )
    parser.add_argument(
        "--chat-template",
        type=text,
        metavar="T",
        help=(
            "write messages with a chat template: `tokenizer`, for the one beside it, or a .jinja"
            " file (default: <|user|> and <|assistant|> lines)"
        ),
    )
    parser.add_argument(
        "--max-tokens",
        type=count,
        metavar="N",
        help="with a chat template: cut conversations to the turns that fit (default: any length)",
    )


def _boundary_options(parser: argparse.ArgumentParser) -> None:
    """Add the tokens at the ends of a document."""
    parser.add_argument(
        "--eod",
        type=text,
        metavar="TOKEN",
        help="end-of-document token (default: the tokenizer's end-of-text token)",
    )
    parser.add_argument(
        "--bos", type=text, metavar="TOKEN", help="token before each document (default: none)"
    )


def _data_prepare(sources: Added) -> None:
    prepared = command(
        sources,
        "prepare",
        "data:prepare",
        "tokenize text, JSONL and parquet of any size with any tokenizer.json",
        "Reads files in their order (folders: all files below, sorted), encodes in parallel and"
        " writes train, validation and test as Megatron .bin/.idx pairs. After a kill the same"
        " command resumes; the result is the same byte for byte, for any number of workers.",
        "meshwright data prepare books/ pages.jsonl.gz --tokenizer ~/models/gpt2 --out data/books\n"
        "  meshwright data prepare crawl/*.parquet --text-key content --tokenizer"
        " tok/tokenizer.json --eod '</s>' \\\n      --validation-share 0.001 --test-share 0.001"
        " --workers 32 --out data/crawl\n  meshwright data prepare chats.jsonl --format messages"
        " --chat-template tokenizer \\\n      --tokenizer ~/models/qwen3-0.6b --out data/chats",
    )
    prepared.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="SOURCE",
        help=(
            ".jsonl (also .gz): one document per line; .parquet: one per row; other files: one per"
            " file; or a folder"
        ),
    )
    prepared.add_argument(
        "--tokenizer", type=Path, required=True, metavar="T", help="a tokenizer.json, or its folder"
    )
    output(prepared, "DIR", "folder of the new corpus", "corpus", is_folder=True, is_required=True)
    _record_options(prepared)
    prepared.add_argument(
        "--glob",
        action="append",
        default=[],
        metavar="PATTERN",
        help="take only these files of folders; may be repeated",
    )
    _boundary_options(prepared)
    _share_option(prepared, "validation", 0.05)
    _share_option(prepared, "test", 0.0)
    _split_option(prepared)
    prepared.add_argument(
        "--seed",
        type=seed,
        default=1234,
        metavar="N",
        help="seed of a split by documents (default: 1234)",
    )
    workers = "number of processes (default: one per core)"
    prepared.add_argument(
        "--workers", type=whole(1, MAX_WORKERS), default=0, metavar="N", help=workers
    )
    prepared.add_argument(
        "--skip-broken",
        action="store_true",
        help="leave out broken records, count them and list them in skipped.txt",
    )
    _replace_option(prepared)


def _data_verify(sources: Added) -> None:
    verified = command(
        sources,
        "verify",
        "data:verify",
        "check every byte of a prepared corpus against its hashes",
        "Compares the sha256 of every file written by `data prepare`, `stdlib` or `files` with"
        " fingerprint.json; exit code 1 when one differs. A training run itself checks sizes and a"
        " sample of each file.",
        "meshwright data verify data/pages",
    )
    verified.add_argument("place", type=Path, metavar="DIR", help="the folder of the corpus")


def _data_stdlib(sources: Added) -> None:
    parser = command(
        sources,
        "stdlib",
        "data:prepare_stdlib",
        "prepare the source text of Python's standard library: no download",
        "Prepares the .py files of the running Python's standard library.",
        "meshwright data stdlib --out runs/data/stdlib --vocab-size 4096",
    )
    _new_tokenizer_options(parser)


def _data_files(sources: Added) -> None:
    parser = command(
        sources,
        "files",
        "data:prepare_files",
        "prepare text files, and folders of them",
        "Each file is a document; of a folder all files below it.",
        "meshwright data files notes/ book.txt --out runs/data/notes --vocab-size 8192",
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="text files, or folders of them"
    )
    _split_option(parser)
    _new_tokenizer_options(parser)


def _new_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a corpus for which a tokenizer is trained."""
    output(parser, "DIR", "folder of the new corpus", "corpus", is_folder=True, is_required=True)
    parser.add_argument(
        "--vocab-size",
        type=whole(1, MAX_VOCABULARY),
        default=4096,
        metavar="N",
        help="tokens of the vocabulary (default: 4096)",
    )
    _share_option(parser, "validation", 0.05)
    _replace_option(parser)


def _share_option(parser: argparse.ArgumentParser, split: str, default: float) -> None:
    parser.add_argument(
        f"--{split}-share",
        type=part,
        default=default,
        metavar="X",
        help=f"share of the text (default: {default})",
    )


def _replace_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replace", action="store_true", help="overwrite a corpus of other text or settings"
    )


def _data_show(sources: Added) -> None:
    shown = command(
        sources,
        "show",
        "data:show",
        "print samples of a corpus as text, with counts",
        "Prints document lengths and training samples, with the start of each document; tokens"
        " without a label are dimmed (in a file: in braces). Of a configuration: the share of each"
        " corpus in each data stage, then samples of each corpus. --cp prints how unequally"
        " context-parallel ranks would share the keys of its documents. Names damaged files. Reads"
        " only a few tokens of a corpus of any size.",
        "meshwright data show data/chats --samples 5\n"
        "  meshwright data show data/pages/validation --sequence-length 512 --packing documents\n"
        "  meshwright data show data/pages --sequence-length 131072 --cp 8",
    )
    shown.add_argument(
        "place",
        type=Path,
        metavar="DIR",
        help="a prepared folder, one .bin/.idx without its suffix, or a configuration (.toml)",
    )
    shown.add_argument(
        "--samples",
        type=whole(1, MAX_SHOWN),
        default=3,
        metavar="N",
        help="samples of each split (default: 3)",
    )
    shown.add_argument(
        "--sequence-length",
        type=count,
        metavar="S",
        help="tokens of a sample (default: the configuration's, or 256)",
    )
    packing = "as data.packing (default: the configuration's, or stream)"
    shown.add_argument("--packing", choices=["stream", "documents"], help=packing)
    shown.add_argument(
        "--cp",
        type=rank_count,
        default=1,
        metavar="N",
        help="context-parallel ranks (default: none)",
    )
    shown.add_argument(
        "--cp-order",
        choices=["contiguous", "zigzag", "documents"],
        help="order of their tokens (default: each)",
    )
    shown.add_argument(
        "--tokenizer", type=Path, metavar="T", help="default: the tokenizer.json beside the corpus"
    )
    trust_code(shown)


def config(added: Added) -> None:
    of_configs = command(
        added,
        "config",
        None,
        "print a resolved configuration, or import that of another framework",
        "Needs no torch, no device and no data.",
        "meshwright config show configs/demo.toml",
    )
    commands_of = of_configs.add_subparsers(
        title="commands", dest="what", metavar="WHAT", required=True
    )
    shown = command(
        commands_of,
        "show",
        "configs:show",
        "print a resolved configuration, with the origin of each value",
        "Origins: the file, the command line, a default, or the other values and the number of"
        " ranks.",
        "meshwright config show configs/demo.toml --parallel.tp=4 --parallel.pp=1",
    )
    config_file(shown)
    shown.add_argument(
        "--ranks",
        type=rank_count,
        metavar="N",
        help="number of ranks (default: as the degrees need)",
    )
    shown.add_argument("--all", action="store_true", help="include keys at their default")
