"""core/ stands on numpy and the standard library alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pagedweight.core

CORE = Path(pagedweight.core.__file__).parent


def test_core_imports_nothing_heavy() -> None:
    modules = sorted(
        ".".join(["pagedweight.core", *path.relative_to(CORE).with_suffix("").parts])
        for path in CORE.rglob("*.py")
        if path.name != "__init__.py"
    )
    assert "pagedweight.core.planner.step" in modules
    program = f"""
import importlib, json, sys
for name in {modules!r}:
    importlib.import_module(name)
names = {{name.split(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)
print(json.dumps(sorted(names)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outside = {name for name in json.loads(done.stdout) if not name.startswith("_")}
    assert outside & {"torch", "vllm", "numba", "transformers", "safetensors"} == set()
    assert {"numpy", "pagedweight"} <= outside
