"""Reference of all configuration keys, from the schema.

python -m tests.support.configuration_keys          writes docs/configuration.md
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from meshwright.config import schema, sections, training
from meshwright.config.keys import KEYS, SECTIONS, describe_allowed, toml_value

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"

UNITS = {
    r"bytes$": "bytes",
    r"_s$": "seconds",
    r"^validate_steps$": "global batches",
    r"^ns_steps$": "iterations",
    r"steps$|_step$|every$": "steps",
    r"^sequence_length$": "tokens",
    r"^micro_batch_size$|^global_batch$": "samples",
    r"^chunks$": "micro-batches",
    r"^block_size$": "elements",
    r"^dp$|^shard_factor$": "replicas",
    r"^pp$|^tp$|^cp$|^ep$|^processes$": "ranks",
    r"^interleave$": "stages",
}
"""Pattern of a key's name -> its unit."""


def sentences() -> dict[tuple[str, str], str]:
    """Return the docstrings of the schema by (class, field)."""
    found = {}
    for node in [
        node
        for module in (sections, training, schema)
        for node in ast.parse(inspect.getsource(module)).body
    ]:
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    assert isinstance(field.target, ast.Name) and isinstance(
                        below.value, ast.Constant
                    )
                    found[node.name, field.target.id] = " ".join(str(below.value.value).split())
    return found


def document() -> str:
    """Return ``docs/configuration.md``."""
    lines = [
        "# Configuration keys",
        "",
        "*For those who look up a key: its values, default and unit.*",
        "",
        (
            "A configuration is a TOML file with these sections, as in `configs/demo.toml`. On the"
            " command line a key goes"
        ),
        (
            "after the file: `--section.key=value`; `none` unsets a key that may be unset."
            " `meshwright config show FILE`"
        ),
        (
            "prints the result, with the origin of each value. Unknown keys, values out of bounds,"
            " contradictions and"
        ),
        "options without effect are refused, all in one message.",
        "",
        "The page is generated from the schema: `python -m tests.support.configuration_keys`.",
    ]
    told = sentences()
    for section, model in SECTIONS.items():
        about = " ".join((model.__doc__ or "").split()).replace("``", "`")
        lines += [
            "",
            f"## [{section}]",
            "",
            about,
            "",
            "| key | values | default | unit | about |",
            "|---|---|---|---|---|",
        ]
        for (owner, key), field in KEYS.items():
            if owner == section:
                units = (unit for pattern, unit in UNITS.items() if re.search(pattern, key))
                unit = "" if field.annotation is bool else next(units, "")
                default = field.get_default(call_default_factory=True)
                shown = "unset" if default is None else f"`{toml_value(default)}`"
                about = told[model.__name__, key].replace("``", "`")
                cells = [f"`{key}`", describe_allowed((owner, key)), shown, unit, about]
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
