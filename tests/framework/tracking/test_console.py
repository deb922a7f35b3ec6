"""What the console shows: plain lines in a log, a bar on a terminal."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from meshwright.terminal.format import format_count, format_duration, format_gib
from meshwright.tracking.console import ConsoleSink


def run(sink: ConsoleSink, records) -> None:
    sink.open()
    for each in records:
        sink.write(each)
    sink.close()


@pytest.fixture
def log() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def test_plain_lines_every_log_every_steps(log, record) -> None:
    run(
        ConsoleSink(total_steps=25, log_every=10, console=log),
        [record(step) for step in range(4, 26)],
    )
    lines = log.file.getvalue().splitlines()
    assert [line.split("  loss")[0] for line in lines] == [
        "step  4/25",
        "step 10/25",
        "step 20/25",
        "step 25/25",
    ]
    assert lines[1] == "step 10/25  loss 0.9000  norm 1.25  lr 3.00e-04  4.1k tokens/s  0:08 left"


def test_a_wide_console_has_every_number(record) -> None:
    wide = Console(file=io.StringIO(), force_terminal=False, width=120)
    run(ConsoleSink(total_steps=25, console=wide), [record(10)])
    assert (
        wide.file.getvalue()
        == "step 10/25  loss 0.9000  grad norm 1.25  lr 3.00e-04  4.1k tokens/s  0.5 s/step  1.50"
        " GiB  0:08 left\n"
    )


LARGE = {
    "loss": 10.12345,
    "grad_norm": 1234.5,
    "tokens_per_s": 12.34e6,
    "step_s": 12.34,
    "memory_bytes": 80 * 2**30,
}


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("steps", [120, 10**5, 10**7])
@pytest.mark.parametrize(
    "changes", [{}, LARGE, {"loss": math.nan, "grad_norm": math.inf, "skipped": True}]
)
def test_lines_fit_and_keep_their_columns(
    record, width: int, steps: int, changes: dict[str, Any]
) -> None:
    log = Console(file=io.StringIO(), force_terminal=False, width=width)
    last = record(steps, validation_loss=2.0, validation_perplexity=7.389)
    run(
        ConsoleSink(steps, console=log, unit="labels"),
        [record(1), record(2, **changes), record(3), last],
    )
    lines = log.file.getvalue().splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= width, lines
    assert all("loss" in line and f"/{steps}" in line for line in lines[:-1])
    assert len({line.partition("loss")[2].count("  ") for line in lines[1:4]}) == 1


@pytest.mark.parametrize("width", [80, 60])
def test_the_bar_fits(record, width: int) -> None:
    terminal = Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system=None,
        legacy_windows=False,
    )
    run(ConsoleSink(10**6, console=terminal), [record(10**5, **LARGE)])
    shown = [
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)
        for line in re.split(r"[\r\n]+", terminal.file.getvalue())
    ]
    assert any(re.match("loss 10.1235  (grad )?norm 1.23e", line) for line in shown)
    assert max(map(len, shown)) <= width, shown


def test_a_validation_is_told_whether_or_not_its_step_is(log, record) -> None:
    run(
        ConsoleSink(100, log_every=10, console=log),
        [record(1), record(2), record(3, validation_loss=2.0, validation_perplexity=7.389)],
    )
    assert log.file.getvalue().splitlines()[1:] == [
        "validation at step 3: loss 2.0000, perplexity 7.389"
    ]


def test_non_finite_numbers_are_shown_as_they_are(log, record) -> None:
    broken = record(1, loss=math.nan, grad_norm=math.inf, tokens_per_s=math.nan, step_s=math.inf)
    broken = dataclasses.replace(broken, validation_loss=1e9, validation_perplexity=math.inf)
    run(ConsoleSink(2, console=log), [broken])
    line, validation = log.file.getvalue().splitlines()
    assert "loss nan" in line and "norm inf" in line and "-:-- left" in line
    assert validation.endswith("perplexity inf")


def test_a_loss_that_is_no_cross_entropy_has_no_perplexity(log, record) -> None:
    run(ConsoleSink(2, console=log), [record(1, validation_loss=2.0)])
    assert log.file.getvalue().splitlines()[1:] == ["validation at step 1: loss 2.0000"]


def test_the_bar_fits_eighty_columns_and_validations_stay_above(record) -> None:
    terminal = Console(
        file=io.StringIO(), force_terminal=True, width=80, color_system=None, legacy_windows=False
    )
    run(
        ConsoleSink(20, console=terminal),
        [record(19), record(20, validation_loss=2.0, validation_perplexity=7.389)],
    )
    text = terminal.file.getvalue()
    last = text.rsplit("validation at step 20: loss 2.0000, perplexity 7.389", 1)[1]
    assert "step 20/20" in last and "100 %" in last
    assert "loss 0.5000  grad norm 1.25  lr 3.00e-04  4.1k tokens/s  0.5 s/step  1.50 GiB\n" in last


def test_time_left_forgets_the_first_step(log, record) -> None:
    """The first step warms up: a hundred seconds of it say nothing about the rest."""
    run(ConsoleSink(102, console=log), [record(1, step_s=100.0), record(2, step_s=1.0)])
    assert log.file.getvalue().splitlines()[1].endswith("1:40 left")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1k"),
        (12_345, "12.3k"),
        (2_500_000, "2.5M"),
        (15e12, "15T"),
        (math.inf, "inf"),
    ],
)
def test_count(value, text) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00"),
        (59.6, "1:00"),
        (3599, "59:59"),
        (3661, "1:01:01"),
        (90_061, "1d 1:01:01"),
        (math.nan, "-:--"),
    ],
)
def test_duration(seconds, text) -> None:
    assert format_duration(seconds) == text


def test_memory() -> None:
    assert format_gib(2**29) == "512 MiB"
    assert format_gib(80 * 2**30) == "80.00 GiB"
