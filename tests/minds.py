"""Negotiators for tests: what ranks say to them, and what they decide, in words."""

from __future__ import annotations

from coordd.negotiation.message_table import Negotiator
from coordd.negotiation.wire import bits
from coordd.ops.messages import Announcement, Plan, Report, Request, Response

__all__ = ["knowing", "mind", "say", "told"]


def say(
    *requests: Request, seen: int = 0, hits: int = 0, fillers: int = 0, unlock: int = 0, **details: object
) -> Report:
    fresh = tuple(Announcement(request, "train.py:1", **details) for request in requests)
    return Report(seen, hits.to_bytes(4, "little"), fillers.to_bytes(4, "little"), fresh, unlock)


def mind(size: int = 2, *, capacity: int = 64, lock_steps: int = 0) -> Negotiator:
    return Negotiator(size, cache_capacity=capacity, fusion_bytes=64, lock_steps=lock_steps)


def knowing(*requests: Request, size: int = 2, **details: int) -> Negotiator:
    """A negotiator with these in its slots 0, 1, …; its first plan has put them there."""
    made = mind(size, **details)
    for rank in range(size):
        made.hear(rank, say(*(request for request in requests if rank in (request.members or range(size)))))
    plan = made.decide()
    assert [response.slot for response in plan.responses] == list(range(len(requests)))
    return made


def told(plan: Plan | None) -> list[str]:
    """A plan in words: slots as numbers, responses as names, in the order in which they are carried out."""
    if plan is None:
        return []
    slots = [f"slot {slot}" for slot in bits(int.from_bytes(plan.hits, "little"))]
    voids = [f"void slot {slot}" for slot in bits(int.from_bytes(plan.voids, "little"))]
    return [*slots, *voids, *map(_response, plan.responses)]


def _response(response: Response) -> str:
    name = response.request.name
    if response.left:
        return f"{name}: {list(response.left)} left, refused to {list(response.recipients)}"
    if response.error:
        return f"{name}: {response.attribute}, refused to {list(response.recipients)}"
    return f"{name}: void" if response.void else name
