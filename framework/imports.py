"""Functions that a configuration names: ``package.module:function``, and where in a user's code an error was raised."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework.errors import UserError


def place(error: BaseException) -> str:
    """ " at FILE:LINE", the innermost place in the user's code where an error was raised."""
    if isinstance(error, SyntaxError):
        return f" at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the caller's own
    theirs = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<")]
    return f" at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def find_function(path: str, key: str, wanted: str, error_type: type[UserError]) -> Callable[..., Any]:
    """``package.module:function`` -> the function. The current directory counts, as it does for ``python``.

    Raises ``error_type`` for no such module or function; an import inside the module that fails is told with its
    reason. ``key`` is the configuration's, ``wanted`` says what the function should be.
    """
    module_name, _, function_name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise error_type(
            f"{key} = {path!r}: cannot import {module_name} ({error}). Run from the directory that holds it, "
            f"or install it into this environment"
        ) from error
    except (Exception, SystemExit) as error:
        raise error_type(
            f"{key} = {path!r}: importing {module_name} failed{place(error)}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        close = difflib.get_close_matches(function_name, public, 1)
        hint = f"did you mean {module_name}:{close[0]}?" if close else f"name {wanted}"
        raise error_type(f"{key} = {path!r}: {module_name} has no function {function_name}; {hint}")
    return function  # type: ignore[no-any-return]
