"""`torch.compile` around code that calls coordd."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch._C._dynamo.eval_frame", exc_type=ImportError)

_STEPS = """
import coordd.torch as cd, torch

cd.init()
model = torch.nn.Linear(8, 3)
optimizer = cd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return cd.allreduce(loss.detach())

traced = []

def backend(graph, inputs):
    traced.extend(node.stack_trace or "" for node in graph.graph.nodes)
    return graph.forward

compiled = torch.compile(step, backend=backend)
for _ in range(4):
    loss = compiled(torch.ones(4, 8))
assert traced
assert not [trace for trace in traced if "coordd" in trace]
"""


def test_the_compiler_looks_at_no_function_of_coordd():
    found = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, timeout=100, check=True)
    assert "coordd" not in found.stderr


_COMPILED_BACKWARD = """
import coordd.torch as cd, torch, torch._dynamo

cd.init()
model = torch.nn.Linear(8, 3)
optimizer = cd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
torch._dynamo.config.compiled_autograd = True

@torch.compile(backend="eager")
def step(x):
    model(x).sum().backward()

try:
    step(torch.ones(4, 8))
except cd.ArgumentError as error:
    print(error)
"""


def test_a_compiled_backward_pass_is_refused_with_a_way_out():
    command = [sys.executable, "-m", "coordd", "run", "-n", "2", sys.executable, "-c", _COMPILED_BACKWARD]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert found.stdout.count("compiled_autograd), and does not tell when gradients are complete: turn that off") == 2
