"""Random training programs on ranks, against one process that has all batches: gradients, weights, errors, kept memory.

A program is a list of what a script may do in any order: backward passes, in `no_sync` or not, some of which fail on
some ranks; clearing, clipping, synchronizing, stepping; keeping gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank
from tests.torch_plugin.test_discarded import Failing
from tests.torch_plugin.training import LARGE

SIZES = {"a": 3, "b": LARGE, "c": 2, "d": 1}
RATE, NORM = 1e-2, 0.7
CLEAR = ["optimizer none", "optimizer zero", "model none", "model zero"]
VIEWS = {
    "object": lambda gradient: gradient,
    "detach": torch.Tensor.detach,
    "view": lambda gradient: gradient.view(-1),
    "numpy": lambda gradient: gradient.numpy(),
}
WORLDS = [{}, {"shared_memory": False}, {"fusion_mb": 0.1}, {"lock_steps": 2, "fusion_mb": 0.1}, {"overlap": False}]

Names = frozenset[str]
Grads = dict[str, float | None]


class Reference:
    """What every rank must have: all values of a parameter or gradient are equal, so one number stands for them."""

    def __init__(self, ranks: int, *, passes: int, op: Any) -> None:
        self.passes_per_step, self.op = passes, op
        self.weights = [dict.fromkeys(SIZES, 1.0) for _ in range(ranks)]
        self.grads: list[Grads] = [dict.fromkeys(SIZES) for _ in range(ranks)]
        self.discarded = False
        self.begin()

    def begin(self) -> None:
        ranks = len(self.grads)
        self.fresh: list[set[str]] = [set() for _ in range(ranks)]
        self.meddled, self.spoilt = [False] * ranks, [False] * ranks
        self.passes = 0
        self.used = self.adds = self.reduced = self.by_hand = False

    def discard(self) -> str:
        for grads in self.grads:
            grads.update(dict.fromkeys(SIZES))
        self.begin()
        self.discarded = True
        return "error"

    def backward(self, uses: list[Names], failing: set[int], moment: str, factor: float, *, local: bool) -> str:
        if self.by_hand and self.used:
            self.begin()
        self.discarded = False
        if self.reduced and self.used and not self.adds and (self.passes_per_step > 1 or self.op == cd.Sum):
            return self.discard()
        for rank, grads in enumerate(self.grads):
            names = sorted(uses[rank])
            names = names[len(names) // 2 :] if rank in failing and moment == "middle" else names
            for name in names:
                grads[name] = (grads[name] or 0.0) + (rank + factor) * self.weights[rank][name]
                self.fresh[rank].add(name)
            self.meddled[rank] = False
        self.passes += 1
        self.used, self.adds, self.by_hand = True, True, False
        last = not local and self.passes >= self.passes_per_step
        if not last:
            for rank in failing:
                self.spoilt[rank] = True
            return ""
        return self.discard() if failing else self.reduce()

    def reduce(self) -> str:
        given = [
            {name for name in self.fresh[rank] if self.grads[rank][name] is not None} for rank in range(len(self.grads))
        ]
        if any(spoilt and given[rank] for rank, spoilt in enumerate(self.spoilt)):
            return self.discard()
        for name in SIZES:
            if any(name in names for names in given):
                total = sum(grads[name] or 0.0 for grads in self.grads)
                for grads in self.grads:
                    grads[name] = total if self.op == cd.Sum else total / len(self.grads)
        used = self.used
        self.begin()
        self.reduced, self.used = True, used
        return ""

    def step(self) -> str:
        if self.discarded:
            return "error"
        if any(self.meddled):
            return self.discard()
        if self.reduce():
            return "error"
        for weights, grads in zip(self.weights, self.grads, strict=True):
            for name, grad in grads.items():
                weights[name] -= RATE * (grad or 0.0)
        self.begin()
        return ""

    def synchronize(self) -> str:
        return "error" if self.discarded else self.reduce()

    def clip(self) -> None:
        for rank, grads in enumerate(self.grads):
            norm = sum(SIZES[name] * grad**2 for name, grad in grads.items() if grad is not None) ** 0.5
            for name, grad in grads.items():
                grads[name] = None if grad is None else grad * min(1.0, NORM / (norm + 1e-6))
            self.meddled[rank] |= any(grads[name] is not None for name in self.fresh[rank])

    def clear(self, style: str) -> None:
        for rank, grads in enumerate(self.grads):
            for name, grad in grads.items():
                grads[name] = None if grad is None or style.endswith("none") else 0.0
            self.meddled[rank] |= any(grads[name] is not None for name in self.fresh[rank])
        if style.startswith("optimizer"):
            self.begin()
            self.discarded = False
        else:
            self.by_hand |= style.endswith("none")


class Rank:
    """One rank's script."""

    def __init__(self, rank: int, *, passes: int, op: Any) -> None:
        self.rank = rank
        self.net = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(size, dtype=torch.float64)) for name, size in SIZES.items()}
        )
        optimizer = torch.optim.SGD(self.net.parameters(), lr=RATE)
        self.optimizer = cd.DistributedOptimizer(
            optimizer, self.net.named_parameters(), backward_passes_per_step=passes, op=op
        )
        self.kept: list[list[Any]] = []

    def loss(self, uses: Names, factor: float, moment: str) -> torch.Tensor:
        found = torch.zeros((), dtype=torch.float64, requires_grad=True)
        names = sorted(uses)
        if moment == "end":
            found = Failing.apply(found)
        for index, name in enumerate(names):
            if moment == "middle" and index == len(names) // 2:
                found = Failing.apply(found)
            found = found + (self.rank + factor) * self.net[name].square().sum() / 2
        return Failing.apply(found) if moment == "start" else found

    def backward(self, uses: list[Names], failing: set[int], moment: str, factor: float, *, local: bool) -> str:
        fails = self.rank in failing
        if fails and moment == "start":  # before any gradient is there: tries again
            with pytest.raises(MemoryError):
                self.loss(uses[self.rank], factor, "start").backward()
        loss = self.loss(uses[self.rank], factor, moment if fails and moment != "start" else "")
        try:
            if local:
                with self.optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        except MemoryError:
            assert fails
            return "failed"
        except cd.CoorddError:
            return "error"
        return ""

    def tried(self, method: Any) -> str:
        try:
            method()
        except cd.CoorddError:
            return "error"
        return ""

    def clear(self, style: str) -> None:
        if style.endswith("none"):
            for entry in self.kept:
                if entry[1] is None:
                    entry[1] = torch.as_tensor(entry[0]).clone()
        target = self.optimizer if style.startswith("optimizer") else self.net
        target.zero_grad(set_to_none=style.endswith("none"))

    def keep(self, how: str) -> None:
        self.kept += [[VIEWS[how](value.grad), None] for value in self.net.values() if value.grad is not None]

    def check(self, weights: dict[str, float], grads: Grads, *, discarded: bool) -> None:
        if discarded:
            self.kept = [entry for entry in self.kept if entry[1] is not None]
        for name, value in self.net.items():
            wanted = grads[name]
            assert (value.grad is None) == (wanted is None), (name, value.grad, wanted)
            torch.testing.assert_close(value.detach(), torch.full_like(value, weights[name]))
            if wanted is not None:
                torch.testing.assert_close(value.grad, torch.full_like(value, wanted))
        for gradient, before in self.kept:
            assert before is None or torch.equal(torch.as_tensor(gradient), before), "a kept gradient has changed"


