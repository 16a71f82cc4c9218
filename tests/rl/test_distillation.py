"""Updates by the divergence from a teacher's distributions, beside Transformers' models and the plain formula."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, SEQUENCE_LAYOUTS, Layout
from local_roles import run_file
from safetensors.torch import load_file
from test_worker_training import assert_same_bits, storage_bytes, weights_of
from torch import Tensor
from worker_kit import NEWEST, PROMPTS, RESPONSES, TEMPERATURE, rollouts, settings_of, started

from megatune.config.dialects.roll import read_keys
from megatune.config.dialects.swift import read_swift
from megatune.config.dialects.swift_rl import rollout_keys
from megatune.config.groups.run import ModelSettings, RunSettings
from megatune.config.rl.role import RouterReplay
from megatune.config.rl.settings import RLSettings
from megatune.data.encode import load_tokenizer
from megatune.demo.checkpoint import make_checkpoint
from megatune.rl.problem_files import count_rows, find_prompts
from megatune.rl.samples import Rollouts
from megatune.rl.worker.distillation import DistillationWorker
from megatune.rl.worker.training import TrainResult
from megatune.verify.reference import load_reference_model

ALL = {
    **EXPERT_LAYOUTS,
    **SEQUENCE_LAYOUTS,
    **LAYOUTS,
    "dp2, overlaps": Layout(2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
}
SGD = {"optimizer": "sgd", "learning_rate": 1000.0, "sgd_momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": 0.0}
WHOLE = (4, 2)  # one update takes all samples
Loss = dict[str, Any]
LOSSES: dict[str, Loss] = {
    "JSD": {"opd_beta": 0.4},
    "reverse, top of all": {"opd_beta": 1.0, "opd_top_k": 10**9},
    "forward, top 20": {"opd_beta": 0.0, "opd_top_k": 20},
    "JSD of answers": {"opd_beta": 0.4, "opd_lmbda": 0.0, "opd_sft_alpha": 0.3},
}


def settings_with(
    model: Path, teacher: Path, layout: Layout, loss: Loss, batch: tuple[int, int] = WHOLE, **options: Any
) -> RLSettings:
    algorithm = {"is_pure_opd": True, "opd_loss": "jsd", "adv_estimator": "reinforce", "gamma": 0.0, **loss}
    options = {"optimizer": SGD, **options}
    tokens = 64 if layout.packed else None
    settings = settings_of(model, layout, batch=batch, algorithm=algorithm, packed_tokens=tokens, **options)
    own = layout.settings({}, options.get("precision", {})).model_copy(
        update={"run": RunSettings(ddp_timeout=30), "model": ModelSettings(model_name_or_path=str(teacher))}
    )
    return replace(settings, actor_train=settings.actor_train.model_copy(update={"teacher": own}))


def samples_of(step: int) -> Rollouts:
    """Samples of which one token does not count."""
    made = rollouts(301, step, rollout_log_probs=0.1)
    masks = [np.ones(size, np.float32) for size in RESPONSES]
    masks[1][3] = 0
    zeros = [np.zeros(size, np.float32) for size in RESPONSES]
    extras = {"mask": masks, "weights": masks, "advantages": zeros}
    routing = [np.full((len(tokens) - 1, 4, 2), (0, 1), np.int16) for tokens in made.tokens]
    return Rollouts(made.tokens, made.prompt_lengths, {**made.per_token, **extras}, routing=routing)


def train(settings: RLSettings, steps: range, checkpoint: str | None = None, save_at: int = 0) -> Any:
    """On every rank: what the steps came to, and the weights."""
    worker = started(DistillationWorker, settings, checkpoint)
    found: list[TrainResult] = []
    for step in steps:
        if save_at:  # a teacher leaves the device and comes back with the policy
            total = storage_bytes(worker._offload)
            assert worker.offload() == total
            assert storage_bytes(worker._offload) == 0
            worker.onload()
        found.append(worker.train(samples_of(step), step))
        if step + 1 == save_at:
            worker.save(save_at)
    return found, weights_of(worker)


def gradients(model: Path, teacher: Path, loss: Loss) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step, and its gradients, by Transformers and the formula."""
    policy, other = (load_reference_model(each, torch.float32) for each in (model, teacher))
    samples, beta, top_k = samples_of(0), loss["opd_beta"], loss.get("opd_top_k")
    total, count = torch.zeros(()), 0.0
    for ids, prompt, mask in zip(samples.tokens, PROMPTS, samples.per_token["mask"], strict=True):
        row = torch.from_numpy(ids.copy())[None]
        with torch.no_grad():
            theirs = other(row).logits[0, prompt - 1 : -1]
        mine = policy(row).logits[0, prompt - 1 : -1]
        shared = min(mine.shape[-1], theirs.shape[-1])
        losses = torch.nn.functional.cross_entropy(mine, row[0, prompt:], reduction="none")
        mine, theirs = mine[:, :shared] / TEMPERATURE, theirs[:, :shared] / TEMPERATURE
        if top_k is not None:
            chosen = theirs.topk(min(top_k, shared)).indices
            mine, theirs = mine.gather(1, chosen), theirs.gather(1, chosen)
        p, t = mine.softmax(-1), theirs.softmax(-1)
        mixed = beta * t + (1 - beta) * p
        of_student = 0 if beta == 1 else (1 - beta) * (p * (p / mixed).log()).sum(-1)
        of_teacher = 0 if beta == 0 else beta * (t * (t / mixed).log()).sum(-1)
        if beta in (0, 1):
            value = ((t * (t / p).log()) if beta == 0 else (p * (p / t).log())).sum(-1)
        else:
            value = of_student + of_teacher
        value = value + loss.get("opd_sft_alpha", 0) * losses
        total = total + (value * torch.from_numpy(mask)).sum()
        count += float(mask.sum())
    (total / count).backward()
    named = {name: each.grad for name, each in policy.named_parameters() if each.grad is not None}
    return total.item() / count, named


