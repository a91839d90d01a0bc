"""The key of a search: the same model on the same layout of equal machines has the same best settings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from coordd.host.world import World
from coordd.ops.messages import Request

__all__ = ["Key", "fingerprint", "shape"]


def fingerprint(requests: Iterable[Request]) -> str:
    """Returns a hash of the kinds, names, dtypes and shapes of a training step's tensors, in any order.

    Transient requests, whose names are used only once, say nothing about the model and are left out.
    """
    told = {(int(one.kind), one.name, one.dtype, one.shape) for one in requests if not one.transient}
    return hashlib.sha256(msgspec.json.encode(sorted(told))).hexdigest()[:16]


def shape(world: World) -> str:
    """Returns the number of ranks on each host, in the order of the hosts' first ranks: ``4`` or ``4+4+2``."""
    return "+".join(str(world.hosts.count(host)) for host in dict.fromkeys(world.hosts))


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model, world and host of a search.

    Attributes:
        model: the `fingerprint` of the model's tensors.
        world: the number of ranks on each host, as `shape` formats it.
        host: kind of rank 0's host (hardware threads and processor), not its name: jobs move among a cluster's nodes.
    """

    model: str
    world: str
    host: str

    @property
    def digest(self) -> str:
        """Hash of the key, for file names."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
