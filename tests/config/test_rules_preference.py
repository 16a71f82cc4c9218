"""Rules of preference training and of classifiers, with their whole messages, and its warnings."""

from dataclasses import replace

import pytest
from test_rules import BASE, QWEN

from megatune.architecture import MixtureOfExperts
from megatune.config.load import load
from megatune.config.rules import check
from megatune.config.rules.finetuning import warnings
from megatune.config.settings import all_settings
from megatune.references import spell

MOE = replace(QWEN, moe=MixtureOfExperts(num_experts=8, layers=(True,) * 12, router_topk=2, moe_ffn_hidden_size=64))
DPO, KTO, RM, LORA = "stage=dpo", "stage=kto", "stage=rm", "finetuning_type=lora"
STREAMED = ["streaming=true", "max_steps=5"]


def messages(*overrides: str) -> list[str]:
    loaded = load(overrides=[*BASE, *overrides])
    assert loaded.findings == []
    return [str(finding) for finding in check(loaded.settings, MOE, written=loaded.written)]


@pytest.mark.parametrize(
    "overrides",
    [
        [DPO],
        [DPO, "pref_beta=0.2", "pref_ftx=0.1", "pref_bco_weight=0.5", "dpo_label_smoothing=0.1", "ld_alpha=0.5"],
        [DPO, "ref_model=r", "ref_model_adapters=a,b"],
        [DPO, LORA, "packing=true"],
        [DPO, "pref_loss=sigmoid,bco_pair", "pref_loss_weights=0.8,0.2", "pref_ftx=1"],
        [DPO, "pref_loss=simpo", "simpo_gamma=1", "pref_beta=2"],
        [DPO, "pref_loss=simpo,sigmoid", "ref_model=r", "dpo_label_smoothing=0.2"],
        [DPO, "pref_loss=exo_pair", "dpo_label_smoothing=0.001"],
        [DPO, "pref_loss=discopop", "discopop_tau=0.1"],
        *([stage, "moe_aux_loss_coeff=0.001", "moe_z_loss_coeff=0.001"] for stage in (DPO, KTO, RM)),
        [RM, "center_rewards_coefficient=0.01", "packing=true"],
        [RM, LORA, *STREAMED],
        [RM, *STREAMED],
        ["stage=cls", "num_labels=1", *STREAMED],
        ["stage=cls", "num_labels=1", "problem_type=multi_label_classification"],
        [DPO, LORA, *STREAMED],
        [DPO, "pref_loss=orpo", *STREAMED],
        [KTO],
        [KTO, "pref_beta=0.2", "pref_ftx=0.1", "kto_chosen_weight=1.5", "kto_rejected_weight=0.5", "ref_model=r"],
        [KTO, LORA, "kto_loss=apo_zero_unpaired", "preserve_thinking=true"],
        # A file may say what is so anyway.
        ["stage=sft", "pref_loss=sigmoid", "pref_beta=0.1", "pref_ftx=0", "simpo_gamma=0.5", "ref_model=null"],
        *([DPO, f"pref_loss={name}"] for name in all_settings()["preference.pref_loss"].choices if name != "exo_pair"),
    ],
)
def test_what_is_valid_passes(overrides):
    assert messages(*overrides) == []


