"""What a rank has refused, calls and operations: what others announce of it fails, whenever it comes. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coordd.messages import Refused, Request, Response
from coordd.wire import bits

__all__ = ["Refusals", "RefusedParts", "answer"]


@dataclass
class _Call:
    """Who refused the call first, and the members that may still announce something of it, as a bit mask."""

    first: Refused
    inside: int


@dataclass
class _Part:
    """An operation of which a rank has refused its part; its members, and those that have yet to announce theirs."""

    first: Refused
    wanted: int
    inside: int


class Refusals:
    """By the id of a call, who has refused it.

    A call is forgotten once every member has left it by an error or has left the job: none announces anything of it
    after that.
    """

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __contains__(self, call: str) -> bool:
        return call in self._calls

    def enter(self, refused: Refused, members: int, left: int) -> bool:
        """Notes that a rank has refused a call; says whether it is the first of the members.

        Args:
            refused: what the rank has said.
            members: bit mask of the ranks that make the call together.
            left: bit mask of the ranks that have left the job.
        """
        call = self._calls.get(refused.call)
        if new := call is None:
            call = self._calls[refused.call] = _Call(refused, members & ~left)
        call.inside &= ~(1 << refused.rank)
        if not call.inside:
            del self._calls[refused.call]
        return new

    def leave(self, ranks: int) -> None:
        """Notes that ranks, a bit mask, will announce nothing more."""
        for name, call in [*self._calls.items()]:
            call.inside &= ~ranks
            if not call.inside:
                del self._calls[name]

    def response(self, request: Request, ranks: int) -> Response:
        """Makes what ranks, a bit mask, get that announce part of a call that was refused."""
        return answer(self._calls[request.call].first, request, ranks)


class RefusedParts:
    """By name and process set, the operations of which a rank has refused its part, oldest first.

    Each of them is forgotten once every other member has announced or refused its part, has joined or left the job. So
    the n-th operation of a name is the same one on all members, whether they announce or refuse it.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, tuple[int, ...]], list[_Part]] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __iter__(self) -> Iterator[str]:
        """Lists the names."""
        return (name for name, _ in self._parts)

    def enter(self, refused: Refused, name: str, wanted: int, inside: int) -> None:
        """Notes that a rank has refused its part of an operation.

        Args:
            refused: what the rank has said.
            name: of the operation.
            wanted: bit mask of its members.
            inside: bit mask of those that have yet to announce theirs.
        """
        if inside:
            self._parts.setdefault((name, refused.members), []).append(_Part(refused, wanted, inside))

    def claim(self, name: str, members: tuple[int, ...], ranks: int) -> list[tuple[Refused, int]]:
        """Takes what ranks, a bit mask, get that announce or refuse their part: refusals, and the ranks of each."""
        found = []
        for part in self._parts.get((name, members), ()):
            if concerned := part.inside & ranks:
                found.append((part.first, concerned))
                part.inside &= ~concerned
                ranks &= ~concerned
        if found:
            self._forget()
        return found

    def leave(self, ranks: int, wide: int) -> None:
        """Notes that ranks will announce nothing more for now in the sets within ``wide``; both are bit masks."""
        for parts in self._parts.values():
            for part in parts:
                part.inside &= ~(0 if part.wanted & ~wide else ranks)
        self._forget()

    def _forget(self) -> None:
        for key, parts in [*self._parts.items()]:
            parts[:] = [part for part in parts if part.inside]
            if not parts:
                del self._parts[key]


def answer(refused: Refused, request: Request, ranks: int) -> Response:
    """Makes what ranks, a bit mask, get that have announced part of what a rank refuses."""
    return Response(request, error=refused.reason, recipients=tuple(bits(ranks)), refuser=refused.rank)
