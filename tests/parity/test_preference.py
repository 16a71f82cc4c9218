"""Losses of preference pairs against Transformers with autograd: loss, metrics and gradients, in every kind of layout.

What the losses are is proved in tests/objectives; here the same functions take Transformers' log-probabilities, of all
pairs at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, SEQUENCE_LAYOUTS, Layout
from pairs_kit import Case, Expected, compute, expect, gradient_errors, log_probs, near, random_pairs
from test_lora import finetuning
from test_vision import NUM_LAYERS, SQUARE, WIDE

from megatune.bridge.peft_model import apply_adapter
from megatune.engine.sequences import Sequences
from megatune.families import load_architecture
from megatune.objectives import preference
from megatune.objectives.pair_losses import PairLossOptions
from megatune.objectives.preference import Preference
from megatune.verify.checkpoints import write_random_adapter
from megatune.verify.reference import load_reference_model

OPTIONS = PairLossOptions(beta=0.3, smoothing=0.05, gamma=0.4, reward_shift=0.2)
LOSSES: dict[str, Preference] = {
    "sigmoid": Preference({"sigmoid": 1.0}, OPTIONS),
    "ipo": Preference({"ipo": 1.0}, OPTIONS),
    "simpo": Preference({"simpo": 1.0}, OPTIONS),
    "orpo": Preference({"orpo": 1.0}, OPTIONS),
    # Of MPO (arXiv:2411.10442).
    "a mix": Preference({"sigmoid": 0.8, "bco_pair": 0.2}, OPTIONS, likelihood=1.0),
    "three losses": Preference({"nca_pair": 0.7, "hinge": 0.5, "exo_pair": 1.0}, OPTIONS, likelihood=0.5),
}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
EVERY = {**EXPERT_LAYOUTS, **LAYOUTS, **SEQUENCE_LAYOUTS, "dp2, overlaps": Layout(2, OVERLAPS)}
DENSE = (
    "1", "tp2 sp", "pp2 vpp2", "dp2, overlaps", "cp2 p2p", "cp2 pp2", "packed", "cp2, packed", "tp2 pp2 dp2 sp",
)  # fmt: skip
# Family, losses, layout, pairs of a micro-batch, weight of what the longer answer has beyond the shorter.
CASES: list[tuple[str, str, str, int, float | None]] = [
    *(("qwen3", "sigmoid", layout, 1, None) for layout in DENSE),
    *(("qwen3", "a mix", layout, 2, None) for layout in ("1", "tp2 sp", "pp2 vpp2", "cp2, packed")),
    *(("qwen3", name, layout, 1, None) for name in ("ipo", "simpo", "orpo") for layout in ("1", "cp2, packed")),
    *(("qwen3", "sigmoid", layout, 1, 0.4) for layout in ("1", "cp2 p2p", "cp2, packed")),
    *(("qwen3", "a mix", layout, 2, 0.4) for layout in ("tp2 sp",)),
    # Pairs of a step on several ranks, and in several micro-batches, of which some hold padding.
    *(("qwen3", "three losses", layout, 2, None) for layout in ("1", "pp2 vpp2", "tp2 pp2 dp2 sp", "cp2 p2p")),
    *(("qwen3_moe", "sigmoid", layout, 1, None) for layout in ("ep2", "cp2 ep2, packed", "ep2 pp2")),
]
GRADIENT = 1e-5
Truth = Callable[..., tuple[Path, list[Any], list[float], Expected]]


@pytest.fixture(scope="module")
def truth(model_dir: Any) -> Truth:
    """A checkpoint, pairs, log-probabilities of a reference, and what Transformers computes of them; made once."""
    models: dict[str, Any] = {}
    made: dict[Any, Any] = {}

    def make(family: str, losses: str, ld_alpha: float | None = None) -> tuple[Path, list[Any], list[float], Expected]:
        sizes = {"num_hidden_layers": NUM_LAYERS} if family.endswith("_vl") else {}
        model = model_dir(family, **sizes)
        if family not in models:
            vision = load_architecture(model).vision
            media = [[WIDE], [], [SQUARE, WIDE]] if vision is not None else ()
            loaded = load_reference_model(model, torch.float32)
            pairs = random_pairs(301, media=media, vision=vision)
            models[family] = loaded, pairs, near(log_probs(loaded, pairs))
        if (family, losses, ld_alpha) not in made:
            loaded, pairs, reference = models[family]
            found = expect(loaded, pairs, reference, LOSSES[losses], ld_alpha=ld_alpha)
            made[family, losses, ld_alpha] = model, pairs, reference, found
        return made[family, losses, ld_alpha]

    return make


def check(answers: list[tuple[float, dict[str, float]]], folder: Path, expected: Expected) -> None:
    for loss, metrics in answers:
        assert loss == pytest.approx(expected.loss, rel=1e-6)
        assert {name: metrics[name] for name in expected.metrics} == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5)
    errors = gradient_errors(folder, expected.gradients)
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= GRADIENT}


@pytest.mark.covering
@pytest.mark.parametrize(("family", "losses", "layout", "size", "ld_alpha"), CASES)
def test_pairs_agree(
    pool: Any, truth: Truth, tmp_path: Path, family: str, losses: str, layout: str, size: int, ld_alpha: float | None
) -> None:
    model, pairs, reference, expected = truth(family, losses, ld_alpha)
    case = Case(model, EVERY[layout].settings(), pairs, reference, LOSSES[losses], size, ld_alpha)
    check(pool.run(EVERY[layout].world_size, compute, case, tmp_path), tmp_path, expected)


@pytest.mark.extended("1")  # on two ranks there are padding pairs, too
@pytest.mark.parametrize("layout", ["1", "dp2, overlaps", "pp2 vpp2"])
def test_pairs_of_a_micro_batch_do_not_matter(pool: Any, truth: Truth, tmp_path: Path, layout: str) -> None:
    """Seven pairs: four at a time, there are padding pairs, and on one rank more of them."""
    model, pairs, reference, expected = truth("qwen3", "a mix")
    for size in (1, 4):
        case = Case(model, EVERY[layout].settings(), pairs, reference, LOSSES["a mix"], size)
        folder = tmp_path / str(size)
        folder.mkdir()
        check(pool.run(EVERY[layout].world_size, compute, case, folder), folder, expected)


@pytest.mark.extended("1", "cp2 tp2 sp")  # of pictures tests/parity/test_vision.py has these, of pairs the cases above
@pytest.mark.parametrize(
    ("family", "layout"), [*(("qwen3_vl", layout) for layout in ("1", "tp2 sp", "cp2 tp2 sp")), ("mistral3", "tp2 sp")]
)
def test_pairs_with_pictures_agree(pool: Any, truth: Truth, tmp_path: Path, family: str, layout: str) -> None:
    model, pairs, reference, expected = truth(family, "sigmoid")
    case = Case(model, EVERY[layout].settings(), pairs, reference, LOSSES["sigmoid"], 2)
    check(pool.run(EVERY[layout].world_size, compute, case, tmp_path), tmp_path, expected)


@pytest.mark.extended("1", "cp2 p2p")
@pytest.mark.parametrize("layout", ["1", "tp2 sp", "pp2 vpp2", "cp2 p2p"])
def test_the_base_is_the_reference_of_its_adapter(pool: Any, model_dir: Any, tmp_path: Path, layout: str) -> None:
    """Against peft, and Transformers without it."""
    model, folder = model_dir("qwen2", tied=True), tmp_path / "adapter"
    folder.mkdir()
    selection = finetuning("LoRA", folder)
    write_random_adapter(folder, model, load_architecture(model), selection, seed=7)
    pairs = random_pairs(301)
    base = log_probs(load_reference_model(model, torch.float32), pairs)
    applied = apply_adapter(load_reference_model(model, torch.float32), folder, trained=True)
    expected = expect(applied.model.eval(), pairs, base, LOSSES["a mix"], adapter=applied)
    settings = EVERY[layout].settings().model_copy(update={"finetuning": selection})
    case = Case(model, settings, pairs, None, LOSSES["a mix"], 2)
    check(pool.run(EVERY[layout].world_size, compute, case, tmp_path), tmp_path, expected)


def compute_with_summing_backward(case: Case, folder: Path) -> tuple[float, dict[str, float]]:
    """On every rank: documents are added up by an all-reduce that adds up gradients, too."""
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


def test_a_backward_pass_that_sums_over_ranks_is_seen(pool: Any, truth: Truth, tmp_path: Path) -> None:
    """It leaves the loss as it is, and makes every gradient as many times too large as there are ranks."""
    model, pairs, reference, expected = truth("qwen3", "sigmoid")
    case = Case(model, EVERY["cp2 p2p"].settings(), pairs, reference, LOSSES["sigmoid"])
    answers = pool.run(2, compute_with_summing_backward, case, tmp_path)
    assert answers[0][0] == pytest.approx(expected.loss, rel=1e-6)
    errors = gradient_errors(tmp_path, expected.gradients)
    assert list(errors.values()) == pytest.approx([1.0] * len(errors), rel=1e-4)
