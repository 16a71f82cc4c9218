"""`megatune export`: merging adapters from files as LLaMA-Factory's users have them, and from flags."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_sizes import MakeModel
from safetensors.torch import load_file
from torch import Tensor

from megatune.cli.main import main
from megatune.demo.checkpoint import make_checkpoint

# As LLaMA-Factory publishes it (examples/merge_lora), with folders put in.
FILE = """\
### Note: DO NOT use quantized model or quantization_bit when merging lora adapters

### model
model_name_or_path: {model}
adapter_name_or_path: {adapter}
template: qwen3_nothink
trust_remote_code: true

### export
export_dir: {out}
export_size: 5
export_device: cpu  # choices: [cpu, auto]
export_legacy_format: false
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("demo") / "base")


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return save_adapter(model, tmp_path / "run")


def save_adapter(model: Path, folder: Path) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )  # B is not zero
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    adapted.peft_config["default"].base_model_name_or_path = str(model)
    adapted.save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_published_file_merges(
    model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    (tmp_path / "merge.yaml").write_text(FILE.format(model=model, adapter=adapter, out=out))
    assert main(["export", str(tmp_path / "merge.yaml")]) == 0
    said = capsys.readouterr().out
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith(("q_proj.weight", "down_proj.weight"))}
    assert f"merged 1 adapter into {len(changed)} of {len(before)} tensors" in said
    assert {path.name for path in out.iterdir()} == {path.name for path in model.iterdir() if path.suffix != ".md"}
    assert (out / "config.json").read_bytes() == (model / "config.json").read_bytes()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(model).chat_template
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_flags_win_and_the_base_is_known_to_the_adapter(model: Path, adapter: Path, tmp_path: Path) -> None:
    """An adapter, a run's folder with one in a checkpoint, or the base and both adapters."""
    shutil.copytree(adapter, tmp_path / "out/checkpoint-8")
    (tmp_path / "merge.yaml").write_text(FILE.format(model=model, adapter=adapter, out=tmp_path / "never"))
    named = ["--adapter_name_or_path", f"{adapter},{tmp_path / 'out'}"]
    for number, words in enumerate(
        (
            [str(tmp_path / "merge.yaml"), "export_size=0.0001"],
            ["--adapter-name-or-path", str(tmp_path / "out"), "--merge_lora", "true"],
            [str(adapter), "--finetuning_type=lora"],
            ["--model_name_or_path", str(tmp_path / "out/checkpoint-8")],
            ["--model_name_or_path", str(model), *named],
            named,
        )
    ):
        assert main(["export", *words, "--export_dir", str(tmp_path / str(number))]) == 0
    read = [tensors(tmp_path / str(number)) for number in range(6)]
    assert len(list((tmp_path / "0").glob("*.safetensors"))) > 2
    base = load_file(model / "model.safetensors")
    for found in read[:4]:
        assert all(torch.equal(found[name], read[1][name]) for name in base)
    for found in read[4:]:
        for name, weight in base.items():
            assert torch.allclose(found[name] - weight, 2 * (read[1][name] - weight), atol=1e-6)


def test_what_is_there_is_kept(model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "merged"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    words = ["export", str(adapter), "--export_dir", str(out)]
    assert main(words) == 73
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert main([*words, "--overwrite_output_dir"]) == 0
    assert not (out / "mine.txt").exists()
    assert main(["export", str(adapter), "--export_dir", str(model), "--overwrite_output_dir"]) == 73
    assert "is read from there" in capsys.readouterr().err
    assert (model / "model.safetensors").is_file()
    assert main(["export", str(adapter), "--export_dir", str(out / "config.json")]) == 73


def test_every_key_that_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "merge.yaml").write_text(
        "model_name_or_path: base\n"
        "export_quantization_bit: 4\n"
        "export_quantization_dataset: c4.json\n"
        "export_hub_model_id: me/mine\n"
        "export_legacy_format: true\n"
        "export_device: cuda\n"
        "finetuning_type: full\n"
        "export_size: 0\n"
        "adaptor_name_or_path: a\n"
        "merge_lora: false\n"
    )
    assert main(["export", str(tmp_path / "merge.yaml"), "--torch_dtype", "int8"]) == 64
    text = capsys.readouterr().err
    for said in (
        "merge.yaml:2: export_quantization_bit: 4 is not supported",
        "merge.yaml:3: export_quantization_dataset",
        "merge.yaml:4: export_hub_model_id",
        "merge.yaml:5: export_legacy_format: true is not supported",
        "merge.yaml:6: export_device: cuda is not supported",
        "merge.yaml:7: finetuning_type: full is not supported",
        "merge.yaml:8: export_size is 0",
        "merge.yaml:9: unknown setting 'adaptor_name_or_path'",
        "did you mean adapter_name_or_path?",
        "merge.yaml:10: merge_lora: false",
        "--torch_dtype: torch_dtype is 'int8'",
        "export_dir is missing",
        "11 problems",
    ):
        assert said in text, text


def test_what_is_missing_is_said(
    model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--export_dir", str(tmp_path / "merged")]
    assert main(["export", *out]) == 64
    assert "adapter_name_or_path is missing" in capsys.readouterr().err
    assert main(["export", str(model), *out]) == 64
    assert "there is nothing to merge" in capsys.readouterr().err
    assert main(["export", str(model), "--adapter_name_or_path", str(tmp_path / "nothing"), *out]) == 66
    assert "there is no folder" in capsys.readouterr().err
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"bias": "all", "init_lora_weights": "pissa"}))
    assert main(["export", str(adapter), *out]) == 66
    text = capsys.readouterr().err
    assert "bias is 'all'" in text
    assert "init_lora_weights is 'pissa'" in text
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    assert main(["export", str(adapter), *out]) == 66
    assert "base_model_name_or_path" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_another_model_is_refused(
    adapter: Path, model_dir: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model_name_or_path", str(model_dir("mixtral")), "--adapter_name_or_path", str(adapter)]
    assert main(["export", *words, "--export_dir", str(tmp_path / "merged")]) == 66
    assert "give the base that it was trained on" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_file_of_training_is_read(
    model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What says how to train changes nothing, and its output_dir, which it may overwrite, is that of the run."""
    path = tmp_path / "train.yaml"
    path.write_text(
        f"model_name_or_path: {model}\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\n"
        f"dataset: identity\ncutoff_len: 2048\nquantization_bit: 4\noutput_dir: {adapter}\n"
        "overwrite_output_dir: true\nper_device_train_batch_size: 1\nlearning_rate: 1.0e-4\nbf16: true\n"
    )
    assert main(["export", str(path)]) == 64
    said = capsys.readouterr().err
    assert "export_dir is missing" in said
    out = tmp_path / "merged"
    assert main(["export", str(path), f"adapter_name_or_path={adapter}", f"export_dir={out}"]) == 0
    assert (adapter / "adapter_config.json").is_file()
    assert (out / "model.safetensors").is_file()
    assert capsys.readouterr().err.splitlines() == [
        "accepted   stage, do_train, lora_rank, dataset, cutoff_len, per_device_train_batch_size, learning_rate, bf16: "
        "it belongs to training",
        "accepted   quantization_bit, output_dir, overwrite_output_dir: set for the run that the file trains",
    ]
