"""Code that initialises parameters cannot tell ghosts from real ones."""

from __future__ import annotations

import sys
from contextlib import suppress

import pytest
import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline.meta_init import Ghosts

RANDOM = {
    "normal": lambda w: w.normal_(),
    "uniform": lambda w: w.uniform_(),
    "random": lambda w: w.random_(0, 9),
    "exponential": lambda w: w.exponential_(),
    "geometric": lambda w: w.geometric_(0.3),
    "log_normal": lambda w: w.log_normal_(),
    "cauchy": lambda w: w.cauchy_(),
    "bernoulli": lambda w: w.bernoulli_(0.3),
    "bernoulli of unknown": torch.bernoulli,
    "bernoulli by unknown": lambda w: torch.empty_like(w).bernoulli_(w),
    "normal by unknown": lambda w: torch.normal(0.0, w),
    "like": torch.randn_like,
    "integers like": lambda w: torch.randint_like(w, 7),
    "out": lambda w: torch.rand(w.shape, out=w.detach()),
    "dropout": lambda w: nn.functional.dropout(w, 0.4),
    "transposed": lambda w: w.T.normal_(),
    "strided": lambda w: w[:, ::2].normal_(),
    "half": lambda w: w.to(torch.bfloat16).normal_(),
    "own generator": lambda w: w.normal_(generator=torch.Generator().manual_seed(2)),
    "truncated": lambda w: nn.init.trunc_normal_(w, std=2.0),
    "far truncated": lambda w: nn.init.trunc_normal_(w, a=2.0, b=4.0),
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "kaiming": nn.init.kaiming_normal_,
    "xavier": nn.init.xavier_uniform_,
    "noisy relu": lambda w: nn.functional.rrelu(w, training=True),
    "permutation": lambda w: w[torch.randperm(len(w))],
    "by mask": lambda w: w[torch.arange(24) > 20].normal_(),
    "mask written": lambda w: w.index_put_((torch.rand(24) > 0.5,), torch.zeros(1)),
    "again": lambda w: [w.normal_() for _ in range(1 + int(w.normal_().max() > 2))],
    "by half": lambda w: [part.normal_().max().item() for part in w.chunk(2, dim=1)],
}


@pytest.fixture(params=RANDOM.values(), ids=RANDOM)
def draw(request):
    return request.param


def drawn(draw, ghosts: Ghosts | None) -> torch.Tensor:
    torch.manual_seed(5)
    if ghosts is None:
        with torch.no_grad():
            draw(nn.Parameter(torch.zeros(24, 30)))
    else:
        with ghosts.entered(), torch.no_grad():
            draw(nn.Parameter(torch.zeros(24, 30)))
    return torch.get_rng_state()


def test_drawing_for_a_ghost_leaves_the_generator_as_for_a_real_one(draw) -> None:
    assert torch.equal(drawn(draw, Ghosts(frozenset(), draw=True)), drawn(draw, None))


def test_what_is_kept_is_real(draw) -> None:
    ghosts = Ghosts({0}, draw=True)
    assert torch.equal(drawn(draw, ghosts), drawn(draw, None))


def test_without_drawing_nothing_is_drawn() -> None:
    before = torch.get_rng_state()
    with Ghosts(frozenset(), draw=False).entered():
        nn.init.normal_(nn.Parameter(torch.empty(30, 30)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_ghost_says_what_it_stands_for() -> None:
    with Ghosts(frozenset(), draw=True).entered():
        weight = nn.Parameter(torch.empty(2, 3))
        shown = (
            weight.device,
            weight.is_meta,
            weight.is_cpu,
            weight.is_cuda,
            torch.ones(2, device=weight.device).sum().item(),
        )
    assert shown == (torch.device("cpu"), False, True, False, 2)
    assert weight.is_meta


def test_a_ghost_that_is_moved_stands_for_what_is_there() -> None:
    with Ghosts(frozenset(), draw=True).entered():
        weight = nn.Parameter(torch.empty(2, 3))
        moved = torch.ops.aten._to_copy(weight, device=torch.device("cuda"))
        assert moved.device.type == moved.clone()[0].device.type == "cuda"
        assert moved.is_cuda
        assert weight.is_cpu
    assert moved.is_meta


def test_values_are_gone_when_the_next_parameter_is_drawn() -> None:
    with Ghosts(frozenset(), draw=True).entered() as ghosts, torch.no_grad():
        first, second = nn.Linear(2, 2).weight, nn.Parameter(torch.empty(3))
        assert first.normal_().max().item() > -9
        second.normal_()
        with pytest.raises(
            ArgumentError, match=r"uses the values of Linear.weight \(number 0, of shape \(2, 2\)\) when"
        ):
            first.max().item()
        assert not ghosts.sources(first) & ghosts.sources(second)


def test_real_ones_do_not_take_values_that_are_not_there() -> None:
    with Ghosts({1}, draw=True).entered(), torch.no_grad():
        ghost, real = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        with pytest.raises(ArgumentError, match=r"uses the values of a parameter \(number 0"):
            real.copy_(ghost)
        with pytest.raises(ArgumentError, match=r"uses the values of a parameter \(number 0"):
            real.data = ghost.data * 2
        with pytest.raises(ArgumentError, match=r"uses the values of a parameter \(number 0"):
            real.bernoulli_(ghost)
        assert real.add_(ghost.uniform_(3.0, 4.0)) is real
        real.data = ghost.data
    assert real.min() >= 3


def test_ghosts_take_what_is_real() -> None:
    with Ghosts(frozenset(), draw=True).entered(), torch.no_grad():
        ghost = nn.Parameter(torch.ones(2, 2))
        ghost.copy_(torch.eye(2))
        ghost[0] = torch.ones(2)
        ghost[torch.tensor([True, False])] = torch.ones(2)
        ghost.mul_(torch.ones(2))
        assert ghost[torch.tensor([True, False])].shape == (1, 2)
        ghost.data = torch.zeros(5)
    assert ghost.is_meta
    assert ghost.shape == (5,)


def test_sources_are_what_values_were_computed_from() -> None:
    with Ghosts(frozenset(), draw=False).entered() as ghosts, torch.no_grad():
        one, two, three = (nn.Parameter(torch.ones(2)) for _ in range(3))
        product = nn.Parameter(one * 2 + two)
        three[0] = product[1]
        assert [sorted(ghosts.sources(tensor)) for tensor in (one, two, three)] == [[0], [1], [0, 1, 2, 3]]
        assert ghosts.sources(torch.ones(2)) == frozenset()


def test_wherever_an_error_comes_nothing_stays_patched():
    """Say of a signal, at any line until the block begins: later parameters of this thread would be ghosts."""
    plain = nn.Parameter.__dict__["__new__"]

    def failing(lines: int) -> int:
        """Enters, with an error at the line after so many; returns how many lines there were."""
        left = [lines]

        def trace(frame, event, _argument):
            ours = frame.f_code is Ghosts.entered.__wrapped__.__code__
            if ours and event == "line":
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            return trace if ours else None

        sys.settrace(trace)
        try:
            with suppress(KeyboardInterrupt), Ghosts(frozenset(), draw=True).entered():
                sys.settrace(None)
        finally:
            sys.settrace(None)
        return lines - left[0]

    for lines in range(failing(1000) + 1):
        failing(lines)
        assert nn.Parameter.__dict__["__new__"] is plain
        assert not nn.Linear(2, 2).weight.is_meta
