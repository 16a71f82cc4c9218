"""Runs whose settings are drawn at random: a layout trains as one process does, and another one goes on from its
checkpoint."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pictures_kit import TEMPLATES, make_model
from pictures_kit import draw as draw_picture
from pool import RankPool
from pool_launch import CommandLine
from runs import metrics

from megatune.demo.checkpoint import make_checkpoint

DENSE = (
    "qwen2", "qwen3", "llama", "mistral", "ministral3", "phi3", "granite", "smollm3", "seed_oss", "olmo3",
    "gemma3_text", "gemma4_text", "qwen3_5", "glm4", "olmo2", "ernie4_5", "exaone4",
)  # fmt: skip
SPARSE = (
    "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2",
    "ernie4_5_moe", "hy_v3", "gemma4_text_moe", "qwen3_next", "qwen3_5_moe", "olmoe", "dots1",
)  # fmt: skip
EXPERTS = (*SPARSE, "qwen3_vl_moe")
CLASSIFIERS = (
    "qwen2", "qwen3", "llama", "mistral", "ministral3", "phi3", "gemma3_text", "seed_oss", "mixtral", "qwen3_moe",
    "glm", "glm4", "olmo2", "exaone4",
)  # fmt: skip
OF_IMAGES = ("mistral3", "gemma3", "gemma4", "internvl")  # these take no video
WHOLE_ROWS = ("gemma3", "gemma4")  # tokens of a picture see those behind them
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "nobody", "had", "been", "there", "before")
ROWS_PER_STEP, STEPS = 8, 4
LOSS, GRADIENT_NORM = 1e-5, 1e-5  # relative; the worst of all seeds were 1.2e-6 and 1.6e-6


def draw(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A family, and settings that do not depend on the layout."""
    stage = chance.choice(("pt", "sft", "sft", "dpo", "kto", "rm"))
    family = chance.choice(CLASSIFIERS if stage == "rm" else (*DENSE, *SPARSE))
    drawn: dict[str, Any] = {
        "template": "default",
        "dataset": stage if stage in ("pt", "sft", "kto") else "pairs",
        "cutoff_len": chance.choice((64, 96)),
        **of_stage(chance, stage),
    }
    drawn |= chance.choice((trained_whole, trained_in_part, adapted))(chance)
    return family, drawn | recomputed(chance)


