"""`megatune plan` from the command line to what is printed and written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatune.cli.main import main
from megatune.cli.plan import COMMAND
from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode

Run = Callable[..., tuple[int, str, str]]

SETTINGS = """\
model_name_or_path: Qwen/Qwen2.5-1.5B
dataset: rows
output_dir: out
cutoff_len: 1024
bf16: true
pipeline_model_parallel_size: 2
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
"""
GPUS = ("--gpu", "a100-80g", "--gpus", "8")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    (tmp_path / "run.yaml").write_text(SETTINGS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["plan", *words])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def test_a_file_is_no_value_of_a_flag_that_nobody_knows() -> None:
    given = COMMAND.read(["--foo", "1", "--json", "run.yaml"])
    assert (given.settings.source, given.options.json_) == ("run.yaml", True)


def test_a_file_is_planned_as_it_is(run: Run) -> None:
    code, out, err = run("run.yaml", *GPUS, "--dataset_tokens", "1B", "overlap_grad_reduce=false")
    assert (code, err) == (ExitCode.DONE, "")
    assert "layout   pp2 dp4" in out
    assert "32 rows a step = 2 a micro-batch x 4 accumulated x 4 data-parallel" in out
    for said in (
        "stage 0  stage 1",
        "activations",
        "It fits",
        "tokens/s",
        "MFU",
        "likely",
        "1 B tokens take",
        "Assumed",
    ):
        assert said in out, said
    assert "Is there a better layout?\nYes: " in out
    assert "  overlap_grad_reduce: true" in out
    assert re.search(r"\n  pipeline bubble, m?s +[\d.,]+ +[\d.,]+ +-", out)


def test_a_gain_within_the_uncertainty_is_no_promise(run: Run, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "demo")
    one = ("--gpu", "a100-80g", "--gpus", "1")
    _, out, _ = run(str(model), *one, "per_device_train_batch_size=8", "bf16=true")
    found = re.search(
        r"Is there a better layout\?\n(\w+): one device is predicted to be (\d+)% faster, which is\s+less", out
    )
    assert found is not None, out
    assert found[1] == "Perhaps"
    assert re.search(r"measure a\s+few steps of both", out)


def test_words_change_the_file(run: Run) -> None:
    _, out, _ = run("run.yaml", *GPUS, "recompute_granularity=full", "--pipeline_model_parallel_size", "4", "--seq=512")
    assert "layout   pp4 dp2, gradient reduction overlapped; recompute full" in out
    assert "512 tokens a row" in " ".join(out.split())
    assert "recomputing" in out
    _, out, _ = run("run.yaml", *GPUS, "--global_batch", "64")
    assert "64 rows a step = 2 a micro-batch x 8 accumulated x 4 data-parallel" in out


def test_a_model_is_searched_for_its_best_layout(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("Qwen2.5-1.5B", *GPUS, "--seq", "1024", "--global-batch", "32", "--top", "3",
                       "--output", "new/best.yaml", "--figures", "figures")  # fmt: skip
    assert code == ExitCode.DONE
    assert "32 rows a step" in out
    assert re.search(r"\n +3=? +", out)
    assert "\n  4  " not in out
    assert "Recommended: " in out
    assert out.endswith(
        "written: figures/plan_frontier.png\nwritten: figures/plan_schedule.json\nwritten: new/best.yaml\n"
    )
    written = load("new/best.yaml")
    assert written.findings == []
    assert written.settings.data.cutoff_len == 1024
    assert written.settings.precision.bf16
    # What was asked for is not said to be a default.
    text = Path("new/best.yaml").read_text(encoding="utf-8")
    assert re.search(r"^cutoff_len: 1024 +# asked for$", text, re.M)
    assert re.search(r"^per_device_train_batch_size: \d+ +# plan$", text, re.M)
    assert re.search(r"^bf16: true +# plan$", text, re.M)
    # For which machines, and what is predicted of them.
    assert re.match(r"# Planned for \d+ × a100-80g: .*\n# Predicted: memory: .* GiB; .* a step ±\d+ %\n", text)
    assert (tmp_path / "figures" / "plan_frontier.png").stat().st_size > 10_000


def test_a_layout_among_the_words_is_planned(run: Run) -> None:
    _, out, _ = run("Qwen2.5-1.5B", *GPUS, "tensor_model_parallel_size=2")
    assert "layout   tp2 dp4" in out
    assert "64 rows a step = 1 a micro-batch x 16 accumulated x 4 data-parallel" in out
    assert "Is there a better layout?" in out


def test_what_does_not_fit_is_told_and_ends_with_its_own_code(run: Run) -> None:
    code, out, err = run("Llama-3-70B", "--gpu", "rtx-4090", "--gpus", "8", "per_device_train_batch_size=1")
    assert (code, err) == (ExitCode.OUT_OF_MEMORY, "")
    for said in ("IT DOES NOT FIT", "The largest part is", "What helps most", "No layout fits"):
        assert said in out, said
    assert "What would make it fit" not in out  # none of these changes is enough
    code, out, _ = run("Llama-3-70B", "--gpu", "rtx-4090", "--gpus", "8")
    assert code == ExitCode.OUT_OF_MEMORY
    assert "NO LAYOUT FITS" in out
    assert "Too large for" in out


def test_too_few_devices_are_told_how_many_would_do(run: Run) -> None:
    words = ("Qwen2.5-7B", "--gpu", "rtx-4090", "--gpus")
    code, out, _ = run(*words, "2")
    assert code == ExitCode.OUT_OF_MEMORY
    told = re.search(r"\n(\d+) devices are enough, as ", out)
    assert told is not None
    assert "finetuning_type: lora fits: " in out
    assert run(*words, "4")[0] == ExitCode.OUT_OF_MEMORY
    code, out, _ = run(*words, "8")
    assert (code, "NO LAYOUT SURELY FITS" in out) == (ExitCode.DONE, True)
    code, out, _ = run(*words, told[1], "--json")
    assert (code, json.loads(out)["recommended"]["tight"]) == (ExitCode.DONE, False)
    enough = json.loads(run(*words, "2", "--json")[1])
    assert enough["enough"]["world_size"] == int(told[1])
    assert [each["changes"] for each in enough["less"]] == [{"finetuning.finetuning_type": "lora"}]


def test_tensor_parallelism_across_machines_is_warned_of(run: Run) -> None:
    code, out, _ = run("Qwen3-8B", "--gpu", "h100-80g", "--gpus", "32", "tensor_model_parallel_size=16")
    assert code == ExitCode.DONE
    assert "WARNING: tensor_model_parallel_size 16 goes across machines of 8" in out


def test_what_is_recommended_fits_at_the_upper_end_with_all_that_costs_nothing(run: Run, tmp_path: Path) -> None:
    words = ("Qwen3-8B", "--gpu", "h100-80g", "--gpus", "8", "--seq", "4096", "--global_batch", "64")
    _, out, _ = run(*words, "--output", str(tmp_path / "best.yaml"))
    written = load(tmp_path / "best.yaml").settings
    assert (written.performance.bias_activation_fusion, written.performance.apply_rope_fusion,
            written.performance.gradient_accumulation_fusion) == (True, True, True)  # fmt: skip
    assert written.precision.accumulate_allreduce_grads_in_fp32
    assert "accumulate_allreduce_grads_in_fp32: false" in out.partition("With lower precision")[2]
    found = json.loads(run(*words, "apply_rope_fusion=false", "--json", "--top", "25")[1])
    assert len(found["search"]["ranked"]) == 25
    best = found["recommended"]
    assert best["fullest_bytes"] * (1 + best["memory_bound"]) <= best["memory_limit"]
    settings = best["settings"]
    assert (settings["apply_rope_fusion"], settings["bias_activation_fusion"]) == (False, True)
    assert found["priced"]
    assert all(each["plan"]["seconds"]["total"] < best["seconds"]["total"] for each in found["priced"])


def test_what_the_run_has_not_is_not_assumed(run: Run) -> None:
    said = ("(--gpus_per_node)", "(--link)", "(--network)", "Left out of the search")
    for gpus, expected in (("1", (False, False, False, False)), ("8", (True, True, False, True)), ("16", (True,) * 4)):
        _, out, _ = run("Qwen2.5-0.5B", "--gpu", "h100", "--gpus", gpus)
        assert tuple(word in out for word in said) == expected, gpus
    assert "experts" not in out


@pytest.mark.parametrize(
    ("gpu", "words", "told"),
    [
        ("v100", ("bf16=true",), "(fp16: true computes 7.96 times as fast on this device)"),
        ("v100", (), ""),
        ("h100", ("bf16=false",), "(bf16: true computes 14.8 times as fast on this device)"),
    ],
)
def test_a_precision_that_the_device_hardly_computes_is_told(run: Run, gpu: str, words: tuple[str, ...], told: str):
    _, out, _ = run("Qwen2.5-0.5B", "--gpu", gpu, "--gpus", "1", *words)
    assert told in out
    assert ("times as fast on this device" in out) == bool(told)


def test_machines_that_are_not_full_are_noted_and_not_launched(run: Run) -> None:
    code, out, _ = run("Qwen2.5-1.5B", "--gpu", "h100", "--gpus", "12")
    assert code == ExitCode.DONE
    assert "1 node of 8 and 1 of 4" in out
    assert "12 devices do not fill machines of 8: the last one has 4; --gpus_per_node 6" in out
    code, out, err = run("Qwen2.5-1.5B", "--gpu", "h100", "--gpus", "12", "--launch")
    assert (code, out) == (ExitCode.SETTINGS, "")
    assert "fix: --gpus 8, --gpus 16, or --gpus_per_node 6" in err
    assert run("Qwen2.5-1.5B", "--gpu", "h100", "--gpus", "12", "--gpus_per_node", "6", "--launch")[0] == ExitCode.DONE


def test_a_model_is_planned_for_rows_beyond_its_positions_with_or_without_a_layout(run: Run) -> None:
    for words in ((), ("context_parallel_size=2", "recompute_granularity=full")):
        code, out, _ = run("Llama-3-8B", *GPUS, "--seq", "16384", *words)
        assert code == ExitCode.DONE
        assert "Llama-3-8B has 8,192 positions, and megatune train refuses longer rows" in out


def test_no_line_is_longer_than_a_page(run: Run) -> None:
    layout = ("tensor_model_parallel_size=2", "pipeline_model_parallel_size=2", "sequence_parallel=true",
              "virtual_pipeline_model_parallel_size=2", "gradient_accumulation_steps=8")  # fmt: skip
    for words in (("Qwen3-VL-8B", *layout, "overlap_grad_reduce=true"), ("DeepSeek-V3",)):
        _, out, _ = run(*words, "--gpu", "h20", "--gpus", "8")
        assert max(map(len, out.splitlines())) <= 80


def test_every_refused_number_has_one_that_would_do(run: Run) -> None:
    _, _, err = run(
        "Qwen2.5-0.5B", "--gpu", "h100", "--gpus", "x", "--seq", "-3", "--global_batch", "1.5", "--top", "0"
    )
    assert err.count("why: expected a whole number, at least 1\n    fix: ") == 4
    assert "--seq: seq is -3" in err
    assert "fix: write --seq 1" in err
    assert "write --top 1" in err
    code, _, err = run("Qwen2.5-7B", "--gpu", "h100", "--gpus", "12", "pipeline_model_parallel_size=4",
                       "--global_batch", "64")  # fmt: skip
    assert code == ExitCode.SETTINGS
    assert "1 row a micro-batch times 3 data-parallel processes" in err


def test_what_a_calibration_does_not_take_is_told(run: Run) -> None:
    code, _, err = run("run.yaml", "--calibrate", "out")
    assert code == ExitCode.SETTINGS
    assert "'run.yaml' has no effect on --calibrate" in err


def test_lora_and_images_can_be_planned(run: Run) -> None:
    full = json.loads(run("Qwen2.5-1.5B", *GPUS, "--json", "per_device_train_batch_size=1")[1])
    code, text, _ = run("Qwen2.5-1.5B", *GPUS, "--json", "per_device_train_batch_size=1", "--trainable", "lora",
                        "--lora_rank", "4", "--lora_target", "q_proj,down_proj")  # fmt: skip
    lora = json.loads(text)
    assert code == ExitCode.DONE
    assert lora["model"]["trainable"]["lora_target"] == ["q_proj", "down_proj"]
    assert lora["model"]["trainable"]["lora_rank"] == 4
    assert lora["plan"]["stages"][0]["optimizer_state"] < full["plan"]["stages"][0]["optimizer_state"] / 20
    _, out, _ = run("Qwen2-VL-7B", *GPUS, "image_max_pixels=451584", "freeze_vision_tower=false")
    assert "frozen: projector" in out
    assert "451,584 pixels" in out
    _, out, _ = run("Qwen2.5-1.5B", *GPUS, "--image_tokens", "1500")
    assert "reads no images: --image_tokens has no effect" in out


def test_the_document_holds_everything(run: Run) -> None:
    code, text, _ = run("run.yaml", *GPUS, "--json", "--top", "2")
    document = json.loads(text)
    plan = document["plan"]
    assert code == ExitCode.DONE
    assert plan["fits"]
    assert plan["settings"]["pipeline_model_parallel_size"] == 2
    assert len(plan["stages"]) == 2
    for stage in plan["stages"]:
        parts = {key: value for key, value in stage.items() if key not in ("stage", "num_layers", "total")}
        assert sum(parts.values()) == stage["total"]
    assert plan["fullest_bytes"] == max(stage["total"] for stage in plan["stages"])
    seconds = dict(plan["seconds"])
    assert seconds.pop("total") == pytest.approx(sum(seconds.values()))
    assert 0 < plan["bubble_share"] < 1
    assert len(document["search"]["ranked"]) == 2
    assert document["search"]["ranked"][0]["tokens_per_second"] > plan["tokens_per_second"]
    assert document["assumptions"]


def test_how_it_is_launched(run: Run) -> None:
    _, out, _ = run("run.yaml", "--gpu", "a100-80g", "--gpus", "16", "--launch")
    assert "# On machine 1\n" in out
    assert "torchrun --nnodes 2 --node_rank 1 --nproc_per_node 8" in out
    assert "megatune train run.yaml" in out
    _, out, _ = run("run.yaml", "--gpu", "a100-80g", "--gpus", "16", "--launch", "slurm")
    assert "#SBATCH --nodes=2" in out
    _, out, _ = run(
        "run.yaml", "--gpu", "a100-80g", "--gpus", "16", "--launch", "kubernetes", "--launch_file", "job.yaml"
    )
    assert "written: job.yaml, for kubectl apply" in out
    assert "kind: JobSet" in Path("job.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 64, ["there is no model to plan"]),
        (("Qwen3-8B", "--gpu", "h100-80g"), 64, ["the number of GPUs is missing", "--gpus 8"]),
        (("Qwen3-8B", "--gpus", "8"), 64, ["the kind of GPU is missing", "--gpu KIND"]),
        (("Qwen3-8B", "--gpu", "h100-80g", "--gpus", "0"), 64, ["--gpus: gpus is 0", "write --gpus 1"]),
        (("Qwen3-8B", "--gpu", "h1000", "--gpus", "eight", "--top", "x"), 64,
         ["gpus is 'eight'", "top is 'x'", "write --top 10, the default", "no device 'h1000'", "3 problems"]),
        (("Qwen3-8B", "--gpu", "h1000", "--gpus", "8"), 66, ["h100-80g"]),
        (("Qwen9-8B", "--gpu", "h100-80g", "--gpus", "8"), 66, ["Qwen9-8B", "nearest: Qwen3-8B"]),
        (("no.yaml", *GPUS), 66, ["there is no settings file no.yaml"]),
        (("run.yaml", "--gpu", "a100-80g", "--gpus", "7"), 64, ["7 processes are not a multiple", "start 6 or 8"]),
        (("run.yaml", *GPUS, "tensor_model_parallel_size=5"), 64, ["tensor_model_parallel_size 5 does not split"]),
        (("run.yaml", *GPUS, "--netwrok", "ib-400"), 64, ["did you mean --network?"]),
        (("run.yaml", *GPUS, "--tokens", "4M"), 64, ["did you mean --image_tokens or --dataset_tokens or"]),
        (("run.yaml", *GPUS, "cutoff_lne=5"), 64, ["did you mean cutoff_len?"]),
        (("run.yaml", *GPUS, "--trainable", "half", "lora_rank=0", "lora_target=q"), 64,
         ["trainable is 'half'", "lora_rank is 0", "with finetuning_type: full", "3 problems"]),
        (("run.yaml", *GPUS, "--trainable", "lora", "lora_target=q"), 64, ["lora_target has q", "linear layers of a"]),
        (("run.yaml", *GPUS, "--global_batch", "30"), 64, ["--global_batch 30", "--global_batch 32"]),
        (("--calibrate", "no-such-run"), 66, ["no-such-run"]),
        (("run.yaml", "--link", "nvlink4"), 64, ["--link without --gpu"]),
        (("run.yaml", *GPUS, "--launch", "ssh"), 64, ["expected one of: torchrun, slurm, skypilot, kubernetes"]),
        (("run.yaml", *GPUS, "--launch_file", "a.sh"), 64, ["there is no file to write", "--launch slurm"]),
        (("run.yaml", *GPUS, "freeze_trainable_layers=4"), 64, ["freeze_trainable_layers: 4 with finetuning"]),
        (("run.yaml", *GPUS, "finetuning_type=freeze", "freeze_trainable_layers=99"), 64,
         ["freeze_trainable_layers 99: the model has"]),
        (("run.yaml", *GPUS, "freeze_vision_tower=maybe"), 64, ["freeze_vision_tower is 'maybe'"]),
    ],
)  # fmt: skip
def test_everything_wrong_is_said(run: Run, words: tuple[str, ...], code: int, said: list[str]) -> None:
    found, out, err = run(*words)
    assert (found, out) == (code, "")
    assert [text for text in said if text not in err] == []


def test_only_a_batch_that_was_asked_for_is_refused(run: Run) -> None:
    words = ("Qwen3-8B", "--gpu", "h100-80g", "--gpus", "7", "tensor_model_parallel_size=2")
    _, _, err = run(*words)
    assert "7 processes are not a multiple" in err
    assert "global_batch" not in err
    assert "--global_batch 70\n" in run(*words, "--global_batch", "70")[2]


def test_what_cannot_be_written_is_told_after_the_plan(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out, err = run("run.yaml", *GPUS, "--output", "file/best.yaml")
    assert code == ExitCode.CANNOT_WRITE
    assert "It fits" in out
    assert "file/best.yaml: cannot write" in err


def test_this_machine_without_gpu_flags(run: Run) -> None:
    code, out, _ = run("run.yaml", "num_processes=2", "bf16=false", "model_name_or_path=Qwen2.5-0.5B", "cutoff_len=64")
    assert code in (ExitCode.DONE, ExitCode.OUT_OF_MEMORY)  # as this machine's memory has it
    assert "2 processes on this machine's CPU" in out


def test_neither_torch_nor_pictures_are_imported_and_the_end_of_the_process_collects_nothing(tmp_path: Path) -> None:
    program = (
        "import gc, sys\n"
        "from megatune.cli.main import main\n"
        "assert main(['plan', 'Qwen2.5-1.5B', '--gpus', '4', '--gpu', 'a100-80g']) == 0\n"
        "wrong = {'torch', 'transformers', 'megatron', 'matplotlib', 'numpy', 'rich'} & sys.modules.keys()\n"
        "assert not wrong, wrong\n"
        "assert gc.get_freeze_count() > 10 * len(gc.get_objects())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_several_kinds_of_gpus_are_compared_by_time_and_price(run: Run) -> None:
    words = ("Qwen2.5-7B", "--gpus", "8", "--gpu", "h100,a100-80g,rtx-4090,v100-16g", "--dataset_tokens", "40M")
    code, out, err = run(*words, "--price", "h100-80g=2.5", "a100=0.5")
    assert (code, err) == (ExitCode.DONE, "")
    assert "40 M tokens" in out
    table = out[out.index("gpu ") :].split("\n\n")[0].splitlines()
    assert table[0].split() == ["gpu", "layout", "GiB", "step", "tokens/s", "time", "price"]
    # The cheapest first, then the fastest of those without a price.
    assert [line.split()[0] for line in table[1:4]] == ["a100-80g", "h100-80g", "rtx-4090"]
    assert "No layout fits: v100-16g." in out
    _, text, _ = run(*words, "--price", "h100-80g=2.5", "--json")
    rows = {row["gpu"]: row for row in json.loads(text)["gpus"]}
    for kind in ("h100-80g", "a100-80g"):
        alone = json.loads(run(*words[:3], "--gpu", kind, "--json")[1])["recommended"]
        assert rows[kind]["seconds"] == alone["seconds"]["total"]
        assert rows[kind]["hours"] == pytest.approx(40e6 / alone["tokens_per_second"] / 3600)
    assert rows["h100-80g"]["price"] == pytest.approx(rows["h100-80g"]["hours"] * 8 * 2.5)
    assert rows["a100-80g"]["price"] is None
    assert not rows["v100-16g"]["fits"]
    code, _, err = run("Qwen2.5-7B", "--gpus", "8", "--gpu", "h100,h10", "--price", "a100=1")
    assert code == ExitCode.INPUT
    assert "h10" in err
    code, _, err = run(*words, "--price", "b200=1", "h100", "a100=inf", "--output", "best.yaml")
    assert code == ExitCode.SETTINGS
    assert err.count("is not a price of one of these kinds") == 3
    assert run(*GPUS, "Qwen2.5-7B", "--price", "a100=1")[0] == ExitCode.SETTINGS


def test_of_a_file_any_gpu_is_compared_for_the_tokens_of_its_data(run: Run, tmp_path: Path) -> None:
    rows = [{"instruction": "?", "output": "a word " * 50}] * 40
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.json"}}))
    model = make_checkpoint("qwen3", tmp_path / "demo")
    text = f"model_name_or_path: {model}\ndataset: mine\ndataset_dir: {tmp_path}\ntemplate: qwen3_nothink\n"
    (tmp_path / "small.yaml").write_text(f"{text}output_dir: out\nbf16: true\ncutoff_len: 256\nnum_train_epochs: 2\n")
    code, out, _ = run("small.yaml", "--gpus", "1", "--gpu", "any", "--json")
    assert code == ExitCode.DONE
    found = json.loads(out)
    assert len(found["gpus"]) >= 30
    assert 2 * 40 * 50 < found["tokens"] < 2 * 40 * 256
    assert all(row["hours"] > 0 for row in found["gpus"])


def test_a_step_with_other_rows_than_the_files_is_said(run: Run) -> None:
    """run.yaml is for 8 devices: what learns was chosen for its rows."""
    _, out, _ = run("run.yaml", *GPUS)
    assert "learning_rate, warmup and steps were chosen" not in out
    _, out, _ = run("run.yaml", *GPUS, "--global_batch", "64")
    assert "a step has 64 rows, 32 by the file's batch on 8 devices" in " ".join(out.split())
    _, out, _ = run("run.yaml", "--gpu", "a100-80g", "--gpus", "16", "num_processes=8")
    assert "a step has 64 rows, 32 by the file's batch on 8 devices" in " ".join(out.split())
    assert "--global_batch 32 keeps them" in " ".join(out.split())