def acted(on: Reference | Rank, operation: tuple[Any, ...], number: int) -> str:
    """Does one operation; returns what it has ended with."""
    kind, *details = operation
    if kind in {"backward", "local"}:
        uses, failing, moment = details
        failing = failing if isinstance(on, Rank) or moment != "start" else set()
        return on.backward(uses, failing, moment, 1 + number % 3, local=kind == "local")
    if kind in {"step", "synchronize"}:
        if isinstance(on, Reference):
            return getattr(on, kind)()
        return on.tried(getattr(on.optimizer, kind))
    if kind == "clear":
        on.clear(details[0])
    elif kind == "clip":
        on.clip() if isinstance(on, Reference) else nn.utils.clip_grad_norm_(on.net.parameters(), NORM)
    elif kind == "keep" and isinstance(on, Rank):
        on.keep(details[0])
    return ""


def story(program: list[tuple[Any, ...]], ranks: int, **options: Any) -> list[tuple[str, Any, Any, bool]]:
    """What must be after each operation, by the reference."""
    reference, told = Reference(ranks, **options), []
    for number, operation in enumerate(program):
        ended = acted(reference, operation, number)
        state = [dict(one) for one in reference.weights], [dict(one) for one in reference.grads]
        told.append((ended, *state, reference.discarded))
    return told


