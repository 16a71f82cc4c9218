"""What `train` says and refuses before any process is started."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from megatune.config.load import load
from megatune.config.rules import check
from megatune.errors import ExitCode, MegatuneError
from megatune.launch import devices
from megatune.plan.catalogue import cpu_machine, find_machine
from megatune.plan.estimate import estimate
from megatune.plan.fixes import savings, speedups
from megatune.plan.machine import Calibration, Machine
from megatune.plan.pages.words import size
from megatune.plan.run.preflight import Preflight, longest_row, preflight
from megatune.plan.run.record import RunRecord, dump_records, read_records
from megatune.plan.uncertainty import TIGHT

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
TINY = {**LLAMA_8B, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 301}  # fmt: skip
MIXTRAL = {**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
           "num_hidden_layers": 8}  # fmt: skip
# Trains on 8 GPUs without a word.
GOOD = {
    "bf16": True,
    "cutoff_len": 4096,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
A100S = find_machine("a100-80g", gpus_per_node=8)


def checked(
    folder: Path, world: int = 8, machine: Machine = A100S, config: Any = LLAMA_8B, idle: int = 0, **values: Any
) -> Preflight:
    (folder / "config.json").write_text(json.dumps(config))
    values = {"model_name_or_path": folder, "output_dir": "out", "dataset": "d", "template": "qwen", **values}
    loaded = load(None, [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()])
    return preflight(loaded, world, (), machine, idle_gpus=idle)


def test_a_good_run_gets_layout_and_batch_memory_by_part_and_time(tmp_path: Path) -> None:
    found = checked(tmp_path, **GOOD)
    assert found.planned is not None
    assert len(found.lines) == 2, found.lines
    first, line = found.lines
    assert first == "plan       tp2 dp4 on 8 × a100-80g; 1 × 8 × dp 4 = 32 rows a step, of up to 4,096 tokens"
    assert line.startswith("plan       memory: ")
    for word in ("of 79.1 GiB", "weights 7.48", "gradients 15.0", "activations ", " a step ±"):
        assert word in line, line
    again = estimate(found.planned.case)
    assert (found.planned.stages, found.planned.time) == (again.stages, again.time)


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("bf16: true\n", [], True),
        ("finetuning_type: full\n", [], False),
        ("bf16: true\n", ["finetuning_type=lora"], False),
        (None, ["bf16=true"], False),
    ],
)
@pytest.mark.parametrize("machine", [A100S, None])
def test_a_file_without_finetuning_type_is_told_what_that_means(tmp_path: Path, text, overrides, says, machine) -> None:
    """In LLaMA-Factory it means LoRA."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
    basics = [f"model_name_or_path={tmp_path}", "output_dir=out", "dataset=d", "template=qwen", "cutoff_len=64"]
    loaded = load(tmp_path / "run.yaml" if text is not None else None, [*basics, *overrides])
    line = "trained    every parameter: finetuning_type is not set; its default is full here, lora in LLaMA-Factory"
    assert (line in preflight(loaded, 8, (), machine).lines) == says


def test_adapters_are_offered_where_a_model_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError) as refused:
        checked(tmp_path, 1, bf16=True, cutoff_len=1024, per_device_train_batch_size=1)
    fixes = refused.value.findings[0].fix.splitlines()
    (line,) = [line.strip() for line in fixes if "finetuning_type" in line]
    assert line.startswith("finetuning_type: lora: ")
    assert line.endswith(": trains adapters instead of the model")
    assert checked(
        tmp_path, 1, bf16=True, cutoff_len=1024, per_device_train_batch_size=1, finetuning_type="lora"
    ).planned


@pytest.mark.parametrize(
    ("changes", "world", "words"),
    [
        ({"tensor_model_parallel_size": 16, "gradient_accumulation_steps": 32}, 16,
         ("goes across machines of 8", "tensor_model_parallel_size: 8", "faster)")),
        ({"sequence_parallel": False}, 8, ("without sequence parallelism", "sequence_parallel: true", "less)")),
        ({"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "gradient_accumulation_steps": 2}, 8,
         ("2 stages wait for each other", "virtual_pipeline_model_parallel_size: ", "faster)")),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "gradient_accumulation_steps": 2}, 8,
         ("2 micro-batches for 4 stages wait for each other", "gradient_accumulation_steps: 16", "16 rows")),
        ({"tensor_model_parallel_size": 8}, 8,
         ("one replica of the model", "tensor_model_parallel_size: 4", "faster)")),
        ({"recompute_granularity": "full"}, 8, ("not all recomputation is needed", "recompute_granularity: null")),
        ({"bf16": False, "per_device_train_batch_size": 1, "tensor_model_parallel_size": 8}, 8,
         ("computes in fp32", "bf16: true", "faster)")),
        ({"overlap_grad_reduce": False, "overlap_param_gather": False, "gradient_accumulation_steps": 1,
          "tensor_model_parallel_size": 1, "sequence_parallel": False, "cutoff_len": 1024}, 8,
         ("gradient reduction is not overlapped", "overlap_grad_reduce: true, overlap_param_gather: true")),
    ],
)  # fmt: skip
def test_what_could_be_better_is_said_with_its_numbers_and_its_setting(
    tmp_path: Path, changes: dict[str, Any], world: int, words: tuple[str, ...]
) -> None:
    lines = checked(tmp_path, world, **{**GOOD, **changes}).lines
    found = [line for line in lines[2:] if all(word in line for word in words)]
    assert len(found) == 1, "\n".join(lines)
    assert found[0].startswith("warning    ")


def test_memory_that_is_nearly_all_taken_and_idle_gpus_are_said(tmp_path: Path) -> None:
    lines = checked(tmp_path, 4, idle=4, **GOOD).lines
    assert any("4 GPUs of this machine are idle: num_processes: 8" in line for line in lines)
    held = checked(tmp_path, **GOOD).planned.fullest.total  # type: ignore[union-attr]
    small = _with_memory(A100S, int(held / 0.97))
    assert any("memory is tight: 97 %" in line for line in checked(tmp_path, machine=small, **GOOD).lines)


def _with_memory(machine: Machine, memory: int) -> Machine:
    return replace(machine, device=replace(machine.device, memory=memory))


def test_a_tiny_run_on_a_cpu_is_planned_without_a_warning(tmp_path: Path) -> None:
    """In a layout that would be warned of on GPUs."""
    machine = cpu_machine(8 * 2**30, cores=2, processes=4)
    values = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "recompute_granularity": "full"}
    found = checked(tmp_path, 4, machine, TINY, gradient_accumulation_steps=2, cutoff_len=128, **values)
    assert len(found.lines) == 2, found.lines
    assert "of 2.00 GiB" in found.lines[1]


def test_what_cannot_fit_is_refused_with_the_largest_part_and_fixes_that_hold(tmp_path: Path) -> None:
    too_much = {**GOOD, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    with pytest.raises(MegatuneError) as caught:
        checked(tmp_path, **too_much)
    assert caught.value.exit_code == ExitCode.SETTINGS
    text = str(caught.value)
    assert "cannot fit" in text
    assert "the largest part is activations" in text
    assert "memory_check: warn" in text
    planned = checked(tmp_path, memory_check="warn", **too_much).planned
    assert planned is not None
    longest = longest_row(planned)
    assert f"cutoff_len: {longest}," in text
    fitting, beyond = (checked(tmp_path, memory_check="warn", **{**too_much, "cutoff_len": length}).planned
                       for length in (longest, longest + 64))  # fmt: skip
    assert fitting is not None
    assert fitting.fits
    assert beyond is not None
    assert not beyond.fits
    fixes = savings(planned)
    assert len(fixes) == 3
    assert len({frozenset(fix.changes) for fix in fixes}) == 3
    for fix in fixes:
        assert str(fix) in text
        case = fix.after.case
        assert not check(case.settings, case.model.architecture, case.world_size)
        assert case.global_batch_size == planned.case.global_batch_size
        assert fix.after.fullest.total <= TIGHT * A100S.device.memory
        for path, value in fix.changes.items():
            group, _, name = path.partition(".")
            assert getattr(getattr(case.settings, group), name) == value


def test_a_model_that_no_batch_makes_fit_is_refused_with_what_its_state_takes(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError, match=r"optimizer alone take 134.* GiB, for any batch"):
        checked(tmp_path, 1, find_machine("rtx-4090", gpus_per_node=1), bf16=True)


def test_where_one_or_two_changes_are_not_enough_a_layout_is_searched_for(tmp_path: Path) -> None:
    """Llama 3 70B on 32 GPUs of 80 GB without a layout."""
    large = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
             "num_attention_heads": 64}  # fmt: skip
    with pytest.raises(MegatuneError) as caught:
        checked(tmp_path, 32, config=large, bf16=True, cutoff_len=4096, gradient_accumulation_steps=8)
    [line] = [line for line in str(caught.value).splitlines() if " a step (" in line]
    assert "the fastest layout that fits" in str(caught.value)
    assert "sequence_parallel: true" in line


