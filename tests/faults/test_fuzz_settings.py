"""Settings files that nobody would write: each is taken, and says the same when written again, or refused with places.

As `train`, `megatron sft` and `rl` read them, with the rules and the plan of a run on eight GPUs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import JSON, NUMBERS, TEXTS, changed_environment, fuzz
from hypothesis import strategies as st

from megatune.config.dialects.dialect import LLAMAFACTORY
from megatune.config.dialects.roll import read_roll, run_yaml
from megatune.config.dialects.swift import read_swift, swift_lines
from megatune.config.dialects.swift_command import kinds
from megatune.config.entry import is_rl_file
from megatune.config.load import Loaded, dump, load
from megatune.config.rl.settings import rl_keys
from megatune.config.setting import SettingInfo
from megatune.config.settings import Settings, all_settings, setting_paths
from megatune.config.values import shown
from megatune.errors import Finding, MegatuneError
from megatune.families import load_architecture
from megatune.plan.catalogue import find_machine
from megatune.plan.run.preflight import preflight
from megatune.training.checks import check_files
from megatune.training.source import RunModel

_CONFIG = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 24, "vocab_size": 512,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
_ROLL_FILES = sorted((Path(__file__).parents[1] / "config" / "roll_files").glob("*.yaml"))
# What YAML can say and a settings file has no use for.
_ODD = [
    "!!int abc", "!!float 1", "!!binary aGk=", "!!python/object/apply:os.system [true]", "!!set {a, b}", "!mine x",
    "*a",
    "&a [*a]", "&a {b: *a}", "{<<: {a: 1}}", "[1, [2, [3, [4, [5, [6, [7, [8, [9]]]]]]]]]", "{", "[", '"', "'", "|",
    ">",
    "|\n  a\n  b", "? x", "? [a]: b", "- a\n- b", "a: b: c", "a:\n\tb: 1", "2026-01-01", "1:30", "0x1F", "0o17",
    "1_000",
    "1e400", "-1e400", "+.inf", ".nan", "01", "1.", ".5", "1e", "0b1", "yes", "NO", "Off", "~", "", "# nothing",
    "\t", "@x", "`x`", "%x", "---", "...", "--- x", "a # b", "a#b", "\u2028", "\x85", "1" * 400, "1" * 5000, "- - - a",
    "{a: 1, a: 2}", "{1: 2, null: 3}", "{[1]: 2}", "{? 1}", "'null'", '"1e-5"', "[", "]", "[a, b", "a, b,, c", ",",
]  # fmt: skip


def _value_of(info: SettingInfo) -> st.SearchStrategy[Any]:
    """Return values of a setting's type, most of them in its range."""
    likely: list[st.SearchStrategy[Any]] = [st.just(info.default)]
    if info.choices:
        choice = st.sampled_from(info.choices)
        likely.append(st.lists(choice, max_size=3) if list in info.kinds else choice)
    if int in info.kinds or float in info.kinds:
        low = int(info.bounds.get("ge", info.bounds.get("gt", 0)))
        likely.append(st.integers(low, low + 8) if int in info.kinds else st.floats(0, 1))
    if bool in info.kinds:
        likely.append(st.booleans())
    if list in info.kinds and not info.choices:
        item = NUMBERS if info.items is not str else TEXTS
        likely.append(st.lists(item, max_size=3))
    if str in info.kinds and not info.choices:
        likely.append(TEXTS)
    if dict in info.kinds:
        likely.append(st.dictionaries(TEXTS, JSON, max_size=3))
    return st.one_of(likely)


def _key(names: Sequence[str]) -> st.SearchStrategy[str]:
    """Return names, some of them with a letter wrong, and other texts."""
    known = st.sampled_from(names)
    wrong = st.tuples(known, st.integers(0, 30), TEXTS).map(
        lambda each: each[0][: each[1]] + each[2] + each[0][each[1] :]
    )
    return st.one_of(*[known] * 18, wrong, TEXTS)


@st.composite
def _texts_of(draw: st.DrawFn, names: Sequence[str], wild: bool) -> tuple[str, str]:
    """Draw a key and its value as YAML; where it is not wild, a value of the setting's type."""
    key = draw(_key(names) if wild else st.sampled_from(names))
    info = all_settings().get(setting_paths().get(key, ""))
    kind = draw(st.integers(0, 3)) if wild else 3
    if kind == 0:
        return key, draw(st.sampled_from(_ODD) | TEXTS)
    value = draw(_value_of(info)) if info is not None and kind > 1 else draw(JSON)
    return key, _written(value)


def _written(value: Any) -> str:
    try:
        return shown(value, quoted=True)
    except (ValueError, UnicodeError):  # an integer of more digits than Python writes
        return "9" * 5000


def _line(pair: tuple[str, str]) -> str:
    key, value = pair
    plain = key.isidentifier()
    return f"{key if plain else json.dumps(key)}: {value}"


