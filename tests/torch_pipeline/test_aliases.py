from __future__ import annotations

import torch
from torch import fx

from coordd_torch.pipeline.aliases import Aliases, renamed

ATEN = torch.ops.aten


def graph_of(build):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(build(graph, x))
    return graph


def named(graph, name):
    return next(node for node in graph.nodes if node.name == name)


def names(aliases):
    return [[node.name for node in group] for group in aliases.groups]


def test_a_value_without_other_names_becomes_a_new_value_when_it_is_written_to():
    def build(graph, x):
        y = graph.call_function(ATEN.mul.Tensor, (x, 2))
        graph.call_function(ATEN.relu_.default, (y,))
        return graph.call_function(ATEN.add.Tensor, (y, 1))

    graph = graph_of(build)
    renamed(graph)
    assert named(graph, "add_tensor").args[0].name == "relu__default"
    assert names(Aliases(graph)) == []


def test_names_of_memory_that_is_written_to_through_a_view_stay_together():
    def build(graph, x):
        y = graph.call_function(ATEN.mul.Tensor, (x, 2))
        view = graph.call_function(ATEN.select.int, (y, 0, 0))
        graph.call_function(ATEN.fill_.Scalar, (view, 1))
        graph.call_function(ATEN.neg.default, (x,))
        return graph.call_function(ATEN.add.Tensor, (y, 1))

    graph = graph_of(build)
    renamed(graph)
    aliases = Aliases(graph)
    assert names(aliases) == [["mul_tensor", "select_int", "fill__scalar"]]
    pairs = {(early.name, late.name) for early, late in aliases.together()}
    assert pairs == {("mul_tensor", "fill__scalar"), ("mul_tensor", "add_tensor")}
    assert aliases.writers(named(graph, "select_int")) == [named(graph, "fill__scalar")]


def test_what_is_only_read_forms_no_group():
    def build(graph, x):
        return graph.call_function(ATEN.view.default, (x, [-1]))

    graph = graph_of(build)
    assert names(Aliases(graph)) == []