def draw_pictured(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A vision-language family, and settings that do not depend on the layout."""
    family, stage = chance.choice([*TEMPLATES]), chance.choice(("sft", "sft", "dpo", "kto"))
    media = "images" if family in OF_IMAGES else chance.choice(("images", "videos"))
    drawn = {
        "template": TEMPLATES[family],
        "dataset": f"{media}_{stage}",
        "cutoff_len": chance.choice((160, 256)),  # some rows are longer, and cut or left out
        "truncation_strategy": chance.choice(("budget", "right", "drop")),
        "image_max_pixels": chance.choice((48 * 48, 96 * 96)),
        "crop_to_patches": family == "internvl" and chance.random() < 0.5,
        **of_stage(chance, stage),
    }
    if media == "videos":
        drawn |= {"video_fps": chance.choice((1.0, 3.5)), "video_maxlen": chance.choice((2, 5))}
    encoder, projector = chance.random() < 0.5, chance.random() < 0.5
    way = chance.choice((trained_whole, trained_in_part, adapted))
    if way is not adapted:
        drawn |= {"freeze_vision_tower": not encoder, "freeze_multi_modal_projector": not projector}
        drawn["freeze_language_model"] = way is trained_whole and (encoder or projector) and chance.random() < 0.5
    elif encoder and family != "gemma4":  # its encoder has no linear layer that may have an adapter
        drawn["freeze_vision_tower"] = False
    return family, drawn | way(chance) | recomputed(chance)


def of_stage(chance: random.Random, stage: str) -> dict[str, Any]:
    """A stage, with what it takes, and a schedule."""
    drawn: dict[str, Any] = {
        "stage": stage,
        "seed": chance.randrange(100),
        "max_grad_norm": chance.choice((0.0, 0.5, 1.0)),
        "weight_decay": chance.choice((0.0, 0.1)),
        "lr_scheduler_type": chance.choice(("cosine", "linear", "constant_with_warmup")),
        "warmup_steps": chance.choice((0, 2)),
    }
    if stage == "dpo":
        drawn["pref_loss"] = chance.choice(("sigmoid", "ipo", "orpo", "simpo", "hinge", "cpo", "bco_pair", "nca_pair"))
        drawn["pref_ftx"] = chance.choice((0.0, 0.5))
    if stage in ("pt", "sft", "dpo", "rm"):
        drawn["packing"] = chance.random() < 0.4
    if stage in ("pt", "sft") and chance.random() < 0.3:
        drawn |= {"streaming": True, "buffer_size": 16}
    return drawn


def trained_whole(chance: random.Random) -> dict[str, Any]:
    return chance.choice(({"optimizer": "adam"}, {"optimizer": "muon"}, {"optimizer": "sgd", "learning_rate": 0.1}))


def trained_in_part(chance: random.Random) -> dict[str, Any]:
    extra = chance.choice(({}, {"freeze_extra_modules": "norm"}))
    return {"finetuning_type": "freeze", "freeze_trainable_layers": chance.choice((1, 3, -1)), **extra}


def adapted(chance: random.Random) -> dict[str, Any]:
    more = chance.choice(({}, {"use_rslora": True}, {"loraplus_lr_ratio": 4}, {"quantization_bit": 8}))
    return {"finetuning_type": "lora", "lora_rank": 4, **more}


def recomputed(chance: random.Random) -> dict[str, Any]:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    some = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}
    return chance.choice(({}, full, some))


def draw_layout(chance: random.Random, family: str, *, has_adam: bool) -> dict[str, Any]:
    """The settings of two or four processes."""
    processes = rest = chance.choice((2, 4, 4))
    drawn: dict[str, Any] = {"num_processes": processes}
    for name in chance.sample(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), 3
    ):
        if rest > 1 and chance.random() < 0.4:
            drawn[name], rest = 2, rest // 2
    pipeline = drawn.get("pipeline_model_parallel_size", 1)
    if family in WHOLE_ROWS and "context_parallel_size" in drawn:
        drawn["cp_comm_type"] = "a2a"
    drawn["sequence_parallel"] = "tensor_model_parallel_size" in drawn and (family in EXPERTS or chance.random() < 0.5)
    if family in EXPERTS and processes // pipeline > 1 and chance.random() < 0.6:
        drawn |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    if pipeline == 2 and family.startswith("qwen3_vl"):
        drawn["decoder_first_pipeline_num_layers"] = 3  # those that the encoder's earlier layers feed
    elif pipeline == 2 and chance.random() < 0.5:
        drawn["virtual_pipeline_model_parallel_size"] = 2
    if chance.random() < 0.4:
        drawn |= {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
        drawn["optimizer_cpu_offload"] = has_adam and chance.random() < 0.5
    size = chance.choice((1, 2))
    return drawn | {"per_device_train_batch_size": size, "gradient_accumulation_steps": ROWS_PER_STEP // rest // size}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of every stage, of different lengths."""
    folder, chance = tmp_path_factory.mktemp("data"), random.Random(0)

    def text() -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(3, 25)))

    pairs = [{"instruction": text(), "chosen": text(), "rejected": text()} for _ in range(48)]
    rows: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "pt": ([{"text": text()} for _ in range(48)], {"columns": {"prompt": "text"}}),
        "sft": ([{"instruction": text(), "output": text()} for _ in range(48)], {}),
        "kto": ([{"instruction": text(), "output": text(), "good": number % 3 > 0} for number in range(48)],
                {"columns": {"prompt": "instruction", "response": "output", "kto_tag": "good"}}),
        "pairs": (pairs, {"ranking": True,
                          "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}}),
    }  # fmt: skip
    rows |= pictured_rows(folder, chance, text)
    for name, (content, _) in rows.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    entries = {name: {"file_name": f"{name}.json", **entry} for name, (_, entry) in rows.items()}
    (folder / "dataset_info.json").write_text(json.dumps(entries))
    return folder


def pictured_rows(
    folder: Path, chance: random.Random, text: Callable[[], str]
) -> dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Rows with up to three images, and others with videos among them, of different sizes."""
    for number in range(24):
        draw_picture(folder / f"{number}.png", chance.randint(20, 150), chance.randint(20, 150), seed=number)
    rows: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {}
    for media in ("images", "videos"):

        def asked(kinds: list[str]) -> dict[str, Any]:
            shown = chance.choices(kinds, k=chance.choice((0, 1, 1, 2, 3)))
            words = [f"<{kind.removesuffix('s')}>" for kind in shown] + text().split()
            of_kind: dict[str, list[Any]] = {kind: [] for kind in kinds}
            for kind in shown:
                files = [f"{chance.randrange(24)}.png"] * chance.choice((1, 3, 6))
                of_kind[kind].append(files if kind == "videos" else files[0])
            return {"instruction": " ".join(chance.sample(words, len(words))), **of_kind}

        kinds = sorted({"images", media})
        columns = {"prompt": "instruction", **{kind: kind for kind in kinds}}
        rows |= {
            f"{media}_sft": ([asked(kinds) | {"output": text()} for _ in range(40)],
                             {"columns": columns | {"response": "output"}}),
            f"{media}_kto": ([asked(kinds) | {"output": text(), "good": number % 3 > 0} for number in range(40)],
                             {"columns": columns | {"response": "output", "kto_tag": "good"}}),
            f"{media}_dpo": ([asked(kinds) | {"chosen": text(), "rejected": text()} for _ in range(40)],
                             {"ranking": True, "columns": columns | {"chosen": "chosen", "rejected": "rejected"}}),
        }  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models by family. Every token goes to all experts: rounding decides about none."""
    folder = tmp_path_factory.mktemp("models")

    def make(family: str) -> Path:
        if not (folder / family).exists():
            experts = {"num_experts": 4, "router_topk": 4} if family in EXPERTS else {}
            sizes = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 600, **experts}
            if family in TEMPLATES:
                make_model(folder, family, **sizes)
            else:
                make_checkpoint(family, folder / family, **sizes)
        return folder / family

    return make


