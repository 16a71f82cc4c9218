"""Factors fitted to measured runs predict better, also what they were not fitted to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatune.architecture import Architecture
from megatune.cli.main import main
from megatune.config.settings import ParallelSettings, Settings, with_settings
from megatune.errors import ExitCode, MegatuneError
from megatune.plan.calibration import calibrate, keep_first
from megatune.plan.case import Case, PlannedModel
from megatune.plan.catalogue import cpu_machine, find_machine
from megatune.plan.catalogue.own import calibration_for, calibration_path, write_calibration
from megatune.plan.estimate import estimate
from megatune.plan.machine import Calibration, Machine
from megatune.plan.memory.estimate import beyond_tensors
from megatune.plan.pages.whole import standing_notes
from megatune.plan.run.preflight import _plan_lines
from megatune.plan.run.record import Measured, RankMemory, RunRecord, comparable, dump_records

H100S = find_machine("h100-80g", gpus_per_node=8)
CPU = cpu_machine(16 * 2**30, cores=4)
MODEL = Architecture(
    model_type="qwen3", num_layers=24, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=16,
    num_query_groups=8, kv_channels=128, vocab_size=151936, max_position_embeddings=32768, norm_epsilon=1e-6,
    rotary_base=1e6,
)  # fmt: skip


def case(rows: int, tokens: int, tp: int = 1, world: int = 8, machine: Machine = H100S) -> Case:
    settings = with_settings(
        Settings(parallel=ParallelSettings(tensor_model_parallel_size=tp, sequence_parallel=tp > 1)),
        {"batch.per_device_train_batch_size": rows, "data.cutoff_len": tokens, "precision.bf16": True},
    )
    return Case(
        model=PlannedModel(name="tuna", architecture=MODEL), settings=settings, world_size=world, machine=machine
    )


def leave(
    folder: Path, planned: Case, truth: Calibration, noise: float = 1.0, memory: bool = True, overhead: bool = False
) -> Path:
    """A run's folder as training leaves it, on a machine that these factors describe."""
    was = estimate(replace(planned, machine=replace(planned.machine, calibration=truth)))
    counted = "resident" if planned.machine.device.generation == "cpu" else "allocated"
    tokens = planned.settings.data.cutoff_len
    measured = Measured(
        counted=counted,  # type: ignore[arg-type]
        stages=tuple(
            RankMemory(
                rank=stage.stage,
                stage=stage.stage,
                peak=comparable(stage, counted),
                overhead=stage.total - comparable(stage, counted) if overhead else 0,
            )
            for stage in was.stages
            if memory
        ),
        step_seconds=was.time.total * noise,
        num_steps=10,
        row_tokens=tokens,
        longest_row=tokens,
    )
    folder.mkdir()
    (folder / "plan.json").write_text(dump_records([RunRecord(case=planned, outcome="finished", measured=measured)]))
    return folder


def test_the_factors_of_a_machine_are_found(tmp_path: Path) -> None:
    truth = Calibration(compute=1.4, communication=2.0, activations=1.25)
    # Exchanges are 2 % of the first one's step, and half of the third's.
    cases = (case(16, 4096), case(4, 2048, tp=2), case(1, 512, tp=8), case(2, 1024, tp=4))
    report = calibrate([leave(tmp_path / f"r{number}", each, truth) for number, each in enumerate(cases)])
    found = report.calibration
    assert found.compute == pytest.approx(1.4, rel=0.05)
    assert found.communication == pytest.approx(2.0, rel=0.2)
    assert found.activations == pytest.approx(1.25, rel=0.03)
    assert found.num_runs == 4
    assert set(report.left) == {"framework"}  # an allocator does not see it
    for of in ("time", "memory"):
        before, after, apart = (report.median(of, when) for when in ("before", "after", "left_out"))
        assert before is not None
        assert after is not None
        assert apart is not None
        assert before > 0.05
        assert after < 0.02
        assert apart < 0.05
    text = "\n".join(report.lines())
    assert "h100-80g, fitted to 4 runs" in text
    assert "r3" in text
    assert "left out" in text


