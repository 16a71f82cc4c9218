"""Megatron-SWIFT's quick start and runs, of versions 3 and 4: other models, data and sizes, every flag as it is."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from pool_launch import CommandLine
from runs import metrics, tensors

from megatune.config.dialects.swift import SwiftRun, read_swift
from megatune.demo.checkpoint import make_checkpoint
from megatune.families import read_config
from megatune.plan.catalogue import cpu_machine
from megatune.plan.run.preflight import Preflight, preflight

EXAMPLES = Path(__file__).parents[2] / "examples" / "swift"
SCRIPTS = sorted(str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.glob("*/*.sh"))
# What the shell of a cluster gives the script that needs it.
CLUSTER = {"WORLD_SIZE": "2", "RANK": "0", "NPROC_PER_NODE": "8"}
# Sizes that a tiny model on a small machine needs otherwise.
SIZES = {
    "max_length": "128",
    "train_iters": "2",
    "num_workers": "0",
    "dataloader_num_workers": "0",
    "dataset_num_proc": "1",
    "max_epochs": "1",
    "decoder_last_pipeline_num_layers": "1",
}
HEADS = {"num_attention_heads": 8, "num_query_groups": 8, "num_layers": 2}
# Layouts of more processes, and steps of more rows, than these need, and how many processes they then have.
FEWER = {
    "v3/moe": ({"expert_model_parallel_size": "2"}, "4"),
    "v3/dpo": ({"tensor_model_parallel_size": "2", "micro_batch_size": "4", "global_batch_size": "8"}, "2"),
    "v3/offload": ({"tensor_model_parallel_size": "2", "global_batch_size": "4"}, "2"),
}


class Command(NamedTuple):
    """A command of a script: environment variables before it, program, verb and flags."""

    env: dict[str, str]
    program: str
    verb: str
    flags: dict[str, list[str]]

    @property
    def words(self) -> list[str]:
        return [word for name, values in self.flags.items() for word in (f"--{name}", *values)]

    def having(self, **flags: str | list[str] | Path) -> Command:
        """Return it with other values of flags, of those that it has."""
        values = {name: each if isinstance(each, list) else [str(each)] for name, each in flags.items()}
        return self._replace(flags={name: values.get(name, each) for name, each in self.flags.items()})


def commands(name: str) -> list[Command]:
    """Read a script as a shell does."""
    found = []
    text = (EXAMPLES / f"{name}.sh").read_text()
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        env, flags = {}, {}
        while words and "=" in words[0]:
            variable, _, value = words.pop(0).partition("=")
            env[variable] = CLUSTER[value[1:]] if value.startswith("$") else value
        for word in words[2:]:
            if word.startswith("--"):
                values = flags.setdefault(word[2:], [])
            else:
                values.append(word)
        if words:
            found.append(Command(env, words[0], words[1], flags))
    return found


def training(name: str) -> Command:
    (command,) = (each for each in commands(name) if each.program == "megatron")
    return command


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in ms-swift's standard forms."""
    folder = tmp_path_factory.mktemp("data")
    for number, colour in enumerate(("red", "green")):
        Image.new("RGB", (90 + 60 * number, 80), colour).save(folder / f"{number}.png")
    rows: dict[str, list[dict[str, Any]]] = {"chat": [], "self": [], "text": [], "pair": [], "label": [], "picture": []}
    for number in range(24):
        asked = {"role": "user", "content": f"Say {number}."}
        said = {"role": "assistant", "content": f"It is {number}. " * 3}
        shown = {"role": "user", "content": "<image>Which colour?"}
        told = {"role": "assistant", "content": "It is red." if number % 2 else "It is green."}
        images = {"images": [str(folder / f"{number % 2}.png")]}
        rows["chat"].append({"messages": [asked, said]})
        who = {"query": "Who are you?", "response": "I am {{NAME}} of {{AUTHOR}}."}
        rows["self"].append({**who, "tag": ("zh", "en")[number % 2]})
        rows["text"].append({"content": f"One text is {number}. " * 9})
        rows["pair"].append({"messages": [asked, said], "rejected_response": f"No {number}."})
        rows["label"].append({"messages": [asked], "label": number % 2})
        rows["picture"].append({"messages": [shown, told], **images})
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in each))
    return folder


