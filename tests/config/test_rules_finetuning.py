"""Rules of what is trained, with their whole messages."""

from dataclasses import replace

import pytest
from test_rules import BASE, QWEN

from megatune.architecture import Architecture
from megatune.config.load import load
from megatune.config.rules import RULES, check
from megatune.config.rules.rule import unused
from megatune.encoders import Vision

VISION = Vision(
    depth=2, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=96, patch_size=14, spatial_merge_size=2
)
QWEN_VL = replace(QWEN, model_type="qwen2_vl", vision=VISION)
QWEN3_VL = replace(QWEN, model_type="qwen3_vl", vision=replace(VISION, deepstack_visual_indexes=(0, 1)))


def messages(architecture: Architecture | None, *overrides: str) -> list[str]:
    loaded = load(overrides=[*BASE, *overrides])
    assert loaded.findings == []
    return [str(finding) for finding in check(loaded.settings, architecture, written=loaded.written)]


FREEZE, LORA, FULL = (f"finetuning_type={kind}" for kind in ("freeze", "lora", "full"))
TRAINED = ["freeze_vision_tower=false", "freeze_multi_modal_projector=false"]


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        (QWEN, [FREEZE]),
        (QWEN, [FREEZE, "freeze_trainable_layers=12"]),
        (QWEN, [FREEZE, "freeze_trainable_layers=-12"]),
        (QWEN, [FREEZE, "freeze_trainable_layers=4", "use_llama_pro=true"]),
        (QWEN, [FREEZE, "freeze_trainable_layers=0", "freeze_extra_modules=embed_tokens,lm_head"]),
        # A file may say what is so anyway.
        (QWEN, [FULL, "freeze_trainable_layers=2", "use_llama_pro=false", "freeze_vision_tower=true"]),
        (QWEN, [FREEZE, "optimizer=muon", "muon_momentum=0.9"]),
        (QWEN_VL, [*TRAINED, "vision_lr=1e-6", "merger_lr=1e-5"]),
        (QWEN3_VL, ["freeze_vision_tower=false", "vision_lr=1e-6", "merger_lr=1e-5"]),
        (QWEN3_VL, ["freeze_deepstack_mergers=false", "merger_lr=1e-5"]),
        (None, ["freeze_vision_tower=false", "vision_lr=1e-6"]),
        (QWEN, [LORA]),
        (None, [LORA, "lora_target=.*[qv]_proj", "use_dora=true", "use_rslora=true", "loraplus_lr_ratio=16"]),
        (QWEN, [LORA, "adapter_name_or_path=a,b", "create_new_adapter=true", "lora_dropout=0.1"]),
        (QWEN_VL, [LORA, *TRAINED, "vision_lr=1e-6", "merger_lr=1e-5", "lora_target=all,merger.mlp.0"]),
        (QWEN, [FULL, "lora_rank=8", "lora_target=all", "create_new_adapter=false"]),
        (QWEN, ["use_dora=false", "create_new_adapter=false"]),
    ],
)  # fmt: skip
def test_what_is_valid_passes(architecture, overrides):
    assert messages(architecture, *overrides) == []


