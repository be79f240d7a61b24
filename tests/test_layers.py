"""The import graph, the one seam, and the sizes of modules and functions, read from the source itself.

`ROWS` is the table of layers: a module imports only from rows above its own, never from its own row.  Imports
inside functions, under `TYPE_CHECKING`, relative ones and those through a package count like any other.  A name
may stand in the table before its file exists; a file that is not in the table fails.
"""

import ast
import builtins
import itertools
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "flatcake"

ROWS: tuple[tuple[str, ...], ...] = (
    # Words that everything uses.
    ("errors", "clock", "trace"),
    ("units",),
    # The seam to files and devices, and values that depend on nothing.
    ("fields", "given", "gva", "geometry", "io.seam", "io.driver", "kernels.walk", "sched.counters"),
    ("kernels.launch",),
    # Pure rules, and kernels over plain tensors.
    ("keyrows",),
    ("config", "keys", "messages", "placement", "layout", "index", "wear"),
    (
        "kernels.kvtable",
        "kernels.checksum",
        "io.cuts",
        "io.order",
        "sched.hrrn",
        "sched.ready",
        "sched.settings",
        "sched.estimate",
        "sched.shared",
    ),
    ("io.device", "extents", "io.plan", "kernels.hostcopy", "kernels.copies", "sched.actions", "sched.budget"),
    ("manifest", "io.cuda", "kernels.scatter", "kernels.gather"),
    ("scopes", "tenancy", "turnlog", "about", "homes", "io.devices"),
    ("space",),
    ("ledger", "prefix", "rowcheck", "sched.state"),
    ("reserve", "reopen", "retention", "sched.mas"),
    ("settle",),
    # Decides / acts.
    ("catalog", "io.paged", "io.engine", "io.pieces"),
    ("stats", "hits"),
    ("io.memory", "io.posix", "io.kvikio", "io.pooldir", "io.arena", "io.shelf", "io.records"),
    ("io.ring", "io.window", "io.sizing"),
    ("io.salvage", "io.scribe", "io.dramdump"),
    ("io.filepool", "io.staged", "io.verdict", "io.manifestfile", "io.manifestrows"),
    ("io.pump", "io.tilecopy", "io.probe", "io.manifestdb"),
    ("io.parts", "io.restore", "io.save"),
    ("io.tilebatch", "io.recording", "io.judging"),
    ("io.reading", "io.writing"),
    ("dataplane", "openmedia", "keeper"),
    ("snapshot", "saves"),
    # One process that has both.
    ("store",),
    ("loop.request", "assemble", "settings"),
    # A catalog without data planes of its own.
    ("coordinator",),
    ("loop.ready",),
    ("loop.driver",),
    ("loop.outlet",),
    ("loop.loop",),
    # The package's own `__init__`, which re-exports public names; what follows uses them as a stranger would.
    ("",),
    ("demo.pages", "demo.sessions", "demo.report", "doctor.facts", "doctor.blocks"),
    ("demo.model", "doctor.machine", "doctor.gpu", "doctor.direct", "doctor.bench", "doctor.advice"),
    ("demo.serve", "doctor.measure", "doctor.report", "audit.facts", "audit.copy", "audit.verdicts", "audit.progress"),
    ("demo.control", "audit.home", "audit.rows", "audit.survey", "audit.report"),
    ("audit.roots", "audit.sources", "audit.tally"),
    ("audit.stores", "audit.checking"),
    ("doctor.command", "demo.command", "audit.inspect", "audit.verify"),
    ("cli",),
    ("__main__",),
    # Engines: adapters only, and nothing imports them.
    ("engines.vllm.options", "engines.vllm.orders", "engines.vllm.views", "engines.vllm.signals"),
    ("engines.vllm.weights", "engines.vllm.loads", "engines.vllm.metrics", "engines.vllm.changes"),
    ("engines.vllm.groups", "engines.vllm.blockkeys", "engines.vllm.events"),
    ("engines.vllm.identity", "engines.vllm.worker", "engines.vllm.saving"),
    ("engines.vllm.scheduling",),
    ("engines.vllm.connector",),
)
LAYERS = {name: number for number, row in enumerate(ROWS) for name in row}

