"""Restores batch and instance normalisation in exported graphs as module calls, so that a stage can watch them.

An exported graph updates the running statistics with every microbatch, and each replica of a stage updates its own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from coordd_torch.pipeline.aliases import impure

__all__ = ["restored", "tracking"]

_NORMALISES = {torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default}
_COUNTS = torch.ops.aten.add_.Tensor


def tracking(model: nn.Module) -> frozenset[str]:
    """Returns the paths of the modules that only normalise and track statistics.

    A module in evaluation mode in a model in training mode is frozen, and is left as it is.
    """
    return frozenset(name for name, module in model.named_modules(remove_duplicate=False) if _tracks(module, model))


def _tracks(module: nn.Module, model: nn.Module) -> bool:
    if type(module).forward not in {_BatchNorm.forward, _InstanceNorm.forward}:
        return False
    plain = not (module._forward_hooks or module._forward_pre_hooks)  # noqa: SLF001 - no other way to ask
    return plain and bool(module.track_running_stats) and module.training == model.training


def restored(graph: fx.Graph, paths: Collection[str]) -> None:
    """Replaces the operators of these modules in an exported graph by calls of the modules."""
    for node in list(graph.nodes):
        path = _path(node)
        if path in paths and node.target in _NORMALISES:
            with graph.inserting_before(node):
                call = graph.call_module(path, (node.args[0],))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.erase_node(node)
        elif path in paths and node.target is _COUNTS:
            graph.erase_node(node)
    graph.eliminate_dead_code(impure)


def _path(node: fx.Node) -> Any:
    """Returns the path of the innermost module that the node belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else None
