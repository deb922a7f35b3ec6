"""Keys of the saved layout that an override leaves without effect do not refuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.config.combinations.axes import WHOLE_SAMPLES
from meshwright.inference.load import ModelLocation, config_for
from tests.support.errors import raises

SAVED: dict[str, dict[str, Any]] = {
    "run": {"name": "saved"},
    "model": {
        "builder": "meshwright_models.llama:build",
        "options": {"moe": {"num_experts": 4, "top_k": 2}},
    },
    "data": {"train": "corpus", "sequence_length": 32, "document_boundaries": True},
    "batch": {"micro_batch_size": 1, "global_batch": 8},
    "parallel": {
        "dp": 1,
        "cp": 2,
        "cp_order": "documents",
        "cp_exchange": "heads",
        "tp": 2,
        "tp_across_nodes": True,
    }
    | {"sequence": True, "ep": 2, "ep_across_nodes": True},
    "train": {"device": "cpu"},
}
GROUPS = {"cp_exchange": "keys", "cp_head_groups": 1}


def changed_by(overrides: list[str], **parallel: Any) -> dict[str, Any]:
    """Return the keys of ``[parallel]`` that `eval` changes in a run of SAVED,
    with ``parallel`` on top.
    """
    config = RunConfig.model_validate(SAVED | {"parallel": SAVED["parallel"] | parallel})
    saved = config.model_dump(mode="json")
    after = config_for(ModelLocation(Path("run"), (), saved, "run"), overrides, "eval")
    new = after.parallel.model_dump(mode="json")
    return {key: new[key] for key, value in saved["parallel"].items() if new[key] != value}


def test_a_degree_of_one_resets_its_keys() -> None:
    whole = {"cp": 1, "cp_order": "zigzag"}
    assert changed_by(["--parallel.cp=1"]) == whole | {"cp_exchange": "keys"}
    assert changed_by(["--parallel.cp=1"], **GROUPS) == whole | {"cp_head_groups": None}
    assert changed_by(["--parallel.ep=1"]) == {"ep": 1, "ep_across_nodes": False}
    assert changed_by(["--parallel.tp=1"]) == {"tp": 1, "tp_across_nodes": False, "sequence": False}
    assert changed_by(["--parallel.dp=2"]) == {"dp": 2}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["cp=1", "cp_order=documents"], "MW-CONFIG-084"),
        (["ep=1", "ep_across_nodes=true"], "MW-CONFIG-087"),
        (["tp=1", "sequence=true"], "MW-CONFIG-040"),
    ],
)
def test_a_key_that_the_user_gives_is_refused(words: list[str], code: str) -> None:
    with raises(code, f"parallel.{words[1].partition('=')[0]}"):
        changed_by([f"--parallel.{word}" for word in words])


def test_defaults_of_a_command_reset_keys_too() -> None:
    """``meshwright.evaluate`` of a run with sequence parallelism: one process,
    though the caller names no degree.
    """
    place = ModelLocation(
        Path("run"), (), RunConfig.model_validate(SAVED).model_dump(mode="json"), "run"
    )
    alone = ("--parallel.dp=1", "--parallel.pp=1", "--parallel.tp=1", *WHOLE_SAMPLES)
    found = config_for(place, [], "evaluate", defaults=alone).parallel
    assert found.degrees == (1, 1, 1, 1, 1) and not found.sequence and not found.tp_across_nodes