PURE = {
    *("errors", "units", "fields", "gva", "geometry", "config", "keys", "messages", "placement", "layout", "index"),
    *("keyrows", "extents", "scopes", "space", "ledger", "prefix", "reserve", "settle", "catalog"),
    *("retention", "wear", "tenancy", "turnlog", "rowcheck"),
    *("manifest", "reopen", "io.plan", "io.cuts", "io.order"),
    *("doctor.facts", "doctor.blocks", "doctor.advice", "doctor.report", "demo.sessions", "demo.report"),
    *("engines.vllm.options", "engines.vllm.orders", "engines.vllm.signals", "engines.vllm.changes"),
    *("engines.vllm.groups", "engines.vllm.blockkeys"),
    *("about", "homes", "audit.facts", "audit.verdicts", "audit.survey", "audit.report", "audit.tally"),
    *(name for name in LAYERS if name.startswith("sched.")),
}
"""No GPU package, file, thread or clock: time comes in as `now_ns`."""
LOCKED = {"catalog", "index", "retention"}
"""Pure, but for a lock: any number of threads may call these."""
IMPURE_PACKAGES = {
    *("torch", "triton", "threading", "time", "datetime", "asyncio", "concurrent", "multiprocessing", "queue"),
    *("os", "io", "pathlib", "sqlite3", "socket", "subprocess", "random", "secrets", "logging.handlers"),
}

FILE_SEAM, DEVICE_SEAM = {"io.seam"}, {"io.seam", "io.device", "io.devices", "io.cuda", "io.driver"}
"""The only modules that call files, and devices."""
OUTSIDE = {
    "cli": "reads the environment",
    "settings": "reads the configuration file",
    "engines.vllm.weights": "reads a sample of the model's files",
    "engines.vllm.connector": "hands the environment to `settings`",
    "doctor.machine": "reads /proc and /sys, and looks at a directory, to say what the machine can do",
    "doctor.gpu": "reads /proc to say which drivers are loaded",
    "doctor.measure": "makes a directory to measure in and removes it",
    "audit.copy": "makes a directory for a copy of a manifest and removes it",
    "demo.command": "makes a directory for its store and removes it",
    "demo.control": "flips bytes in a pool file behind the store's back",
}
"""Modules beside the seam that may touch files, and why; a device, never."""
FILE_NAMES = {
    *("open", "io.open", "codecs.open", "os.environ", "os.getenv", "os.open", "os.close", "os.read", "os.write"),
    *("os.pread", "os.preadv", "os.pwrite", "os.pwritev", "os.sendfile", "os.copy_file_range", "os.posix_fallocate"),
    *("os.posix_fadvise", "os.ftruncate", "os.truncate", "os.fsync", "os.fdatasync", "os.fstat", "os.stat"),
    *("os.lstat", "os.statvfs", "os.fstatvfs", "os.mkdir", "os.makedirs", "os.rename", "os.replace", "os.remove"),
    *("os.unlink", "os.rmdir", "os.listdir", "os.scandir", "os.walk", "os.link", "os.symlink", "os.chmod", "os.fchmod"),
    *("os.access", "os.lockf", "os.path.exists", "os.path.isfile", "os.path.isdir", "os.path.getsize"),
    *("numpy.memmap", "numpy.fromfile", "numpy.save", "numpy.savez", "torch.save", "torch.from_file"),
    *("mmap", "fcntl", "tempfile", "shutil", "pathlib.Path", "glob", "sqlite3.connect"),
}
DEVICE_NAMES = {"torch.cuda", "torch.accelerator", "cupy", "cupyx", "kvikio", "cuda", "pynvml"}
DEVICE_FACTS = {
    # Names the devices that there are.
    "doctor.gpu": ("torch.cuda", "torch.cuda.get_device_properties", "torch.cuda.device_count"),
}
"""What these may ask of a device; they change nothing there."""
CODE_NAMES = {
    *("eval", "exec", "compile", "__import__", "pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal"),
    *("shelve", "torch.load", "numpy.load", "importlib", "runpy"),
}
"""Ways to run code that came from data, or to import around this test."""