class Stand(NamedTuple):
    """What stands for the model and the data of a script, and what its flags come to.

    Attributes:
        files: of the rows of each data set.
        settings: name -> value.
    """

    family: str
    files: list[str]
    world_size: int
    settings: dict[str, Any]
    sizes: dict[str, Any] = {}  # noqa: RUF012


PACKED = {"packing": True}
TAUGHT = {
    "model_name": ["swift-robot"],
    "model_author": ["swift"],
    "default_system": "You are a helpful assistant.",
}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
HELD_OUT = {"val_size": 0.01, "eval_strategy": "steps", "eval_steps": 200}
STANDS = {
    "v3/quick_start": Stand(
        "qwen2", ["chat#8", "chat#8", "self#8"], 2, {"max_steps": 2, "warmup_steps": 10.0, **TAUGHT}, {"num_layers": 2}
    ),
    "v3/moe": Stand("qwen3_moe", ["chat"], 16, {"expert_model_parallel_size": 8, **PACKED, **FULL}),
    "v3/pretrain": Stand("qwen2", ["text"], 4, {"stage": "pt", "streaming": True, **PACKED}, HEADS),
    "v3/dpo": Stand(
        "qwen3", ["pair#16"], 4, {"stage": "dpo", "pref_ftx": 1.0, **HELD_OUT, **FULL}, HEADS
    ),
    "v3/offload": Stand(
        "qwen2", ["chat#8"], 8, {"optimizer_cpu_offload": True, "num_train_epochs": 1.0}, HEADS
    ),
    "v3/vision_lora": Stand(
        "qwen2_5_vl", ["picture#24"], 2,
        {"lora_rank": 8, "lora_alpha": 32, "freeze_vision_tower": True,
         "image_max_pixels": 1003520, **PACKED},
    ),
    "v4/quick_start": Stand("qwen2", ["chat#8", "chat#8", "self#8"], 2, {**TAUGHT, **FULL}, {"num_layers": 2}),
    "v4/lora": Stand(
        "qwen2", ["chat#8", "chat#8", "self#8"], 2,
        {"finetuning_type": "lora", "lora_target": ["all"], **TAUGHT, **FULL},
    ),
    "v4/moe_pipeline": Stand(
        "qwen2_moe", ["chat"], 8,
        {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1, **PACKED, **FULL},
    ),
    "v4/long_text": Stand("qwen2", ["chat"], 4, {"sequence_parallel": True, **PACKED, **FULL, **HELD_OUT}, HEADS),
    "v4/dpo": Stand("qwen3", ["pair"], 4, {"stage": "dpo", "group_by_length": True, "pref_ftx": 0.1, **FULL}, HEADS),
    "v4/seq_cls_lora": Stand(
        "qwen3_moe", ["label"], 2,
        {"stage": "cls", "num_labels": 2, "finetuning_type": "lora", "expert_model_parallel_size": 2,
         "merge_lora": True, **PACKED, **FULL, **HELD_OUT},
    ),
    "v4/vision": Stand(
        "qwen3_vl", ["picture#24"], 2, {"video_maxlen": 16, "freeze_language_model": False, **PACKED}
    ),
}  # fmt: skip


def stand_in(name: str, folder: Path) -> Path:
    """Make a tiny model of the family of a script's, in the dtype that is published."""
    model = make_checkpoint(STANDS[name].family, folder, **STANDS[name].sizes)
    config = model / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    return model


def placed(name: str, model: Path, data: Path, output: Path) -> Command:
    """Return the training of a script, on another model and other data."""
    sets = [f"{data}/{file.replace('#', '.jsonl#') if '#' in file else f'{file}.jsonl'}" for file in STANDS[name].files]
    places: dict[str, Any] = {"model": model, "load": model, "mcore_model": model, "output_dir": output, "save": output}
    command = training(name).having(**places, dataset=sets, **SIZES)
    return command._replace(env={**(CLUSTER if "NNODES" in command.env else {}), **command.env})


