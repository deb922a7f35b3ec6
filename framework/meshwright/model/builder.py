"""Function and vocabulary size that ``model.builder`` names: ``package.module:function``,
or ``SCHEME:PLACE``; weights that ``run.start`` names as ``SCHEME:PLACE``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.config.functions import error_place, find_function
from meshwright.config.schemes import is_scheme, scheme_of
from meshwright.errors import ModelError, UserError, reason_of


def find_builder(path: str) -> Callable[..., Any]:
    """Return the function that ``model.builder`` names: ``package.module:function``,
    or ``hf:DIRECTORY``.
    """
    if is_scheme(path):
        return call_scheme(path, "builder")  # type: ignore[no-any-return]
    return find_function(
        path, "model.builder", "a function that returns an nn.Sequential", ModelError
    )


def call_scheme(path: str, function: str, *arguments: object, key: str = "model.builder") -> Any:
    """Call a function of the scheme ``SCHEME:PLACE`` with its place and these arguments.

    ``key``: configuration key of the path.

    Raises:
        ModelError: the scheme's package is not installed, or its function fails.
    """
    scheme, why = scheme_of(path), "no package registers it"
    called: Callable[..., Any] | None = None
    if scheme is not None:
        try:
            called = find_function(
                f"{scheme.module}:{function}", key, "a scheme's function", ModelError
            )
        except ModelError as error:
            if error.code != "MW-CONFIG-008":  # the module is there, and fails by itself
                raise
            why = error.message
    if scheme is None or called is None:
        raise ModelError(
            "MW-MODEL-058",
            f"{key} = {path!r}: the scheme {path.partition(':')[0]} is not installed here"
            f" ({why}): install meshwright with its package meshwright_interop, in a checkout by"
            " `pip install -e .`",
        )
    try:
        return called(scheme.place, *arguments)
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ModelError(
            "MW-MODEL-059",
            f"{key} = {path!r}: {scheme.module} failed{error_place(error)}: {reason_of(error)}",
        ) from error


def vocabulary_size(path: str, options: dict[str, Any]) -> int | None:
    """Return the vocabulary size, from the model's options or its directory;
    None if neither contains it.
    """
    found = options.get("vocab_size")
    if found is None and is_scheme(path):
        found = call_scheme(path, "vocabulary")
    return found if isinstance(found, int) else None
