"""ms-swift's command lines of export and infer, as our verbs read them."""

from __future__ import annotations

import re

import pytest

from megatune.cli.main import main
from megatune.cli.swift import command_of, variables_of


def test_export_takes_what_it_reads_and_names_what_changes_nothing() -> None:
    words = (
        "--model M --to-mcore TRUE --exist_ok --adapters a b --tensor_model_parallel_size 2 --thread_count 4 --seed 1 "
        "--max_shard_size=2GB --use_hf true --hub_token secret --mcore_mod N"
    )
    command = command_of("swift", "export")
    given = command.read(words.split())
    assert given.findings == []
    options = given.options
    assert (options.model_name_or_path, options.to_mcore, options.overwrite_output_dir) == ("M", True, True)
    assert (options.adapters, options.export_size, options.mcore_model) == (["a", "b"], 2.0, "N")
    assert given.lines == [
        "accepted   tensor_model_parallel_size: the file is the same for every layout",
        "accepted   thread_count: tensors are written one by one, to bound memory",
        "accepted   seed: it belongs to training",
    ]
    assert variables_of(given, {}) == {
        "USE_MODELSCOPE_HUB": "0", "HF_TOKEN": "secret", "MODELSCOPE_API_TOKEN": "secret"
    }  # fmt: skip


def test_what_export_does_not_do_is_refused_all_at_once() -> None:
    words = "--to_hf true --quant_method gptq --to_ollama --push_to_hub false --modle M"
    assert [finding.what for finding in command_of("swift", "export").read(words.split()).findings] == [
        "'--modle' is not known here",
        "quant_method: gptq is not supported",
        "to_ollama: true is not supported",
    ]


def test_infer_takes_a_file_of_flags_and_the_hub(tmp_path) -> None:
    path = tmp_path / "infer.yaml"
    path.write_text("model: M\nval_dataset: [a, b]\nstream: true\ntop_k: 3\nENV:\n  MAX_PIXELS: 5\n")
    given = command_of("swift", "infer").read(
        [str(path), "--use-hf", "--temperature", "0"], {"temperature": "model", "max_new_tokens": "1000000000"}
    )
    options = given.options
    assert (options.model, options.val_dataset, options.stream, options.top_k) == ("M", ["a", "b"], True, 3)
    assert (options.temperature, options.max_new_tokens) == (0.0, 10**9)
    assert (given.origin("temperature"), given.origin("max_new_tokens")) == ("flag", "default")
    assert variables_of(given, {}) == {"MAX_PIXELS": "5", "USE_MODELSCOPE_HUB": "0"}
    plain = command_of("swift", "infer").read(["--model", "M"], {"temperature": "model"})
    assert plain.options.temperature is None
    assert variables_of(plain, {"USE_HF": "1"}) == {"USE_MODELSCOPE_HUB": "0"}
    assert variables_of(plain, {}) == {"USE_MODELSCOPE_HUB": "1"}
    path.write_text("ENV: {USE_HF: 1}\n")
    hugging_face = command_of("swift", "infer").read([str(path)])
    assert variables_of(hugging_face, {}) == {"USE_HF": "1", "USE_MODELSCOPE_HUB": "0"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "export",
            ["output_dir is missing", "fix: --output_dir FOLDER", "adapters is missing", "fix: --adapters FOLDER"],
        ),
        ("export --to_mcore true", ["model is missing", "fix: --model FOLDER"]),
        ("export --adapters nowhere --output_dir x", ["--adapters: there is no folder nowhere"]),
        ("export --model here --to_mcore true --output_dir full", ["output_dir: full is", "write --exist_ok true"]),
        ("infer --model here --adapters nowhere", ["--adapters: there is no folder nowhere"]),
        ("deploy", ["model is missing"]),
    ],
)
def test_messages_name_the_flags_of_ms_swift(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("here/config.json", "full/file"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    assert main(["swift", *words.split()]) > 0
    error = capsys.readouterr().err
    for each in said:
        assert each in error
    assert not re.search("model_name_or_path|adapter_name_or_path|export_dir|overwrite_output_dir", error)
