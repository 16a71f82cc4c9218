"""Reward models against Transformers' ...ForSequenceClassification with autograd: loss, metrics and the gradient of
every weight, the score's included, in every kind of layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs_kit import Case, Expected, compute, documents_of, gradient_errors, gradients_of, random_pairs, shard_pairs
from saving import save_adapters, save_weights
from test_lora import finetuning
from test_preference import EVERY, check
from transformers import AutoModelForSequenceClassification

from megatune.bridge.assemble import assemble
from megatune.bridge.peft_model import AppliedAdapter, apply_adapter
from megatune.config.groups.run import RunSettings
from megatune.config.settings import Settings
from megatune.engine.layers import cross_entropy
from megatune.engine.model import gather_parameters
from megatune.engine.sequences import Sequences
from megatune.families import load_architecture
from megatune.families.dense import OUTPUT_LAYER, SCORE
from megatune.objectives import preference
from megatune.objectives.preference import Reward
from megatune.training.train_step import train_step
from megatune.verify.checkpoints import write_random_adapter

OBJECTIVE, MARGINS = Reward(centering=0.02), (0.5, 0.0, -0.25, 1.0, 0.0, 2.0, 0.125)
FAMILIES = {"qwen3": False, "qwen3, tied": True, "llama": False, "qwen3_moe": False}
CASES: list[tuple[str, str, int]] = [
    *(
        ("qwen3", layout, size)
        for layout, size in (
            ("1", 2), ("tp2 sp", 1), ("tp2", 1), ("pp2 vpp2", 2), ("dp2, overlaps", 1), ("cp2 p2p", 1), ("packed", 1),
            ("cp2, packed", 2), ("tp2 pp2 dp2 sp", 1),
        )
    ),
    *(("qwen3, tied", layout, 1) for layout in ("1", "tp2 sp", "pp2 vpp2")),
    *(("llama", layout, 1) for layout in ("1", "tp2 sp")),
    *(("qwen3_moe", layout, 1) for layout in ("ep2", "cp2 ep2, packed", "ep2 pp2")),
]  # fmt: skip
Truth = Callable[[str], tuple[Path, list[Any], int, Expected]]


def settings_of(layout: str, **changes: Any) -> Settings:
    return EVERY[layout].settings().model_copy(update={"run": RunSettings(stage="rm", ddp_timeout=30), **changes})


def expect(model: Any, pairs: list[Any], adapter: AppliedAdapter | None = None) -> Expected:
    """Differentiate the loss of all pairs at once; documents are alone in their rows."""
    model.zero_grad()
    scores = [model(input_ids=torch.tensor([each.input_ids])).logits[0, 0] for each in documents_of(pairs)]
    chosen, rejected = torch.stack(scores).view(-1, 2).unbind(1)
    difference, both = chosen - rejected, chosen + rejected
    loss = -torch.nn.functional.logsigmoid(difference - torch.tensor(MARGINS)) + OBJECTIVE.centering * both.square()
    loss.mean().backward()
    metrics = {
        "accuracy": (difference > 0).float().mean().item(),
        "margin": difference.mean().item(),
        "mean_reward": both.mean().item() / 2,
        "rewards/chosen": chosen.mean().item(),
        "rewards/rejected": rejected.mean().item(),
    }
    return Expected(loss.mean().item(), metrics, gradients_of(model, adapter))


def load(folder: Path) -> Any:
    """Transformers' model; the embedding of the token that pads, which occurs among others here, gets no gradient."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
    )
    return model.eval()


