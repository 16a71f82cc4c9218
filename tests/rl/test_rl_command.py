"""`megatune rl` with Ray: two ranks train while an engine on a device of its own samples ahead.

The command runs in this process, which has started Ray; test_rl_kills.py has one that starts as it is typed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from digits import make_model
from pool_launch import CommandLine
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatune.rl.cluster import session

ROOT = Path(__file__).parents[2]
FILE = """
exp_name: digits
pretrain: {folder}/model
output_dir: {folder}/out
max_steps: 3
save_steps: 2
eval_steps: 2
logging_steps: 1
profiler_timeline: true
rollout_batch_size: 8
num_return_sequences_in_group: 4
prompt_length: 8
response_length: 8
async_generation_ratio: 1
is_num_return_sequences_expand: true
adv_estimator: grpo
init_kl_coef: 0.0
actor_train:
  device_mapping: list(range(0,2))
  model_args: {{dtype: fp32}}
  training_args: {{learning_rate: 1.0e-3, per_device_train_batch_size: 8, gradient_accumulation_steps: 4}}
  data_args: {{prompt: prompt, file_name: [{folder}/rows.jsonl], domain_interleave_probs: {{digits: 1.0}}}}
  strategy_args: {{strategy_name: megatron_train, strategy_config: {{tensor_model_parallel_size: 2}}}}
actor_infer:
  device_mapping: [2]
  model_args: {{dtype: fp32}}
  generating_args: {{temperature: 1.0, top_p: 1.0, top_k: 0}}
  strategy_args: {{strategy_name: builtin}}
validation:
  data_args: {{prompt: prompt, file_name: [{folder}/rows.jsonl]}}
  generating_args: {{temperature: 1.0, top_p: 1.0, top_k: 0, num_return_sequences: 2}}
rewards:
  digits: {{worker_cls: tests.rl.digits_reward.repeats, tag_included: [digits]}}
"""


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[None]:
    with session.ray_session(4, 0, 256 * 2**20, tmp_path):
        yield


def test_an_asynchronous_run(
    ray: None, command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))  # as `python -m` has it: the reward is named by its path
    make_model(tmp_path / "model")
    rows = [{"id": str(digit), "tag": "digits", "prompt": f"{digit}=", "digit": str(digit)} for digit in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(FILE.format(folder=tmp_path))
    done = command_line("rl", tmp_path / "run.yaml")
    assert done.returncode == 0, done
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "reward" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert [record["staleness"] for record in steps] == [0, 1, 1]  # sampled beside the step before
    assert all(record["log_prob_gap"] < 1e-5 for record in steps if "log_prob_gap" in record)
    evaluations = [json.loads(line) for line in lines if "eval_accuracy" in line]
    assert [record["step"] for record in evaluations] == [0, 2, 3]
    assert {"config.json", "model.safetensors", "checkpoint-2", "checkpoint-3"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert (tmp_path / "out" / "training_loss.png").stat().st_size > 10_000
    _check_timeline(tmp_path / "out" / "profile")
    # Any checkpoint is evaluated as the run evaluates itself: with the same random numbers.
    done = command_line("rl", tmp_path / "run.yaml", "--evaluate", tmp_path / "out" / "checkpoint-3")
    assert done.returncode == 0, done
    folder = tmp_path / "out" / "evaluation" / "checkpoint-3"
    found = json.loads((folder / "metrics.json").read_text())
    assert found["sampled"]["reward"] == pytest.approx(evaluations[-1]["eval_reward"], abs=1e-12)
    assert found["sampled"]["pass@2"] == pytest.approx(evaluations[-1]["eval_pass@2"], abs=1e-12)
    assert f"avg@2 {found['sampled']['accuracy']:.4f}" in done.stdout
    # The likeliest tokens are those of Transformers.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-3")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "checkpoint-3")
    for line in map(json.loads, (folder / "greedy.jsonl").read_text().splitlines()):
        ids = tokenizer(line["prompt"], return_tensors="pt", add_special_tokens=False)["input_ids"]
        expected = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
        assert line["response"] == tokenizer.decode(expected, skip_special_tokens=True)
    own = [each for each in psutil.Process().children(recursive=True) if "actor_" in " ".join(_words(each))]
    assert not psutil.wait_procs(own, timeout=60)[1]


def _check_timeline(folder: Path) -> None:
    """Every process has a row of its own; what it does in it begins after what came before has ended."""
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert set(names.values()) == {"driver", "actor_train-0", "actor_train-1", "actor_infer-0"}
    spans = [event for event in events if event["ph"] == "X"]
    done = {(names[event["pid"]], event["name"]) for event in spans}
    assert {("driver", "rollout"), ("driver", "sync"), ("actor_train-1", "train"), ("actor_infer-0", "build")} <= done
    assert {event["args"]["step"] for event in spans if (event["pid"], event["name"]) == (0, "rollout")} == {1, 2, 3}
    for one in {(event["pid"], event["tid"]) for event in spans}:
        own = sorted((event["ts"], event["dur"]) for event in spans if (event["pid"], event["tid"]) == one)
        assert all(began + lasted <= after + 1 for (began, lasted), (after, _) in pairwise(own))
    with gzip.open(folder / "rank-0.json.gz") as trace:  # of the second step alone
        assert b"aten::" in trace.read()
    assert not (folder / "rank-1.json.gz").exists()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
