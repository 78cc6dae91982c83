"""Which factored values are cheaper as arrays, from a dry run's record of what is asked of them."""

from collections import defaultdict
from collections.abc import Sequence

from microbatch.jax._factored._context import FLOPS_PER_BYTE, Event, Site


def unused_factors(events: Sequence[Event]) -> frozenset[Site]:
    """Sites whose factors would be no use: only entries are asked of them, or these too and are the smaller."""
    return frozenset(site for site, asked in _by_site(events).items() if _factors_are_unused(asked))


def _factors_are_unused(asked: list[Event]) -> bool:
    made = next((event for event in asked if event.statistic == "made"), None)
    kinds = {event.statistic for event in asked} - {"made"}
    small = made is not None and made.bytes <= made.factor_bytes
    return kinds == {"entries"} or ("entries" in kinds and small)


def cheaper_as_arrays(events: Sequence[Event]) -> frozenset[Site]:
    """Sites whose statistics cost more from factors than from an array that is made once and read for each.

    Costs are bytes moved plus multiply-adds divided by `FLOPS_PER_BYTE`. An array larger than its factors is
    not made, so that memory does not grow: it would live until all statistics are known.
    """
    return frozenset(site for site, asked in _by_site(events).items() if _array_is_cheaper(asked))


def _array_is_cheaper(asked: list[Event]) -> bool:
    made = next((event for event in asked if event.statistic == "made"), None)
    if made is None:
        return False
    uses = [event for event in asked if event.statistic != "made"]
    statistics = [event for event in uses if event.statistic != "entries"]
    if len(statistics) < len(uses) or not statistics:
        return False
    new_factors = made.factor_bytes if made.how == "patches" else 0.0
    from_factors = new_factors + sum(_cost(event) for event in statistics)
    from_array = new_factors + _cost(made) + made.bytes * len(uses)
    return made.bytes <= made.factor_bytes and from_array < from_factors


def _cost(event: Event) -> float:
    return event.bytes + event.flops / FLOPS_PER_BYTE


def _by_site(events: Sequence[Event]) -> dict[Site, list[Event]]:
    asked = defaultdict(list)
    for event in events:
        for site in event.sites:
            asked[site].append(event)
    return asked