LINES_MAX, FUNCTION_LINES_MAX, PARAMETERS_MAX = 300, 50, 6
LONGER: dict[str, str] = {
    "store:save": "keyword-only, all of them the caller's",
    "kernels.scatter:scatter_pieces": "a kernel's launcher takes what the kernel takes",
    "kernels.gather:gather_pieces": "the same",
}
"""`module` or `module:function` that may break a limit, and why."""


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name without `flatcake.`; the package itself is ``""``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def is_package(name: str) -> bool:
    return (PACKAGE / name.replace(".", "/") / "__init__.py").exists()


def resolve(dotted: str) -> str | None:
    """The module in `LAYERS` that `flatcake.a.b.name` belongs to, or None when it is not ours."""
    head, _, rest = dotted.partition(".")
    if head != "flatcake":
        return None
    while rest and rest not in LAYERS and rest not in modules():
        rest = rest.rpartition(".")[0]
    return rest if rest in LAYERS else None  # not in the table: another test says so


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of all imports, wherever they stand; `package` anchors relative ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def layer_faults(name: str, tree: ast.AST) -> list[str]:
    full = f"flatcake.{name}" if name else "flatcake"
    package = full if is_package(name) else full.rpartition(".")[0]
    faults = []
    for line, dotted in imported_names(tree, package):
        target = resolve(dotted)
        if target is not None and LAYERS[target] >= LAYERS[name]:
            other = f"flatcake.{target}" if target else "flatcake"
            faults.append(f"{full}:{line} (layer {LAYERS[name]}) imports {other} (layer {LAYERS[target]})")
    return faults


def used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of imports, and of uses of imported or built-in names with aliases written out."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    yield from imported_names(tree, "flatcake")
    for node in ast.walk(tree):
        parts: list[str] = []
        reach: ast.AST = node
        while isinstance(reach, ast.Attribute):
            parts.insert(0, reach.attr)
            reach = reach.value
        if isinstance(reach, ast.Name) and (reach.id in aliases or hasattr(builtins, reach.id)):
            yield node.lineno, ".".join([aliases.get(reach.id, reach.id), *parts])  # type: ignore[attr-defined]