@pytest.fixture(scope="module")
def truth(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A reward model, pairs, the token that pads, which ends two answers, and what Transformers computes; made once."""
    made: dict[str, tuple[Path, list[Any], int, Expected]] = {}

    def make(name: str) -> tuple[Path, list[Any], int, Expected]:
        if name not in made:
            pairs, folder = random_pairs(301), tmp_path_factory.mktemp("reward")
            pad = pairs[0].chosen.input_ids[-1]
            torch.manual_seed(3)
            model = AutoModelForSequenceClassification.from_pretrained(
                model_dir(name.partition(",")[0], tied=FAMILIES[name]), num_labels=1, dtype=torch.float32
            )
            model.score.weight.data.normal_()
            model.config.pad_token_id = pad
            model.save_pretrained(folder)
            made[name] = folder, pairs, pad, expect(load(folder), pairs)
        return made[name]

    return make


@pytest.mark.covering
@pytest.mark.parametrize(("name", "layout", "size"), CASES)
def test_rewards_agree(pool: Any, truth: Truth, tmp_path: Path, name: str, layout: str, size: int) -> None:
    model, pairs, pad, expected = truth(name)
    case = Case(model, settings_of(layout), pairs, None, OBJECTIVE, size, pad_token_id=pad, margins=MARGINS)
    check(pool.run(EVERY[layout].world_size, compute, case, tmp_path), tmp_path, expected)


@pytest.mark.extended("1")
@pytest.mark.parametrize("layout", ["1", "tp2 sp"])
def test_the_score_is_trained_beside_adapters(pool: Any, truth: Truth, tmp_path: Path, layout: str) -> None:
    """Against peft."""
    model, pairs, pad, _ = truth("qwen3")
    folder = tmp_path / "adapter"
    folder.mkdir()
    selection = finetuning("LoRA", folder)
    write_random_adapter(folder, model, load_architecture(model), selection, seed=7)
    applied = apply_adapter(load(model), folder, trained=True)
    expected = expect(applied.model.eval(), pairs, applied)
    settings = settings_of(layout, finetuning=selection)
    case = Case(model, settings, pairs, None, OBJECTIVE, 2, pad_token_id=pad, margins=MARGINS)
    check(pool.run(EVERY[layout].world_size, compute, case, tmp_path), tmp_path, expected)


def train_rewards(case: Case, num_steps: int, folder: Path) -> list[dict[str, float]]:
    """On every rank of test_reward_steps, which imports TRL: what was logged; weights are written."""
    assembly, logged = assemble(case.model, case.settings), []
    for _ in range(num_steps):
        batches = shard_pairs(case, assembly)
        result = train_step(assembly, batches, case.objective, learning_rate=case.settings.optimizer.learning_rate)
        logged.append({"loss": result.totals.loss, "grad_norm": result.grad_norm, **result.totals.metrics})
    gather_parameters(assembly.model)
    trained = assembly.parameters, assembly.architecture, assembly.coords
    if case.settings.finetuning.finetuning_type == "lora":
        save_adapters(folder, *trained, case.settings.finetuning)
    else:
        save_weights(folder, *trained, form=assembly.form)
    return logged


def first_score(model: Path, settings: Settings) -> list[float]:
    """On every rank: the score that training begins with, where it has one; nothing has an output layer."""
    parameters = assemble(model, settings).parameters
    assert not any(local.weight.engine == OUTPUT_LAYER.engine or local.is_copy for local in parameters)
    found = [local.parameter.flatten().tolist() for local in parameters if local.weight.engine == SCORE.engine]
    return found[0] if found else []


def test_a_new_score_is_the_same_in_every_layout(pool: Any, model_dir: Any) -> None:
    """Of a model with tied embeddings: nothing is shared."""
    model = model_dir("qwen3", tied=True)
    (alone,) = pool.run(1, first_score, model, settings_of("1"))
    assert torch.tensor(alone).std().item() == pytest.approx(load_architecture(model).initializer_range, rel=0.3)
    assert pool.run(2, first_score, model, settings_of("tp2 sp")) == [alone, alone]
    assert pool.run(2, first_score, model, settings_of("pp2 vpp2")) == [[], alone]


def without_mark(case: Case, folder: Path) -> Any:
    """On every rank: the score's weight does not say that its gradients are parts of a sum."""
    own = cross_entropy.Score.__init__

    def unmarked(self: Any, *arguments: Any) -> None:
        own(self, *arguments)
        self.weight.sequence_parallel = False

    cross_entropy.Score.__init__ = unmarked
    try:
        return compute(case, folder)
    finally:
        cross_entropy.Score.__init__ = own


def with_summing_backward(case: Case, folder: Path) -> Any:
    """On every rank: scores are added up over cp by an all-reduce that adds up gradients, too."""
    own = preference.sequence_sums

    def summing(values: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        from megatron.core import parallel_state
        from torch.distributed.nn.functional import all_reduce

        return all_reduce(values.sum(1), group=parallel_state.get_context_parallel_group())

    preference.sequence_sums = summing
    try:
        return compute(case, folder)
    finally:
        preference.sequence_sums = own


@pytest.mark.parametrize(
    ("fault", "layout", "wrong"),
    [(without_mark, "tp2 sp", {"score.weight"}), (with_summing_backward, "cp2 p2p", None)],
    ids=["no mark", "summing backward"],
)
def test_faults_are_seen(
    pool: Any, truth: Truth, tmp_path: Path, fault: Any, layout: str, wrong: set[str] | None
) -> None:
    """They leave the loss as it is."""
    model, pairs, pad, expected = truth("qwen3")
    case = Case(model, settings_of(layout), pairs, None, OBJECTIVE, pad_token_id=pad, margins=MARGINS)
    answers = pool.run(2, fault, case, tmp_path)
    assert answers[0][0] == pytest.approx(expected.loss, rel=1e-6)
    errors = gradient_errors(tmp_path, expected.gradients)
    assert {name for name, error in errors.items() if error > 0.1} == (wrong or set(errors))
