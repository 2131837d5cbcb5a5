"""A model's tensors in long buffers: values, strides, ties and types stay; strays come back."""

import gc
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_hieravg.averaging import memory
from elastic_hieravg.averaging.flat import SLOT_ALIGNMENT_BYTES, WIDE_TYPES, FlatModel, tensors_of
from elastic_hieravg.errors import ParametersError


def flat_of(*tensors: Tensor) -> FlatModel:
    return FlatModel([f"tensor {index}" for index in range(len(tensors))], lambda: tensors)


def flat_of_model(model: nn.Module, *, average_buffers: bool = True) -> FlatModel:
    return FlatModel(*tensors_of(model, average_buffers=average_buffers))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(sorted(WIDE_TYPES, key=str)))
    values = torch.randint(0, 2, shape).to(dtype)
    form = draw(st.sampled_from(["plain", "transposed", "sliced", "expanded"]))
    if form == "transposed":
        return values.movedim(0, -1) if shape else values
    if form == "sliced":
        return torch.cat([values, values])[::2] if shape and shape[0] else values
    return values[:1].expand(shape) if form == "expanded" and shape and shape[0] else values


@settings(max_examples=100)
@given(st.lists(tensors(), min_size=1, max_size=6))
def test_values_and_shapes_stay_whatever_the_form(given_tensors: list[Tensor]) -> None:
    values = [tensor.clone() for tensor in given_tensors]
    dense = [torch.empty_like(tensor).stride() for tensor in given_tensors]
    flat = flat_of(*given_tensors)
    for tensor, value, strides in zip(given_tensors, values, dense, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.stride() == strides
    for slot in flat.slots:
        assert slot.start * slot.bank.buffer.element_size() % SLOT_ALIGNMENT_BYTES == 0
    spans = sorted((id(s.bank), s.start, s.start + s.num_values) for s in flat.slots if s.num_values)
    assert all(a[0] != b[0] or a[2] <= b[1] or a == b for a, b in pairwise(spans))
    assert flat.refresh() == ()


def test_writing_to_the_bank_is_writing_to_the_tensors() -> None:
    first, second = torch.zeros(3), torch.zeros(2, 2)
    flat = flat_of(first, second)
    flat.banks[0].values.fill_(7)
    assert bool((first == 7).all())
    assert bool((second == 7).all())


def test_channels_last_stays_and_storages_do_not_move() -> None:
    convolution = nn.Conv2d(3, 8, 3)
    convolution.weight.data = convolution.weight.data.to(memory_format=torch.channels_last)
    flat = flat_of_model(convolution)
    address = convolution.weight.data_ptr()
    flat.take([bank.values.to(bank.wide_type) for bank in flat.banks])
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    assert convolution.weight.data_ptr() == address


def test_tied_tensors_are_laid_out_once() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight.data = first.weight.data
    flat = flat_of_model(nn.Sequential(first, second))
    assert flat.banks[0].values.numel() == 16
    assert second.weight.data_ptr() == first.weight.data_ptr()
    shared = nn.Linear(4, 4, bias=False)
    assert flat_of_model(nn.Sequential(shared, shared)).banks[0].values.numel() == 16


def test_frozen_parameters_and_saved_buffers_are_in_and_caches_are_not() -> None:
    linear = nn.Linear(2, 2)
    linear.weight.requires_grad_(False)
    model = nn.Sequential(linear, nn.BatchNorm1d(2))
    model.register_buffer("cache", torch.zeros(99), persistent=False)
    names = [slot.name for slot in flat_of_model(model).slots]
    assert names == [
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    ]  # fmt: skip
    assert len(flat_of_model(model, average_buffers=False).slots) == 4
    assert not linear.weight.requires_grad


def test_a_model_trains_as_before() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(3, 1), torch.randn(8, 3)
    twin = nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    flat_of_model(model)
    for trained in (model, twin):
        optimizer = torch.optim.Adam(trained.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            trained(inputs).square().sum().backward()
            optimizer.step()
    assert torch.equal(model.weight, twin.weight)


def test_a_tensor_pointed_elsewhere_is_brought_back_with_its_values() -> None:
    model = nn.Linear(2, 2)
    flat = flat_of_model(model)
    address = model.weight.data_ptr()
    model.weight.data = torch.full((2, 2), 5.0)
    assert flat.refresh() == ("weight",)
    assert model.weight.data_ptr() == address
    assert bool((model.weight == 5).all())
    assert flat.refresh() == ()


def test_a_parameter_that_replaced_another_is_noticed() -> None:
    model = nn.Linear(2, 2)
    flat = flat_of_model(model)
    model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, assign=True)
    assert flat.refresh() == ("weight", "bias")
    flat.banks[0].values.fill_(3)
    assert bool((model.weight == 3).all())


def test_a_buffer_that_replaced_another_is_noticed() -> None:
    model = nn.BatchNorm1d(2)
    flat = flat_of_model(model)
    model.running_mean = torch.full((2,), 4.0)
    assert flat.refresh() == ("running_mean",)
    assert bool((model.running_mean == 4).all())


def test_a_tensor_of_another_type_or_number_is_an_error() -> None:
    model = nn.Linear(2, 2)
    flat = flat_of_model(model)
    model.to(torch.float64)
    with pytest.raises(ParametersError, match=r"weight is \(2, 2\) torch.float64 on cpu now and was"):
        flat.refresh()
    grown = nn.Sequential(nn.Linear(2, 2))
    flat = flat_of_model(grown)
    grown.append(nn.Linear(2, 2))
    with pytest.raises(ParametersError, match="has 4 tensors to average and had 2 before"):
        flat.refresh()


def test_only_the_selected_slots_take_a_result() -> None:
    first, second, third = torch.zeros(3), torch.zeros(2, dtype=torch.complex64), torch.zeros(5)
    flat = flat_of(first, second, third)
    flat.take([torch.ones_like(bank.values, dtype=bank.wide_type) for bank in flat.banks], selected=[1, 2])
    assert [tensor.sum().item() for tensor in (first, second, third)] == [0, 2 + 2j, 5]


@pytest.mark.parametrize(
    ("given_tensors", "found"),
    [
        ([], "there is nothing to average"),
        ([torch.zeros(1, device="meta")], "tensor 0 has no values yet: it is on the meta device"),
        ([torch.zeros(1, dtype=torch.float8_e4m3fn)], "tensor 0 has the type torch.float8_e4m3fn"),
        ([torch.zeros(2, 2).to_sparse()], "tensor 0 is sparse"),
    ],
)
def test_rejects_what_cannot_be_averaged(given_tensors: list[Tensor], found: str) -> None:
    with pytest.raises(ParametersError, match=found):
        flat_of(*given_tensors)


def test_rejects_tensors_that_share_a_part_of_their_memory() -> None:
    whole = torch.zeros(10)
    with pytest.raises(ParametersError, match="tensor 1 and tensor 0 share a part of their memory"):
        flat_of(whole[:6], whole[4:])


def test_too_little_memory_falls_back_and_names_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_bytes", lambda: iter([1000]))
    flat = flat_of(torch.zeros(5000))
    assert flat.file is None
    assert flat.shared_error.startswith("20480 bytes of shared memory cannot be had")
    assert "only 1000 bytes of memory are available" in flat.shared_error


def test_memory_goes_when_the_last_tensor_goes() -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    maps = Path("/proc/self/maps").read_text().count("hieravg")
    for _ in range(20):
        model = nn.Linear(100, 100)
        flat = flat_of_model(model)
        weight = model.weight
        del flat, model
        gc.collect()
        assert torch.isfinite(weight).all()
        del weight
        gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
    assert Path("/proc/self/maps").read_text().count("hieravg") == maps
