"""JSON that every reader accepts: a number that is not finite becomes null."""

import json
import math


def strict_json(value: object, *, indent: int | None = None) -> str:
    """JSON text of plain values (dicts, lists, scalars)."""
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, indent=indent)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
