"""Table of the built-in optimizers in docs/optimizers.md, from their specs.

python -m tests.support.optimizer_table          writes it anew
"""

from __future__ import annotations

from pathlib import Path

from meshwright.config import Optimizer
from meshwright.config.optimizers import DEFAULT, OPTIMIZERS, OptimizerSpec
from meshwright.optimizer.at_rest import state_bytes
from meshwright.verify.plain_optimizer import TWINS

DOCUMENT = Path(__file__).parents[2] / "docs" / "optimizers.md"
HEAD = (
    "| `optimizer.name` | states per element | bytes per element | with `state_dtype` | a step"
    " depends on | reference of `verify` |",
    "|---|---|---|---|---|---|",
)
UNITS = {
    "element": "the element",
    "matrix": "the matrix; elsewhere the element",
    "parameter": "the whole parameter",
}


def table() -> str:
    """Return the table, one row per name."""
    return "\n".join([*HEAD, *(_row(name, spec) for name, spec in OPTIMIZERS.items())]) + "\n"


def _row(name: str, spec: OptimizerSpec) -> str:
    keys = Optimizer(name=name, schedule="constant" if spec.averages_weights else "cosine")
    states = [f"`{state.name}`" for state in spec.states]
    shown, size = ", ".join(states), _size(keys)
    if spec.matrix_states:
        shown = f"{', '.join(f'`{each.name}`' for each in spec.matrix_states)}; elsewhere {shown}"
        size = f"{state_bytes(keys, 4, is_matrix=True):g}; elsewhere {size}"
    formats = [
        f"{each}: {_size(keys.model_copy(update={'state_dtype': each}))}" for each in spec.formats
    ]
    reference = " ".join((TWINS[name].__doc__ or "").split()).removeprefix("Return ").rstrip(".")
    label = f"`{name}`" + " (default)" * (name == DEFAULT)
    cells = (label, shown, size, ", ".join(formats), UNITS[spec.unit], reference)
    return "| " + " | ".join(cells) + " |"


def _size(keys: Optimizer) -> str:
    """Return the bytes of state per element, of matrices in blocks."""
    if keys.spec.unit == "parameter":
        return "4 per row and column"
    size = f"{state_bytes(keys, 4, is_eight_bit=keys.has_blocks):.3g}"
    return f"{size} for matrices" if keys.has_blocks else size


def page() -> str:
    """Return docs/optimizers.md with the table in the place of the present one."""
    text = DOCUMENT.read_text()
    start = text.index("| `optimizer.name` |")
    end = text.index("\n\n", start) + 1
    return text[:start] + table() + text[end:]


if __name__ == "__main__":
    DOCUMENT.write_text(page())
