"""The engines of ``pipeline``: the benchmark's GPT in one piece, with ``cd.Pipeline``, and with PyTorch's pipelines.

All pipelines with equal numbers of ranks and of stages per rank cut the model at the same places: where the fullest
rank has the least load.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from coordd.pipeline.schedules.placement import Placement, fold, loop
from coordd_tools.bench.worker.models import LEARNING_RATE, MODELS

if TYPE_CHECKING:  # as in `engines`
    from coordd_tools.bench.worker.rank import Rank

__all__ = ["PIPELINES", "Staged", "balanced", "batch", "loss"]

_ROWS = 16
_PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "gpipe": lambda ranks: loop(ranks, 1),
    "1f1b": lambda ranks: loop(ranks, 1),
    "1f1b-eager": lambda ranks: loop(ranks, 1),
    "zb-h1": lambda ranks: loop(ranks, 1),
    "zb-h2": lambda ranks: loop(ranks, 1),
    "zb-lean": lambda ranks: loop(ranks, 1),
    "zb-h2-lean": lambda ranks: loop(ranks, 1),
    "interleaved": lambda ranks: loop(ranks, 2),
    "zb": lambda ranks: loop(ranks, 2),
    "zb-v": fold,
}


class Staged(Protocol):
    """An engine that trains the GPT in stages."""

    name: str
    seconds: tuple[float, float] | None
    """The last step's forward and backward seconds, where this rank runs the model in one piece."""

    def start(self, rank: Rank) -> None:
        """Imports and initialises the engine on this rank."""

    def stop(self) -> None:
        """Shuts the engine down."""

    def prepare(self, rank: Rank, *, seed: int, microbatches: int) -> None:
        """Creates this rank's stages."""

    def step(self, x: Tensor, y: Tensor) -> float | None:
        """Trains on a batch; returns the loss before the update, or None where this rank does not know it."""


class _Whole:
    """The model in one piece, on rank 0 alone."""

    name = "none"
    seconds: tuple[float, float] | None = None

    def start(self, rank: Rank) -> None:
        pass

    def stop(self) -> None:
        pass

    def prepare(self, rank: Rank, *, seed: int, microbatches: int) -> None:  # noqa: ARG002 - the protocol's
        self._first = rank.number == 0
        self._model = _built(seed)
        self._optimizer = SGD(self._model.parameters(), lr=LEARNING_RATE)

    def step(self, x: Tensor, y: Tensor) -> float | None:
        if not self._first:
            return None
        begin = time.perf_counter()
        found = loss(self._model(x), y)
        turn = time.perf_counter()
        found.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.seconds = turn - begin, time.perf_counter() - turn
        return float(found.detach())


class _Ours:
    """``cd.Pipeline`` with one schedule."""

    seconds: tuple[float, float] | None = None

    def __init__(self, schedule: str) -> None:
        self.name = schedule

    def start(self, rank: Rank) -> None:  # noqa: ARG002 - the protocol's
        self._api: Any = importlib.import_module("coordd.torch")
        self._api.init()

    def stop(self) -> None:
        self._api.shutdown()

    def prepare(self, rank: Rank, *, seed: int, microbatches: int) -> None:
        counts = [len(span) for span in balanced(_LAYERS, _PLACEMENTS[self.name](rank.size))]
        self._pipe = self._api.Pipeline(
            lambda: _built(seed),
            self._api.PipelineConfig(schedule=self.name, microbatches=microbatches, layers_per_proc=counts),
            optimizer=lambda parameters: SGD(parameters, lr=LEARNING_RATE),
            loss=loss,
        )

    def step(self, x: Tensor, y: Tensor) -> float | None:
        found: float = self._pipe.train_batch(x, y)
        return found


