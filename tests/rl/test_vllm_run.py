"""`megatune rl` with real vLLM, whose environment MEGATUNE_TEST_VLLM_PYTHON names: see test_rollout_vllm.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from digits import make_model
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("MEGATUNE_TEST_VLLM_PYTHON", "")
STEPS = 5
FILE = """
exp_name: digits
pretrain: {folder}/model
output_dir: {folder}/out
max_steps: {steps}
save_steps: {steps}
eval_steps: {steps}
logging_steps: 1
rollout_batch_size: 8
num_return_sequences_in_group: 4
prompt_length: 8
response_length: 24
is_num_return_sequences_expand: true
adv_estimator: grpo
init_kl_coef: 0.0
actor_train:
  device_mapping: list(range(0,2))
  model_args: {{dtype: fp32{lora}}}
  training_args: {{learning_rate: 1.0e-2, per_device_train_batch_size: 8, gradient_accumulation_steps: 4}}
  data_args: {{prompt: prompt, file_name: [{folder}/rows.jsonl], domain_interleave_probs: {{digits: 1.0}}}}
  strategy_args: {{strategy_name: megatron_train, strategy_config: {{tensor_model_parallel_size: 2}}}}
actor_infer:
  device_mapping: list(range(0,{shards}))
  model_args: {{dtype: fp32}}
  generating_args: {{temperature: 1.0, top_p: 1.0, top_k: 0}}
  strategy_args:
    strategy_name: vllm
    strategy_config: {{py_executable: {python}, enforce_eager: true, tensor_parallel_size: {shards}}}
validation:
  data_args: {{prompt: prompt, file_name: [{folder}/rows.jsonl]}}
  generating_args: {{temperature: 1.0, top_p: 1.0, top_k: 0, num_return_sequences: 2}}
rewards:
  digits: {{{reward}, tag_included: [digits]}}
"""
TURNS = "environment: tests.rl.digits_reward.Countdown, max_turns: 3"


@pytest.mark.skipif(not PYTHON, reason="MEGATUNE_TEST_VLLM_PYTHON names no Python with vLLM")
@pytest.mark.parametrize(
    ("shards", "lora", "reward"),
    [(2, "", TURNS), (1, ", lora_target: all-linear, lora_rank: 4", "worker_cls: tests.rl.digits_reward.repeats")],
    ids=["two shards, several turns", "lora"],
)
def test_five_steps(shards: int, lora: str, reward: str, tmp_path: Path) -> None:
    """In every step the engine samples from the trainer's new weights, and nothing is left behind."""
    make_model(tmp_path / "model", head_dim=32)
    rows = [{"id": str(digit), "tag": "digits", "prompt": f"{digit}=", "digit": str(digit)} for digit in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = FILE.format(folder=tmp_path, steps=STEPS, python=PYTHON, shards=shards, lora=lora, reward=reward)
    (tmp_path / "run.yaml").write_text(text)
    before = {*os.listdir("/dev/shm")}
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # Ray's sockets need a short path
        done = subprocess.run(
            [sys.executable, "-m", "megatune", "rl", str(tmp_path / "run.yaml")],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": temporary},
            capture_output=True, text=True, timeout=3000,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert not os.listdir(temporary)
    left = {
        name for name in {*os.listdir("/dev/shm")} - before if name.startswith(("psm_", "vllm", "megatune", "torch"))
    }
    assert not left
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "reward" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    # Stale weights would be off by far more: each update has a learning rate of 1e-2.
    assert all(record["log_prob_gap_mean"] < 1e-6 for record in steps)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in weights.values())
    assert all((record["sync_bytes"] < whole / 2) == bool(lora) for record in steps)
