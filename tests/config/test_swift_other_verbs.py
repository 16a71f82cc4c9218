"""ms-swift's command lines of export and infer, in the words that the verbs here read."""

from __future__ import annotations

from megatune.config.dialects.swift_other_verbs import export_words, hub_variables, infer_words


def test_export_is_spelled_as_it_is_read_here():
    found = export_words(
        [
            "--model",
            "M",
            "--to-mcore",
            "TRUE",
            "--exist_ok",
            "--adapters",
            "a",
            "b",
            "--tensor_model_parallel_size",
            "2",
            "--thread_count",
            "4",
            "--seed",
            "1",
            "--max_shard_size=2GB",
            "--use_hf",
            "true",
            "--hub_token",
            "secret",
        ]
    )
    assert found.findings == []
    assert found.words == [
        *("--model", "M", "--to_mcore", "true", "--exist_ok", "true", "--adapters", "a", "b"),
        *("--max_shard_size", "2GB"),
    ]
    assert [line.split()[1] for line in found.lines] == [
        *("--tensor_model_parallel_size", "--thread_count", "--seed", "--use_hf")
    ]
    assert hub_variables(found, {})["USE_MODELSCOPE_HUB"] == "0"
    assert found.variables["HF_TOKEN"] == "secret"
    assert not any("secret" in line for line in found.lines)


def test_what_export_does_not_do_is_refused_all_at_once():
    found = export_words(
        ["--to_hf", "true", "--quant_method", "gptq", "--to_ollama", "--push_to_hub", "false", "--modle", "M"]
    )
    assert [finding.what for finding in found.findings] == [
        "unknown flag --modle",
        "quant_method: gptq is not supported",
        "to_ollama: true is not supported",
    ]


def test_infer_takes_a_file_of_flags_and_the_hub(tmp_path):
    path = tmp_path / "infer.yaml"
    path.write_text("model: M\nval_dataset: [a, b]\nstream: true\nENV:\n  MAX_PIXELS: 5\n")
    found = infer_words([str(path), "--use-hf", "--temperature", "0"])
    given = ["--model", "M", "--val_dataset", "a", "b", "--stream", "true", "--temperature", "0"]
    assert found.words == [*given, "--max_new_tokens", "1000000000"]
    assert found.lines == [
        "swift      --max_new_tokens 1000000000  ms-swift's default: as many as the model's context holds"
    ]
    assert found.variables == {"MAX_PIXELS": "5", "USE_MODELSCOPE_HUB": "0"}
    assert hub_variables(infer_words(["--model", "M"]), {"USE_HF": "1"}) == {"USE_MODELSCOPE_HUB": "0"}
    assert hub_variables(infer_words(["--model", "M"]), {}) == {"USE_MODELSCOPE_HUB": "1"}
