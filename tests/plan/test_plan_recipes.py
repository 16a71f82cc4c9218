"""The published runs of vision-language models, whose files are taken as they are: valid, planned, and they fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatune.config.load import load
from megatune.plan.case import Case
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.estimate import estimate
from megatune.plan.pages.words import describe_layout

EXAMPLES = Path(__file__).parents[2] / "examples" / "vision"
# Devices, layout, rows of a step, and tokens of the images that are planned.
PUBLISHED = {
    "qwen2_vl_full": (8, "tp4 pp2", 2, 262_144 // 28**2),
    "qwen3_vl_8b_32gpu": (32, "tp4 dp8", 64, 451_584 // 32**2),
    "qwen3_vl_8b_32gpu_tp8": (32, "tp8 dp4", 64, 451_584 // 32**2),
    "qwen3_vl_8b_32gpu_pp2": (32, "tp2 pp2 vpp2 dp8", 64, 451_584 // 32**2),
}


def test_every_example_is_published_or_a_demo() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == {*PUBLISHED, "demo", "qwen3_5_demo"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_taken_as_it_is(name: str) -> None:
    path = EXAMPLES / f"{name}.yaml"
    loaded = load(path)
    model = find_model(str(loaded.settings.model.model_name_or_path))
    gpus, layout, rows, tokens = PUBLISHED[name]
    assert loaded.check(model.architecture, gpus) == []
    passes = {"use_mca", "do_train"} & yaml.safe_load(path.read_text()).keys()
    assert len(loaded.written) == len(yaml.safe_load(path.read_text())) - len(passes), (
        "every key is a setting, but for those that say how it is anyway"
    )
    case = Case(model=model, settings=loaded.settings, world_size=gpus, machine=find_machine("a100-80g"))
    planned = estimate(case)
    assert planned.fits
    assert (describe_layout(case), case.global_batch_size, case.picture_tokens) == (layout, rows, tokens)


def test_the_runs_of_one_model_differ_in_their_layout_alone() -> None:
    one, *others = (yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()) for name in PUBLISHED if "32gpu" in name)
    layout = {
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "sequence_parallel", "per_device_train_batch_size", "output_dir",
    }  # fmt: skip
    for other in others:
        assert {key for key in one | other if one.get(key) != other.get(key)} <= layout
