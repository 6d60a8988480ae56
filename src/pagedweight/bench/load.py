"""A load that rises and falls: Poisson arrivals in phases, prompts cut from real text.

    calm:10:1  burst:25:6  calm:30:1        name : seconds : requests a second
    long:20:1:384-448:32-64                 ... : prompt tokens : generated tokens

All is drawn from one seed, so that every policy is asked the same at the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedweight.errors import UserError

Lengths = tuple[int, int]
"""Fewest and most tokens, both included; drawn evenly."""


@dataclass(frozen=True)
class Phase:
    """`rate` requests a second for `seconds`; lengths None: those of the load."""

    name: str
    seconds: float
    rate: float
    prompt: Lengths | None = None
    output: Lengths | None = None

    @staticmethod
    def parse(text: str) -> Phase:
        """Inverse of the form above. Raises UserError."""
        parts = text.split(":")
        try:
            if not 3 <= len(parts) <= 5 or not parts[0]:
                raise ValueError
            phase = Phase(
                parts[0],
                float(parts[1]),
                float(parts[2]),
                *(parse_lengths(part) for part in parts[3:]),
            )
        except ValueError:
            raise UserError(
                f"phase {text!r} is not NAME:SECONDS:RATE[:PROMPT[:OUTPUT]], "
                "for example burst:25:6 or long:20:1:384-448:32-64"
            ) from None
        if phase.seconds <= 0 or phase.rate < 0:
            raise UserError(f"phase {text!r} needs seconds above 0 and a rate of at least 0")
        return phase


@dataclass(frozen=True)
class Load:
    """Phases one after the other; lengths in tokens, for phases that have none of their own."""

    phases: tuple[Phase, ...]
    prompt: Lengths
    output: Lengths
    seed: int = 0

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def calm_after(self, name: str) -> float:
        """When the phase after the one that follows the first phase `name` begins, in seconds from
        the start of the load; infinite where nothing comes after those two."""
        self.span(name)
        at = [phase.name for phase in self.phases].index(name) + 2
        return self.spans[at][0] if at < len(self.phases) else float("inf")

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Start and end of every phase, in seconds from the start of the load."""
        ends = np.cumsum([phase.seconds for phase in self.phases]).tolist()
        return list(zip([0.0, *ends], ends, strict=False))

    def span(self, name: str) -> tuple[float, float]:
        """Start and end of the first phase `name`, in seconds from the start of the load."""
        for phase, span in zip(self.phases, self.spans, strict=True):
            if phase.name == name:
                return span
        raise UserError(f"no phase is called {name!r}: {[phase.name for phase in self.phases]}")


@dataclass(frozen=True)
class Ask:
    """One request: sent `at` seconds after the start; `prompt` in tokens; generates `output`."""

    at: float
    phase: str
    prompt: tuple[int, ...]
    output: int


def parse_lengths(text: str) -> Lengths:
    """ "64-192" or "64". Raises ValueError."""
    first, _, last = text.partition("-")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high:
        raise ValueError(f"{text!r} is not a range of lengths")
    return low, high


def draw(load: Load, stream: Sequence[int]) -> list[Ask]:
    """The requests of `load` in the order of their arrival; prompts are pieces of `stream`.

    Raises UserError when the text is too short or nobody ever asks.
    """
    rng = np.random.default_rng(load.seed)
    asks: list[Ask] = []
    begin = 0.0
    for phase in load.phases:
        at = begin
        while phase.rate and (at := at + rng.exponential(1 / phase.rate)) < begin + phase.seconds:
            tokens = int(rng.integers(*(phase.prompt or load.prompt), endpoint=True))
            if tokens >= len(stream):
                raise UserError(
                    f"the text has {len(stream)} tokens, a prompt of {tokens} needs more"
                )
            first = int(rng.integers(0, len(stream) - tokens))
            output = int(rng.integers(*(phase.output or load.output), endpoint=True))
            asks.append(Ask(at, phase.name, tuple(stream[first : first + tokens]), output))
        begin += phase.seconds
    if not asks:
        raise UserError("the load has no requests: give more seconds or a higher rate")
    return asks


def python_topics() -> str:
    """Half a million characters of English that every CPython has: the texts of `help()`."""
    from pydoc_data import topics

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))
