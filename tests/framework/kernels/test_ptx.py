"""The kernels as machine code of three generations of GPUs, without one:
Triton and its assembler accept them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from meshwright.kernels.triton_adamw_8bit import step_blocks
from meshwright.kernels.triton_dropout import drop_block
from meshwright.kernels import triton_float8

def of(function, signature, constants, generation):
    names = function.arg_names
    places = {(names.index(name),): value for name, value in constants.items()}
    signature = signature | dict.fromkeys(constants, "constexpr")
    target, options = GPUTarget("cuda", generation, 32), {"enable_fp_fusion": False}
    made = compile(ASTSource(function, signature, places), target, options)
    return {"cubin": len(made.asm["cubin"]), "local memory": made.asm["ptx"].count(".local")}

found = []
for generation in map(int, sys.argv[1:]):
    for dtype in ("*fp32", "*bf16"):
        drop = {"x": dtype, "y": dtype, "drawn": ("*i64", "*i64"), "kept": ("i32", "fp32"), "shape": ("i32",) * 4}
        for sharded in (False, True):
            found.append(of(drop_block, drop, {"ELEMENTS": 1024, "IS_SHARDED": sharded}, generation))
        states, tables = ("*u8", "*fp32") * 2, ("*fp32", "*u8", "*fp32") * 2
        step = {"target": ("*fp32", dtype, "i32"), "moments": states, "tables": tables, "numbers": ("fp32",) * 7}
        for rows, columns, block in ((4, 256, 256), (1, 4096, 4096)):
            found.append(of(step_blocks, step, {"ROWS": rows, "COLUMNS": columns, "BLOCK": block}, generation))
        if generation >= 90:
            row = {"x": dtype, "codes": "*fp8e4nv", "exponents": "*i8", "row_stride": "i64", "length": "i32"}
            found.append(of(triton_float8.quantise_row, row, {"LENGTH": 16384}, generation))
            for rows, columns in ((4, 1024), (32, 128)):
                tile, shape = {"ROWS": rows, "COLUMNS": columns}, {"shape": ("i32", "i32")}
                read = {"x": dtype, "exponents": "*i8", "strides": ("i64", "i64")} | shape
                write, values = read | {"codes": "*fp8e4nv"}, {"codes": "*fp8e4nv", "values": dtype, "exponents": "*i8"}
                found.append(of(triton_float8.find_exponents, read, tile | {"TILES": 7}, generation))
                found.append(of(triton_float8.encode_tile, write, tile, generation))
                found.append(of(triton_float8.decode_tile, values | shape, tile, generation))
print(json.dumps(found))
"""


@pytest.mark.parametrize("generation", [80, 90, 100])
def test_kernels_compile(generation: int) -> None:
    pytest.importorskip("triton", reason="runs with Triton installed, see docs/gpu.md")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    words = [sys.executable, "-c", PROGRAM, str(generation)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == (8 if generation < 90 else 22) and all(
        each["cubin"] > 0 and each["local memory"] == 0 for each in found
    )
