"""Both kernels compiled for an H200 on any machine: every access to bulk data is as wide as its unit."""

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flatcake.kernels import checksum, gather, scatter

def accesses(kernel, unit, wide, summed):
    names = kernel.arg_names
    rows = (4096, 1, 4096, 4096, 16384, 32768) if wide else None
    fixed = {"CHUNKS": 8, "COMPONENTS": 2, "PAGES": 4, "UNIFORM": rows, "LANES": 4, "LOOP": not wide, "STEPS": 2}
    fixed |= {"TILE": 512, "UNIT": unit, "WIDE": wide} | {"WEYL": checksum.WEYL, "SPREAD": checksum.SPREAD}
    fixed |= {} if summed else {"sums_ptr": None, "seeds_ptr": None}
    types = {"window_ptr": "*i32" if unit == 4 else "*i64", "sums_ptr": "*i32", "seeds_ptr": "*i32"}
    kinds = {name: types.get(name, "*i64" if name.endswith("_ptr") else "i32") for name in names}
    kinds |= dict.fromkeys(fixed, "constexpr")
    aligned = [(at,) for at, name in enumerate(names) if kinds[name].startswith("*")]
    source = ASTSource(
        kernel, kinds, {(names.index(name),): value for name, value in fixed.items()},
        dict.fromkeys(aligned, [["tt.divisibility", 16]]),
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return re.findall(r"\\b((?:ld|st)\\.global\\S*)", ptx)

found = {}
for name, kernel in (("scatter", scatter._scatter_kernel), ("gather", gather._gather_kernel)):
    variants = ((16, True, True), (16, False, True), (16, True, False), (8, False, True), (4, False, True))
    for unit, wide, summed in variants:
        found[f"{name} {unit} {wide} {summed}"] = accesses(kernel, unit, wide, summed)
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler comes for Linux only")
def test_bulk_accesses_are_as_wide_as_a_unit() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 10
    for name, accesses in found.items():
        unit = name.split()[1]
        width = {"16": ("v2.b64", "v4.b32"), "8": (".b64",), "4": (".b32",)}[unit]
        stores = [access for access in accesses if access.startswith("st.")]
        loads = [access for access in accesses if access.startswith("ld.") and access.endswith(width)]
        assert stores and all(access.endswith(width) for access in stores), (name, stores)
        assert len(loads) >= len(stores), (name, accesses)
