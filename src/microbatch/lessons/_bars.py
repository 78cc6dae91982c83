"""Numbers as bars of text."""

import math
from collections.abc import Iterable


def bars(rows: Iterable[tuple[str, float]], width: int = 30, digits: int = 0) -> list[str]:
    """One line per (label, value): the label, a bar whose length is ∝ \\|value\\|, and the value.

    What is not zero has a bar; what is not finite has none.

    >>> print("\\n".join(bars([("part 1", 10.0), ("total", 60.0)], width=12)))
    part 1  ██            10
    total   ████████████  60
    """
    rows = list(rows)
    longest = max((abs(value) for _, value in rows if math.isfinite(value)), default=0.0) or 1.0
    margin = max((len(label) for label, _ in rows), default=0)
    values = [f"{value:.{digits}f}" for _, value in rows]
    align = max(map(len, values), default=0)
    lines = []
    for (label, value), text in zip(rows, values, strict=True):
        share = abs(value) / longest if math.isfinite(value) else 0.0
        length = max(round(width * share), int(share > 0))
        lines.append(f"{label:<{margin}}  {'█' * length:<{width}}  {text:>{align}}")
    return lines
