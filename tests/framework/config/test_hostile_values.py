"""Every key with values that nobody should write: each is accepted and kept as it is,
or refused by the key's name.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.config import RunConfig, dump, load, parse
from meshwright.config.keys import KEYS
from meshwright.errors import ConfigError
from tests.support.errors import raises
from tests.support.marks import mark_all_rows_but

DEMO = Path(__file__).parents[3] / "configs" / "demo.toml"
NUMBERS = [
    "-1",
    "0",
    "7",
    "-0.0",
    "1e-320",
    "1e36",
    "1e999",
    "nan",
    "99999999999999999999",
    "1" * 4400,
]
WORDS = [
    "",
    "none",
    "true",
    "ünï:cödé",
    "os:nothere",
    "\x00",
    "\udcff",
    "SET-ME",
    "2026-01-01",
    "a" * 5000,
]
LISTS = [
    "[]",
    "[-1, 0, 0]",
    "[[1]]",
    "[nan]",
    "{}",
    "{a = 1}",
    "[{names = ['*']}]",
    "[{from_step = 0}]",
    "[" * 2000,
]


@mark_all_rows_but("long", "adapter", "batch", "checkpoint", "model", "run", "watch")
@pytest.mark.parametrize("section", sorted({section for section, _ in KEYS}))
def test_each_is_kept_or_refused_by_name(section: str) -> None:
    num_refused = 0
    for key in [f"{owner}.{name}" for owner, name in KEYS if owner == section]:
        for value in (*NUMBERS, *WORDS, *LISTS):
            try:
                config = load(DEMO, [f"--{key}={value}"])
            except ConfigError as error:
                num_refused += 1
                named = key.partition(".")[2] in error.message
                assert named and "[MW-CONFIG-" in str(error) and len(str(error)) < 3000, (
                    key,
                    value,
                    str(error),
                )
            else:
                assert parse(dump(config)) == config, (key, value)
    assert num_refused > 20


def test_no_text_has_a_nul_character() -> None:
    """Of paths it would be a ValueError, where they are opened."""
    for key in (
        "data.train",
        "pipeline.schedule_file",
        "parallel.offload_directory",
        "launch.cluster",
        "model.options.x",
    ):
        with raises("MW-CONFIG-019", key):
            load(DEMO, [f"--{key}=a\x00b"])


@pytest.mark.parametrize("written", [2, 0, "1", None, [1]])
def test_a_configuration_of_another_format_is_refused(written: object) -> None:
    """A newer one could mean something else by a key; files of before the key have format 1."""
    tree = json.loads(dump(RunConfig()))
    assert tree.pop("format") == 1 and parse(json.dumps(tree)) == RunConfig()
    with raises("MW-CONFIG-082", 1):
        parse(json.dumps({"format": written, **tree}))
