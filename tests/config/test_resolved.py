"""run.yaml says everything, says where it came from, and is read again as the same settings."""

import string

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatune.config.groups.output import CheckpointSettings
from megatune.config.load import dump, load
from megatune.config.setting import Mark
from megatune.config.settings import Settings, all_settings


def read_again(tmp_path_factory, settings: Settings) -> Settings:
    path = tmp_path_factory.mktemp("resolved") / "run.yaml"
    path.write_text(dump(settings, {}), encoding="utf-8")
    loaded = load(path)
    assert loaded.findings == []
    assert set(loaded.origins.values()) != {"default"}
    return loaded.settings


def test_every_setting_is_a_line_with_its_origin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("\nlearning_rate: 1e-5\ndataset: a,b\n")
    loaded = load("my.yaml", ["eval_strategy=no"], ["--run_name", "1e5"])
    lines = dump(loaded.settings, loaded.origins).splitlines()
    written = dict(line.split(": ", 1) for line in lines if line and not line.startswith("#"))
    assert list(written) == [
        info.name for info in all_settings().values()
        if Mark.SECRET not in info.marks
    ]  # fmt: skip
    assert written["learning_rate"].split() == ["1e-05", "#", "my.yaml:2"]
    assert written["dataset"].split("  ")[0] == "[a, b]"
    assert written["eval_strategy"].split() == ['"no"', "#", "override"]
    assert written["run_name"].split() == ['"1e5"', "#", "flag"]
    assert written["seed"].split() == ["42", "#", "default"]
    assert written["num_processes"].split() == ["null", "#", "default"]


TEXTS = [
    "",
    " ",
    "a: b",
    "# no",
    "yes",
    "1e-5",
    "null",
    "~",
    "你好 😀",
    'a "b" \\ c',
    "line\nline\t\x7f\u2028",
    "[x",
    "-",
    "a,b",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_is_read_again(tmp_path_factory, text):
    settings = Settings.model_validate(
        {
            "run": {"run_name": text},
            "data": {
                "dataset": [text, "b"] if text else ["b"],
                "default_system": text,
                "interleave_probs": [1 / 3, 2 / 3],
                "template": None,
            },
            "optimizer": {"lr_scheduler_kwargs": {"x": text, text: [1, 1e-7, True, None]}},
        }
    )
    assert read_again(tmp_path_factory, settings) == settings


@given(
    rate=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    text=st.text(st.sampled_from(string.printable), max_size=12),
    steps=st.integers(min_value=-1, max_value=10**30),
)
@hypothesis_settings(max_examples=30, deadline=None, database=None)
def test_numbers_and_texts_are_read_again_exactly(tmp_path_factory, rate, text, steps):
    settings = Settings.model_validate(
        {"optimizer": {"learning_rate": rate, "max_steps": steps}, "data": {"default_system": text}}
    )
    assert read_again(tmp_path_factory, settings) == settings


def test_what_training_would_refuse_is_not_written(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(dump(Settings(), {}))
    loaded = load(path, ["model_name_or_path=m", "dataset=d", "output_dir=o"])
    assert loaded.check() == []
    assert loaded.settings.finetuning == Settings().finetuning


def test_an_origin_cannot_break_out_of_its_comment():
    text = dump(Settings(), {"run.seed": "a\nseed: 7\n"})
    assert "seed: 42" in text
    assert not any(line.startswith("seed: 7") for line in text.splitlines())


def test_secrets_are_read_and_never_written(tmp_path):
    """Nothing that holds or writes settings has them."""
    loaded = load(overrides=["hub_token=hf_secret"], flags=["--swanlab_api_key", "sk_secret", "--seed", "x"])
    assert loaded.secrets == {"checkpoint.hub_token": "hf_secret", "logging.swanlab_api_key": "sk_secret"}
    shown = [dump(loaded.settings, loaded.origins), repr(loaded.settings), *map(str, loaded.check())]
    held = CheckpointSettings(hub_token="hf_secret")
    assert "secret" not in "".join([*shown, dump(Settings(checkpoint=held), {})])


@pytest.mark.parametrize(
    ("line", "template"),
    [
        ("template: default                                   # default", None),
        ("template: default  # default", None),
        ("template: default                                   # my.yaml:3", "default"),
        ("template: default", "default"),
    ],
)
def test_an_older_run_keeps_the_template_that_nobody_wrote(tmp_path, line, template):
    """template: default meant the tokenizer's own chat template, which null means now."""
    (tmp_path / "run.yaml").write_text(f"# data\ndataset: [a]\n{line}\n")
    loaded = load(tmp_path / "run.yaml")
    assert (loaded.findings, loaded.settings.data.template) == ([], template)
