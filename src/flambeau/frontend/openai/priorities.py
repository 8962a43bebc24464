"""vLLM's `priority` of a request, a whole number of which the lower goes first → our three classes."""

from __future__ import annotations

from flambeau.errors import InvalidField
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.openai.fields import integer
from flambeau.serving.job import HIGH, LOW, PRIORITIES, PRIORITY_HEADER, priority_named

PRIORITY = integer().described("Below 0: high priority; above 0: low; 0: normal, or what the header says.")


def apply_priority(exchange: Exchange, asked: int | None) -> None:
    """Use the number of a request, unless it is 0, which many clients send with every request.

    The server's own choice for requests of a batch stays.
    """
    if not asked:
        return
    name = PRIORITIES[HIGH if asked < 0 else LOW]
    if exchange.priority is None:
        exchange.priority = name
    elif exchange.header(PRIORITY_HEADER) is not None and PRIORITIES[priority_named(exchange.priority)] != name:
        header = f"the header {PRIORITY_HEADER} is {exchange.priority!r}"
        raise InvalidField("priority", f"priority {asked} means {name}, and {header}; send one of them")
