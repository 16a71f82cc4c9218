"""`megatune export --to_mcore | --to_hf`: what it writes and says, what it refuses, and what a kill leaves."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatune.cli.main import main
from megatune.demo.checkpoint import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("demo") / "base")


@pytest.fixture
def here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the model in it."""
    shutil.copytree(model, tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_adapter(model: Path, folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    adapted.peft_config["default"].base_model_name_or_path = str(model)
    adapted.save_pretrained(folder)


def test_there_and_back(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Megatron-SWIFT's users write it, with its default names."""
    words = ["--tensor_model_parallel_size", "2", "--pipeline_model_parallel_size", "2"]
    assert main(["export", "--model", "m", "--to_mcore", "true", *words]) == 0
    said, told = capsys.readouterr()
    assert "tensor_model_parallel_size, pipeline_model_parallel_size: the file is the same for every layout" in told
    assert "converted m to Megatron-Core's torch_dist: 1.5 MB in" in said
    assert "GB/s, in m-mcore" in said
    assert {path.name for path in Path("m-mcore").iterdir()} == {
        *(path.name for path in Path("m").iterdir() if path.suffix not in (".safetensors", ".md")),
        *("args.json", "iter_0000001", "latest_checkpointed_iteration.txt", "training"),
    }
    assert {path.name for path in Path("m-mcore/iter_0000001").iterdir()} == {
        ".metadata", "__0_0.distcp", "common.pt", "metadata.json"
    }  # fmt: skip
    common = torch.load("m-mcore/iter_0000001/common.pt", weights_only=False)
    assert (common["args"].tensor_model_parallel_size, common["checkpoint_version"]) == (1, 3.0)
    back = ["export", "--mcore_model", "m-mcore", "--to_hf", "true", "--max_shard_size", "500MB"]
    assert main(back) == 0
    assert Path("m-mcore-hf/model.safetensors").read_bytes() == Path("m/model.safetensors").read_bytes()
    assert Path("m-mcore-hf/config.json").read_bytes() == Path("m/config.json").read_bytes()
    assert main(back) == 73
    assert main([*back, "--exist_ok", "true", "--torch_dtype", "bfloat16"]) == 0
    assert {each.dtype for each in load_file("m-mcore-hf/model.safetensors").values()} == {torch.bfloat16}
    assert json.loads(Path("m-mcore-hf/config.json").read_text())["dtype"] == "bfloat16"


def test_what_is_beside_the_weights_says_what_they_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An iteration's folder; args.json in place of copied files; and nothing at all."""
    assert main(["export", "--model", "m", "--to_mcore", "--output_dir", "out"]) == 0
    assert main(["export", "--mcore_model", "out/iter_0000001", "--to_hf", "--output_dir", "a"]) == 0
    Path("out/config.json").unlink()
    shutil.rmtree("out/training")
    assert main(["export", "--mcore_model", "out", "--to_hf", "--output_dir", "b"]) == 0
    for folder in ("a", "b"):
        assert Path(folder, "model.safetensors").read_bytes() == Path("m/model.safetensors").read_bytes()
        assert Path(folder, "tokenizer.json").is_file()
    Path("out/args.json").write_text('{"model": "elsewhere/on/disk"}')
    assert main(["export", "--mcore_model", "out", "--to_hf", "--output_dir", "c"]) == 66
    assert "names 'elsewhere/on/disk', which does not exist here" in capsys.readouterr().err
    assert main(["export", "--mcore_model", "out", "--model", "m", "--to_hf", "--output_dir", "c"]) == 0


def test_adapters_are_merged(here: Path) -> None:
    Path("m/chat_template.jinja").unlink(missing_ok=True)
    config = json.loads(Path("m/tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    Path("m/tokenizer_config.json").write_text(json.dumps(config))
    save_adapter(Path("m"), Path("lora"))
    assert main(["export", "--model", "m", "--adapters", "lora", "--export_dir", "merged"]) == 0
    assert main(["export", "--model", "m", "--adapters", "lora", "--to_mcore", "true", "--output_dir", "mc"]) == 0
    assert main(["export", "--mcore_model", "mc", "--to_hf", "true", "--output_dir", "hf"]) == 0
    assert main(["export", "--model", "m", "--to_mcore", "true", "--output_dir", "plain"]) == 0
    # The template that an adapter was trained with goes with it, where the model has none.
    Path("lora/chat_template.jinja").write_text("{{ messages[0].content }}")
    assert main(["export", "--mcore_model", "plain", "--adapters", "lora", "--to_hf", "--output_dir", "hf2"]) == 0
    assert Path("hf2/chat_template.jinja").read_text() == "{{ messages[0].content }}"
    # As in Megatron-SWIFT's examples: a model and its adapter, or the adapter alone, which names its model.
    words = ["--to_hf", "true", "--merge_lora", "true", "--output_dir"]
    assert main(["megatron", "export", "--model", "m", "--mcore_adapter", "lora", *words, "hf3"]) == 0
    assert main(["megatron", "export", "--adapters", "lora", *words, "hf4"]) == 0
    # In version 3, where --save is the folder to write.
    assert main(["megatron", "export", "--load", "mc", "--to_hf", "true", "--save", "hf5"]) == 0
    expected = load_file("merged/model.safetensors")
    for folder in ("hf", "hf2", "hf3", "hf4", "hf5"):
        found = load_file(f"{folder}/model.safetensors")
        assert all(torch.equal(found[name], values) for name, values in expected.items())


REFUSED = {
    ("--to_hf", "--to_mcore", "--model", "m"): (64, "keep the one"),
    ("--to_hf", "--output_dir", "x"): (64, "mcore_model is missing"),
    ("--to_mcore", "--output_dir", "x"): (64, "model_name_or_path is missing"),
    ("--to_hf", "--model", "m", "--output_dir", "x"): (64, "there is nothing to convert"),
    ("--to_hf", "--mcore_model", "nowhere"): (66, "mcore_model: no folder 'nowhere'"),
    ("--to_mcore", "maybe", "--model", "m"): (64, "--model: names the model a second time"),
    ("--to_mcore", "--model", "m", "--torch_dtype", "int8"): (64, "expected one of: bfloat16"),
    ("--to_mcore", "--model", "m", "--adapters", "a", "--test_convert_precision"): (64, "merge them first"),
    ("--model", "m", "--export_dir", "x", "--mcore_model", "y"): (64, "mcore_model without a conversion"),
    ("--to_mcore", "--model", "m", "--output_dir", "m", "--exist_ok"): (73, "is read from there"),
    ("--to_hf", "--adapters", "a", "--merge_lora", "false"): (64, "fix: write --merge_lora true, or remove it"),
    ("--to_hf", "--mcore_model", "m", "--fp8_format", "e4m3"): (64, "fp8_format: e4m3 is not supported"),
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_refused(words: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = REFUSED[words]
    assert main(["export", *words]) == code
    assert said in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["m"]


def test_a_flipped_bit_is_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--model", "m", "--to_mcore", "--output_dir", "out"]) == 0
    path = Path("out/iter_0000001/__0_0.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert main(["export", "--mcore_model", "out", "--to_hf", "--output_dir", "hf"]) == 66
    assert "iter_0000001/__0_0.distcp is damaged: its digest does not match" in capsys.readouterr().err
    assert not Path("hf").exists()


def test_damage_in_files_of_others_is_found_while_they_are_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They have no digests; what was written before is deleted."""
    assert main(["export", "--model", "m", "--to_mcore", "--output_dir", "out"]) == 0
    shutil.rmtree("out/training")
    path = Path("out/iter_0000001/__0_0.distcp")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2].ljust(len(content), b"\0"))
    assert main(["export", "--mcore_model", "out", "--to_hf", "--output_dir", "hf"]) == 66
    assert "it is not a tensor written by torch.save" in capsys.readouterr().err
    assert sorted(path.name for path in here.iterdir()) == ["m", "out"]


# A process that is killed when it has written so many chunks.
KILLED = """
import os, signal, sys
from megatune.bridge.torch_dist.export import TorchDistFiles
from megatune.cli.main import main

add, left = TorchDistFiles.add, iter(range(20))

def add_and_die(files, *args):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    add(files, *args)

TorchDistFiles.add = add_and_die
main(sys.argv[1:])
"""


def test_a_kill_leaves_nothing_half_visible(here: Path) -> None:
    words = ["export", "--model", "m", "--to_mcore", "--output_dir", "out"]
    for before in ([], [*words]):
        if before:
            assert main(before) == 0
            words = [*words, "--exist_ok"]
        kept = sorted(path for path in Path("out").rglob("*") if path.is_file())
        # Forked threads of torch may wait for ever, so it is a new process.
        ended = subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True, text=True, timeout=600)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert sorted(path for path in Path("out").rglob("*") if path.is_file()) == kept
        assert Path(".out.partial").exists()
    assert main(words) == 0
    assert not [path for path in here.iterdir() if path.name.startswith(".")]


@pytest.mark.usefixtures("command_line")
def test_a_conversion_that_differs_ends_with_1(here: Path) -> None:
    from megatune.cli.export import COMMAND, _compare

    words = ["--model", "m", "--to_mcore", "--test_convert_precision", "--output_dir", "out"]
    assert main(["export", *words[:-3], *words[-2:]]) == 0
    weights = load_file("m/model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] += 1
    save_file(weights, "m/model.safetensors", {"format": "pt"})
    assert _compare(COMMAND.read(words).options, Path("m"), Path("out")) == 1
