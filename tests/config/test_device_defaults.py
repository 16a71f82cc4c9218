"""What a GPU decides where it is not written."""

from __future__ import annotations

import pytest

from megatune.config.derived import Gpu, with_device_defaults
from megatune.config.load import Loaded, dump, load
from megatune.plan.catalogue import find_machine

H100 = Gpu("NVIDIA H100 80GB HBM3", has_bf16=True, speedup=14.8)
FUSIONS = ("bias_activation_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")
BASE = ["model_name_or_path=m", "dataset=d", "output_dir=o"]


def on(gpu: Gpu, *words: str, world_size: int | None = 1) -> tuple[Loaded, list[str]]:
    loaded, lines = with_device_defaults(load(overrides=[*BASE, *words]), gpu, world_size)
    assert loaded.check(world_size=world_size) == []
    return loaded, lines


def test_a_gpu_computes_in_bf16_with_fused_kernels() -> None:
    loaded, lines = on(H100)
    settings = loaded.settings
    assert settings.precision.params_dtype == "bfloat16"
    assert all(getattr(settings.performance, name) for name in FUSIONS)
    assert not settings.parallel.overlap_grad_reduce
    assert "bf16: true on NVIDIA H100 80GB HBM3, which computes it 14.8 times as fast as fp32" in lines[0]
    assert lines[1].startswith(", ".join(FUSIONS))
    assert len(lines) == 2
    (line,) = (line for line in dump(settings, loaded.origins).splitlines() if line.startswith("bf16"))
    assert line.split("#")[1].strip() == H100.name


def test_ranks_that_exchange_gradients_do_so_while_they_compute() -> None:
    words = ("tensor_model_parallel_size=2", "sequence_parallel=true")
    for world_size, overlaps in ((None, False), (2, False), (4, True)):
        parallel = on(H100, *words, world_size=world_size)[0].settings.parallel
        assert parallel.overlap_grad_reduce is parallel.overlap_param_gather is overlaps


@pytest.mark.parametrize(
    ("words", "reduces", "gathers"),
    [
        (["overlap_grad_reduce=false"], False, False),
        (["overlap_param_gather=false"], True, False),
        (["use_distributed_optimizer=false"], True, False),
    ],
)
def test_overlaps_follow_what_is_written(words: list[str], reduces: bool, gathers: bool) -> None:
    parallel = on(H100, *words, world_size=2)[0].settings.parallel
    assert (parallel.overlap_grad_reduce, parallel.overlap_param_gather) == (reduces, gathers)


def test_what_is_written_stays() -> None:
    words = ["bf16=false", *(f"{name}=false" for name in FUSIONS)]
    loaded, (line,) = on(H100, *words)
    assert loaded.settings == load(overrides=[*BASE, *words]).settings
    assert "fp32 on NVIDIA H100 80GB HBM3: products without TF32, attention without flash kernels" in line
    assert line.endswith("bf16: true computes 14.8 times as fast")
    assert on(H100, "fp16=true")[0].settings.precision.params_dtype == "float16"


def test_a_gpu_without_bf16_is_told_what_fp32_costs() -> None:
    volta = find_machine("v100").device.gpu
    loaded, lines = on(volta)
    assert loaded.settings.precision.params_dtype == "float32"
    assert lines[-1].endswith("fp16: true computes 7.96 times as fast")
    assert "several times as fast" in on(Gpu("a new GPU", has_bf16=None))[1][-1]


def test_a_rerun_of_what_a_gpu_decided_is_the_same(tmp_path) -> None:
    loaded, _ = on(H100)
    (tmp_path / "run.yaml").write_text(dump(loaded.settings, loaded.origins))
    again = load(tmp_path / "run.yaml")
    assert with_device_defaults(again, Gpu("another", has_bf16=False), 8)[0].settings == loaded.settings
