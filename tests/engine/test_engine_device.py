"""The stand-ins for CUDA on a CPU: enough for Megatron-Core, and no hindrance to others."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import megatune.engine  # noqa: F401  (installs the stand-ins)
from megatune.engine import device, groups, sequences
from megatune.engine.layers.rotary import inverse_frequencies
from megatune.errors import ExitCode, MegatuneError
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


def test_the_norm_of_a_large_tensor_is_precise():
    """torch adds up squares one by one on a CPU: of this many the norm is 0.01 % too small."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in (4_000_000, 0, 3)]
    expected = sum(tensor.double().square().sum() for tensor in tensors).sqrt().item()
    assert device.norm(tensors).item() == pytest.approx(expected, rel=1e-6)
    assert device.norm(tensors).shape == ()


def test_a_gpu_is_still_not_there():
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0


def test_a_machine_whose_gpus_torch_cannot_use_is_refused(monkeypatch):
    """It would train on the CPU, far slower, and say so nowhere."""
    device.require_gpus(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(MegatuneError) as caught:
        device.require_gpus(8)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    (finding,) = caught.value.findings
    assert finding.what == "this machine has 8 GPUs, but torch cannot use any of them"
    assert finding.why == f"torch {torch.__version__} is a build for CPUs"
    assert finding.fix.endswith("or write use_cpu: true to train on the CPU")


def test_a_refusal_has_the_reason_of_cuda(monkeypatch):
    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_init", too_old, raising=False)
    with pytest.raises(MegatuneError, match="driver on your system is too old"):
        device.require_gpus(1)
    monkeypatch.setattr(torch._C, "_cuda_init", lambda: None, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0000")
    with pytest.raises(MegatuneError, match="CUDA_VISIBLE_DEVICES is GPU-0000"):
        device.require_gpus(1)
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: too_old())
    with pytest.raises(MegatuneError, match=r"install a build of torch for CUDA 13\.0"):
        device.select(0)


def test_operators_are_compiled_only_where_triton_can(monkeypatch, tmp_path):
    """Without a C compiler the first step would end with an error of Triton's."""
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(device, "why_not_compiled", why := device.why_not_compiled.__wrapped__)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: lambda *args: ("compiled", function(*args)))
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert why() == "Triton is not installed"
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Triton needs a C compiler" in why()
    assert device.compiled(sum) is sum
    (tmp_path / "clang").touch(mode=0o755)
    total = device.compiled(sum)
    assert total([1, 2]) == ("compiled", 3)
    monkeypatch.setattr(device, "_compiles", True)  # and put back at the end
    device.compile_operators(False)
    assert total([1, 2]) == 3


@pytest.mark.parametrize("obstacle", ["", "there is no C compiler"])
def test_fusions_of_megatron_core_are_compiled_as_our_own(monkeypatch, obstacle):
    """They are decorated while it is imported, and would ask for a C compiler in the first step."""
    made = []

    @contextlib.contextmanager
    def importing(module):
        made.extend([torch.compile(sum), torch.compile(dynamic=True)(max)])
        yield

    usual = Mock(side_effect=lambda function=None, **options: lambda *args: ("compiled", options))
    monkeypatch.setattr(torch, "compile", usual)
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(device, "why_not_compiled", lambda: obstacle)
    monkeypatch.setattr(device, "_absent", importing)
    device.install.__wrapped__()
    assert torch.compile is usual
    ours, theirs = made
    assert ours([1, 2]) == (3 if obstacle else ("compiled", {"dynamic": True}))
    assert theirs == ("compiled", {"dynamic": True})  # what other packages ask for stays


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


def test_ranks_meet_on_their_devices(monkeypatch):
    """NCCL connects at once, and groups are parts of the first one."""
    given = {}
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **options: given.update(options))
    groups.init_process_group(None, 0, 1, timeout=1.0)
    assert given["device_id"] is None
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    groups.init_process_group(None, 0, 1, timeout=1.0)
    assert given["device_id"] == torch.device("cuda", 3)


@pytest.mark.parametrize(("waits", "expected"), [(False, ["left", "left"]), (True, ["left"])], ids=["gloo", "nccl"])
def test_a_rank_that_fails_does_not_wait_for_the_others(monkeypatch, waits, expected):
    """NCCL first completes what was launched, which the others may never come to: its failure would not be told."""
    left = []
    monkeypatch.setattr(device, "LEAVING_WAITS", waits)
    monkeypatch.setattr(groups, "leave", lambda: left.append("left"))
    with groups.leaving():
        pass
    with pytest.raises(OSError, match="disk"), groups.leaving():
        raise OSError("disk")
    assert left == expected


def test_a_gpu_computes_the_same_bits_only_where_it_is_asked_to(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for has_gpu, wanted, expected in ((False, True, False), (True, False, False), (True, True, True)):
        monkeypatch.setattr(device, "HAS_GPU", has_gpu)
        try:
            device.set_deterministic(wanted)
            assert torch.are_deterministic_algorithms_enabled() is expected
            assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is expected
        finally:
            torch.use_deterministic_algorithms(False)


def test_every_copy_of_a_micro_batch_is_sent(monkeypatch):
    """From page-locked memory, without waiting: also what is computed on the host, of context-parallel parts."""
    monkeypatch.setattr(sequences.parallel_state, "get_context_parallel_rank", lambda: 1)
    monkeypatch.setattr(sequences.parallel_state, "get_context_parallel_world_size", lambda: 2)
    sent = []
    monkeypatch.setattr(sequences, "send", lambda tensor: sent.append(tensor) or tensor)
    ids = torch.arange(8)[None]
    batch = SimpleNamespace(
        input_ids=ids, labels=ids, position_ids=ids, lengths=(8,), cu_seqlens=None, extras={}, media=None
    )
    mine = sequences.local_batch(batch)
    copies = mine.input_ids, mine.labels, mine.sequences.position_ids, mine.sequences.is_padding
    copies += mine.sequences.normalizer, mine.sequences.trained
    assert [any(copy is each for each in sent) for copy in copies] == [True] * 6
    assert mine.input_ids.tolist() == [[2, 3, 4, 5]]


def sums_in_groups(num_groups: int) -> tuple[list[float], int]:
    """On every rank: a sum in each of so many groups, and how many threads they brought."""
    before = len(os.listdir("/proc/self/task"))
    made = [torch.distributed.new_group() for _ in range(num_groups)]
    values = [torch.tensor(float(groups.rank() + index)) for index in range(num_groups)]
    works = [
        torch.distributed.all_reduce(value, group=one, async_op=True) for value, one in zip(values, made, strict=True)
    ]
    for work in works:
        work.wait()
    return [value.item() for value in values], len(os.listdir("/proc/self/task")) - before


def test_groups_of_gloo_share_the_thread_that_looks_for_messages(pool):
    for sums, threads in pool.run(2, sums_in_groups, 8):
        assert sums == [1.0 + 2 * index for index in range(8)]
        assert threads == 8 * 2  # two work in each group; a third would look for its messages