@pytest.mark.parametrize(
    ("kind", "factor"), [("dense", 1.25), ("experts", 1.4), ("calibrated", 1.2), ("ada", 1.5), ("cpu", 1.25)]
)
def test_what_may_fit_by_the_plans_own_uncertainty_is_warned_of_and_starts(
    tmp_path: Path, kind: str, factor: float
) -> None:
    """Refused is what does not fit at the lower end of the plan's uncertainty, and nothing else."""
    machine = replace(A100S, calibration=Calibration(activations=1.01, num_runs=1)) if kind == "calibrated" else A100S
    machine = find_machine("l40s", gpus_per_node=8) if kind == "ada" else machine
    machine = cpu_machine(8 * 2**30, cores=2, processes=8) if kind == "cpu" else machine
    config = MIXTRAL if kind == "experts" else LLAMA_8B
    values = {**GOOD, "recompute_granularity": "full", "cutoff_len": 8192, "per_device_train_batch_size": 8}
    values["expert_model_parallel_size"] = 4 if kind == "experts" else 1

    def on(memory: float) -> Preflight:
        device = replace(machine.device, memory=int(memory))
        return checked(tmp_path, machine=replace(machine, device=device), config=config, **values)

    held = on(2**50).planned.fullest.total  # type: ignore[union-attr]
    assert not any("not fit" in line for line in on(held).lines)
    for memory in (0.999 * held, 1.001 * held / factor):
        [warning] = [line for line in on(memory).lines if "may not fit" in line]
        said = f"is planned to hold {size(held)}, between {size(held / factor)} and {size(factor * held)}, and"
        assert said in warning
        assert f"has {size(memory)}" in warning
        assert " a step (" in warning  # what would help, with its numbers
        assert "memory_check" not in warning
    with pytest.raises(MegatuneError, match=f"cannot fit: .* would hold {size(held)}, {size(held / factor)} at least"):
        on(0.999 * held / factor)


def test_weights_gradients_and_optimizer_are_exact(tmp_path: Path) -> None:
    """They hold hardly anything but these: the bound of what may fit is not below them."""
    stage = checked(tmp_path, **{**GOOD, "cutoff_len": 64}).planned.fullest  # type: ignore[union-attr]
    state = stage.weights + stage.gradients + stage.master_weights + stage.optimizer_state
    assert stage.total / 1.25 < state
    found = checked(tmp_path, machine=_with_memory(A100S, state), **{**GOOD, "cutoff_len": 64})
    assert any("may not fit" in line for line in found.lines)
    with pytest.raises(MegatuneError, match="cannot fit"):
        checked(tmp_path, machine=_with_memory(A100S, state - 1), **{**GOOD, "cutoff_len": 64})


def test_memory_check_warn_starts_it_and_off_does_not_plan(tmp_path: Path) -> None:
    too_much = {**GOOD, "per_device_train_batch_size": 8}
    warned = checked(tmp_path, memory_check="warn", **too_much)
    assert warned.planned is not None
    assert "cannot fit" in warned.lines[2]
    off = checked(tmp_path, memory_check="off", **too_much)
    assert (off.planned, off.lines) == (None, ())


def test_speedups_are_faster_fit_and_keep_the_rows_of_a_step(tmp_path: Path) -> None:
    planned = checked(tmp_path, **{**GOOD, "tensor_model_parallel_size": 8, "recompute_granularity": "full"}).planned
    assert planned is not None
    found = speedups(planned)
    assert len(found) == 3
    for fix in found:
        assert fix.after.fits
        assert fix.after.time.total < planned.time.total
        assert fix.after.case.global_batch_size == planned.case.global_batch_size
    assert "data.cutoff_len" not in {key for fix in found for key in fix.changes}


def test_it_takes_no_torch() -> None:
    program = "import sys, megatune.training.planning as m; m.this_machine(2, 0); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("config", [LLAMA_8B, {**LLAMA_8B, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}])  # fmt: skip
def test_a_case_survives_plan_json(tmp_path: Path, config: dict[str, Any]) -> None:
    planned = checked(tmp_path, config=config, **GOOD).planned
    assert planned is not None
    (tmp_path / "plan.json").write_text(dump_records([RunRecord(case=planned.case)]))
    [record] = read_records(tmp_path)
    assert astuple(record.case) == astuple(planned.case)
    again = record.planned()  # the case works: caches take it as a key
    assert (again.stages, again.time) == (planned.stages, planned.time)


# ---------------------------------------------------------------------------------------------------------------------
# What the machine has


@pytest.mark.parametrize(
    ("visible", "memories"), [(None, [81559, 40960]), ("1", [40960]), ("GPU-bb,0", [40960, 81559]), ("", [])]
)
def test_gpus_are_listed_with_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, memories: list[int]
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho '0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559'\n"
        "echo '1, GPU-bb22, NVIDIA A100-SXM4-40GB, 40960'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus = devices.list_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.memory // 2**20 for gpu in gpus] == memories


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       64000000 kB\nMemAvailable:   32000000 kB\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    if version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    own = groups / ("" if version == 2 else "memory") / "box" / "job"
    own.mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/box/job\n" if version == 2 else "7:cpu:/\n4:memory:/box/job\n0::/\n")
    monkeypatch.setattr(devices, "_PROC", proc)
    monkeypatch.setattr(devices, "_CGROUPS", groups)
    assert devices.free_memory() == 32000000 * 1024
    for folder, limit in ((own, "max" if version == 2 else str(2**63 - 4096)), (own.parent, "8000000000")):
        (folder / names[0]).write_text(limit)
        (folder / names[1]).write_text("5000000000")
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} 1000000000\n")
    assert devices.free_memory() == 4_000_000_000