# architecture, overrides -> the one message they cause
WRONG = [
    (
        QWEN,
        [FREEZE, "freeze_trainable_layers=0"],
        "freeze_trainable_layers is 0\n"
        "    why: nothing would be trained, inside or outside of layers\n"
        "    fix: write freeze_trainable_layers: 1 for the last layer, or freeze_trainable_layers: -1 for the first",
    ),
    (
        QWEN,
        [FREEZE, "freeze_trainable_layers=13"],
        "freeze_trainable_layers 13: the model has 12 layers\n"
        "    fix: write freeze_trainable_layers: 12, which is all of them",
    ),
    (
        QWEN,
        [FREEZE, "freeze_trainable_layers=-20"],
        "freeze_trainable_layers -20: the model has 12 layers\n"
        "    fix: write freeze_trainable_layers: -12, which is all of them",
    ),
    (
        QWEN,
        [FREEZE, "freeze_trainable_layers=5", "use_llama_pro=true"],
        "use_llama_pro with freeze_trainable_layers 5: the model has 12 layers\n"
        "    why: the last layer of each of this many equal groups is trained\n"
        "    fix: write freeze_trainable_layers: 4",
    ),
    (
        QWEN,
        [FREEZE, "freeze_trainable_layers=-3", "use_llama_pro=true"],
        "use_llama_pro with freeze_trainable_layers -3: the model has 12 layers\n"
        "    why: the last layer of each of this many equal groups is trained\n"
        "    fix: write freeze_trainable_layers: 3",
    ),
    (
        QWEN,
        ["freeze_trainable_layers=4"],
        "freeze_trainable_layers: 4 with finetuning_type: full\n"
        "    why: it is a setting of freeze\n"
        "    fix: write finetuning_type: freeze, or remove freeze_trainable_layers",
    ),
    (
        None,
        ["use_llama_pro=true"],
        "use_llama_pro: true with finetuning_type: full\n"
        "    why: it is a setting of freeze\n"
        "    fix: write finetuning_type: freeze, or remove use_llama_pro",
    ),
    (
        QWEN,
        ["freeze_vision_tower=false"],
        "freeze_vision_tower: false, and the model has no vision encoder\n    fix: remove freeze_vision_tower",
    ),
    (
        QWEN_VL,
        ["freeze_deepstack_mergers=false"],
        "freeze_deepstack_mergers: false, and the model has no deepstack mergers\n"
        "    fix: remove freeze_deepstack_mergers",
    ),
    (
        QWEN,
        ["vision_lr=1e-6"],
        "vision_lr 1e-06, and the model has no vision encoder\n    fix: remove vision_lr",
    ),
    (
        QWEN_VL,
        ["vision_lr=1e-6"],
        "vision_lr 1e-06 with freeze_vision_tower: true\n"
        "    why: frozen parameters have no learning rate\n"
        "    fix: write freeze_vision_tower: false, or remove vision_lr",
    ),
    (
        QWEN_VL,
        ["merger_lr=1e-5", "freeze_vision_tower=false"],
        "merger_lr 1e-05 with freeze_multi_modal_projector: true\n"
        "    why: frozen parameters have no learning rate\n"
        "    fix: write freeze_multi_modal_projector: false, or remove merger_lr",
    ),
    (
        QWEN_VL,
        ["vision_lr=1e-6", "freeze_vision_tower=false", "learning_rate=0"],
        "vision_lr 1e-06 with learning_rate 0\n"
        "    why: it follows learning_rate at a fixed ratio\n"
        "    fix: write freeze_language_model: true and a learning_rate above 0, to train nothing else",
    ),
    (
        QWEN,
        ["lora_rank=8"],  # its default, which a user who leaves the method open still asks for
        "lora_rank: 8 with finetuning_type: full\n"
        "    why: it is a setting of lora\n"
        "    fix: write finetuning_type: lora, or remove lora_rank",
    ),
    (
        QWEN,
        ["lora_rank=16"],
        "lora_rank: 16 with finetuning_type: full\n"
        "    why: it is a setting of lora\n"
        "    fix: write finetuning_type: lora, or remove lora_rank",
    ),
    (
        QWEN,
        [FREEZE, "adapter_name_or_path=a"],
        "adapter_name_or_path: [a] with finetuning_type: freeze\n"
        "    why: it is a setting of lora\n"
        "    fix: write finetuning_type: lora, or remove adapter_name_or_path",
    ),
    (
        None,
        [LORA, "lora_target=[]"],
        "lora_target is empty\n    why: there would be no adapters\n    fix: remove lora_target",
    ),
    (
        None,
        [LORA, "lora_target=(q_proj"],
        "lora_target (q_proj is not a valid regular expression: missing ), unterminated subpattern at position 0\n"
        "    fix: write names of linear layers, such as lora_target: q_proj,v_proj",
    ),
    (
        QWEN,
        ["merge_lora=true"],
        "merge_lora: true with finetuning_type: full\n"
        "    why: there is no adapter to merge\n"
        "    fix: write finetuning_type: lora, or remove merge_lora",
    ),
    (
        None,
        [LORA, "create_new_adapter=true"],
        "create_new_adapter: true without adapter_name_or_path\n"
        "    why: a run without adapters to start from trains a new one anyway\n"
        "    fix: remove create_new_adapter, or write adapter_name_or_path: FOLDER",
    ),
    (
        QWEN,
        [LORA, "use_dora=true", "lora_dropout=0.1"],
        "lora_dropout: 0.1 with use_dora: true\n"
        "    why: rows are divided by their norms in the adapted matrix, which is computed without dropout\n"
        "    fix: remove lora_dropout or use_dora",
    ),
    (
        QWEN,
        [LORA, "optimizer=muon"],
        "optimizer: muon with finetuning_type: lora\n"
        "    why: Muon updates whole matrices of the model, not adapters\n"
        "    fix: write optimizer: adam",
    ),
    (
        QWEN,
        [LORA, "loraplus_lr_ratio=16", "optimizer=sgd"],
        "loraplus_lr_ratio: 16 with optimizer: sgd\n"
        "    why: the ratio is derived for Adam, whose updates do not depend on the scale of gradients\n"
        "    fix: write optimizer: adam, or remove loraplus_lr_ratio",
    ),
    (
        QWEN_VL,
        [LORA, "vision_lr=1e-6"],
        "vision_lr 1e-06 with freeze_vision_tower: true\n"
        "    why: frozen parameters have no learning rate\n"
        "    fix: write freeze_vision_tower: false, or remove vision_lr",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "overrides", "message"), WRONG)
def test_message_says_what_why_and_the_nearest_fix(architecture, overrides, message):
    assert messages(architecture, *overrides) == [message]


def test_settings_that_change_nothing_are_noted() -> None:
    """They are no reason to refuse a file; a value that is the default asks for nothing."""
    words = ["optimizer=muon", "sgd_momentum=0.5", "muon_scale=0.3", "eval_steps=7", "adam_beta2=0.9", "save_steps=500"]
    loaded = load(
        overrides=[
            *words,
            "save_strategy=no",
            "wandb_project=a",
            "report_to=none",
            "moe_z_loss_coeff=0.1",
            "eval_generate_tokens=9",
            "preserve_thinking=true",
        ]
    )
    assert unused(loaded.settings, loaded.written, QWEN) == {
        "with optimizer: muon": ["sgd_momentum"],
        "in a dense model": ["moe_z_loss_coeff"],
        "with report_to: [none]": ["wandb_project"],
        "with eval_strategy: no": ["eval_steps"],
        "without eval_generate_steps": ["eval_generate_tokens"],
        "with mask_history: false": ["preserve_thinking"],
    }


@pytest.mark.parametrize("rank", [8, 16])
def test_settings_of_another_method_are_noted_whatever_their_value(rank: int) -> None:
    """LLaMA-Factory ignores them without a word; they change nothing of the method that is written."""
    loaded = load(overrides=["finetuning_type=full", f"lora_rank={rank}", "lora_target=all", "use_dora=false"])
    found = {"with finetuning_type: full": ["lora_rank", "lora_target"]}
    assert unused(loaded.settings, loaded.written, None) == found
    assert not [each for each in loaded.check(rules=RULES) if "lora" in each.what]
