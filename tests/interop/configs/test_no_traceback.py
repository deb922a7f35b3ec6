"""Whatever stands in a file: a configuration, or one error for people. Never a traceback,
never without end.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright_interop.configs import convert_file, file_text, format_report
from meshwright_interop.configs.flags import read_flags
from tests.interop.configs import dumps, samples

WORDS = """--bf16 if then else elif fi for while do done case esac function { } ( ) [ ] [[ ]] == != -z -n || && ; ;; |
    > < & $ ${ } $(( )) $( ` ' " \\ = += A A= A=( A+=( B ${A} ${A[@]} ${A:-b} $A $1 $@ --x --y=1 1 2 x.py torchrun eval
    #"""
PIECES = st.sampled_from([*WORDS.split(), "\n", "\n"])
VALUES = [
    "0",
    "-1",
    "1",
    "3",
    "0.5",
    "1e30",
    "true",
    "null",
    '"word"',
    "[]",
    "[1, 2]",
    '""',
    "nan",
    "10000000000000",
    "$UNSET",
]


HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", f"--lr-warmup-fraction 1e308 {samples.MEGATRON_FLAGS}"),
        ("a.txt", f"--window-size {HUGE},0 {samples.MEGATRON_FLAGS}"),
        (
            "a.txt",
            f"--rampup-batch-size 16 16 {HUGE} --global-batch-size 64 {samples.MEGATRON_FLAGS}",
        ),
        ("a.txt", samples.MEGATRON_LLAMA.replace("torchrun", "torchrun --nproc_per_node \u00b2")),
        (
            "a.yaml",
            samples.NANOTRON.replace("parallelism:", "parallelism:\n  ddp_bucket_cap_mb: 1.0e308"),
        ),
        ("a.toml", samples.TORCHTITAN_PIPELINE + "\n[lr_scheduler]\ndecay_ratio = 1e308\n"),
    ],
)
def test_numbers_beyond_all_bounds(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with contextlib.suppress(ConfigError):
        convert_file(path)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=25).map(" ".join))
def test_any_words(text: str) -> None:
    with contextlib.suppress(ConfigError):
        read_flags(Path("a.txt"), text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", samples.TORCHTITAN),
        ("a.toml", samples.TORCHTITAN_PIPELINE),
        ("a.yaml", samples.NANOTRON),
        ("a.txt", samples.MEGATRON_GPT),
        ("a.txt", samples.MEGATRON_LLAMA),
        ("a.txt", samples.MEGATRON_FLAGS),
        ("a.json", samples.TORCHTITAN_JSON),
        ("run_config.yaml", dumps.BRIDGE),
        ("model_config.yaml", dumps.MODEL_CONFIG),
    ],
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_in_any_place(name: str, text: str, data: st.DataObject) -> None:
    """One or two values of a sample are others; one line may be missing."""
    forms = {
        ".yaml": r"^(\s*[\w-]+: )\S+$",
        ".toml": r"^(\w+ = ).+$",
        ".json": r'^(\s*"\w+": )[^\s\[{,]+',
        ".txt": r"(--[\w-]+ )\S+",
    }
    assigned = forms[Path(name).suffix]
    for _ in range(data.draw(st.integers(1, 2))):
        found = list(re.finditer(assigned, text, re.MULTILINE))
        chosen = data.draw(st.sampled_from(found))
        text = text[: chosen.end(1)] + data.draw(st.sampled_from(VALUES)) + text[chosen.end() :]
    lines = text.splitlines()
    if data.draw(st.booleans()):
        del lines[data.draw(st.integers(0, len(lines) - 1))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_text("\n".join(lines))
        with contextlib.suppress(ConfigError):
            adopted = convert_file(path)
            assert format_report(adopted) and file_text(adopted, name)
