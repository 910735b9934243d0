"""Schemas of the JSON Schema Test Suite: draft 2020-12 with its optional tests, and what draft 7
adds.

The file has each distinct schema once, those that the server enforces with their invalid instances.
Without: draft 7's tests of references, whose rules draft 2020-12 has changed.
"""

import json
from pathlib import Path
from typing import NamedTuple


class SuiteSchema(NamedTuple):
    """A schema of the suite."""

    file: str
    schema: dict | bool
    invalid: list  # instances that do not satisfy it


def _read(one: dict) -> SuiteSchema:
    schema = one["schema"]
    if one["file"].startswith("draft7") and isinstance(schema, dict):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#"} | schema
    return SuiteSchema(one["file"], schema, one.get("invalid", []))


_CONTENT = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ENFORCED = [_read(one) for one in _CONTENT["enforced"]]
REFUSED = [_read(one) for one in _CONTENT["refused"]]
CHECKABLE = [one for one in ENFORCED if r"\\p{" not in json.dumps(one.schema)]
"""Those that `jsonschema` can check: Python's regular expressions have no classes of Unicode."""
