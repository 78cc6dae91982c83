"""Results as JSON that every reader accepts."""

import json
import math
from typing import Any


def to_json(value: Any) -> str:
    """One line of JSON; what JSON has no number for is written as a string.

    >>> to_json({"losses": (0.5, float("nan")), "bound": float("inf")})
    '{"losses": [0.5, "nan"], "bound": "inf"}'
    """
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
