"""Consistency of the counts in a manifest. A contradiction is reported with both values.

    samples_seen      = step x batch.global_batch (a run never changes its global batch; see `compatible`)
    optimizer_steps  <= step
    skipped_in_a_row <= step - optimizer_steps, and <= watch.most_skipped of the start that saved
    tokens_seen      <= samples_seen x data.sequence_length, for a causal corpus
    seed              = run.seed

The configuration is the one in the manifest itself. Missing keys are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATE = ("tokens_seen", "optimizer_steps", "skipped_in_a_row")


def contradictions(
    step: int, samples_seen: int, seed: int, config: Mapping[str, Any], state: Mapping[str, Any]
) -> list[str]:
    """Return the contradictions between the counts, one line each with both values."""
    problems = [
        f"state.{name} = {state[name]!r}, which must be a whole number from 0 up"
        for name in STATE
        if name in state and not _is_count(state[name])
    ]
    if problems:
        return problems
    global_batch = _value(config, "batch", "global_batch")
    if _is_count(global_batch) and samples_seen != step * global_batch:
        problems.append(
            f"samples_seen = {samples_seen}, and step {step} x batch.global_batch {global_batch} = "
            f"{step * global_batch}"
        )
    recorded_seed = _value(config, "run", "seed")
    if _is_count(recorded_seed) and seed != recorded_seed:
        problems.append(f"seed = {seed}, and its run.seed = {recorded_seed}")
    return problems + _of_steps(step, config, state) + _of_tokens(samples_seen, config, state)


def _of_steps(step: int, config: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    problems = []
    taken, in_a_row = state.get("optimizer_steps"), state.get("skipped_in_a_row")
    if taken is not None and taken > step:
        problems.append(f"state.optimizer_steps = {taken}, more than its step {step}")
    elif taken is not None and in_a_row is not None and in_a_row > step - taken:
        problems.append(
            f"state.skipped_in_a_row = {in_a_row}, and of its {step} steps {taken} were taken: at most {step - taken}"
        )
    most = _value(config, "watch", "most_skipped")
    if _value(config, "watch", "on_nonfinite") == "stop":
        most = 0
    if in_a_row is not None and _is_count(most) and in_a_row > most:
        problems.append(f"state.skipped_in_a_row = {in_a_row}, and its run allowed {most} (watch.most_skipped)")
    return problems


def _of_tokens(samples_seen: int, config: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    tokens, length = state.get("tokens_seen"), _value(config, "data", "sequence_length")
    is_causal = _value(config, "data", "task") == "causal" and _value(config, "data", "builder") is None
    if tokens is None or not is_causal or not _is_count(length) or tokens <= samples_seen * length:
        return []
    return [f"state.tokens_seen = {tokens}, more than {samples_seen} samples of {length} tokens"]


def _value(config: Mapping[str, Any], section: str, key: str) -> Any:
    found = config.get(section)
    return found.get(key) if isinstance(found, Mapping) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
