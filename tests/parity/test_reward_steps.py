"""Optimizer steps of a reward model against TRL's RewardTrainer, with margins and centred rewards.

Measured as in test_one_step: losses, metrics, gradient norms and the parameters after three steps, with SGD after one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from pairs_kit import Case, random_pairs
from test_lora import finetuning
from test_one_step import OPTIMIZERS, TOLERANCES, _checkpoint_copy, saved, update_errors
from test_preference import EVERY
from test_rewards import MARGINS, OBJECTIVE, settings_of, train_rewards
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer

from megatune.bridge.peft_model import apply_adapter
from megatune.config.groups.optimizer import OptimizerSettings
from megatune.families import load_architecture
from megatune.families.peft_form import PREFIX
from megatune.verify.checkpoints import write_random_adapter

VOCABULARY = 300  # and a token that pads
# With SGD weights are rounded by as much as is tolerated in several steps.
NUM_STEPS = {"adam": 3, "sgd": 1}
OPTIMIZERS = {
    "adam": OPTIMIZERS["adam, larger epsilon"],
    "sgd": {**OPTIMIZERS["sgd"], "sgd_momentum": 0.0},
}


@dataclass(frozen=True)
class Steps:
    """What training came to: weights before and after, and what was logged of each step."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    logged: list[dict[str, float]]


def trl_steps(model_dir: Path, optimizer: dict[str, Any], folder: Path, adapter: Path | None = None) -> Steps:
    """All pairs in one batch of each step; with an adapter its tensors, and the score's."""
    pairs = random_pairs(VOCABULARY)
    rows = [
        {"chosen_ids": list(pair.chosen.input_ids), "rejected_ids": list(pair.rejected.input_ids), "margin": margin}
        for pair, margin in zip(pairs, MARGINS, strict=True)
    ]
    words = Tokenizer(WordLevel({"<unk>": 0, "<pad>": VOCABULARY}, unk_token="<unk>"))
    model = AutoModelForSequenceClassification.from_pretrained(
        model_dir, dtype=torch.float32, experts_implementation="eager"
    )
    applied = None if adapter is None else apply_adapter(model, adapter, trained=True)

    def copied() -> dict[str, Tensor]:
        if applied is None:
            return _checkpoint_copy(model)
        return {PREFIX + name: each[slices].detach().clone() for name, (each, slices) in applied.places.items()}

    before, is_adam = copied(), optimizer["optimizer"] == "adam"
    trainer = RewardTrainer(
        model if applied is None else applied.peft,
        args=RewardConfig(
            output_dir=str(folder), per_device_train_batch_size=len(pairs), num_train_epochs=1, logging_steps=1,
            bf16=False, gradient_checkpointing=False, max_length=None, use_cpu=True, report_to=[], save_strategy="no",
            train_sampling_strategy="sequential", disable_tqdm=True, lr_scheduler_type="constant", warmup_steps=0,
            center_rewards_coefficient=OBJECTIVE.centering, learning_rate=optimizer["learning_rate"],
            weight_decay=optimizer["weight_decay"], max_grad_norm=optimizer["max_grad_norm"],
            optim="adamw_torch" if is_adam else "sgd", adam_beta1=optimizer.get("adam_beta1", 0.9),
            adam_beta2=optimizer.get("adam_beta2", 0.999), adam_epsilon=optimizer.get("adam_epsilon", 1e-8),
        ),
        train_dataset=Dataset.from_list(NUM_STEPS[optimizer["optimizer"]] * rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"),
    )  # fmt: skip
    trainer.train()
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    return Steps(before, copied(), logged)


@pytest.fixture(scope="module")
def steps(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A reward model, and what TRL makes of it; made once."""
    made: dict[Any, tuple[Path, Steps]] = {}

    def make(family: str, optimizer: str) -> tuple[Path, Steps]:
        if (family, optimizer) not in made:
            folder = tmp_path_factory.mktemp("reward")
            torch.manual_seed(3)
            model = AutoModelForSequenceClassification.from_pretrained(model_dir(family), num_labels=1)
            model.score.weight.data.normal_()
            model.save_pretrained(folder)
            made[family, optimizer] = folder, trl_steps(folder, OPTIMIZERS[optimizer], folder / "trl")
        return made[family, optimizer]

    return make


@pytest.mark.extended("1", "cp2 p2p")  # gradients in tests/parity/test_rewards.py; steps packed
@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "layout", "optimizer", "size"),
    [
        *(("qwen3", layout, "adam", 1) for layout in ("1", "tp2 sp", "pp2 vpp2", "cp2 p2p", "dp2, overlaps")),
        ("qwen3", "cp2, packed", "adam", 2),
        *(("qwen3", layout, "sgd", 2) for layout in ("1", "tp2 pp2 dp2 sp")),
        ("qwen3_moe", "ep2", "adam", 1),
    ],
)
def test_steps_equal_trl(
    pool: Any, steps: Any, tmp_path: Path, family: str, layout: str, optimizer: str, size: int
) -> None:
    model, expected = steps(family, optimizer)
    settings = settings_of(layout, optimizer=OptimizerSettings(**OPTIMIZERS[optimizer]))
    pairs = random_pairs(VOCABULARY)
    case = Case(model, settings, pairs, None, OBJECTIVE, size, pad_token_id=VOCABULARY, margins=MARGINS)
    check(
        pool.run(EVERY[layout].world_size, train_rewards, case, NUM_STEPS[optimizer], tmp_path),
        expected,
        saved(tmp_path),
        optimizer,
    )


@pytest.mark.extended  # test_rewards.py compares its gradients, test_lora.py steps of adapters
def test_steps_of_an_adapter_equal_trl(pool: Any, steps: Any, tmp_path: Path) -> None:
    """The score is trained whole beside it."""
    model, _ = steps("qwen3", "adam")
    folder, found = tmp_path / "adapter", tmp_path / "found"
    folder.mkdir()
    found.mkdir()
    selection = finetuning("LoRA", folder)
    write_random_adapter(folder, model, load_architecture(model), selection, seed=7)
    expected = trl_steps(model, OPTIMIZERS["adam"], tmp_path / "trl", folder)
    settings = settings_of("tp2 sp", optimizer=OptimizerSettings(**OPTIMIZERS["adam"]), finetuning=selection)
    pairs = random_pairs(VOCABULARY)
    case = Case(model, settings, pairs, None, OBJECTIVE, pad_token_id=VOCABULARY, margins=MARGINS)
    answers = pool.run(2, train_rewards, case, NUM_STEPS["adam"], found)
    assert "base_model.model.score.weight" in expected.after
    check(answers, expected, saved(found), "adam")


def check(answers: list[list[dict[str, float]]], expected: Steps, found: dict[str, Tensor], optimizer: str) -> None:
    for logged in answers:
        for mine, wanted in zip(logged, expected.logged, strict=True):
            names = ("loss", "grad_norm", "accuracy", "margin", "mean_reward")
            assert [mine[name] for name in names] == pytest.approx(
                [float(wanted[name]) for name in names], rel=1e-4, abs=1e-4
            )
    errors = update_errors(expected.before, expected.after, found)
    tolerance = TOLERANCES[optimizer]
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= tolerance}
