"""What stands in the environment is in no file that a run leaves, and in nothing that it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.run.directory import run_directory
from tests.end_to_end.driving import GPT2, layout, run_config
from tests.end_to_end.shell import Shell, written

pytestmark = pytest.mark.slow

CANARIES = {
    name: f"canary-{number}-7c41e9"
    for number, name in enumerate(
        ["MY_API_KEY", "HF_TOKEN", "DB_PASSWORD", "X_SECRET", "AWS_SECRET_ACCESS_KEY"]
    )
}
URLS = {
    "WANDB_BASE_URL": "https://me:canary-url-7c41e9@127.0.0.1:9",
    "HTTPS_PROXY": "http://me:canary-proxy-7c41e9@127.0.0.1:9",
    "MLFLOW_TRACKING_URI": "https://me:canary-mlflow-7c41e9@127.0.0.1:9",
}


@pytest.mark.torture(row="canary secrets in the environment: nowhere on disk or terminal")
@pytest.mark.parametrize("fails", [False, True])
def test_no_secret_of_the_environment_is_written(
    fails: bool, corpus: Path, tmp_path: Path, shell: Shell
) -> None:
    """To its end with everything on that writes; and with an exception in a layer of the user,
    whose trace is told.
    """
    sections: dict[str, Any] = {
        "parallel": layout("dp2"),
        "train": {"steps": 2},
        "checkpoint": {"every": 1},
        "tracking": {"console": True, "wandb": "offline", "trace_step": 2},
    }
    if fails:
        options = {**GPT2, "rank": 1, "at_call": 6}
        sections["model"] = {"builder": "tests.end_to_end.builders:trapped", "options": options}
        sections["train"] = {"steps": 1000}
    config = run_config(corpus, tmp_path / "runs", **sections)
    shell.environment |= CANARIES | URLS
    done = shell.run("-m", "meshwright_launch", "train", written(config, tmp_path))
    assert done.returncode == (1 if fails else 0), done.stderr
    assert ("ArithmeticError: the layer of a user has failed" in done.stderr) == fails
    files = [
        path
        for path in run_directory(config.run).rglob("*")
        if path.is_file() and not path.is_symlink()
    ]
    for wanted in (
        "metrics.jsonl",
        "config.toml",
        "resolved.json",
        "manifest.json",
        "*.safetensors",
        "*.wandb",
    ):
        assert any(path.match(wanted) for path in files), wanted
    said = {"stdout": done.stdout.encode(), "stderr": done.stderr.encode()}
    in_urls = {name: re.findall(r"canary[\w-]+", url)[0] for name, url in URLS.items()}
    for name, canary in (CANARIES | in_urls).items():
        for place, content in said.items():
            assert canary.encode() not in content, (name, place)
        for path in files:
            assert canary.encode() not in path.read_bytes(), (name, path)
