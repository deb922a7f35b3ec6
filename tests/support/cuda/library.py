"""Stub CUDA device, which executes nothing, compiled against the installed torch. Imports no torch.

A CPU build of torch refuses autograd on CUDA tensors, fake ones too, because it has no CUDA hooks
and no device guard. ``pretend_cuda.cpp`` registers both. It has to be loaded before torch is
imported, in a process of its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("pretend_cuda.cpp")
COMPILERS = ("g++", "c++", "clang++")


def find_compiler() -> str | None:
    """Return the path of a C++ compiler; None: there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def compile_library(directory: Path) -> Path:
    """Compile the library into a directory and return its path; takes some seconds.

    Tests that call it are skipped where :func:`find_compiler` returns None.
    """
    compiler = find_compiler()
    assert compiler is not None, f"none of {', '.join(COMPILERS)} is on PATH"
    torch, library = _torch_directory(), directory / "pretend_cuda.so"
    words = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    words += [
        f"-I{torch / 'include'}",
        f"-L{torch / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        f"-Wl,-rpath,{torch / 'lib'}",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{compiler} cannot compile {SOURCE.name}:\n{done.stderr}"
    return library


def load_library(library: Path) -> None:
    """Register the device. Must run before torch is imported."""
    assert "torch" not in sys.modules, "torch has been imported already"
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _torch_directory() -> Path:
    """Return the directory of the installed torch, without importing it."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent
