from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd_torch.tensors import as_bytes, borrow, densify, from_array, view
from tests.local_ranks import each_rank

TYPES = [
    torch.bool,
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_a_view_shares_memory_type_and_shape_both_ways(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    array = view(tensor)
    assert array.shape == shape
    assert array.dtype.itemsize == dtype.itemsize
    array[...] = 0
    assert not tensor.view(torch.uint8).any() if shape else not tensor.item()
    back = from_array(array)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert back.data_ptr() == tensor.data_ptr() or not tensor.numel()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (7, 1), (3, 5), (0, 2)])
def test_bytes_are_those_of_a_contiguous_copy_whatever_the_strides(dtype, size):
    table = torch.arange(1, 36).reshape(5, 7).to(torch.uint8).to(dtype)
    for each in (table[: size[0], : size[1]], table.t()[: size[0], : size[1]], table[:1, :1].expand(size)):
        copy = torch.empty(each.shape, dtype=dtype).copy_(each)
        assert as_bytes(each).tolist() == copy.reshape(-1).view(torch.uint8).tolist()


def test_bytes_of_a_conjugated_view_are_those_of_its_values():
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert as_bytes(values.conj()).tolist() == as_bytes(values.conj().resolve_conj().clone()).tolist()


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("rows", [[], [3], [3, 3], [3, 5]])
def test_a_sparse_gradient_of_a_sum_becomes_dense(rows, dim):
    """PyTorch's own conversion loses a single value that is expanded."""
    table, same = nn.Embedding(9, dim, sparse=True), nn.Embedding(9, dim)
    for each in (table, same):
        each(torch.tensor(rows, dtype=torch.long)).sum().backward()
    assert torch.equal(densify(table.weight.grad), same.weight.grad)


def test_sixteen_bit_floats_keep_their_names():
    assert view(torch.ones(2, dtype=torch.bfloat16)).dtype == ml_dtypes.bfloat16
    assert view(torch.ones(2, dtype=torch.bfloat16)).tolist() == [1.0, 1.0]
    assert view(torch.ones(2, dtype=torch.float16)).dtype == np.float16


def test_strides_are_kept():
    tensor = torch.arange(6.0).reshape(2, 3).T
    array = view(tensor)
    assert not array.flags.c_contiguous
    array[2, 1] = 9.0
    assert tensor[2, 1] == 9.0
    assert view(torch.arange(6).bfloat16()[::2]).tolist() == [0.0, 2.0, 4.0]


def test_gradients_do_not_hinder():
    tensor = torch.ones(2, requires_grad=True)
    view(tensor)[0] = 5.0
    assert tensor.tolist() == [5.0, 1.0]


def test_a_plain_tensor_is_lent_and_comes_back_itself():
    tensor = torch.ones(2)
    array, back = borrow(tensor)
    array[0] = 2.0
    assert back(array) is tensor
    assert tensor.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("lazy", [torch.conj, lambda x: x.conj().imag])
def test_a_lazy_view_is_lent_as_a_copy_whose_values_come_back(lazy):
    base = torch.tensor([1 + 2j, 3 + 4j])
    tensor = lazy(base)
    array, back = borrow(tensor)
    assert array.tolist() == tensor.tolist()
    array *= 2
    wanted = array.tolist()
    assert back(array) is tensor
    assert tensor.tolist() == wanted


def test_readonly_and_foreign_arrays_become_tensors():
    array = np.frombuffer(b"\1\2\3", np.uint8)
    assert from_array(array).tolist() == [1, 2, 3]
    assert from_array(np.arange(6).reshape(2, 3).T).tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_tensors_are_refused_with_a_way_out(make):
    tensor = make(torch.eye(2))

    def body(rank):
        for operation in (cd.allreduce, cd.allreduce_, cd.allgather, lambda x: cd.broadcast(x, 0), cd.broadcast_async):
            with pytest.raises(
                cd.ArgumentError, match=r"a torch.sparse_\w+ tensor cannot travel as it is: use to_dense()"
            ):
                operation(tensor) if operation is not cd.broadcast_async else operation(tensor, 0)
        return cd.allreduce(torch.ones(1)).item()

    assert each_rank(2, body) == [1.0, 1.0]
