"""Tenant: who sends requests with one key; its limits, its requests in flight, and what it has used.

Time is an argument, in seconds of the monotonic clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from flambeau.errors import KeyLimitReached, ModelNotAllowed
from flambeau.wire.messages import GenerationWork

MINUTE_S = 60.0
HIGH, NORMAL = 0, 1  # priorities, as in job.py

LimitName = Literal["requests", "tokens", "concurrent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What a key may do. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    models: tuple[str, ...] = ()  # names; empty: all models
    priority: int | None = None  # the highest that its requests may have; None: as they say
    weight: float = 1.0  # its share of a busy model, in proportion to those of others


NO_LIMITS = KeyLimits()


class RateBucket:
    """A token bucket: full at first, and refilled evenly to its capacity within a minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)  # negative: more was used than there was
        self._at = now

    def remaining(self, now: float) -> float:
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / MINUTE_S)
        self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until an amount can be taken; one beyond the capacity needs a full bucket."""
        return max(0.0, (min(amount, self.per_minute) - self.remaining(now)) * MINUTE_S / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Take an amount, or return a negative one."""
        self._level = min(self.per_minute, self.remaining(now) - amount)

    def reset_s(self, now: float) -> float:
        """Seconds until it is full again."""
        return (self.per_minute - self.remaining(now)) * MINUTE_S / self.per_minute


@dataclass(frozen=True, slots=True)
class RateState:
    """A limit as clients read it in headers."""

    name: Literal["requests", "tokens"]
    limit: int
    remaining: int
    reset_s: float


class Tenant:
    """One key: admits its requests, and counts them."""

    def __init__(self, name: str, limits: KeyLimits, now: float) -> None:
        self.name = name
        self.num_running = 0  # requests that are accepted and not over
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_rejected: Counter[str] = Counter()  # by the limit that was reached
        self._use(limits, now)

    def _use(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = None if requests is None else RateBucket(requests, now)
        self._tokens = None if tokens is None else RateBucket(tokens, now)

    def change(self, limits: KeyLimits, now: float) -> None:
        """Use other limits; what was used of the same ones stays used."""
        if limits != self.limits:
            self._use(limits, now)

    def admit(self, model: str, num_tokens: int, now: float) -> None:
        """Accept a request of about so many tokens; raise the limit that it exceeds."""
        limits = self.limits
        if limits.models and model not in limits.models:
            raise ModelNotAllowed(
                f"The key {self.name} may not use the model {model!r}, only {', '.join(limits.models)}. "
                "The server's operator decides: flambeau keys limit."
            )
        if limits.max_concurrent is not None and self.num_running >= limits.max_concurrent:
            many = f"{limits.max_concurrent} requests at a time"
            raise self._rejection("concurrent", f"{many}, and {self.num_running} are running", 1.0)
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)) > 0:
            raise self._rejection("requests", f"{self._requests.per_minute} requests a minute", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(max(1, num_tokens), now)) > 0:
            many = f"{self._tokens.per_minute} tokens a minute, and this request may need {num_tokens}"
            raise self._rejection("tokens", many, wait_s)
        if self._requests is not None:
            self._requests.take(1, now)
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)
        self.num_running += 1
        self.num_requests += 1

    def _rejection(self, name: LimitName, limit: str, wait_s: float) -> KeyLimitReached:
        self.num_rejected[name] += 1
        seconds = max(1, math.ceil(wait_s))
        text = f"The key {self.name} is limited to {limit}. Try again in {seconds} s."
        return KeyLimitReached(text, retry_after_s=seconds)

    def release(self, num_tokens: int, made: GenerationWork | None, now: float, *, is_used: bool) -> None:
        """A request that was admitted with so many tokens is over; `made` is what it really used, if known.

        Otherwise what was assumed counts, where a part of the reply was sent (`is_used`), or nothing.
        """
        self.num_running -= 1
        used = num_tokens if is_used else 0
        if made is not None:
            used = made.num_prompt + made.num_tokens
            self.num_prompt_tokens += made.num_prompt
            self.num_output_tokens += made.num_tokens
        if self._tokens is not None and used != num_tokens:
            self._tokens.take(used - num_tokens, now)

    def priority_of(self, asked: int) -> int:
        """The priority of a request that asks for one; NORMAL is what requests without a wish have."""
        own = self.limits.priority
        if own is None:
            return asked
        return own if asked == NORMAL else max(asked, own)

    def rates(self, now: float) -> Iterator[RateState]:
        """The limits that clients can follow."""
        if self._requests is not None:
            yield rate_state("requests", self._requests, now)
        if self._tokens is not None:
            yield rate_state("tokens", self._tokens, now)


def rate_state(name: Literal["requests", "tokens"], bucket: RateBucket, now: float) -> RateState:
    return RateState(name, bucket.per_minute, max(0, int(bucket.remaining(now))), bucket.reset_s(now))


class Tenants:
    """The tenants of a server by the names of their keys. What one has used stays known when its key is revoked."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants[name]

    def update(self, limits: Mapping[str, KeyLimits], now: float) -> None:
        """Use the limits of these keys."""
        for name, one in limits.items():
            if name in self._tenants:
                self._tenants[name].change(one, now)
            else:
                self._tenants[name] = Tenant(name, one, now)