def assert_an_update_is_the_formulas(
    pool: Any, folder: Path, model: Path, teacher: Path, layout: str, loss: Loss, **options: Any
) -> None:
    """Loss, metrics, and by what SGD has changed the weights."""
    chosen = ALL[layout]
    dp_size = chosen.world_size // chosen.settings().parallel.model_parallel_size
    settings = settings_with(model, teacher, chosen, loss, (4 // dp_size, 2), output=folder, **options)
    before = pool.run(chosen.world_size, train, settings, range(0))[0][1]
    (found,), after = pool.run(chosen.world_size, train, settings, range(1))[0]
    value, expected = gradients(model, teacher, loss)
    assert found.updates == 1
    assert found.loss == pytest.approx(value, rel=1e-5)
    likelihood = loss.get("opd_sft_alpha", 0.0)
    assert ("answer_loss" in found.metrics) is (likelihood > 0)
    terms = found.metrics["teacher_divergence"] + likelihood * found.metrics.get("answer_loss", 0.0)
    assert terms == pytest.approx(value, rel=1e-5)
    moved = {name: (before[name] - after[name]).double() / found.learning_rate for name in before.keys() & expected}
    assert not [name for name in expected.keys() - moved if ".experts." not in name]  # which Transformers stacks
    errors = {name: float((each - expected[name]).norm() / expected[name].norm()) for name, each in moved.items()}
    assert not {name: error for name, error in errors.items() if not error < 1e-5}


@pytest.mark.covering
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("teacher", ["a larger vocabulary", "experts"])
@pytest.mark.parametrize(
    "layout", ["1", "tp2 sp", "pp2 vpp2", "cp2 p2p", "dp2, overlaps", "packed", "tp2 sp, packed", "cp2, packed"]
)
def test_an_update_is_by_the_gradient_of_the_formula(
    pool: Any, model_dir: Any, tmp_path: Path, loss: str, teacher: str, layout: str
) -> None:
    """With a teacher of another family, size or vocabulary."""
    other = model_dir("qwen3_moe") if teacher == "experts" else model_dir("qwen2", vocab_size=330, hidden_size=48)
    assert_an_update_is_the_formulas(pool, tmp_path, model_dir("qwen3"), other, layout, LOSSES[loss])


@pytest.mark.extended("ep2", "ep2 pp2")
@pytest.mark.parametrize("layout", ["ep2", "ep2 etp1 tp2 sp", "ep2 pp2"])
def test_experts_learn_from_experts(pool: Any, model_dir: Any, tmp_path: Path, layout: str) -> None:
    models = model_dir("qwen3_moe"), model_dir("mixtral")
    assert_an_update_is_the_formulas(pool, tmp_path, *models, layout, LOSSES["JSD"])


def test_a_teacher_chooses_its_experts_by_itself(pool: Any, model_dir: Any, tmp_path: Path) -> None:
    """Where the student replays those that the engine took: here it has none."""
    models, replay = (model_dir("qwen3"), model_dir("qwen3_moe")), {"router_replay": RouterReplay(mode="R3")}
    assert_an_update_is_the_formulas(pool, tmp_path, *models, "1", LOSSES["JSD"], **replay)


@pytest.mark.parametrize(
    ("layout", "options"),
    [("tp2 sp", {"lora": {"lora_dropout": 0.1}}), ("dp2, overlaps", {"precision": {"bf16": True}})],
)
def test_offloading_and_a_resume_change_nothing(
    pool: Any, model_dir: Any, tmp_path: Path, layout: str, options: dict[str, Any]
) -> None:
    """Of two updates a step: the teacher comes back as it was."""
    chosen, optimizer = ALL[layout], {"learning_rate": 1e-2}
    arguments = model_dir("qwen3"), model_dir("qwen2"), chosen, LOSSES["JSD"], (2, 1)
    settings = settings_with(*arguments, optimizer=optimizer, output=tmp_path, **options)
    plain, weights = pool.run(chosen.world_size, train, settings, range(5))[0]
    assert plain[-1].loss < plain[0].loss
    moved, others = pool.run(chosen.world_size, train, settings, range(5), None, 2)[0]
    assert_same_bits(others, weights)
    resumed, others = pool.run(chosen.world_size, train, settings, range(2, 5), NEWEST)[0]
    assert_same_bits(others, weights)
    assert [each.loss for each in resumed] == [each.loss for each in moved[2:]] == [each.loss for each in plain[2:]]


def test_some_steps_take_the_answers_of_the_rows(pool: Any, tmp_path: Path) -> None:
    """As the template writes them, whole or cut; which steps these are does not change with a resume."""
    student, teacher = (make_checkpoint("qwen3", tmp_path / f"{size}", num_layers=size) for size in (2, 3))
    answers = [f"{number} and one are {number + 1}." for number in range(8)]
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1"}, {"role": "assistant", "content": answer}]}
        for n, answer in enumerate(answers)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = f"""--rlhf_type gkd --model {student} --teacher_model {teacher} --dataset {tmp_path}/rows.jsonl --lmbda 0.5
    --sft_alpha 0.5 --train_iters 6 --global_batch_size 4 --micro_batch_size 2 --max_length 64 --lr 1e-3 --seed 3
    --max_completion_length 8 --fp16 false --bf16 false --output_dir {tmp_path}/out --save_steps 2 --logging_steps 1"""
    run = read_swift("rlhf", words.split(), env={"NPROC_PER_NODE": "1"}, config={}, on_cpu=True)
    settings = read_keys(rollout_keys(run, find_prompts, count_rows), "the command line").require_valid()
    settings = replace(settings, run=settings.run.model_copy(update={"rollout_dump_dir": str(tmp_path / "dump")}))
    pool.run(1, run_file, settings)
    samples = [settings.algorithm.samples_at(step, 3) for step in range(6)]
    assert {*samples[:3]} == {*samples[3:]} == {False, True}
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if "teacher_divergence" in line]
    assert ["answer_loss" not in record for record in records] == samples
    tokenizer = load_tokenizer(student)
    ends = [tokenizer(f"{answer}<|im_end|>\n")["input_ids"] for answer in answers]
    said = {tokenizer.decode(ids[:8], skip_special_tokens=True) for ids in ends}
    for step, is_sampled in enumerate(samples, 1):
        dump = (tmp_path / f"dump/step-{step:06d}.jsonl").read_text().splitlines()
        assert all((json.loads(line)["response"] in said) is not is_sampled for line in dump)
    own = {"output_dir": str(tmp_path / "again"), "resume_from_checkpoint": str(tmp_path / "out/checkpoint-2")}
    again = settings.run.model_copy(update=own | {"rollout_dump_dir": None})
    pool.run(1, run_file, replace(settings, run=again))
    whole, resumed = (load_file(tmp_path / each / "checkpoint-6/model.safetensors") for each in ("out", "again"))
    assert_same_bits(resumed, whole)
