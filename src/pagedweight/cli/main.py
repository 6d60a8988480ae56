"""The `pagedweight` command. Each subcommand is a module here with a function `command`.

Modules import what they need inside that function, so that `pagedweight --help` stays quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from pagedweight import __version__
from pagedweight.errors import UserError

COMMANDS = (
    "quantize",
    "calibrate",
    "inspect",
    "plan",
    "serve",
    "eval",
    "top",
    "plot",
    "bench",
    "doctor",
)
"""Modules of this package, in the order of the help text. A module may have `SETTINGS`, keyword
arguments for `typer.Typer.command`."""

app = typer.Typer(
    name="pagedweight",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve Mixture-of-Experts models with expert precision that gives way to KV cache.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Options of the command itself."""


for _name in COMMANDS:
    _module = import_module(f"pagedweight.cli.{_name}")
    app.command(_name, **getattr(_module, "SETTINGS", {}))(_module.command)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and exit; a UserError becomes one line on stderr and exit code 2."""
    try:
        app(args=None if args is None else list(args), prog_name="pagedweight")
    except UserError as error:
        print(f"pagedweight: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
