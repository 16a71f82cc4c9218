"""The stand-ins for CUDA on a CPU: enough for Megatron-Core, and no hindrance to others."""

from __future__ import annotations

import pytest
import torch

import megatune.engine  # noqa: F401  (installs the stand-ins)
from megatune.engine import device
from megatune.engine.layers.rotary import inverse_frequencies
from megatune.families import load_architecture
from megatune.verify.reference import load_reference_model

pytestmark = pytest.mark.skipif(device.HAS_GPU, reason="with a GPU nothing is patched")


def test_calls_of_megatron_core_work():
    assert torch.cuda.current_device() == torch.device("cpu") == device.current()
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record(stream)
    stream.wait_event(event)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.stream(stream):
        torch.cuda.synchronize()
    assert event.query()
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"


@pytest.mark.parametrize("where", ["cuda", torch.device("cuda"), "cuda:0"])
def test_factories_make_cpu_tensors(where):
    assert torch.zeros(3, device=where).device.type == "cpu"
    assert torch.tensor([1], dtype=torch.int64, device=where).device.type == "cpu"
    assert torch.empty_like(torch.ones(2), device=where).device.type == "cpu"


def test_a_gpu_is_still_not_there():
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0


def test_factories_obey_a_meta_device():
    """Transformers builds models on it; a wrapped factory that torch did not know would fill them with memory."""
    with torch.device("meta"):
        made = [torch.zeros(2), torch.empty(2), torch.arange(2), torch.full((2,), 1.0), torch.tensor([1.0])]
    assert {tensor.device.type for tensor in made} == {"meta"}


def test_transformers_loads_every_weight(model_dir):
    """Values, and buffers such as rotary frequencies, which are computed and not loaded."""
    from safetensors.torch import load_file

    folder = model_dir("llama")
    model = load_reference_model(folder, torch.float32)
    named = dict(model.named_parameters())
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(named[name], tensor)
    assert all(buffer.device.type == "cpu" and buffer.isfinite().all() for buffer in model.buffers())
    assert torch.equal(model.model.rotary_emb.inv_freq, inverse_frequencies(load_architecture(folder)))


def test_random_state_is_the_cpu_generators():
    state = device.rng_state()
    drawn = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.cuda.get_rng_state(), torch.random.get_rng_state())