@pytest.fixture
def check(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, models: Any, data: Path, tmp_path: Path
) -> Callable[..., None]:
    """Train settings in one process and in a layout, and from its checkpoint in another, and compare every step."""
    command = CommandLine(pool, monkeypatch)

    def losses(name: str, family: str, settings: dict[str, Any]) -> dict[int, Mapping[str, float]]:
        values = {
            "model_name_or_path": models(family), "dataset_dir": data, "output_dir": tmp_path / name,
            "learning_rate": 1e-3, "adam_epsilon": 1e-5, "max_steps": STEPS, "save_steps": STEPS // 2,
            "logging_steps": 1, "moe_aux_loss_coeff": 0.0, "report_to": "none", "plot_loss": False,
            "dataloader_num_workers": 0, **settings,
        }  # fmt: skip
        ended = command("train", *(f"{key}={json.dumps(value, default=str)}" for key, value in values.items()))
        assert ended.returncode == 0, ended.stderr
        return metrics(tmp_path / name)

    def check(chance: random.Random, family: str, drawn: dict[str, Any]) -> None:
        has_adam = drawn.get("optimizer", "adam") == "adam"
        one, other = (draw_layout(chance, family, has_adam=has_adam) for _ in range(2))
        whole = {
            "num_processes": 1,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": ROWS_PER_STEP // 2,
        }
        expected, found = losses("whole", family, drawn | whole), losses("one", family, drawn | one)
        shutil.copytree(tmp_path / "one" / f"checkpoint-{STEPS // 2}", tmp_path / "other" / f"checkpoint-{STEPS // 2}")
        resumed = losses("other", family, drawn | other)
        assert (list(found), list(resumed)) == ([1, 2, 3, 4], [3, 4])
        for step, logged in (*found.items(), *resumed.items()):
            for name, bound in (("loss", LOSS), ("grad_norm", GRADIENT_NORM)):
                assert logged[name] == pytest.approx(expected[step][name], rel=bound), (step, name, one, other)

    return check


@pytest.mark.extended(*range(4, 60))
@pytest.mark.parametrize("seed", range(60))
def test_layouts_agree(seed: int, check: Any) -> None:
    chance = random.Random(seed)
    check(chance, *draw(chance))


@pytest.mark.extended(*(set(range(30)) - {14, 15}))  # these hold packed images and videos, tp, pp, cp and ep
@pytest.mark.parametrize("seed", range(30))
def test_layouts_agree_with_pictures(seed: int, check: Any) -> None:
    chance = random.Random(seed)
    check(chance, *draw_pictured(chance))
