"""TenantShares: how many tokens each tenant has had computed lately, and how long a step may be beside lighter ones."""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE_STEPS = 256  # after so many steps, tokens count half
RECENT_STEPS = 4096  # a tenant counts for so long after its last request
REVIEW_STEPS = 8  # so often, the lightest tenant is looked for
MIN_LEAD = 64  # tokens by which a heavy tenant is ahead at least: the first steps decide nothing


@dataclass(slots=True)
class Share:
    """What is known of one tenant."""

    used: float = 0.0  # tokens, as of the step `since`
    since: int = 0
    last_seen: int = 0
    prompt_length: int = 0  # tokens of its last prompt that were not cached


class TenantShares:
    """Counts tokens by tenant. Old ones count less, so a tenant that was idle is served first for a while only."""

    def __init__(self) -> None:
        self._step = 0
        self._shares: dict[str, Share] = {}
        self._lightest = 0.0  # what the tenant with the fewest tokens has used

    @property
    def is_shared(self) -> bool:
        """Whether several tenants have sent requests lately."""
        return len(self._shares) > 1

    def see(self, tenant: str) -> None:
        """A request of this tenant has arrived."""
        if tenant not in self._shares:
            self._shares[tenant] = Share(since=self._step)
            self._lightest = 0.0
        self._shares[tenant].last_seen = self._step

    def set_prompt(self, tenant: str, length: int) -> None:
        """Its prompt has started, with so many tokens to compute."""
        if tenant in self._shares:
            self._shares[tenant].prompt_length = length

    def begin_step(self) -> None:
        self._step += 1
        if self._step % HALF_LIFE_STEPS == 0:
            self._forget()
        if self._step % REVIEW_STEPS == 0 and self.is_shared:
            self._lightest = min(map(self.used, self._shares))

    def charge(self, tenant: str, num_tokens: int) -> None:
        if (share := self._shares.get(tenant)) is not None:
            share.used, share.since = self.used(tenant) + num_tokens, self._step

    def used(self, tenant: str) -> float:
        """Its tokens, each counted less the older it is."""
        share = self._shares.get(tenant)
        return 0.0 if share is None else share.used * 0.5 ** ((self._step - share.since) / HALF_LIFE_STEPS)

    def outweighs(self, tenant: str, other: str) -> bool:
        return is_heavier(self.used(tenant), self.used(other))

    def is_heavy(self, tenant: str) -> bool:
        """Whether a tenant of late has used much less."""
        return is_heavier(self.used(tenant), self._lightest)

    def max_tokens(self, tenant: str, shortest: int, longest: int) -> int:
        """The tokens of a step for this tenant: no more than the prompts that lighter ones send, but `shortest`."""
        used = self.used(tenant)
        prompts = [
            share.prompt_length
            for name, share in self._shares.items()
            if share.prompt_length and is_heavier(used, self.used(name))
        ]
        return min(longest, max(shortest, min(prompts, default=longest)))

    def _forget(self) -> None:
        """Drop those that sent nothing for long."""
        for name, share in [*self._shares.items()]:
            if self._step - share.last_seen > RECENT_STEPS and self.used(name) < 1:
                del self._shares[name]


def is_heavier(used: float, other: float) -> bool:
    return used > 2 * other + MIN_LEAD