def forbidden(tree: ast.AST, names: set[str]) -> list[str]:
    """Uses of any of `names`, or of something inside one of them."""
    found = set()
    for line, dotted in used_names(tree):
        prefixes = itertools.accumulate(dotted.split("."), lambda left, right: f"{left}.{right}")
        found |= {f"line {line}: {dotted}" for prefix in prefixes if prefix in names}
    return sorted(found)


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Every function, and whether it is a Triton kernel."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """All parameters but `self` and `cls`."""
    spec = node.args
    listed = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    return [arg for arg in listed if arg.arg not in ("self", "cls")]


def size_faults(name: str, tree: ast.Module, lines: int) -> list[str]:
    faults = [f"{name}: {lines} lines, at most {LINES_MAX}"] if lines > LINES_MAX and name not in LONGER else []
    for node, is_kernel in functions(tree):
        where = f"{name}:{node.name}"
        if where in LONGER:
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES_MAX:
            faults.append(f"{where} at line {node.lineno}: {length} lines, at most {FUNCTION_LINES_MAX}")
        if len(parameters(node)) > PARAMETERS_MAX and not is_kernel:
            faults.append(
                f"{where} at line {node.lineno}: {len(parameters(node))} parameters, at most {PARAMETERS_MAX}"
            )
    return faults


def unhinted(tree: ast.AST) -> list[str]:
    """Functions that lack a hint, kernels aside."""
    inside = {id(sub) for node, is_kernel in functions(tree) if is_kernel for sub in ast.walk(node)}
    return [
        f"line {node.lineno}: {node.name}"
        for node, _ in functions(tree)
        if id(node) not in inside and (node.returns is None or any(arg.annotation is None for arg in parameters(node)))
    ]


def test_table_names_each_module_once() -> None:
    names = [name for row in ROWS for name in row]
    assert len(names) == len(set(names))
    assert set(names) >= PURE | FILE_SEAM | DEVICE_SEAM | set(OUTSIDE)


def test_every_module_is_in_the_table() -> None:
    unknown = [name for name in modules() if name not in LAYERS and not is_package(name)]
    assert not unknown, f"give these a row in ROWS: {unknown}"


def test_inner_packages_are_empty() -> None:
    for name, tree in modules().items():
        if name and is_package(name):
            assert not tree.body, f"flatcake/{name}/__init__.py: only flatcake/__init__.py re-exports names"


def test_imports_go_to_lower_layers_only() -> None:
    faults = [fault for name, tree in modules().items() if name in LAYERS for fault in layer_faults(name, tree)]
    assert not faults, "\n".join(faults)


def test_pure_modules_import_no_gpu_file_thread_or_clock() -> None:
    faults = []
    for name in PURE & set(modules()):
        packages = IMPURE_PACKAGES - ({"threading"} if name in LOCKED else set())
        faults += [f"{name} {use}" for use in forbidden(modules()[name], packages)]
    assert not faults, "\n".join(faults)


def test_files_and_devices_are_called_in_the_seam_only() -> None:
    faults = []
    for name, tree in modules().items():
        names = set() if name in FILE_SEAM or name in OUTSIDE else FILE_NAMES
        names = names if name in DEVICE_SEAM else names | DEVICE_NAMES
        uses = forbidden(tree, names)
        faults += [f"{name} {use}" for use in uses if use.partition(": ")[2] not in DEVICE_FACTS.get(name, ())]
    assert not faults, "\n".join(faults)


def test_no_code_comes_from_data() -> None:
    allowed = {"importlib", "importlib.util", "importlib.util.find_spec"}
    faults = [
        f"{name} {use}"
        for name, tree in modules().items()
        if name not in DEVICE_SEAM  # its optional packages are imported by name
        for use in forbidden(tree, CODE_NAMES)
        if (dotted := use.partition(": ")[2]) not in allowed and not dotted.startswith("importlib.metadata")
    ]
    assert not faults, "\n".join(faults)


def test_modules_and_functions_keep_to_their_sizes() -> None:
    faults = []
    for name, tree in modules().items():
        path = PACKAGE / name.replace(".", "/")
        path = path / "__init__.py" if is_package(name) else path.with_suffix(".py")
        faults += size_faults(name, tree, len(path.read_text(encoding="utf-8").splitlines()))
    assert not faults, "\n".join(faults)


def test_every_exemption_is_still_needed() -> None:
    known = {f"{name}:{node.name}" for name, tree in modules().items() for node, _ in functions(tree)} | set(modules())
    assert set(LONGER) <= known
    assert all(LONGER.values()) and all(OUTSIDE.values())


def test_every_function_has_hints() -> None:
    faults = [f"{name} {where}" for name, tree in modules().items() for where in unhinted(tree)]
    assert not faults, "\n".join(faults)


def test_every_module_begins_with_a_docstring() -> None:
    missing = [name for name, tree in modules().items() if tree.body and not ast.get_docstring(tree)]
    assert not missing


# The checks themselves can fail.


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("gva", "import flatcake.store", "flatcake.store"),
        ("gva", "import flatcake.store as s, math", "flatcake.store"),
        ("gva", "from flatcake.store import Store", "flatcake.store"),
        ("gva", "from flatcake import store", "flatcake.store"),
        ("gva", "from flatcake.io import seam", "flatcake.io.seam"),
        ("gva", "from flatcake import __version__", "flatcake"),
        ("gva", "import flatcake", "flatcake"),
        ("gva", "from . import catalog", "flatcake.catalog"),
        ("io.plan", "from . import parts", "flatcake.io.parts"),
        ("io.plan", "from ..extents import Extent", "flatcake.extents"),
        ("gva", "def f():\n    from flatcake.catalog import Catalog", "flatcake.catalog"),
        ("gva", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import flatcake.index", "flatcake.index"),
        ("gva", "try:\n    import flatcake.keys\nexcept ImportError:\n    pass", "flatcake.keys"),
        ("gva", "class A:\n    import flatcake.gva", "flatcake.gva"),
        ("", "from flatcake import cli", "flatcake.cli"),
    ],
)
def test_layer_check_sees(name: str, source: str, target: str) -> None:
    (fault,) = layer_faults(name, ast.parse(source))
    assert fault.endswith(f"imports {target} (layer {LAYERS[target.removeprefix('flatcake').removeprefix('.')]})")


def test_layer_check_lets_lower_layers_and_other_packages_pass() -> None:
    source = (
        "import numpy\nfrom flatcake.errors import AddressError\nfrom flatcake import units\nimport flatcakes.store"
    )
    assert not layer_faults("gva", ast.parse(source))
    assert not layer_faults("io.plan", ast.parse("from ..layout import LaneTable\nfrom flatcake.gva import Medium"))


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "def f(path):\n    with open(path) as file:\n        return file",
        "import os\nos.preadv(1, [], 0)",
        "import os as system\nsystem.pwrite(1, b'', 0)",
        "from os import pread as read\nread(1, 1, 0)",
        "import mmap",
        "from mmap import mmap",
        "import fcntl",
        "import numpy as np\nnp.memmap('x')",
        "import torch\ntorch.cuda.synchronize()",
        "from torch import cuda",
        "import torch.cuda as c",
        "def f():\n    import cupy as cp",
        "from cuda.bindings import cufile",
        "from kvikio import CuFile",
        "import os\nx = os.environ['HOME']",
        "from pathlib import Path",
    ],
)
def test_seam_check_sees(source: str) -> None:
    assert forbidden(ast.parse(source), FILE_NAMES | DEVICE_NAMES)


def test_seam_check_lets_other_names_pass() -> None:
    source = """
        import os
        import flatcake
        def open_store(open_count, files):
            flatcake.open(files)
            files.open(os.path.join("a", "b"))
            return tensor.cuda, store.mmap, open_count
        class Files:
            def open(self): ...
    """
    assert not forbidden(ast.parse(textwrap.dedent(source)), FILE_NAMES | DEVICE_NAMES)


@pytest.mark.parametrize(
    "source", ["eval('1')", "import pickle", "from pickle import loads", "import torch\ntorch.load(f)"]
)
def test_code_check_sees(source: str) -> None:
    assert forbidden(ast.parse(source), CODE_NAMES)


def test_code_check_lets_methods_pass() -> None:
    assert not forbidden(ast.parse("import re\nmodel.eval()\nre.compile('x')\nself.exec(1)"), CODE_NAMES)


def test_size_check_sees_lines_and_parameters() -> None:
    long = "def f():\n" + "    x = 1\n" * 50
    assert size_faults("m", ast.parse(long), 51) == ["m:f at line 1: 51 lines, at most 50"]
    assert not size_faults("m", ast.parse(long.replace("    x = 1\n", "", 1)), 300)
    assert size_faults("m", ast.parse(""), 301) == ["m: 301 lines, at most 300"]
    wide = "def g(self, a, b, c, *d, e, f, **g): ..."
    assert size_faults("m", ast.parse(wide), 1) == ["m:g at line 1: 7 parameters, at most 6"]
    assert not size_faults("m", ast.parse(wide.replace(", **g", "")), 1)
    assert not size_faults("m", ast.parse("@triton.jit\ndef k(a, b, c, d, e, f, g): ..."), 1)


def test_hint_check_sees_missing_hints_but_not_in_kernels() -> None:
    assert unhinted(ast.parse("def f(a: int): ...")) == ["line 1: f"]
    assert unhinted(ast.parse("def f(a) -> None: ...")) == ["line 1: f"]
    assert not unhinted(ast.parse("@triton.jit\ndef k(a): ...\ndef f(self, a: int) -> None: ..."))
