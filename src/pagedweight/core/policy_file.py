"""A policy as JSON: `{"format": "pagedweight-policy", "format_version": 1, <fields of Policy>}`.

A field left out has its default. An unknown one is refused: a misspelt option must not be inert.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from pagedweight.core.atomic_file import write_atomic
from pagedweight.core.policy import Bucket, FloorStage, Policy
from pagedweight.errors import UserError, listing

FORMAT = "pagedweight-policy"
FORMAT_VERSION = 1
HEAD = ("format", "format_version")


def policy_to_json(policy: Policy) -> str:
    """The whole policy, defaults included, as indented JSON."""
    return json.dumps(
        {"format": FORMAT, "format_version": FORMAT_VERSION} | asdict(policy), indent=1
    )


def policy_from_json(text: str, name: str = "policy") -> Policy:
    """Inverse of `policy_to_json`. `name` goes into messages. Raises UserError."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as fault:
        raise UserError(f"{name} is not JSON: {fault}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f'{name} is not a policy: it lacks "format": "{FORMAT}"')
    if data.get("format_version") != FORMAT_VERSION:
        found = data.get("format_version")
        raise UserError(f"{name} has format_version {found}, this program reads {FORMAT_VERSION}")
    values = {key: value for key, value in data.items() if key not in HEAD}
    try:
        checked = _checked(Policy, values)
        for key, part in (("buckets", Bucket), ("stages", FloorStage)):
            if key in checked:
                checked[key] = tuple(part(**_checked(part, item)) for item in checked[key])
        return Policy(**checked)
    except UserError as fault:
        raise UserError(f"{name}: {fault}") from None


def load_policy(path: str | Path) -> Policy:
    """Read a policy file. Raises UserError when it is missing or not a sound policy."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"cannot read policy {path}: {fault}") from None
    return policy_from_json(text, f"policy {path}")


def save_policy(policy: Policy, path: str | Path) -> None:
    """Write a policy file, whole or not at all."""
    write_atomic(Path(path), [f"{policy_to_json(policy)}\n".encode()])


_TYPES: dict[str, tuple[type, ...]] = {
    "float": (int, float),
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
    "str": (str,),
}


def _checked(kind: type[Policy | Bucket | FloorStage], values: object) -> dict[str, Any]:
    """`values` as arguments of the frozen class `kind`; UserError names every offender."""
    if not isinstance(values, Mapping):
        raise UserError(f"a {kind.__name__} is an object, not {json.dumps(values)}")
    known = {field.name: field for field in fields(kind)}
    unknown = [key for key in values if key not in known]
    if unknown:
        raise UserError(f"unknown: {listing(unknown)}; known are {listing(known, 20)}")
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
    if missing:
        raise UserError(f"a {kind.__name__} needs {listing(missing)}")
    return {key: _value(key, str(known[key].type), value) for key, value in values.items()}


def _value(key: str, declared: str, value: object) -> object:
    if declared.startswith("tuple"):
        if not isinstance(value, list):
            raise UserError(f"{key} must be a list, not {json.dumps(value)}")
        whole = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        if "int" in declared and not whole:
            raise UserError(f"{key} must be whole numbers, not {json.dumps(value)}")
        return tuple(value)
    wrong_bool = isinstance(value, bool) and declared != "bool"
    if wrong_bool or not isinstance(value, _TYPES[declared]):
        raise UserError(f"{key} must be {declared}, not {json.dumps(value)}")
    return value
