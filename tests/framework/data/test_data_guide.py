"""docs/data.md says what is so: its first commands run as they stand, without torch;
its tables of a run are read.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from meshwright.config import load
from tests.framework.data.corpora import bytes_tokenizer, write_lines

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/data.md").read_text()


def test_the_first_commands(tmp_path: Path) -> None:
    bytes_tokenizer(tmp_path / "tok")
    (tmp_path / "notes").mkdir()
    for i in range(9):
        (tmp_path / f"notes/{i}.md").write_text(f"note {i}")
    write_lines(tmp_path / "pages.jsonl.gz", [{"text": f"page {i}"} for i in range(40)])
    block = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    code = (
        "import shlex, sys\nfrom meshwright_launch.cli import main\n"
        f"codes = [main(shlex.split(line)[1:]) for line in {block[1].splitlines()!r}]\n"
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "train       4" in done.stdout and "data/notes/validation: " in done.stdout
    assert "[document] note 0</s>" in done.stdout and done.stderr == ""


def test_the_tables(tmp_path: Path) -> None:
    """Each block of TOML, with a batch, is a configuration that loads."""
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        rest = (
            '[data]\ntrain = "x"\n'
            if "[data]" not in block
            else "[batch]\nmicro_batch_size = 1\nchunks = 1\n"
        )
        (tmp_path / "run.toml").write_text(f"{block}\n{rest}")
        config = load(tmp_path / "run.toml", ["--train.steps=10000"])
        assert config.data.train or config.data.builder
