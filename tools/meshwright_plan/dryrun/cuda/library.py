"""Stub CUDA device, which executes nothing, compiled against the installed torch. Imports no torch.

A CPU build of torch refuses autograd on CUDA tensors, fake ones too, because it has no CUDA hooks and no device guard.
``pretend_cuda.cpp`` registers both. It has to be loaded before torch is imported, in a process of its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from meshwright.errors import UserError

SOURCE = Path(__file__).with_name("pretend_cuda.cpp")
COMPILERS = ("g++", "c++", "clang++")


def find_compiler() -> str | None:
    """Return the path of a C++ compiler; None: there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def compile_library(directory: Path) -> Path:
    """Compile the library into a directory and return its path; takes some seconds.

    Raises:
        UserError: no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise UserError(
            "MW-DRYRUN-001",
            f"--device cuda compiles {SOURCE.name} against torch, and none of {', '.join(COMPILERS)} is on PATH: "
            "install a C++ compiler (Debian: g++)",
        )
    torch, library = _torch_directory(), directory / "pretend_cuda.so"
    words = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    words += [f"-I{torch / 'include'}", f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise UserError("MW-DRYRUN-002", f"--device cuda: {compiler} cannot compile {SOURCE.name}: {first}")
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