def asked(name: str, model: Path, data: Path, output: Path) -> SwiftRun:
    """Read the training of a script."""
    command = placed(name, model, data, output)
    return read_swift(command.verb, command.words, env=command.env, config=read_config(model), on_cpu=True)


def checked(run: SwiftRun) -> Preflight:
    world_size = run.loaded.settings.run.num_processes
    assert world_size is not None
    return preflight(run.loaded.for_world(world_size), world_size, (), cpu_machine(2**36, world_size))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_understood(name: str, data: Path, tmp_path: Path) -> None:
    stand = STANDS[name]
    settings = checked(asked(name, stand_in(name, tmp_path / "model"), data, tmp_path / "out")).settings
    assert settings.run.num_processes == stand.world_size
    found = {name: value for group in settings.model_dump().values() for name, value in group.items()}
    assert {name: found[name] for name in stand.settings} == stand.settings


def test_adapters_of_experts(data: Path, tmp_path: Path) -> None:
    """What nobody asked for and they cannot do is left out; what is asked for is not."""
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    found = asked("v4/lora", model, data, tmp_path / "out")
    assert found.loaded.settings.finetuning.lora_dropout == 0
    assert checked(found).settings.finetuning.lora_target == ["all"]
    command = training("v4/lora").having(target_modules=["linear_qkv"])
    of_attention = read_swift("sft", command.words, env={}, config=read_config(model))
    assert of_attention.loaded.settings.finetuning.lora_dropout == 0.05


@pytest.fixture
def run(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Command], str]:
    """Run a command of a script, `megatune` before it; return what it printed."""
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))

    def run_one(command: Command) -> str:
        with monkeypatch.context() as patch:
            for variable, value in command.env.items():
                if variable != "CUDA_VISIBLE_DEVICES":
                    patch.setenv(variable, value)
            ended = command_line(command.program, command.verb, *command.words)
        assert ended.returncode == 0, ended
        return ended.stdout

    return run_one


@pytest.mark.parametrize("version", ["v3", "v4"])
def test_the_quick_start(
    version: str, run: Callable[[Command], str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convert, train on two processes, convert back and ask, with the flags that are published."""
    name = f"{version}/quick_start"
    to_mcore, _, to_hf, infer = commands(name)
    mcore, output, hf = (tmp_path / name for name in ("mcore", "out", "hf"))
    model = stand_in(name, tmp_path / "model")
    run(to_mcore.having(model=model, output_dir=mcore))
    assert "step 2/2" in run(placed(name, mcore, data, output))
    (checkpoint,) = output.glob("checkpoint-*")
    assert (checkpoint / "latest_checkpointed_iteration.txt").is_file() is (version == "v4")
    run(to_hf.having(mcore_model=checkpoint if version == "v4" else output, output_dir=hf))
    before, trained, after = tensors(model), tensors(checkpoint), tensors(hf)
    assert before.keys() == trained.keys() == after.keys()
    assert all(tensor.equal(after[key]) for key, tensor in trained.items())
    assert any(not tensor.to(torch.bfloat16).equal(after[key]) for key, tensor in before.items())
    monkeypatch.setattr("sys.stdin", io.StringIO("who are you?\n"))
    assert run(infer.having(model=hf, max_new_tokens="8"))


@pytest.mark.extended("v3/pretrain", "v3/moe", "v4/long_text", "v4/dpo", "v4/moe_pipeline", "v3/vision_lora", "v4/lora")
@pytest.mark.parametrize("name", [name for name in SCRIPTS if not name.endswith("quick_start")])
def test_a_run(name: str, run: Callable[[Command], str], data: Path, tmp_path: Path) -> None:
    model, output = stand_in(name, tmp_path / "model"), tmp_path / "out"
    command = placed(name, model, data, output)
    if name in FEWER:
        sizes, processes = FEWER[name]
        command = command.having(**sizes)._replace(env={"NPROC_PER_NODE": processes})
    run(command)
    records = metrics(output).values()
    assert records
    assert all(step["loss"] > 0 and step["grad_norm"] > 0 for step in records)
    if "lora" in name:
        assert (output / "adapter_model.safetensors").is_file()
    else:
        assert tensors(output).keys() == tensors(model).keys()
