"""The house of docs/design.md: a package imports what stands below it, never above or beside."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pagedweight

SOURCE = Path(pagedweight.__file__).parent
FLOORS = (
    {"cli"},
    {"bench", "eval"},
    {"serving"},
    {"runtime"},
    {"calibrate", "quantize"},
    {"kernels"},
    {"memory"},
    {"checkpoint"},
    {"core"},
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# quantize measures moments with calibrate; bench drives eval: neighbours, in this direction only.
BESIDE = {("quantize", "calibrate"), ("bench", "eval")}


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_imports_go_down(path):
    package = path.relative_to(SOURCE).parts[0]
    for name in _imports(path):
        top, _, rest = name.partition(".")
        if top == "vllm":
            assert package in {"serving", "bench", "eval"}, f"{path} imports {name}"
        if package not in FLOOR or top != "pagedweight":
            continue
        other = rest.split(".")[0]
        if other in FLOOR and other != package and (package, other) not in BESIDE:
            assert FLOOR[other] > FLOOR[package], f"{path} imports {name}"


def test_core_needs_numpy_alone():
    code = (
        "import sys, importlib, pkgutil, pagedweight.core as c\n"
        "for m in pkgutil.walk_packages(c.__path__, 'pagedweight.core.'):\n"
        "    importlib.import_module(m.name)\n"
        "heavy = {'torch', 'numba', 'vllm', 'safetensors', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
