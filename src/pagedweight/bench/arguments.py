"""Types of the benchmarks' command lines."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1; argparse says which option it was."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def positive_float(text: str) -> float:
    """A finite number above 0; argparse says which option it was."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
