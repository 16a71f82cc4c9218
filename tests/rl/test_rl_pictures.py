"""Pictures in prompts: what is read, sampled and trained, against Transformers with its own processor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import LAYOUTS as EVERY_LAYOUT
from layouts import SEQUENCE_LAYOUTS
from local_roles import run_file
from PIL import Image
from safetensors.torch import load_file
from script_kit import run_script
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from worker_kit import TEMPERATURE, settings_of, started, whole

from megatune.config.dialects.roll import read_roll
from megatune.config.groups.run import ModelSettings
from megatune.config.rl.rollout import PromptData
from megatune.config.rl.settings import InferRole, RewardRole, RLSettings
from megatune.data.encode import load_tokenizer
from megatune.demo.checkpoint import make_checkpoint
from megatune.engine import groups
from megatune.errors import ExitCode, MegatuneError
from megatune.families import load_architecture
from megatune.rl.media import check_images, model_arguments, vision_of
from megatune.rl.problems import read_problems
from megatune.rl.rollout.builtin import BuiltinEngine
from megatune.rl.samples import Problem, Request, Response, Rollouts
from megatune.rl.worker.batching import merge_ranks
from megatune.rl.worker.distillation import DistillationWorker
from megatune.rl.worker.policy import PolicyWorker
from megatune.rl.worker.training import TrainResult

REWARDS = {"math_rule": RewardRole("math_rule", "math_rule", ("colours",))}
EXAMPLE = Path(__file__).parents[2] / "examples/rl/colours.yaml"
SIZES = ((60, 90), (200, 56), (84, 84))
LEAST, MOST = 56 * 56, 128 * 128


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        Image.fromarray(random.integers(0, 255, (*size[::-1], 3), np.uint8)).save(folder / f"{number}.png")
    return folder


def row(content: Any, *names: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    return {"tag": "colours", "messages": messages, "images": list(names), "ground_truth": "1", **more}


ROWS = [
    row("Which is it? <image>", "0.png"),
    row("<image>And <image>?", "1.png", "2.png"),
    row("No tag at all.", "2.png"),
    row([{"type": "image", "image": "0.png"}, {"type": "text", "text": "A part."}]),
    row("Text alone."),
]


def problems(folder: Path, rows: Sequence[dict[str, Any]], images: Path, **settings: Any) -> list[Problem]:
    path = images / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    data = PromptData(
        file_name=[str(path)], messages="messages", media_dir=str(images), image_max_pixels=MOST, **settings
    )
    tokenizer = load_tokenizer(folder)
    vision = vision_of(folder, tokenizer, data)
    return read_problems(data, REWARDS, tokenizer, 600, vision=vision).all()


def of_transformers(folder: Path, images: Path, content: str, names: Sequence[str]) -> tuple[list[int], dict[str, Any]]:
    """The tokens of a prompt, and the images as the processor of Transformers makes them, without its resizing in
    torchvision. Tags are parts of the content there."""
    tokenizer, shown = load_tokenizer(folder), {}
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(content.split("<image>")):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": piece}] * bool(piece)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    if names:
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder, min_pixels=LEAST, max_pixels=MOST)
        shown = dict(processor([Image.open(images / name) for name in names], return_tensors="pt"))
    for grid in shown.get("image_grid_thw", []):
        text = text.replace("<|image_pad|>", "<pad>" * int(grid.prod() // 4), 1)
    return tokenizer(text.replace("<pad>", "<|image_pad|>"))["input_ids"], shown


FAMILIES = ["qwen2_5_vl", "qwen3_vl"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    return make_checkpoint(request.param, folder, num_layers=2, hidden_size=32, seed=1)


def test_prompts_and_patches_are_those_of_the_processor(model, images):
    found = problems(model, ROWS, images)
    asked = [("Which is it? <image>", ["0.png"]), ("<image>And <image>?", ["1.png", "2.png"])]
    asked += [("<image>No tag at all.", ["2.png"]), ("<image>A part.", ["0.png"]), ("Text alone.", [])]
    for problem, (content, names) in zip(found, asked, strict=True):
        tokens, expected = of_transformers(model, images, content, names)
        assert problem.prompt_ids.tolist() == tokens
        assert (problem.images is None) == (not names)
        if problem.images is not None:
            given = model_arguments(problem.prompt_ids, problem.images)
            assert torch.equal(given["image_grid_thw"], expected["image_grid_thw"])
            assert torch.equal(given["pixel_values"], expected["pixel_values"])


def drained(engine: BuiltinEngine, requests: Sequence[Request]) -> dict[str, Response]:
    engine.submit(requests)
    found: dict[str, Response] = {}
    while len(found) < len(requests):
        found |= {response.id: response for response in engine.step()}
    return found


def test_the_engine_samples_with_pictures_as_transformers_sees_them(model, images):
    found = problems(model, ROWS, images)
    requests = [
        Request(
            f"{number}-{copy}", each.prompt_ids, seed=7 * number + copy, max_new_tokens=6 + copy, images=each.images
        )
        for number, each in enumerate(found)
        for copy in range(2)
    ]
    role = InferRole(device_mapping=[0], model_name_or_path=str(model), dtype="fp32")

    def sampled(most: int, order: int) -> dict[str, Response]:
        return drained(BuiltinEngine(role, max_running=most, context=400), requests[::order])

    together, alone = sampled(4, 1), sampled(1, -1)
    reference = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    names = [["0.png"], ["1.png", "2.png"], ["2.png"], ["0.png"], []]
    for request in requests:
        number, response = int(request.id[0]), together[request.id]
        np.testing.assert_array_equal(response.response_ids, alone[request.id].response_ids)
        _, pixels = of_transformers(model, images, "<image>" * len(names[number]), names[number])
        ids = torch.tensor(np.concatenate([request.prompt_ids, response.response_ids]))[None]
        kinds = {} if not pixels else {"mm_token_type_ids": (ids == reference.config.image_token_id).int()}
        with torch.no_grad():
            logits = reference(input_ids=ids, **pixels, **kinds).logits[0]
        start = len(request.prompt_ids)
        expected = logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()
        np.testing.assert_allclose(response.log_probs, expected, atol=2e-5)
        placeholders = {reference.config.image_token_id, reference.config.video_token_id}
        assert not placeholders & {*response.response_ids.tolist()}


LAYOUTS = {**EVERY_LAYOUT, **SEQUENCE_LAYOUTS}
LENGTHS = (5, 9, 3, 7, 4)  # of responses


def with_responses(found: Sequence[Problem]) -> Rollouts:
    """Samples of random responses, whose tokens all count."""
    random = np.random.default_rng(3)
    ones = [np.ones(each, np.float32) for each in LENGTHS]
    return Rollouts(
        [
            np.concatenate([each.prompt_ids, random.integers(20, 300, r)])
            for each, r in zip(found, LENGTHS, strict=True)
        ],
        [len(each.prompt_ids) for each in found],
        {"mask": ones, "weights": ones, "advantages": [random.normal(0, 1, r).astype(np.float32) for r in LENGTHS]},
        images=[each.images for each in found],
    )


def an_update(settings: RLSettings, samples: Rollouts) -> tuple[dict[int, np.ndarray], float]:
    """On every rank: log-probabilities of the responses, and the norm of a gradient."""
    worker = started(PolicyWorker, settings)
    found = worker.log_probs(samples)
    samples.per_token["old_log_probs"] = merge_ranks(groups.all_gather_object(found), samples)
    return found, worker.train(samples, 0).grad_norm


@pytest.mark.parametrize(("layout", "tokens"), [("1", None), ("tp2 sp", None), ("pp2", None), ("cp2, packed", 400)])
def test_pictures_are_trained_as_transformers_trains_them(pool, model, images, layout, tokens):
    """The ratio is 1, so that the gradient is that of -Σ advantage · log-probability / tokens."""
    samples = with_responses(problems(model, ROWS, images))
    algorithm = {"enable_old_logprobs_recompute": True, "loss_agg_mode": "token-mean"}
    place = LAYOUTS[layout]
    settings = settings_of(model, place, batch=(5, 1), packed_tokens=tokens, algorithm=algorithm)
    found = pool.run(place.world_size, an_update, settings, samples)
    reference, loss, expected = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32), 0.0, []
    for place, (ids, prompt) in enumerate(zip(samples.tokens, samples.prompt_lengths, strict=True)):
        given = {} if (shown := samples.images[place]) is None else model_arguments(ids, shown)
        logits = reference(input_ids=torch.tensor(ids)[None], **given).logits[0] / TEMPERATURE
        own = logits[prompt - 1 : -1].log_softmax(-1).gather(1, torch.tensor(ids)[prompt:, None])[:, 0]
        expected.append(own.detach().numpy())
        loss = loss - (own * torch.from_numpy(samples.per_token["advantages"][place])).sum()
    (loss / sum(LENGTHS)).backward()
    norm = torch.stack([each.grad.norm() for each in reference.parameters() if each.grad is not None]).norm()
    np.testing.assert_allclose(whole([own for own, _ in found], samples), np.concatenate(expected), atol=2e-5)
    assert found[0][1] == pytest.approx(float(norm), rel=1e-5)


def distilled(settings: RLSettings, samples: Rollouts) -> TrainResult:
    """On every rank: an update."""
    return started(DistillationWorker, settings).train(samples, 0)  # type: ignore[no-any-return]


def taught(model: Path, teacher: Path, layout: str, tokens: int | None = None) -> RLSettings:
    """A run that distils whole distributions, by the formula with the mixture of half and half."""
    algorithm, place = {"is_pure_opd": True, "opd_loss": "jsd"}, LAYOUTS[layout]
    settings = settings_of(model, place, batch=(5, 1), packed_tokens=tokens, algorithm=algorithm)
    own = settings.actor_train.settings.model_copy(update={"model": ModelSettings(model_name_or_path=str(teacher))})
    return replace(settings, actor_train=settings.actor_train.model_copy(update={"teacher": own}))


@pytest.mark.parametrize(("layout", "tokens"), [("1", None), ("tp2 sp", None), ("pp2", None), ("cp2, packed", 400)])
def test_a_teacher_sees_the_pictures_that_the_student_sees(pool, model, images, tmp_path, layout, tokens):
    """The divergence of both distributions, and its gradient, by Transformers."""
    family = model.name
    teacher = make_checkpoint(family, tmp_path / "teacher", num_layers=2, hidden_size=48, seed=2)
    samples = with_responses(problems(model, ROWS, images))
    found = pool.run(LAYOUTS[layout].world_size, distilled, taught(model, teacher, layout, tokens), samples)[0]
    policy, other = (
        AutoModelForImageTextToText.from_pretrained(each, dtype=torch.float32) for each in (model, teacher)
    )
    total = torch.zeros(())
    for place, (ids, prompt) in enumerate(zip(samples.tokens, samples.prompt_lengths, strict=True)):
        given = {} if (shown := samples.images[place]) is None else model_arguments(ids, shown)
        with torch.no_grad():
            t = (other(input_ids=torch.tensor(ids)[None], **given).logits[0, prompt - 1 : -1] / TEMPERATURE).softmax(-1)
        p = (policy(input_ids=torch.tensor(ids)[None], **given).logits[0, prompt - 1 : -1] / TEMPERATURE).softmax(-1)
        mixed = (p + t) / 2
        total = total + (t * (t / mixed).log() + p * (p / mixed).log()).sum() / 2
    loss = total / sum(LENGTHS)
    loss.backward()
    norm = torch.stack([each.grad.norm() for each in policy.parameters() if each.grad is not None]).norm()
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    assert found.grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_what_takes_no_pictures_is_refused(model, images, tmp_path):
    with pytest.raises(MegatuneError, match="different numbers of <image> tags") as error:
        problems(model, [row("<image><image>", "0.png"), row("", "0.png", videos=["0.mp4"])], images)
    assert "the row has videos" in str(error.value)
    system = row("Which?")
    system["messages"][0]["content"] = [{"type": "image", "image": "0.png"}]
    with pytest.raises(MegatuneError, match="the system message has an image"):
        problems(model, [system], images)
    text = make_checkpoint("qwen3", tmp_path / "text", num_layers=1, hidden_size=32)
    with pytest.raises(MegatuneError, match="the row has images, and the model reads text only"):
        problems(text, ROWS[:1], images)
    found = problems(model, ROWS, images)
    asked = read_roll(EXAMPLE).require_valid()
    check_images(asked, [replace(each, domain="colours") for each in found])
    plays = replace(asked.rewards["colours"], arguments={"environment": {"name": "python"}})
    elsewhere = replace(
        asked,
        actor_infer=asked.actor_infer.model_copy(update={"engine": "vllm"}),
        rewards={"colours": plays},
    )
    with pytest.raises(MegatuneError) as error:
        check_images(elsewhere, [replace(each, domain="colours") for each in found])
    said = str(error.value)
    assert error.value.exit_code == ExitCode.SETTINGS
    for part in ("strategy_name vllm", "rewards.colours has an environment"):
        assert part in said
    check_images(elsewhere, found[-1:])  # text alone


def test_models_that_read_no_images_or_others_are_refused_as_teachers(model, images, tmp_path):
    """Those of the same family may be of another size."""
    found = problems(model, ROWS, images)
    names = {"text": "qwen3", "other": next(each for each in FAMILIES if each != model.name), "larger": model.name}
    teachers = {name: make_checkpoint(names[name], tmp_path / name, num_layers=2, hidden_size=48) for name in names}

    def checked(name: str) -> str:
        settings = taught(model, teachers[name], "1")
        role = settings.actor_train.model_copy(update={"name": "critic", "settings": settings.actor_train.teacher})
        try:
            check_images(replace(settings, critic=role, rewards=REWARDS), found)
        except MegatuneError as error:
            return str(error)
        return ""

    for name, why in (("text", "it reads text only"), ("other", "other patches or tokens")):
        said = checked(name)
        assert why in said
        for role in ("teacher", "critic"):
            assert f"{role} does not read the images of the prompts" in said
    assert checked("larger") == ""


def test_rows_of_verl_are_read(model, images):
    rows = [
        {
            "data_source": "colours",
            "prompt": [{"role": "user", "content": "<image>Which?"}],
            "images": [{"path": "0.png"}],
            "reward_model": {"style": "rule", "ground_truth": "7"},
        }
    ]
    (found,) = problems(model, rows, images)
    assert (found.tag, found.row["ground_truth"], found.images is not None) == ("colours", "7", True)


def test_which_parts_are_trained_is_as_in_roll(model):
    changed = "actor_train.model_args.freeze_module_prefix"

    def frozen(value: str) -> tuple[bool, bool]:
        read = read_roll(EXAMPLE, [f"{changed}={value}"], lambda settings, stage: load_architecture(model))
        found = read.require_valid().actor_train.settings.finetuning
        return found.freeze_vision_tower, found.freeze_multi_modal_projector

    assert frozen("null") == frozen("none") == (False, False)
    assert frozen("vision_model") == (True, True)
    wrong = read_roll(EXAMPLE, [f"{changed}=language_model"]).findings
    assert any("vision_model" in str(each) for each in wrong)


def test_the_example_of_colours_runs(pool, tmp_path):
    run_script(EXAMPLE.with_name("colours.py"), tmp_path)
    changed = {
        "pretrain": tmp_path / "model",
        "output_dir": tmp_path / "out",
        "rollout_dump_dir": tmp_path / "dump",
        "max_steps": 2,
        "eval_steps": 2,
        "logging_steps": 1,
        "rollout_batch_size": 8,
        "rewards.colours.worker_cls": "tests.rl.digits_reward.is_odd",
        "actor_train.training_args.gradient_accumulation_steps": 1,
    }
    for role in ("actor_train", "validation"):
        name = "train" if role == "actor_train" else "test"
        changed[f"{role}.data_args.file_name"] = f"[{tmp_path}/{name}.jsonl]"
        changed[f"{role}.data_args.media_dir"] = tmp_path
    asked = read_roll(EXAMPLE, [f"{key}={value}" for key, value in changed.items()]).require_valid()
    pool.run(1, run_file, asked, limit=120.0)  # max_log_prob_gap compares engine and trainer
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [each["prompt_length"] for each in records if "reward" in each] == [pytest.approx(55)] * 2
    assert any("eval_accuracy" in each for each in records)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", tmp_path / "out"))
    moved = {name.split(".")[0] for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert {"visual", "model"} <= moved
