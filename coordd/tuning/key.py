"""What a search is about: the same model on an equal world of equal machines has the same best settings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from coordd.messages import Request
from coordd.world import World

__all__ = ["Key", "fingerprint", "shape"]


def fingerprint(requests: Iterable[Request]) -> str:
    """Digests the tensors of a training step, whatever order they come in: their kinds, names, types and shapes.

    Those used only once say nothing about the model, and are left out.
    """
    told = {(int(one.kind), one.name, one.dtype, one.shape) for one in requests if not one.transient}
    return hashlib.sha256(msgspec.json.encode(sorted(told))).hexdigest()[:16]


def shape(world: World) -> str:
    """Writes the number of ranks on each host, hosts in the order of their first rank: ``4`` or ``4+4+2``."""
    return "+".join(str(world.hosts.count(host)) for host in dict.fromkeys(world.hosts))


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model, world and host of a search.

    Attributes:
        model: the fingerprint of its tensors.
        world: ranks on each host.
        host: what rank 0's host is, rather than its name: jobs move among the nodes of a cluster.
    """

    model: str
    world: str
    host: str

    @property
    def digest(self) -> str:
        """A name for files."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