def test_what_a_gpu_holds_beyond_tensors_is_taken_from_the_first_run_that_measured_it(tmp_path: Path) -> None:
    """Context, NCCL's buffers and fragments are assumed until then."""
    truth, planned = Calibration(framework=3 * 2**30), case(4, 4096)
    report = calibrate([leave(tmp_path / "r0", planned, truth, overhead=True)])
    assert report.calibration.framework == pytest.approx(3 * 2**30, rel=0.05)
    least, assumed, most = beyond_tensors(planned, estimate(planned).fullest)
    assert least < assumed < most
    known = replace(planned, machine=replace(planned.machine, calibration=report.calibration))
    least, measured, most = beyond_tensors(known, estimate(known).fullest)
    assert least == measured == most
    assert measured == pytest.approx(assumed + 3 * 2**30, rel=0.05)


@pytest.mark.parametrize("machine", [H100S, CPU], ids=["gpu", "cpu"])
def test_the_first_run_of_a_device_replaces_what_is_assumed(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its memory alone, and what was fitted before stays."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    tiny = PlannedModel(name="tiny", architecture=replace(MODEL, num_layers=2, hidden_size=256, vocab_size=2048))
    planned = replace(case(2, 512, world=1, machine=machine), model=tiny)
    truth = Calibration(compute=2.0, framework=2**29)
    run = leave(tmp_path / "r0", planned, truth, overhead=machine is H100S)
    path = keep_first(run)
    assert path == calibration_path(machine.device.name)
    known = calibration_for(machine.device.name)
    assert known == Calibration(framework=known.framework, num_runs=1)
    assert known.framework == pytest.approx(2**29, rel=0.05)
    after = estimate(replace(planned, machine=replace(machine, calibration=known)))
    assert "plan       memory beyond tensors was measured in 1 run on this device" in list(_plan_lines(after))
    assert "memory beyond tensors was measured in 1 run on this device" in list(standing_notes(after.case))
    assert keep_first(run) is None
    path.unlink()
    path.parent.rmdir()
    path.parent.touch()
    with pytest.raises(MegatuneError, match="cannot write"):
        keep_first(run)


def test_what_runs_cannot_tell_is_left_as_it_is(tmp_path: Path) -> None:
    """Without exchanges there is no factor of them; runs of one shape do not part activations from the rest."""
    truth = Calibration(compute=1.5, communication=3.0, activations=1.3, framework=10**8)
    tiny = replace(MODEL, num_layers=2, hidden_size=256, ffn_hidden_size=512, vocab_size=2048)
    runs = []
    for number in range(2):
        planned = case(2, 512, world=1, machine=CPU)
        planned = replace(planned, model=PlannedModel(name="tiny", architecture=tiny))
        runs.append(leave(tmp_path / f"r{number}", planned, truth))
    report = calibrate(runs)
    assert report.calibration.communication == 1
    assert report.calibration.compute == pytest.approx(1.5, rel=0.05)
    assert "communication" in report.left
    assert "activations" in report.left
    assert report.median("time", "after") < 0.02  # type: ignore[operator]
    assert report.median("memory", "after") < 0.02  # type: ignore[operator]


def test_one_run_that_was_disturbed_hardly_counts(tmp_path: Path) -> None:
    truth = Calibration(compute=1.4)
    cases = [case(rows, tokens) for rows, tokens in ((1, 4096), (2, 4096), (1, 2048), (4, 1024))]
    runs = [leave(tmp_path / f"r{number}", each, truth) for number, each in enumerate(cases)]
    runs.append(leave(tmp_path / "disturbed", case(2, 2048), truth, noise=5.0))
    assert calibrate(runs).calibration.compute == pytest.approx(1.4, rel=0.15)


def test_a_fit_that_is_worse_than_none_on_runs_it_was_not_made_of_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs twice as slow as planned, two twice as fast: no factor says more of the others than none."""
    cases = [case(rows, tokens) for rows, tokens in ((1, 4096), (2, 4096), (1, 2048), (4, 1024))]
    truth = Calibration(activations=1.25)
    runs = [
        leave(tmp_path / f"r{number}", each, truth, noise)
        for number, (each, noise) in enumerate(zip(cases, (2.0, 2.0, 0.5, 0.5), strict=True))
    ]
    report = calibrate(runs)
    assert report.refused == ("time",)
    assert (report.calibration.compute, report.calibration.communication) == (1, 1)
    assert report.calibration.activations == pytest.approx(1.25, rel=0.03)  # memory is fitted apart, and kept
    assert not report.calibration.of_time
    assert report.calibration.of_memory
    assert report.errors["time", "after"] == report.errors["time", "before"]
    before, left_out = report.median("time", "before"), report.median("time", "left_out")
    assert before is not None
    assert left_out is not None
    assert left_out > before
    assert "refused: runs that were left out of the fit are off by" in "\n".join(report.lines())

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folders = [
        leave(tmp_path / f"n{number}", each, truth, noise, memory=False)
        for number, (each, noise) in enumerate(zip(cases, (2.0, 2.0, 0.5, 0.5), strict=True))
    ]
    assert main(["plan", "--calibrate", *map(str, folders)]) == ExitCode.INPUT
    printed = capsys.readouterr()
    assert "as it is: refused" in printed.out
    assert "no factors are written" in printed.err
    assert not calibration_path("h100-80g").exists()


def test_runs_that_cannot_be_used_are_all_named(tmp_path: Path) -> None:
    unmeasured = tmp_path / "unmeasured"
    unmeasured.mkdir()
    (unmeasured / "plan.json").write_text(dump_records([RunRecord(case=case(1, 1024))]))
    with pytest.raises(MegatuneError) as caught:
        calibrate([tmp_path / "nothing", unmeasured])
    assert caught.value.exit_code == ExitCode.INPUT
    assert len(caught.value.findings) == 2
    one = leave(tmp_path / "gpu", case(1, 1024), Calibration())
    other = leave(tmp_path / "cpu", case(1, 1024, world=1, machine=CPU), Calibration())
    with pytest.raises(MegatuneError, match="several devices: cpu, h100-80g"):
        calibrate([one, other])


def test_a_calibration_is_kept_and_taken_for_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert calibration_for("h100-80g") == Calibration()
    fitted = Calibration(compute=1.25, communication=0.9, activations=1.1, framework=-5_000_000, num_runs=3)
    path = calibration_path("h100-80g")
    assert path == tmp_path / "megatune/calibration/h100-80g.yaml"
    write_calibration(fitted, path, "h100-80g")
    assert calibration_for("h100-80g") == calibration_for("h100-80g", path) == fitted
    assert calibration_for("cpu") == Calibration()
    with pytest.raises(MegatuneError, match="was fitted to h100-80g"):
        calibration_for("cpu", path)
    path.write_text("device: h100-80g\ncompute: [1\n")
    with pytest.raises(MegatuneError, match=r"yaml:3: cannot be read\n    why: [^\n]*\n    fix: [^\n]*$"):
        calibration_for("h100-80g", path)
    path.write_text("compute: -1\nframework: 1.5\nspeed: 3\n")
    with pytest.raises(MegatuneError) as caught:
        calibration_for("h100-80g", path)
    assert caught.value.exit_code == ExitCode.INPUT
    assert [each.what for each in caught.value.findings] == ["compute is -1", "framework is 1.5", "unknown key 'speed'"]
    path.write_text("[1]")
    with pytest.raises(MegatuneError, match="is not a mapping of factors"):
        calibration_for("h100-80g", path)
