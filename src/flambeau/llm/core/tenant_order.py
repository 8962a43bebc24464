"""Which sequences come first, and which are preempted, where several tenants send requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from flambeau.llm.core.sequence import Sequence
from flambeau.llm.core.step_limits import StepLimits
from flambeau.llm.core.tenant_shares import TenantShares


def first_of_each_tenant(waiting: Iterable[Sequence]) -> list[Sequence]:
    """The first of each tenant, without those whose prefix is being copied."""
    firsts: dict[str, Sequence] = {}
    for sequence in waiting:
        if not sequence.is_restoring:
            firsts.setdefault(sequence.tenant, sequence)
    return [*firsts.values()]


def max_heavy_decodes(sequences: Many[Sequence], shares: TenantShares, limits: StepLimits) -> int | None:
    """How many sequences of heavy tenants decode in one step; None: there are none."""
    heavy = {sequence.tenant for sequence in sequences if shares.is_heavy(sequence.tenant)}
    numbers = (shares.max_tokens(each, limits.short_step_tokens, limits.max_step_tokens) for each in heavy)
    return min(numbers, default=None)


def may_preempt(running: Iterable[Sequence], waiting: Iterable[Sequence], shares: TenantShares) -> bool:
    """Whether a sequence that waits could take the place of one that runs."""
    ours = {sequence.tenant for sequence in running}
    theirs = {sequence.tenant for sequence in waiting if not sequence.is_restoring}
    return any(shares.outweighs(one, other) for one in ours for other in theirs)


def victims_for(tenant: str, running: Iterable[Sequence], shares: TenantShares) -> list[Sequence]:
    """Those that may be preempted for a tenant, the first one last: of the heaviest, the one that costs least."""
    found = [each for each in running if shares.outweighs(each.tenant, tenant)]
    return sorted(found, key=lambda each: (shares.used(each.tenant), -each.num_preempted, -each.num_computed))


def in_rotation(sequences: Many[Sequence], is_limited: Callable[[Sequence], bool], most: int) -> list[Sequence]:
    """All that are not limited, and of the others the `most` that have waited longest, in the given order."""
    limited = [sequence for sequence in sequences if is_limited(sequence)]
    if len(limited) <= most:
        return [*sequences]
    left_out = {*sorted(limited, key=lambda sequence: sequence.last_decoded)[most:]}
    return [sequence for sequence in sequences if sequence not in left_out]
