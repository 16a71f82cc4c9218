"""Our safetensors files against the safetensors library."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from megatune.bridge.safetensors_files import TensorEntry, safetensors_writer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(kinds=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6), seed=st.integers(0, 99))
def test_library_reads_what_was_written(tmp_path_factory, kinds, seed):
    generator = torch.Generator().manual_seed(seed)
    # Names that JSON must escape.
    tensors = {
        f'tensor "{index}" ü': torch.randn(shape, generator=generator).to(dtype)
        for index, (shape, dtype) in enumerate(kinds)
    }
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    entries = [TensorEntry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    with safetensors_writer(path, entries) as write:
        for name, tensor in tensors.items():
            write(name, tensor)
    found = load(path.read_bytes())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_transposed_tensor_is_written_in_order(tmp_path):
    tensor = torch.arange(6.0).view(2, 3).T
    with safetensors_writer(tmp_path / "x.safetensors", [TensorEntry("x", (3, 2), torch.float32)]) as write:
        write("x", tensor)
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], tensor)


def test_wrong_order_and_missing_tensors_are_caught(tmp_path):
    entries = [TensorEntry("a", (1,), torch.float32), TensorEntry("b", (1,), torch.float32)]
    with pytest.raises(AssertionError), safetensors_writer(tmp_path / "x.safetensors", entries) as write:
        write("b", torch.zeros(1))
    with (
        pytest.raises(AssertionError, match="1 tensors were not written"),
        safetensors_writer(tmp_path / "x.safetensors", entries) as write,
    ):
        write("a", torch.zeros(1))
