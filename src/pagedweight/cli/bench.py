"""`pagedweight bench`: the benchmarks, by name. Each is also `python -m pagedweight.bench.NAME`."""

from __future__ import annotations

import ast
import inspect
import sys
from importlib import import_module
from pathlib import Path

import typer

import pagedweight.bench
from pagedweight.errors import UserError, listing

SETTINGS = {
    # Everything behind NAME is the benchmark's own, --help too.
    "context_settings": {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    },
    "add_help_option": False,
}


def command(
    context: typer.Context,
    name: str = typer.Argument("", metavar="[NAME]", help="Without it, a list of them."),
) -> None:
    """Measure: `bench` lists what there is, `bench NAME --help` says what NAME takes."""
    known = benchmarks()
    if name in ("", "--help", "-h"):
        print("pagedweight bench NAME [ARGUMENTS]; NAME --help says more\n")
        for known_name, question in known.items():
            print(f"  {known_name:<13} {question}")
        return
    if name not in known:
        raise UserError(f"there is no benchmark {name!r}; there are {listing(known, 20)}")
    main = import_module(f"pagedweight.bench.{name}").main
    if inspect.signature(main).parameters:
        main(context.args)
    else:  # reads the command line itself
        sys.argv = [f"pagedweight bench {name}", *context.args]
        main()


def benchmarks() -> dict[str, str]:
    """Modules of `pagedweight.bench` with a function `main`, and what each asks.

    Read from their sources: importing them all would take seconds, and some need a GPU.
    """
    found = {}
    for path in sorted(Path(p) for p in pagedweight.bench.__path__ for p in Path(p).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found
