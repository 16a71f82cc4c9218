"""Our safetensors files against the safetensors library."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from megatune.bridge import file_stream
from megatune.bridge.checked_files import BLOCK_BYTES, RangedFile, ReadCheck
from megatune.bridge.file_stream import FileStream, HostBuffers, SmallFile, TensorFile
from megatune.bridge.safetensors_files import TensorEntry
from megatune.families.weight_index import read_header
from megatune.training.storage.manifest import digest_file

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
    TensorFile(path.name, entries, tensors.values()).write(path.parent)
    assert {name: entry.shape for name, entry in read_header(path).items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    found = load(path.read_bytes())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_transposed_tensor_is_written_in_order(tmp_path):
    tensor = torch.arange(6.0).view(2, 3).T
    TensorFile("x.safetensors", [TensorEntry("x", (3, 2), torch.float32)], [tensor]).write(tmp_path)
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], tensor)


def test_missing_tensors_are_caught(tmp_path):
    entries = [TensorEntry("a", (1,), torch.float32), TensorEntry("b", (1,), torch.float32)]
    with pytest.raises(AssertionError, match="does not have the size in its header"):
        TensorFile("x.safetensors", entries, [torch.zeros(1)]).write(tmp_path)


def test_a_stream_writes_what_a_file_has(tmp_path, monkeypatch):
    """In buckets that end inside of tensors, with digests of the file and of its blocks."""
    monkeypatch.setattr(file_stream, "BUCKET_BYTES", 2 * BLOCK_BYTES)
    tensors = [torch.randn(100_003), torch.randn(5, 7).bfloat16().T, torch.randn(70_000)]
    entries = [TensorEntry(f"{index}", tuple(each.shape), each.dtype) for index, each in enumerate(tensors)]
    stream = FileStream(tmp_path, HostBuffers())
    written = []
    thread = threading.Thread(target=lambda: written.extend(stream.write()))
    thread.start()
    stream.put([TensorFile("a/x.safetensors", entries, tensors), SmallFile("b.json", b"{}")])
    thread.join()
    TensorFile("plain.safetensors", entries, tensors).write(tmp_path)
    content = (tmp_path / "a/x.safetensors").read_bytes()
    assert content == (tmp_path / "plain.safetensors").read_bytes()
    assert [file.name for file in written] == ["a/x.safetensors", "a/training/digests/x.safetensors.xxh3", "b.json"]
    for file in written:
        assert (file.size, file.xxh3_128) == digest_file(tmp_path / file.name)
    check = ReadCheck(tmp_path / "a")
    assert bytes(RangedFile(tmp_path / "a/x.safetensors", check).read(5, 300_000).numpy()) == content[5:300_000]
    assert not check.problems
    damaged = bytearray(content)
    damaged[200_000] ^= 1
    (tmp_path / "a/x.safetensors").write_bytes(damaged)
    file = RangedFile(tmp_path / "a/x.safetensors", check)
    file.read(0, 1000)
    assert not check.problems
    file.read(199_999, 200_002)
    assert check.problems == {"x.safetensors": "x.safetensors is damaged: its digest does not match"}
