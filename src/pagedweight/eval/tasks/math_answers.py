r"""Answers of MATH: what is in the last `\boxed{}`, and when two answers are the same.

As in the data set's own script (Hendrycks et al. 2021), two answers are the same when they are the
same text once spacing, units, dollar signs, `\left` and the spellings of fractions are taken away.
Two plain decimal numbers also are when they have the same value.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\boxed\s+")
_DROPPED = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\:|\\ |~|\\\$|\$|\^\{?\\circ\}?|\\%|%")
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=.)\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?\d\}?)?$")
_BARE_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([^\s{}\\]))\s*(?:\{([^{}]*)\}|([^\s{}\\]))")
_BARE_ROOT = re.compile(r"\\sqrt\s*([^\s{}\[\\])")
_SLASH = re.compile(r"(-?)(\d+)/(\d+)")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` with its braces matched, None when there is none."""
    starts = list(_BOX.finditer(text))
    if not starts:
        return None
    last = starts[-1]
    if not last[0].endswith("{"):
        return text[last.end() :].split("$")[0].strip()
    depth = 1
    for position in range(last.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[last.end() : position]
    return None


def same_answer(one: str, other: str) -> bool:
    """Whether two answers are the same after normalization, or the same decimal number."""
    left, right = normalized(one), normalized(other)
    if left == right:
        return True
    numbers = [_decimal(text) for text in (left, right)]
    return numbers[0] is not None and numbers[0] == numbers[1]


def normalized(answer: str) -> str:
    """An answer without what does not change its meaning."""
    text = answer.strip().removesuffix(".").replace("\n", "")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = _UNIT.sub("", _DROPPED.sub("", text).strip())
    text = _WORDS.sub(r"\1", text)
    if text.count("=") == 1 and len(text.split("=")[0].strip()) <= 2:
        text = text.split("=")[1]
    text = _BARE_FRACTION.sub(_fraction, text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = re.sub(r"\s+", "", text)
    if match := _SLASH.fullmatch(text):
        text = rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}"
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)


def _fraction(match: re.Match[str]) -> str:
    top, bottom = match[1] or match[2], match[3] or match[4]
    return rf"\frac{{{top}}}{{{bottom}}}"


def _decimal(text: str) -> Decimal | None:
    try:
        found = Decimal(text)
    except InvalidOperation:
        return None
    return found if found.is_finite() else None
