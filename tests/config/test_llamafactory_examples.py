"""Every file of LLaMA-Factory's folder `examples` is one that runs, or is refused by the name of what is not built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llamafactory_kit import Example, examples, findings_of, refused_keys

from megatune.cli import export
from megatune.data.templates import named_template
from megatune.errors import MegatuneError
from megatune.families import load_architecture

EXAMPLES = examples()
OF_KEYS = {"template", "architecture", "unknown"}


@pytest.mark.parametrize(
    "example", [each for each in EXAMPLES if each.verb in ("train", "none")], ids=lambda each: each.name
)
def test_a_file_of_settings_is_read_or_refused_by_name(example: Example, tmp_path: Path) -> None:
    findings = findings_of(example.write(tmp_path), example.processes)
    if example.refused == ["unknown"]:
        assert all(finding.what.startswith(("unknown setting", "model_", "dataset", "output_")) for finding in findings)
        return
    assert refused_keys(findings) == set(example.refused) - OF_KEYS
    assert not [finding for finding in findings if finding.what.startswith("unknown setting")]
    if not set(example.refused) - OF_KEYS:
        assert findings == []


@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.verb == "export"], ids=lambda each: each.name)
def test_a_file_of_an_export_is_read_or_refused_by_name(example: Example, tmp_path: Path) -> None:
    words = [str(example.write(tmp_path))]
    if not set(example.refused) - OF_KEYS:
        assert export.checked(export.COMMAND.read(words)).export_dir == example.keys["export_dir"]
        return
    with pytest.raises(MegatuneError) as caught:
        export.checked(export.COMMAND.read(words))
    assert {finding.what.split(":")[0].split(" ")[0] for finding in caught.value.findings} == set(example.refused)


@pytest.mark.parametrize("example", [each for each in EXAMPLES if "template" in each.keys], ids=lambda each: each.name)
def test_templates_are_known_or_refused(example: Example) -> None:
    if "template" in example.refused:
        with pytest.raises(MegatuneError, match="is unknown"):
            named_template(example.keys["template"])
    else:
        named_template(example.keys["template"])


@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.config], ids=lambda each: each.name)
def test_models_that_are_not_built_are_refused(example: Example, tmp_path: Path) -> None:
    assert "architecture" in example.refused
    (tmp_path / "config.json").write_text(json.dumps(example.config))
    with pytest.raises(MegatuneError) as caught:
        load_architecture(tmp_path)
    said = str(caught.value)
    quantized = example.config.get("quantization_config")
    assert (quantized["quant_method"] if quantized else example.config["model_type"]) in said


def test_no_file_is_left_out_of_the_table() -> None:
    assert len(EXAMPLES) == 96
    assert all(example.family or example.refused for example in EXAMPLES)
