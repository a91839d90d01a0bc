"""Users who use parts of a model, clear gradients in every way, and meddle with them."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.local_ranks import each_rank
from tests.torch_plugin.training import LARGE, WAYS, weights, wrapped

STYLES = ["none", "zero", "model", "keep"]
AFTER = ["nothing", "double", "replace", "drop"]
plans = st.lists(
    st.tuples(
        st.lists(st.sets(st.sampled_from("abcd")), min_size=2, max_size=2),
        st.sampled_from(STYLES),
        st.sampled_from(AFTER),
        st.booleans(),
    ),
    min_size=2,
    max_size=6,
)


def cleared(style: str, net: nn.ParameterDict, optimizer: Any) -> None:
    if style == "model":
        net.zero_grad()
    elif style != "keep":
        optimizer.zero_grad(set_to_none=style == "none")


def meddled(how: str, net: nn.ParameterDict) -> None:
    """What users do between backward and step."""
    for value in net.values():
        if value.grad is not None and how == "double":
            value.grad.mul_(2)
        elif value.grad is not None and how == "replace":
            value.grad = value.grad.clone()
        elif how == "drop":
            value.grad = None


def reference(plan: Any, sizes: dict[str, int]) -> list[dict[str, float | None]]:
    """The gradients of one process that sees what both ranks see."""
    kept: dict[str, float | None] = dict.fromkeys(sizes)
    told = []
    for uses, style, how, _ in plan:
        for name in sizes:
            if style != "keep":
                kept[name] = None if style != "zero" or kept[name] is None else 0.0
            fresh = [rank + 1 for rank in range(2) if name in uses[rank]]
            if fresh:
                kept[name] = (kept[name] or 0.0) + sum(fresh) / 2
        told.append(dict(kept))
        for name in sizes:
            if kept[name] is not None and how == "double":
                kept[name] *= 2
            elif how == "drop":
                kept[name] = None
    return told


@settings(deadline=None, max_examples=60)
@given(plan=plans, way=st.sampled_from(WAYS))
@example(
    plan=[([set("ab"), set("ab")], "none", "nothing", False)] * 2 + [([set("a"), set()], "keep", "nothing", True)],
    way={},
)
def test_gradients_are_those_of_one_process_whatever_ranks_use_and_users_do(plan, way):
    """Parameters that some ranks or all do not use, every way to clear gradients, and hands that meddle with them."""
    sizes = {"a": 3, "b": LARGE, "c": 1, "d": 0}

    def body(rank):
        net, told = weights(sizes), []
        optimizer = wrapped(net)
        for uses, style, how, late in plan:
            cleared(style, net, optimizer)
            first = uses[rank] - (set() if rank == 0 or not late else uses[1] - uses[0])
            for names in (first, uses[rank] - first):
                if names:
                    sum(((rank + 1) * net[name]).sum() for name in names).backward()
            optimizer.synchronize()
            found = {name: value.grad for name, value in net.items()}
            assert all(grad is None or grad.numel() == 0 or (grad == grad[0]).all() for grad in found.values())
            told.append({name: None if g is None else g[:1].sum().item() for name, g in found.items()})
            meddled(how, net)
            optimizer.step()
        return told

    wanted = reference(plan, sizes)
    for step in wanted:
        step["d"] = None if step["d"] is None else 0.0
    for told in each_rank(2, body, **way):
        assert told == wanted