_NO_REFERENCE = "    why: {} no reference to compare with\n    fix: remove {}, or name another pref_loss"
# overrides -> the one message they cause
WRONG = [
    (
        ["pref_loss=sigmoid"],  # its default, which a user who leaves the stage open still asks for
        "pref_loss: [sigmoid] with stage: sft\n"
        "    why: it sets how answers are compared\n"
        "    fix: write stage: dpo, or remove pref_loss",
    ),
    (
        ["pref_beta=0.2"],
        "pref_beta: 0.2 with stage: sft\n"
        "    why: it sets how answers are compared\n"
        "    fix: write stage: dpo, or remove pref_beta",
    ),
    (
        ["pref_loss=simpo", "stage=pt", "packing=false"],
        "pref_loss: [simpo] with stage: pt\n"
        "    why: it sets how answers are compared\n"
        "    fix: write stage: dpo, or remove pref_loss",
    ),
    (
        [RM, "ref_model=r"],
        "ref_model: r with stage: rm\n"
        "    why: it sets how answers are compared\n"
        "    fix: write stage: dpo, or remove ref_model",
    ),
    (
        [DPO, "center_rewards_coefficient=0.01"],
        "center_rewards_coefficient: 0.01 with stage: dpo\n"
        "    why: it keeps the scores of a reward model around 0\n"
        "    fix: write stage: rm, or remove center_rewards_coefficient",
    ),
    (
        [RM, "mask_history=true"],
        "mask_history: true with stage: rm\n    why: only the answers are trained\n    fix: remove mask_history",
    ),
    (
        [DPO, "pref_loss=[]"],
        "pref_loss is empty\n    why: there would be nothing to train\n    fix: write pref_loss: sigmoid",
    ),
    (
        [DPO, "pref_loss=ipo,sigmoid,ipo"],
        "pref_loss has ipo 2 times\n    fix: name it once, and weight it with pref_loss_weights",
    ),
    (
        [DPO, "pref_loss=ipo,sigmoid", "pref_loss_weights=1"],
        "1 of pref_loss_weights for 2 of pref_loss\n    fix: write as many numbers as losses, in their order",
    ),
    (
        [DPO, "pref_loss=ipo,sigmoid", "pref_loss_weights=1,0"],
        "pref_loss_weights has 0\n"
        "    why: every number must be above 0\n"
        "    fix: remove the losses that should not be used from pref_loss",
    ),
    (
        [DPO, "pref_loss=ipo,hinge", "dpo_label_smoothing=0.1"],
        "dpo_label_smoothing: 0.1 with pref_loss: [ipo, hinge]\n"
        "    why: it is part of sigmoid, robust, exo_pair, simpo, cpo only\n"
        "    fix: write pref_loss: sigmoid, or remove dpo_label_smoothing",
    ),
    (
        [DPO, "pref_loss=exo_pair"],
        "pref_loss exo_pair with dpo_label_smoothing 0\n"
        "    why: it compares with smoothed labels, and is not finite without smoothing\n"
        "    fix: write dpo_label_smoothing: 0.001",
    ),
    (
        [DPO, "simpo_gamma=1"],
        "simpo_gamma: 1 with pref_loss: [sigmoid]\n"
        "    why: it is a parameter of simpo only\n"
        "    fix: write pref_loss: simpo, or remove simpo_gamma",
    ),
    (
        [DPO, "discopop_tau=1"],
        "discopop_tau: 1 with pref_loss: [sigmoid]\n"
        "    why: it is a parameter of discopop only\n"
        "    fix: write pref_loss: discopop, or remove discopop_tau",
    ),
    (
        [DPO, "pref_loss=simpo", "ref_model=r"],
        "ref_model r with pref_loss simpo\n" + _NO_REFERENCE.format("simpo has", "ref_model"),
    ),
    (
        [DPO, "pref_loss=simpo,orpo", "pref_bco_weight=1"],
        "pref_bco_weight 1.0 with pref_loss simpo, orpo\n"
        + _NO_REFERENCE.format("simpo, orpo have", "pref_bco_weight"),
    ),
    (
        [DPO, "pref_loss=cpo", "pref_bco_weight=0.5"],
        "pref_bco_weight 0.5 with pref_loss cpo\n" + _NO_REFERENCE.format("cpo has", "pref_bco_weight"),
    ),
    (
        [DPO, "ref_model_adapters=a"],
        "ref_model_adapters: [a] without ref_model\n"
        "    why: adapters are merged into the model that it names\n"
        "    fix: write ref_model: FOLDER, which may be that of model_name_or_path, or remove ref_model_adapters",
    ),
    (
        [DPO, *STREAMED],
        "stage dpo with streaming: true and finetuning_type: full\n"
        "    why: the reference is computed before the first step, when rows are not known, or with adapters off\n"
        "    fix: remove streaming, or write finetuning_type: lora, or pref_loss: simpo, orpo or cpo",
    ),
    (
        [DPO, LORA, *STREAMED, "ref_model=r"],
        "ref_model r with streaming: true\n"
        "    why: its log-probabilities are computed before the first step, when the rows are not known\n"
        "    fix: remove streaming, or write pref_loss: simpo, orpo or cpo",
    ),
    *(
        (
            [f"stage={stage}", *needed, f"{setting}"],
            f"{setting.replace('=', ': ')} with stage: {stage}\n"
            "    why: it sets the loss of single desirable and undesirable answers\n"
            f"    fix: write stage: kto, or remove {setting.partition('=')[0]}",
        )
        for stage, needed, setting in (
            ("dpo", [], "kto_loss=apo_zero_unpaired"),
            ("sft", [], "kto_chosen_weight=2"),
            ("pt", ["packing=false"], "kto_rejected_weight=2"),
        )
    ),
    *(
        (
            [KTO, f"{name}={value}"],
            f"{name}: {value} with stage: kto\n"
            "    why: it sets how answers are compared\n"
            f"    fix: write stage: dpo, or remove {name}",
        )
        for name, value in (("pref_loss", "[hinge]"), ("dpo_label_smoothing", "0.1"), ("ld_alpha", "0.5"))
    ),
    (
        [KTO, "ref_model_adapters=a"],
        "ref_model_adapters: [a] without ref_model\n"
        "    why: adapters are merged into the model that it names\n"
        "    fix: write ref_model: FOLDER, which may be that of model_name_or_path, or remove ref_model_adapters",
    ),
    (
        [KTO, *STREAMED],
        "streaming: true with stage: kto\n"
        "    why: the reference, and the pairs of prompts with other answers, need all rows prepared first\n"
        "    fix: remove streaming",
    ),
    (
        ["stage=cls"],
        "num_labels is missing, which stage: cls needs\n"
        "    why: it is the number of scores of the classifier\n"
        "    fix: write num_labels: N, one more than the largest label, or 1 if labels are numbers to predict",
    ),
    (
        ["stage=cls", "num_labels=1", "problem_type=single_label_classification"],
        "problem_type: single_label_classification with num_labels: 1\n"
        "    why: a single class is always right\n"
        "    fix: write num_labels: 2, or problem_type: regression",
    ),
    (
        ["num_labels=3"],
        "num_labels: 3 with stage: sft\n"
        "    why: it sets what a classifier outputs for a row\n"
        "    fix: write stage: cls, or remove num_labels",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG)
def test_what_is_wrong_is_told_with_its_fix(overrides, message):
    assert "\n".join(messages(*overrides)) == message


@pytest.mark.parametrize(
    ("overrides", "usual"),
    [
        ([DPO], "5e-7 to 5e-6"),
        ([DPO, "finetuning_type=freeze", "learning_rate=2e-5"], "5e-7 to 5e-6"),
        ([DPO, LORA, "learning_rate=2e-4"], "1e-6 to 5e-5 with adapters"),
        ([KTO], "5e-7 to 5e-6"),
        ([DPO, "learning_rate=1e-5"], None),
        ([DPO, LORA], None),
        ([], None),
    ],
)
def test_a_learning_rate_of_supervised_fine_tuning_is_warned_of(overrides, usual):
    settings = load(overrides=[*BASE, *overrides]).settings
    rate = settings.optimizer.learning_rate
    text = f"learning_rate {rate:g} is usual for supervised fine-tuning, but preference training needs {usual}"
    assert list(map(spell, warnings(settings))) == ([text] if usual else [])