def run(program: list[tuple[Any, ...]], ranks: int, world: dict[str, Any], **options: Any) -> None:
    """Runs a program on ranks, and compares after each operation."""
    wanted = story(program, ranks, **options)

    def body(rank: int) -> None:
        script = Rank(rank, **options)
        for number, (operation, (ended, weights, grads, discarded)) in enumerate(zip(program, wanted, strict=True)):
            found = acted(script, operation, number)
            failed = operation[0] in {"backward", "local"} and rank in operation[2] and operation[3] != "start"
            assert found == ("failed" if failed and found != "error" else ended), (number, operation, found, ended)
            script.check(weights[rank], grads[rank], discarded=discarded)
        script.optimizer.zero_grad()  # what is under way has to end before the ranks leave

    each_rank(ranks, body, **world)


any_names = st.frozensets(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4)


def passes_of(ranks: int, moments: list[str], names: st.SearchStrategy[Names]) -> st.SearchStrategy[tuple[Any, ...]]:
    failing = st.one_of(st.just(frozenset()), st.just(frozenset()), st.sets(st.integers(0, ranks - 1), max_size=1))
    return st.tuples(
        st.sampled_from(["backward", "backward", "local"]),
        st.lists(names, min_size=ranks, max_size=ranks),
        failing.map(set),
        st.sampled_from(moments),
    )


@st.composite
def programs(draw: Any) -> tuple[list[tuple[Any, ...]], int, dict[str, Any], dict[str, Any]]:
    ranks = draw(st.sampled_from([2, 2, 3]))
    options = draw(
        st.sampled_from(
            [{"passes": 1, "op": cd.Average}] * 3 + [{"passes": 2, "op": cd.Average}, {"passes": 1, "op": cd.Sum}]
        )
    )
    plain = options["passes"] == 1 and options["op"] == cd.Average
    # One pass too many is refused where "a" is computed again, which a pass that fails in the middle may not come to.
    moments = ["start", "middle", "end"] if plain else ["start", "end"]
    passes = passes_of(ranks, moments, any_names if plain else any_names.map(lambda found: found | {"a"}))
    operation = st.one_of(
        passes,
        passes,
        st.sampled_from([("clip",), ("synchronize",), ("step",), ("step",)]),
        st.tuples(st.just("clear"), st.sampled_from(CLEAR if plain else CLEAR[:2])),
        st.tuples(st.just("keep"), st.sampled_from(sorted(VIEWS))),
    )
    program = draw(st.lists(operation, min_size=3, max_size=16))
    if options["op"] == cd.Sum:  # a sum of what was summed before is another sum
        program = [each for one in program for each in ([one, ("clear", CLEAR[0])] if one == ("step",) else [one])]
    return program, ranks, draw(st.sampled_from(WORLDS)), options


ALL = [frozenset("abcd")] * 2
PLAIN: dict[str, Any] = {"passes": 1, "op": cd.Average}


@settings(deadline=None, max_examples=30)
@given(programs())
@example(([("synchronize",), ("local", ALL, {0}, "middle"), ("clear", CLEAR[1])], 2, {}, PLAIN))
@example(
    (
        [
            ("backward", ALL, set(), ""),
            ("local", ALL, set(), ""),
            ("backward", [frozenset("a")] * 2, set(), ""),
            ("step",),
        ]
        * 2,
        2,
        {},
        PLAIN,
    )
)
@example(
    ([("local", ALL, {1}, "middle"), ("backward", ALL, set(), ""), ("step",), ("clear", CLEAR[0])] * 2, 2, {}, PLAIN)
)
@example(
    (
        [("backward", ALL, set(), ""), ("local", ALL, set(), ""), ("clear", CLEAR[2]), ("backward", ALL, set(), "")],
        2,
        {},
        PLAIN,
    )
)
def test_a_program_does_on_ranks_what_it_does_in_one_process(found):
    program, ranks, world, options = found
    run(program, ranks, world, **options)