class _Theirs:
    """``torch.distributed.pipelining`` over gloo, with one schedule."""

    seconds: tuple[float, float] | None = None

    def __init__(self, schedule: str, kind: str, *, several: bool) -> None:
        self.name = f"torch-{schedule}"
        self._placement = _PLACEMENTS[schedule]
        self._kind = kind
        self._several = several

    def start(self, rank: Rank) -> None:
        self._api: Any = importlib.import_module("torch.distributed.pipelining")  # its memory counts for this engine
        if not dist.is_initialized():
            meeting = f"file://{rank.directory / 'gloo'}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank.number, world_size=rank.size)

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def prepare(self, rank: Rank, *, seed: int, microbatches: int) -> None:
        placement = self._placement(rank.size)
        layers = _layers(_built(seed))
        mine = {
            stage: nn.Sequential(*layers[span.start : span.stop])
            for stage, span in enumerate(balanced(_LAYERS, placement))
            if rank.number in placement[stage]
        }
        del layers
        gc.collect()
        stages = [
            self._api.PipelineStage(module, stage, len(placement), torch.device("cpu"))
            for stage, module in mine.items()
        ]
        self._first, self._last = 0 in mine, len(placement) - 1 in mine
        parameters = [parameter for module in mine.values() for parameter in module.parameters()]
        self._optimizer = SGD(parameters, lr=LEARNING_RATE)
        make = getattr(self._api, self._kind)
        self._schedule = make(stages if self._several else stages[0], microbatches, loss_fn=loss)

    def step(self, x: Tensor, y: Tensor) -> float | None:
        losses: list[Tensor] = []
        known = {"target": y, "losses": losses} if self._last else {}
        self._schedule.step(*((x,) if self._first else ()), **known, return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if self._last else None


class _Entry(nn.Module):
    """The GPT's first layer, as a module of its own."""

    def __init__(self, token: nn.Module, place: nn.Parameter) -> None:
        super().__init__()
        self.token = token
        self.place = place

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.token(tokens) + self.place
        return found


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy over all rows and positions."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Returns the inputs and labels of the batch, which is the same on all ranks."""
    generator = torch.Generator().manual_seed(seed + 1)
    parts = [MODELS["gpt"].batch(generator)]
    while sum(len(x) for x, _ in parts) < _ROWS:
        parts.append(MODELS["gpt"].batch(generator))
    xs, ys = zip(*parts, strict=True)
    return torch.cat(xs), torch.cat(ys)


def balanced(loads: Sequence[float], placement: Placement) -> list[range]:
    """Cuts layers into stages so that the fullest rank, then the fullest stage, has the least load; tries all cuts."""

    def spans(cuts: tuple[int, ...]) -> list[range]:
        return [range(*pair) for pair in itertools.pairwise((0, *cuts, len(loads)))]

    def price(cuts: tuple[int, ...]) -> tuple[float, float]:
        stages = [sum(loads[span.start : span.stop]) for span in spans(cuts)]
        ranks = [0.0] * len({rank for ranks in placement for rank in ranks})
        for load, (rank,) in zip(stages, placement, strict=True):
            ranks[rank] += load
        return max(ranks), max(stages)

    return spans(min(itertools.combinations(range(1, len(loads)), len(placement) - 1), key=price))


def _built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS["gpt"].build()


def _layers(model: Any) -> list[nn.Module]:
    return [_Entry(model.token, model.place), *model.blocks, *model.head]


_LAYERS = (0.1, *[1.0] * 6, 0.05, 0.15)
"""The cost of each layer, in transformer blocks."""

PIPELINES: dict[str, Callable[[], Staged]] = {
    "none": _Whole,
    "gpipe": lambda: _Ours("gpipe"),
    "1f1b": lambda: _Ours("1f1b"),
    "1f1b-eager": lambda: _Ours("1f1b-eager"),
    "interleaved": lambda: _Ours("interleaved"),
    "zb-h1": lambda: _Ours("zb-h1"),
    "zb-h2": lambda: _Ours("zb-h2"),
    "zb-lean": lambda: _Ours("zb-lean"),
    "zb-h2-lean": lambda: _Ours("zb-h2-lean"),
    "zb-v": lambda: _Ours("zb-v"),
    "torch-gpipe": lambda: _Theirs("gpipe", "ScheduleGPipe", several=False),
    "torch-1f1b": lambda: _Theirs("1f1b", "Schedule1F1B", several=False),
    "torch-interleaved": lambda: _Theirs("interleaved", "ScheduleInterleaved1F1B", several=True),
    "torch-zb": lambda: _Theirs("zb", "ScheduleInterleavedZeroBubble", several=True),
    "torch-zb-v": lambda: _Theirs("zb-v", "ScheduleZBVZeroBubble", several=True),
}
