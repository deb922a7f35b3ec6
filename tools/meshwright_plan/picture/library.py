"""Check of matplotlib, before anything is computed for a picture."""

from __future__ import annotations

from importlib.util import find_spec

from meshwright.errors import UserError


def require_matplotlib() -> None:
    """Raise UserError if matplotlib, which draws all pictures, is not installed; set its defaults.

    It has read a ``matplotlibrc`` of the working directory, which may be a run of somebody else.
    """
    if find_spec("matplotlib") is None:
        raise UserError(
            "MW-PICTURE-001",
            "matplotlib is not installed, and pictures need it: pip install matplotlib",
        )
    import matplotlib

    matplotlib.rcdefaults()
