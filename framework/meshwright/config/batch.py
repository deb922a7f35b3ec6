"""Batch arithmetic, ``global_batch = micro_batch_size x chunks x dp``: with dp,
two batch numbers give the third.

Pure functions. They run once when the file is read, where dp may be unknown, and again with the
number of ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshwright.config.bounds import MAX_COUNT, MAX_LENGTH
from meshwright.config.sections import Batch
from meshwright.errors import ConfigError


def _product(factors: dict[str, int]) -> tuple[str, int]:
    """Return text and value: ``{"micro_batch_size": 4, "dp":
    2}`` -> ("micro_batch_size 4 x dp 2 = 8", 8).
    """
    value = math.prod(factors.values())
    text = " x ".join(f"{name} {factor}" for name, factor in factors.items())
    return (text if len(factors) == 1 else f"{text} = {value}"), value


def divisors(value: int) -> list[int]:
    """Return all divisors of a number, smallest first."""
    small = [d for d in range(1, int(value**0.5) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})


def _not_a_multiple(batch: Batch, factors: dict[str, int], dp: int | None) -> str:
    """Return the error text for a global_batch that its factors do not divide,
    with the nearest values that work.
    """
    assert batch.global_batch is not None
    text, unit = _product(factors)
    whole = batch.global_batch // unit
    problem = f"batch.global_batch = {batch.global_batch} is "
    if dp is not None and batch.global_batch < dp:
        problem += f"smaller than dp {dp}: no sample for some replicas"
    elif whole == 0:
        problem += f"smaller than {text}"
    else:
        problem += f"not a multiple of {text}"
    works = [unit * (whole + i) for i in (0, 1) if whole + i]
    moves = [f"batch.global_batch = {' or '.join(map(str, works))}"]
    name, own = next(iter(factors.items()))
    share, rest = divmod(batch.global_batch, unit // own)
    if rest == 0:
        below = [d for d in divisors(share) if d < own][-1:]
        above = [d for d in divisors(share) if d > own][:1]
        moves.append(f"batch.{name} = {' or '.join(map(str, below + above))}")
    return f"{problem}; the nearest that work: {', or '.join(moves)}"


def find_problem(batch: Batch, dp: int | None) -> str | None:
    """Check the batch numbers. Return the error text, or None.

    ``dp`` is None while it is unknown; then only errors that hold for every dp are found.
    """
    given = {
        name: value
        for name, value in batch.model_dump(exclude={"ramp", "balance", "padding"}).items()
        if value is not None
    }
    if len(given) < 2:
        present = ", ".join(f"{name} = {value}" for name, value in given.items()) or "none of them"
        return (
            "batch: give two of micro_batch_size, chunks and global_batch, the third follows from "
            f"global_batch = micro_batch_size x chunks x dp; given: {present}"
        )
    factors = {name: value for name, value in given.items() if name != "global_batch"}
    if dp is not None:
        factors["dp"] = dp
    text, product = _product(factors)
    if batch.global_batch is None:
        return None
    if len(given) == 3 and dp is not None:
        if product == batch.global_batch:
            return None
        return (
            f"batch: {text}, not global_batch {batch.global_batch}: leave one of the three out, and"
            " it follows (on the command line: --batch.chunks=none), or set batch.global_batch ="
            f" {product}"
        )
    return _not_a_multiple(batch, factors, dp) if batch.global_batch % product else None


def derive(batch: Batch, dp: int) -> Batch:
    """Return all three batch numbers for a known dp.

    Raises:
        ConfigError: The numbers contradict each other, or a derived one is above the bound of its
            key; the text contains the arithmetic.
    """
    wrong = find_problem(batch, dp)
    if wrong is not None:
        raise ConfigError("MW-CONFIG-001", wrong)
    micro_batch_size = batch.micro_batch_size
    chunks = batch.chunks
    global_batch = batch.global_batch
    if global_batch is None:
        assert micro_batch_size is not None and chunks is not None
        global_batch = micro_batch_size * chunks * dp
    elif micro_batch_size is None:
        assert chunks is not None
        micro_batch_size = global_batch // (chunks * dp)
    elif chunks is None:
        chunks = global_batch // (micro_batch_size * dp)
    derived = {"micro_batch_size": micro_batch_size, "chunks": chunks, "global_batch": global_batch}
    for name, value in derived.items():
        if value > (most := MAX_LENGTH if name == "global_batch" else MAX_COUNT):
            raise ConfigError(
                "MW-CONFIG-002",
                f"batch.{name} follows from the other two and is {value:,}, at most {most:,} is"
                " allowed: lower "
                f"batch.{'global_batch' if name != 'global_batch' else 'micro_batch_size or batch.chunks'}",
            )
    resolved = batch.model_copy(update=derived)
    if (wrong := _ramp_problem(resolved, dp)) is not None:
        raise ConfigError("MW-CONFIG-063", wrong)
    return resolved


def _ramp_problem(batch: Batch, dp: int) -> str | None:
    """Return the error text for a ramp that does not fit the resolved batch numbers, or None."""
    if batch.ramp is None:
        return None
    assert batch.micro_batch_size is not None and batch.global_batch is not None
    start, increment, _ = batch.ramp
    given, unit = f"batch.ramp = {list(batch.ramp)}", batch.micro_batch_size * dp
    if start >= batch.global_batch or (batch.global_batch - start) % increment:
        return (
            f"{given}: {start} + a number of times {increment} is not batch.global_batch ="
            f" {batch.global_batch}: choose a start below it, and an increment that divides the"
            " difference"
        )
    if start % unit or increment % unit:
        return (
            f"{given}: start and increment must be multiples of micro_batch_size"
            f" {batch.micro_batch_size} x dp {dp} = {unit}, so that each replica has whole"
            " micro-batches: round them, or choose a smaller micro_batch_size"
        )
    return None


class Phase(NamedTuple):
    """Consecutive steps with the same number of samples in a batch-size ramp."""

    first_step: int
    """Steps before the phase."""
    samples_seen: int
    """Samples before the phase."""
    global_batch: int


def phases(batch: Batch) -> list[Phase]:
    """Return the phases of a resolved batch, the last one with all of ``global_batch``;
    without a ramp there is one.

    As in Megatron-LM, a step that begins at sample s has start + increment x floor(s x n / samples)
    samples, for n increments in all. No layout affects it.
    """
    assert batch.global_batch is not None
    start, increment, over = batch.ramp or (batch.global_batch, 1, 1)
    num_increments = (batch.global_batch - start) // increment
    found = [Phase(0, 0, start)]
    while (last := found[-1]).global_batch < batch.global_batch:
        passed = (last.global_batch - start) // increment
        steps = -(
            -(-(-(passed + 1) * over // num_increments) - last.samples_seen) // last.global_batch
        )
        samples = last.samples_seen + steps * last.global_batch
        size = start + increment * min(samples * num_increments // over, num_increments)
        found.append(Phase(last.first_step + steps, samples, size))
    return found


def step_of(batch: Batch, sample: int) -> int:
    """Return the number of the step that reads a sample of the run; the first step is 1."""
    last = [phase for phase in phases(batch) if phase.samples_seen <= sample][-1]
    return last.first_step + (sample - last.samples_seen) // last.global_batch + 1


def samples_after(batch: Batch, steps: int) -> int:
    """Return the number of samples in the first ``steps`` steps of a run."""
    last = [phase for phase in phases(batch) if phase.first_step <= steps][-1]
    return last.samples_seen + (steps - last.first_step) * last.global_batch


def validation_steps(num_samples: int, global_batch: int, at_most: int) -> int:
    """Return the number of global batches that read every sample once, at most ``at_most``."""
    return min(at_most, -(-num_samples // global_batch))
