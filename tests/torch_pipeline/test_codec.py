"""PyTorch's tensors in frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import conv2d

from coordd.errors import ArgumentError
from coordd.pipeline.frame import pack, unpack
from coordd.pipeline.storage import FORMS
from coordd_torch.int8 import dequantized, quantized
from coordd_torch.pipeline.codec import TorchCodec, leaf

CODEC = TorchCodec()


def travelled(value, **options):
    return unpack(pack(value, CODEC, **options)[0], CODEC)[0]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2],
)
def test_every_type_arrives_as_it_left(dtype):
    value = {"x": torch.arange(12).reshape(3, 4).to(dtype), "scalar": torch.tensor(1).to(dtype), "none": torch.ones(0)}
    found = travelled(value)
    for name, tensor in value.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].to(torch.complex64), tensor.to(torch.complex64))


def test_a_tensor_on_the_cpu_is_a_view_of_the_frame_and_a_leaf():
    x = torch.randn(3, 5, requires_grad=True)
    frame, sent = pack((x * 2, torch.ones(2)), CODEC)
    (found, other), received = unpack(frame, CODEC)
    assert np.shares_memory(found.detach().numpy(), frame)
    assert found.data_ptr() % 64 == 0
    assert sent[0].grad_fn is not None
    assert found.requires_grad
    assert leaf(found).is_leaf
    assert not other.requires_grad
    assert received[0] is found


def test_a_transposed_tensor_can_be_viewed_as_the_senders_can():
    x = torch.randn(2, 3, 4).transpose(1, 2)
    assert travelled(x).transpose(1, 2).view(6, 4).shape == (6, 4)
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    found = travelled(image)
    assert found.is_contiguous(memory_format=torch.channels_last)
    kernel = torch.randn(4, 3, 3, 3)
    assert torch.equal(conv2d(found, kernel), conv2d(image, kernel))


def test_a_parameter_and_a_conjugate_arrive_as_tensors():
    found = travelled([torch.nn.Parameter(torch.ones(2)), torch.tensor([1 + 2j]).conj()])
    assert type(found[0]) is torch.Tensor
    assert found[0].requires_grad
    assert found[1].tolist() == [1 - 2j]


def test_what_arrives_may_be_changed_in_place_before_and_after_it_has_a_graph():
    found = travelled([torch.ones(3, requires_grad=True), torch.ones(3)])
    start = leaf(found[0])
    result = found[0].mul_(2).relu_() + found[1].add_(1)
    result.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert start.grad.tolist() == [2.0, 4.0, 6.0]
    assert result.tolist() == [4.0, 4.0, 4.0]


def test_a_sparse_tensor_is_refused():
    with pytest.raises(ArgumentError, match="sparse"):
        pack(torch.eye(3).to_sparse(), CODEC)


def test_a_value_of_transformers_arrives_as_its_class():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    hidden = torch.randn(2, 3, requires_grad=True)
    found = travelled(outputs.BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden, torch.ones(1))))
    assert isinstance(found, outputs.BaseModelOutput)
    assert found.attentions is None
    assert found.last_hidden_state is found.hidden_states[0]
    assert torch.equal(found["last_hidden_state"], hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_is_the_gradients_int8(dtype):
    flat = torch.randn(2000, dtype=dtype) * torch.logspace(-3, 3, 2000, dtype=dtype)
    part = FORMS["int8"].stored(flat.numpy())
    stored = np.empty(part.nbytes, np.uint8)
    part.write(stored)
    numbers, scales = quantized(flat, 256)
    assert np.array_equal(stored[: 4 * 8].view(np.float32), scales.numpy())
    assert np.array_equal(stored[4 * 8 :].view(np.int8), numbers[:2000].numpy())
    ours = FORMS["int8"].read(stored, flat.numpy().dtype, (2000,))
    assert np.array_equal(ours.astype(np.float32), dequantized(numbers, scales, 256)[:2000].numpy())