_RL = sorted({dotted.rpartition(".")[2] for dotted in rl_keys()})
_REFERENCES = st.sampled_from(
    ["${max_steps}", "${a}", "${actor_train}", "${rewards.math_rule}", "${oc.env:HOME}", "${oc.env:NONE,1}", "${", "$"]
)
_NEAR = st.one_of(
    st.integers(0, 8), st.floats(0, 2), st.booleans(), st.sampled_from(["list(range(0,8))", "[0]", "1,2"])
)
_OWN = [info.name for info in all_settings().values()]
_BYTES = st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))


@st.composite
def _files(draw: st.DrawFn) -> tuple[bytes, list[str], list[str]]:
    """Draw a file of our own or LLaMA-Factory's keys, overrides and flags."""
    names = _OWN if draw(st.booleans()) else LLAMAFACTORY.names
    wild = draw(st.booleans())
    good = "stage: sft\nmodel_name_or_path: MODEL\ndataset: a\noutput_dir: out\n"
    good = draw(st.sampled_from([good, good, ""])) if wild else good
    pairs = draw(st.lists(_texts_of(names if wild else _OWN, wild), min_size=1, max_size=5 if wild else 3))
    text = (good + "\n".join(map(_line, pairs)) + "\n").encode("utf-8", "surrogatepass")
    if not wild:
        return text, [], []
    kind = draw(st.integers(0, 9))
    if kind == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(_BYTES) + text[at:]
    elif kind == 1:
        text = text.decode("utf-8", "replace").encode(
            draw(st.sampled_from(["utf-16", "utf-8-sig", "utf-32", "cp037"])), "replace"
        )
    elif kind == 2:
        text = draw(_BYTES)
    elif kind == 3:
        text = text.replace(b"\n", draw(st.sampled_from([b"\r\n", b"\r", b"\n\n\n", b"\n  ", b"\n\t", b"\0\n"])))
    words = [f"{key}={value}" for key, value in draw(st.lists(_texts_of(names, wild), max_size=2))]
    flags = [word for key, value in draw(st.lists(_texts_of(names, wild), max_size=2)) for word in (f"--{key}", value)]
    return text, words, flags


@st.composite
def _command_lines(draw: st.DrawFn) -> tuple[str, list[str], bytes, dict[str, str]]:
    """Draw a command line of Megatron-SWIFT, a file of flags beside it, and variables."""
    wild = draw(st.booleans())
    texts = _texts_of(list(kinds()) if wild else _OWN, wild)
    words = ["--model", "MODEL", "--dataset", "a", "--save", "out", "--train_iters", "3"]
    for key, value in draw(st.lists(texts, max_size=5 if wild else 2)):
        forms = [[f"--{key}", value], [f"--{key}={value}"], [f"--{key}"], [f"--{key}", *value.split()]]
        words += draw(st.sampled_from(forms)) if wild else forms[1]
    words = [word.replace("\0", "") for word in words]  # which no process can be given
    lines = [_line(pair) for pair in draw(st.lists(texts, max_size=4 if wild else 1))]
    env = {}
    if wild:
        lines.append(f"ENV: {_written(draw(st.dictionaries(TEXTS, JSON, max_size=2)))}")
        counts = st.sampled_from(["1", "2", "8", "0", "-1", "x", "", "²", "٢", "9" * 5000, "1.5"])
        env = draw(st.fixed_dictionaries({}, optional={"NNODES": counts, "NPROC_PER_NODE": counts}))
    first = ["flags.yaml"] if draw(st.booleans()) else []
    verb = draw(st.sampled_from(["sft", "pt", "rlhf"]))
    return verb, [*first, *words], "\n".join(lines).encode("utf-8", "surrogatepass"), env


