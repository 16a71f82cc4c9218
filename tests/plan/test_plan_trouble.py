"""A run that ran out of memory, or was slow, is explained: what was larger than planned, and what helps."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatune.architecture import Architecture
from megatune.config.settings import Settings, with_settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import find_machine
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.fixes import savings
from megatune.plan.run.record import Measured, RankMemory, RunRecord, dump_records, read_rank_memory, read_records
from megatune.plan.run.trouble import diagnose, ran_out_of_memory

LIMIT = 240.0
MODEL = Architecture(
    model_type="qwen3", num_layers=36, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32,
    num_query_groups=8, kv_channels=128, vocab_size=151936, max_position_embeddings=40960, norm_epsilon=1e-6,
    rotary_base=1e6,
)  # fmt: skip
SETTINGS = with_settings(
    Settings(),
    {
        "precision.bf16": True,
        "parallel.tensor_model_parallel_size": 4,
        "parallel.sequence_parallel": True,
        "batch.per_device_train_batch_size": 2,
        "batch.gradient_accumulation_steps": 8,
        "data.cutoff_len": 4096,
    },
)
CASE = Case(
    model=PlannedModel(name="tuna", architecture=MODEL),
    settings=SETTINGS,
    world_size=8,
    machine=find_machine("a100-80g", gpus_per_node=8),
)


def leave(
    folder: Path, *, outcome: str = "finished", slower: float = 1.0, memory: RankMemory | None = None, **report: Any
) -> Path:
    """What a run of CASE leaves behind."""
    folder.mkdir()
    planned = estimate(CASE)
    measured = Measured(
        counted="allocated",
        stages=(_as_planned(planned),),
        step_seconds=planned.time.total * slower,
        num_steps=6,
        row_tokens=4096,
        longest_row=4096,
    )
    record = RunRecord(case=CASE, outcome=outcome, measured=measured)  # type: ignore[arg-type]
    (folder / "plan.json").write_text(dump_records([record]))
    launch = folder / "launch"
    (launch / "memory").mkdir(parents=True)
    if memory is not None:
        (launch / "memory" / f"rank-{memory.rank}.json").write_text(json.dumps(asdict(memory)))
    if report:
        usual = {"outcome": outcome, "findings": [], "culprit": None, "traceback": ""}
        (launch / "report.json").write_text(json.dumps({**usual, **report}))
    return folder


def _as_planned(planned: Estimate) -> RankMemory:
    stage = planned.stages[0]
    state = stage.weights + stage.gradients + stage.master_weights
    kept = stage.activations + stage.logits_and_loss + stage.communication
    stepped = state + stage.optimizer_state
    return RankMemory(rank=0, stage=0, loaded=state, stepped=stepped, peak=stepped + kept)


def test_a_run_that_went_well_says_so_with_planned_and_measured(tmp_path: Path) -> None:
    folder = leave(tmp_path / "run", exit_code=0)
    assert not ran_out_of_memory(folder)
    text = "\n".join(diagnose(folder))
    assert "run: finished" in text
    assert "it was as fast as planned" in text
    assert "a step, was" in text
    assert "helps" not in text


def test_a_slow_run_says_how_slow_of_what_a_step_is_and_what_would_be_faster(tmp_path: Path) -> None:
    lines = diagnose(leave(tmp_path / "run", slower=2.0))
    text = "\n".join(lines)
    assert "slow       2.0 times what was planned" in text
    assert "computing " in text
    assert f"megatune plan --calibrate {tmp_path}/run" in text
    fixes = [line for line in lines if line.startswith("    ") and "faster)" in line]
    assert len(fixes) >= 2, text


@pytest.mark.parametrize("larger", ["activations, loss, communication", "weights, gradients, optimizer"])
def test_out_of_memory_names_the_part_that_was_larger_than_planned(tmp_path: Path, larger: str) -> None:
    usual = _as_planned(estimate(CASE))
    more = 20 * 2**30
    if larger.startswith("activations"):
        memory = replace(usual, rank=3, peak=usual.peak + more)
    else:
        memory = replace(usual, rank=3, stepped=usual.stepped + more, peak=usual.peak + more)
    what = (
        "rank 3 ran out of memory at step 2 (train): OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    folder = leave(
        tmp_path / "run",
        outcome="failed",
        memory=memory,
        exit_code=71,
        culprit=3,
        findings=[{"what": what}],
    )
    lines = diagnose(folder)
    assert what in lines[0]
    [line] = [line for line in lines if line.startswith(f"    {larger} ")]
    assert "times what was planned" in line
    fixes = lines[lines.index("helps, by the planner:") + 1 :]
    assert len(fixes) == 3
    planned = estimate(CASE)
    room = 0.9 * planned.fullest.total
    assert [fix.split(". ", 1)[1] for fix in fixes] == [str(each) for each in savings(planned, room=int(room))]


def test_what_the_kernel_killed_for_memory_is_out_of_memory_too(tmp_path: Path) -> None:
    findings = [{"what": "rank 1 was killed by SIGKILL", "why": "the kernel's out-of-memory killer: this machine or"
                 " container is out of main memory"}]  # fmt: skip
    folder = leave(tmp_path / "run", exit_code=ExitCode.OUT_OF_MEMORY, culprit=1, findings=findings)
    assert ran_out_of_memory(folder)
    text = "\n".join(diagnose(folder))
    assert "measured   nothing" in text
    assert "helps, by the planner:" in text


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    for folder, words in ((tmp_path, "not the folder of a run"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(MegatuneError, match=words) as caught:
            diagnose(folder)
        assert caught.value.exit_code == ExitCode.INPUT
    (tmp_path / "run.yaml").write_text("")
    with pytest.raises(MegatuneError, match="it has no plan"):
        diagnose(tmp_path)
    (tmp_path / "plan.json").write_text('{"format": 1, "runs": [{"record": {"case": {}}}]}')
    with pytest.raises(MegatuneError, match="of another version") as caught:
        diagnose(tmp_path)
    assert caught.value.exit_code == ExitCode.INPUT


@pytest.mark.extended
def test_a_run_that_really_runs_out_of_memory(tmp_path: Path) -> None:
    """Its processes may have 2.3 GB of addresses, which the forward pass of a large micro-batch is beyond."""
    model = make_checkpoint("qwen3", tmp_path / "model")
    words = random.Random(0)
    sample = {"instruction": "?", "output": " ".join(words.choice(("tuna", "sea", "boat")) for _ in range(1500))}
    (tmp_path / "long.jsonl").write_text((json.dumps(sample) + "\n") * 32)
    settings = {
        "model_name_or_path": model, "output_dir": tmp_path / "out", "dataset": tmp_path / "long.jsonl",
        "template": "qwen3_nothink", "cutoff_len": 1024, "per_device_train_batch_size": 32, "max_steps": 2,
        "cross_entropy_loss_fusion": "false", "report_to": "none", "plot_loss": "false",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "megatune", "sft", *(f"--{key}={value}" for key, value in settings.items())],
        env={**os.environ, "MEGATUNE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2_300_000_000, 2_300_000_000)),
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == ExitCode.OUT_OF_MEMORY, done.stdout + done.stderr
    assert f"`megatune explain {tmp_path}/out`" in done.stderr
    assert "Traceback" not in done.stderr
    [record] = read_records(tmp_path / "out")
    assert record.outcome == "failed"
    [memory] = read_rank_memory(tmp_path / "out" / "launch")
    assert memory.peak > memory.loaded + 2**28  # noted on the way down
    text = "\n".join(diagnose(tmp_path / "out"))
    assert "ran out of memory at step 1" in text
    assert "limit      memory ended at" in text  # the limit was lower than what was free
    assert "per_device_train_batch_size: " in text
    assert text.count(" a step (") == 3


def test_a_run_that_torchrun_started_is_explained_by_what_its_ranks_noted(tmp_path: Path) -> None:
    folder = leave(tmp_path / "run", outcome="failed", memory=RankMemory(rank=1, peak=2**34))
    noted: dict[str, Any] = {"host": "here", "pid": 7, "phase": "train", "step": 3, "findings": [], "traceback": ""}
    lost = {**noted, "rank": 0, "exit_code": 76, "kind": "collective", "time": 1.0, "summary": "peer is gone"}
    first = {**noted, "rank": 1, "exit_code": 71, "kind": "error", "time": 2.0, "summary": "tried to allocate 2 GiB"}
    earlier = {**noted, "rank": 8, "exit_code": 70, "kind": "error", "time": 0.0, "summary": "of a larger run"}
    for each in (lost, first, earlier):
        (folder / "launch" / f"rank-{each['rank']}.error.json").write_text(json.dumps(each))
    text = "\n".join(diagnose(folder))
    assert "rank 1 on host here ran out of memory at step 3 (train): tried to allocate 2 GiB" in text
    assert "helps, by the planner:" in text


def test_where_memory_ended_far_below_what_there_is_a_limit_is_named(tmp_path: Path) -> None:
    stage = estimate(CASE).stages[0]
    loaded = stage.weights + stage.gradients + stage.master_weights + 3 * 2**30
    folder = leave(
        tmp_path / "run", memory=RankMemory(rank=0, loaded=loaded, peak=loaded + 2**20), exit_code=71, culprit=0
    )
    [line] = [line for line in diagnose(folder) if line.startswith("limit")]
    assert "memory ended at" in line
    assert "a lower limit of the process or its container" in line


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (None, "it has no plan"),
        ('{"format": 1, "runs": []}', "its plan.json cannot be read"),
        ('{"format": 1, "ru', "its plan.json cannot be read"),
        ("worldless", "its plan.json cannot be read"),
    ],
)
def test_a_run_without_a_plan_says_how_it_ended_and_what_it_measured(
    tmp_path: Path, plan: str | None, words: str
) -> None:
    folder = leave(tmp_path / "run", memory=RankMemory(rank=0, peak=2**33), exit_code=0)
    (folder / "run.yaml").write_text("stage: sft\n")
    if plan == "worldless":
        plan = (folder / "plan.json").read_text().replace('"world_size": 8', '"world_size": 0')
    (folder / "plan.json").write_text(plan) if plan else (folder / "plan.json").unlink()
    with pytest.raises(MegatuneError, match=words) as caught:
        diagnose(folder)
    [finding] = caught.value.findings
    assert "run: finished; a rank held up to 8.00 GiB; " in finding.what
    assert f"`megatune plan {folder}/run.yaml`" in finding.fix
    (folder / "plan.json").unlink(missing_ok=True)
    with pytest.raises(MegatuneError, match="runs with memory_check: off have none"):
        diagnose(folder)
