"""Translation of Megatron-LM's flags on the batch: its size, the ramp to it, and its schedule by tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from meshwright.system.numbers import whole_number
from meshwright_interop.configs.source_keys import DropReason, is_off
from meshwright_interop.configs.translation import Translation

RAMP, SCHEDULE = "rampup-batch-size", "step-batch-size-schedule"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = r"(\d{1,18}(?:\.\d{1,18})?)([KMBT]?)"
_ENTRY = re.compile(f"{_NUMBER}:{_NUMBER}", re.ASCII)
_IN_A_RAMP = "the learning rate follows steps here and samples there: with a decay, the two differ until it ends"


def batch(translation: Translation) -> int | None:
    """Translate the batch, and return the samples per step; None if the data-parallel size is unknown."""
    micro = translation.optional_count("micro-batch-size") or translation.optional_count("batch-size")
    if micro is None:
        micro = 1
        translation.guess("batch.micro_batch_size", micro, translation.why_missing("micro-batch-size"))
    translation.put("batch.micro_batch_size", micro)
    total = translation.optional_count("global-batch-size")
    if translation.has(SCHEDULE) and not is_off(translation.value(SCHEDULE)):
        total = _schedule(translation, total) or total
    if total is not None:
        translation.put("batch.global_batch", total)
        _ramp(translation, total)
        return total
    if translation.has(RAMP):
        translation.refuse(RAMP, "the ramp ends at --global-batch-size, which is missing")
    translation.put("batch.chunks", 1, "without --global-batch-size Megatron-LM takes micro_batch_size x dp")
    dp = translation.tree.get("parallel.dp")
    return micro * dp if isinstance(dp, int) else None


def _ramp(translation: Translation, total: int) -> None:
    """Translate the batch-size ramp to ``total`` samples: start, increment and samples."""
    given = translation.value(RAMP)
    words = [str(word).replace("_", "") for word in (given if isinstance(given, list) else [given])]
    if is_off(given):
        return
    numbers = [number for word in words if (number := whole_number(word, 1)) is not None]
    if len(words) != 3 or len(numbers) != 3:
        translation.refuse(RAMP, "it is no start, increment and number of samples")
        return
    start, increment, samples = numbers
    if start >= total or (total - start) % increment:
        translation.refuse(RAMP, f"no number of increments leads from its start to {total}")
        return
    if RAMP in translation.without:
        translation.drop(RAMP, DropReason.NONE, "left out by --without")
        return
    translation.put("batch.ramp", [start, increment, samples], _IN_A_RAMP)


def _schedule(translation: Translation, total: int | None) -> int | None:
    """Translate the schedule of batch sizes, and return the last one; None if it is refused or left out."""
    length = translation.optional_count("seq-length") or translation.optional_count("encoder-seq-length")
    given = translation.value(SCHEDULE)
    text = " ".join(map(str, given)) if isinstance(given, list) else str(given)
    found = [_ENTRY.fullmatch(word) for word in text.upper().replace(",", " ").split()]
    if length is None:
        translation.refuse(SCHEDULE, "its thresholds are tokens, and --seq-length is missing")
        return None
    numbers = [[int(float(each[i]) * UNITS[each[i + 1]]) for i in (1, 3)] for each in found if each is not None]
    entries = sorted((tokens // length, size) for tokens, size in numbers)
    starts = [start for start, _ in entries]
    if not all(found) or starts[:1] != [0] or len({*starts}) < len(starts) or min(size for _, size in entries) < 1:
        translation.refuse(SCHEDULE, "it is no list of TOKENS:SAMPLES that starts at 0 and rises by a sample or more")
    elif translation.has(RAMP) or total not in (None, entries[-1][1]):
        translation.refuse(SCHEDULE, f"it contradicts --{RAMP if translation.has(RAMP) else 'global-batch-size'}")
    elif len(entries) > 1 and (ramp := ramp_of(entries)) is None:
        listed = ", ".join(f"{size} from sample {start:,}" for start, size in entries[:6])
        translation.refuse(
            SCHEDULE, f"batch.ramp rises by equal increments after equal numbers of samples, not as {listed}"
        )
    elif SCHEDULE in translation.without:
        translation.drop(SCHEDULE, DropReason.NONE, "left out by --without")
    else:
        translation.put("batch.ramp", ramp if len(entries) > 1 else None, _IN_A_RAMP)
        return entries[-1][1]
    return None


def ramp_of(entries: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return the ``batch.ramp`` with the batch sizes of ``entries``, (first sample, samples per step); or None.

    A ramp over S samples takes the i-th of n increments at the first step at or after sample S x i / n. That must be
    the first step at or after the i-th threshold, so each threshold bounds S from both sides.
    """
    sizes, n = [size for _, size in entries], len(entries) - 1
    increments = {after - before for before, after in pairwise(sizes)}
    low, high, last, at = 1, 10**18, 0, 0  # last, at: steps before and at the threshold, by their first samples
    for i, (threshold, _) in enumerate(entries[1:], 1):
        if at < threshold:
            steps = -(-(threshold - at) // sizes[i - 1])
            last, at = at + (steps - 1) * sizes[i - 1], at + steps * sizes[i - 1]
        low, high = max(low, n * last // i + 1), min(high, n * at // i)
    if len(increments) > 1 or min(increments) < 1 or low > high:
        return None
    return [sizes[0], increments.pop(), min(max(entries[-1][0], low), high)]