@st.composite
def _rl_files(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """Draw one of ROLL's files with some of its values changed, left out, or put elsewhere, and overrides."""
    tree, wild = yaml.safe_load(draw(st.sampled_from(_ROLL_FILES)).read_text()), draw(st.booleans())
    for _ in range(draw(st.integers(0, 3)) if wild else 1):
        below: Any = tree
        while True:
            places = list(below) if isinstance(below, dict) else list(range(len(below)))
            place = draw(st.sampled_from(places))
            if not isinstance(below[place], dict | list) or not below[place] or draw(st.integers(0, 4)) == 0:
                break
            below = below[place]
        change = draw(st.integers(0, 5)) if wild else 6
        if change == 0:
            del below[place]
        elif change == 1 and isinstance(below, dict):
            below[draw(_key(_RL))] = below.pop(place)
        elif change == 2 and isinstance(below, dict):
            below[draw(_key(_RL))] = draw(JSON)
        elif wild:
            below[place] = draw(_REFERENCES | JSON | _NEAR)
        elif isinstance(below[place], bool):
            below[place] = not below[place]
        elif isinstance(below[place], int | float):
            below[place] *= draw(st.integers(0, 4))
        if not tree:
            break
    text = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
    if not wild:
        return text.encode(), []
    if draw(st.integers(0, 5)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(_ODD) | TEXTS) + text[at:]
    dotted = st.lists(_key([*_RL, "actor_train", "rewards", "reference"]), min_size=1, max_size=3).map(".".join)
    words = [
        draw(st.sampled_from(["{}={}", "+{}={}", "~{}", "{}", "++{}={}"])).format(draw(dotted), _written(draw(JSON)))
        for _ in range(draw(st.sampled_from([0, 0, 1, 2])))
    ]
    return text.encode("utf-8", "surrogatepass"), words


class _Checked:
    """What became of files, in a folder with a model beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.counts = folder, Counter[str]()
        (folder / "MODEL").mkdir()
        (folder / "MODEL" / "config.json").write_text(json.dumps(_CONFIG))
        self.architecture = load_architecture(folder / "MODEL")
        self.machine = find_machine("h100")

    def own(self, file: tuple[bytes, list[str], list[str]]) -> None:
        text, words, flags = file
        Path("run.yaml").write_bytes(text)
        is_rl_file("run.yaml")
        try:
            loaded = load("run.yaml", words, flags)
            self._placed(loaded.findings, "run.yaml")
            settings = self._planned(loaded)
        except MegatuneError as error:
            self._refused(error)
            return
        self._same_again(settings, loaded)

    def saw_both(self, examples: int) -> None:
        """A fuzz that is always refused, or never, has shown nothing."""
        print(f"{examples} files: {dict(self.counts)}")
        assert min(self.counts["accepted"], self.counts["refused"]) > examples // 20, self.counts

    def _planned(self, loaded: Loaded) -> Settings:
        """Do what `train` does before it starts processes. Data and folders may not be there: that is told apart."""
        loaded = loaded.for_world(8)
        model = RunModel(loaded.settings, asks=True)
        for error in check_files(loaded.settings, loaded.invalid).errors:
            self._told(error)
        return preflight(loaded, 8, machine=self.machine, rows_follow=True, model_dir=model.config_dir).settings

    def _same_again(self, settings: Any, loaded: Loaded) -> None:
        """What is accepted is written to run.yaml, and means the same there."""
        self.counts["accepted"] += 1
        Path("again.yaml").write_text(dump(settings, loaded.origins), encoding="utf-8")
        again = load("again.yaml")
        assert not again.findings, f"{again.findings}"
        assert repr(again.settings) == repr(settings)

    def _refused(self, error: MegatuneError) -> None:
        self.counts["refused"] += 1
        self._told(error)

    def _told(self, error: MegatuneError) -> None:
        assert error.findings
        assert error.exit_code in (64, 65, 66, 69, 73)
        for finding in error.findings:
            assert finding.what
            assert len(f"{finding}") < 20_000

    def _placed(self, findings: Sequence[Finding], name: str) -> None:
        """What is wrong with a line has its file, line and key."""
        for finding in findings:
            assert finding.where or finding.fix, finding
            if finding.where.startswith(f"{name}:"):
                assert finding.where.rpartition(":")[2].isdigit(), finding

    def swift(self, line: tuple[str, list[str], bytes, dict[str, str]]) -> None:
        verb, words, text, env = line
        Path("flags.yaml").write_bytes(text)
        try:
            asked = read_swift(verb, words, env=env)
            with changed_environment(asked.command.variables):
                found = read_swift(verb, words, env=env, config=_CONFIG, on_cpu=False)
                self._placed(found.loaded.findings, "flags.yaml")
                settings = self._planned(found.loaded)
                assert swift_lines(found, found.loaded.for_world(8))
        except MegatuneError as error:
            self._refused(error)
            return
        self._same_again(settings, found.loaded)

    def roll(self, file: tuple[bytes, list[str]]) -> None:
        text, words = file
        Path("rl.yaml").write_bytes(text)
        is_rl_file("rl.yaml")
        try:
            read = read_roll("rl.yaml", words, lambda settings, stage: self.architecture)
            self._placed(read.findings, "rl.yaml")
            settings = read.require_valid()
        except MegatuneError as error:
            self._refused(error)
            return
        self.counts["accepted"] += 1
        with changed_environment({**read.variables, **settings.run.system_envs}):
            pass
        Path("again.yaml").write_text(run_yaml(read), encoding="utf-8")
        again = read_roll("again.yaml", (), lambda settings, stage: self.architecture)
        assert not again.findings, f"{again.findings}"
        assert repr(again.settings) == repr(settings)


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Checked:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return _Checked(tmp_path)


@pytest.mark.extended(6_000)
@pytest.mark.parametrize("examples", [150, 6_000])
def test_own_files(examples: int, checked: _Checked) -> None:
    fuzz(_files(), checked.own, examples)
    checked.saw_both(examples)


@pytest.mark.extended(2_000)
@pytest.mark.parametrize("examples", [80, 2_000])
def test_command_lines_of_megatron_swift(examples: int, checked: _Checked) -> None:
    fuzz(_command_lines(), checked.swift, examples)
    checked.saw_both(examples)


@pytest.mark.extended(2_000)
@pytest.mark.parametrize("examples", [50, 2_000])
def test_files_of_reinforcement_learning(examples: int, checked: _Checked) -> None:
    fuzz(_rl_files(), checked.roll, examples)
    checked.saw_both(examples)
