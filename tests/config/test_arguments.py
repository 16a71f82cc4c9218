"""A command line taken apart into its file, overrides and flags."""

import pytest

from megatune.config.flags import Arguments, split_arguments
from megatune.errors import ExitCode, MegatuneError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Arguments(None, [], [])),
        (["run.yaml"], Arguments("run.yaml", [], [])),
        (["run.yaml", "seed=1", "bf16=true"], Arguments("run.yaml", ["seed=1", "bf16=true"], [])),
        (["sead=1"], Arguments(None, ["sead=1"], [])),
        (["run.yaml", "--seed", "1", "--bf16"], Arguments("run.yaml", [], ["--seed", "1", "--bf16"])),
        (["--seed=1", "run.yaml"], Arguments("run.yaml", [], ["--seed=1"])),
        (["--dataset", "a", "b", "--seed", "-1"], Arguments(None, [], ["--dataset", "a", "b", "--seed", "-1"])),
        (["--default_system", "a=b"], Arguments(None, [], ["--default_system", "a=b"])),
        (["--bf16", "seed=1", "run.yaml"], Arguments("run.yaml", ["seed=1"], ["--bf16"])),
        # A settings file is no value of a boolean, nor of a flag that nobody knows.
        (["--foo", "1", "--json", "run.yaml"], Arguments("run.yaml", [], ["--foo", "1", "--json"])),
        (["--bf16", "run.yaml"], Arguments("run.yaml", [], ["--bf16"])),
        (["--foo", "run.yaml", "--dataset", "a.json"], Arguments("run.yaml", [], ["--foo", "--dataset", "a.json"])),
        (["--default_system", "-- a", "b"], Arguments(None, [], ["--default_system", "-- a", "b"])),
    ],
)
def test_split(words, expected):
    assert split_arguments(words) == expected


def test_two_files_are_one_too_many():
    with pytest.raises(
        MegatuneError, match=r"unexpected word 'b.yaml': the settings file is already 'a.yaml'"
    ) as caught:
        split_arguments(["a.yaml", "b.yaml"])
    assert caught.value.exit_code == ExitCode.SETTINGS
