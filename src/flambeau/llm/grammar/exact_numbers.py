"""Numbers of JSON schemas as llguidance holds them to the digit: it reads them as floats, and not all of them exactly.

Limits are moved by a digit that nobody needs, always to the side that allows less.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_FLOOR, Decimal
from typing import Any

MAX_EXACT = 2**53 - 1
MAX_LIMIT = 2**63 - 2**10  # the largest float that is a 64-bit integer
NUM_DIGITS = 15
MIN_EXPONENT = -22  # powers of ten up to this one are floats

Number = int | float
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LIMITS = (*LOWER, *UPPER)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_exact(value: Number) -> bool:
    if isinstance(value, int) or value.is_integer():
        return abs(value) <= MAX_EXACT
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return len(digits) <= NUM_DIGITS and isinstance(exponent, int) and exponent >= MIN_EXPONENT


def lower_limit(value: Number) -> Number:
    return -upper_limit(-value)


def upper_limit(value: Number) -> Number:
    """The largest limit up to this one that is held exactly."""
    if value > MAX_LIMIT:
        return MAX_LIMIT
    if is_exact(value) or value < -MAX_LIMIT:  # llguidance rejects the latter
        return value
    given = Decimal(repr(value))
    unit = Decimal(1).scaleb(max(given.adjusted() - NUM_DIGITS + 1, MIN_EXPONENT))
    rounded = (given / unit).to_integral_value(ROUND_FLOOR) * unit
    if abs(rounded) <= MAX_EXACT:
        return float(rounded)
    return int(rounded - unit)  # llguidance's own rounding is smaller than a unit


def limits_of(part: dict[str, Any]) -> dict[str, Any]:
    """The limits of a part; those of draft 4, which are marked as exclusive, in the later form."""
    found = {word: part[word] for word in LIMITS if word in part}
    for limit, exclusive in (LOWER, UPPER):
        if isinstance(is_open := found.get(exclusive), bool):
            del found[exclusive]
            if is_open and limit in found:
                found[exclusive] = found.pop(limit)
    return {
        word: (lower_limit(value) if word in LOWER else upper_limit(value)) if is_number(value) else value
        for word, value in found.items()
    }


def close_limits(limits: dict[str, Any], all_limits: Iterable[Number]) -> dict[str, Any]:
    """Without exclusive integers beside another limit with the same digits before the point.

    llguidance would allow the integer itself.
    """
    found = dict(limits)
    for (limit, exclusive), side in ((LOWER, 1), (UPPER, -1)):
        value: Any = found.get(exclusive)
        if not is_number(value) or value != int(value) or value * side < 0:
            continue
        if any(0 < (other - value) * side < 1 for other in all_limits):
            del found[exclusive]
            unit = Decimal(1).scaleb(Decimal(int(value)).adjusted() - NUM_DIGITS + 1 if value else -NUM_DIGITS)
            closed: Any = float(Decimal(int(value)) + side * unit)
            other: Any = found.get(limit, closed)
            found[limit] = other if is_number(other) and (other - closed) * side > 0 else closed
    return found
