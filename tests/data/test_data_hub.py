"""Data sets on hubs: the real client of Hugging Face's hub, against a small hub on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import TOKEN, Hub, running

CANARY = 'open("{path}", "w").write("a script ran")\n'


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def alpaca(*answers: str) -> str:
    return lines(*({"instruction": "Say it", "input": "", "output": answer} for answer in answers))


CARD = """---
license: mit
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*.jsonl
  - split: check
    path: [en/check.jsonl]
- config_name: zh
  data_files: "zh/*.jsonl"
---
# Two languages
"""
INFO = {
    "here": {"file_name": "deep/rows.jsonl", "num_samples": 4, "columns": {"prompt": "question"}},
    "folder": {"file_name": "deep"},
    "there": {"hf_hub_url": "team/cards", "subset": "en", "split": "check"},
    "gone": {"file_name": "gone.jsonl"},
    "pickle": {"file_name": "deep/rows.pkl"},
}


def repositories(canary: Path) -> dict[str, dict[str, str]]:
    """Each repository's files."""
    script = CANARY.format(path=canary)
    return {
        "team/plain": {"README.md": "# no card", ".gitattributes": "*", "rows.jsonl": alpaca("one", "two", "three")},
        "team/cards": {
            "README.md": CARD,
            "en/train-1.jsonl": alpaca("en 1"),
            "en/train-2.jsonl": alpaca("en 2"),
            "en/check.jsonl": alpaca("en check"),
            "zh/a.jsonl": alpaca("zh"),
            "dataset_info.json": "{}",
        },
        "team/halves": {"README.md": CARD, "en/train-1.jsonl": alpaca("half"), "zh/a.jsonl": alpaca("other half")},
        "team/shards": {
            "data/train-00000-of-00002.jsonl": alpaca("first"),
            "data/train-00001-of-00002.jsonl": alpaca("second"),
            "data/test-00000-of-00001.jsonl": alpaca("test"),
        },
        "solo": {"train.jsonl": alpaca("solo train"), "test.jsonl": alpaca("solo test")},
        "team/script": {"README.md": "---\nlicense: mit\n---\n", "script.py": script, "setup.py": script},
        "team/helped": {"helped.py": script, "rows.jsonl": alpaca("must not be read")},
        "team/pickled": {"rows.pkl": "pickle", "model.bin": "bin", "x/weights.pt": "pt"},
        "team/outside": {
            "../../outside.jsonl": alpaca("not of this repository"),
            "/etc/rows.jsonl": alpaca("nor this"),
        },
        "team/mixed": {"a.jsonl": alpaca("a"), "b.csv": "instruction,output\nx,y\n"},
        "team/separated": {
            "README.md": "---\nconfigs:\n- config_name: default\n  sep: ';'\n  data_files: a.csv\n---\n",
            "a.csv": "a",
        },
        "team/broken": {"README.md": "---\nconfigs: [\n---\n", "rows.jsonl": alpaca("x")},
        "team/badrow": {"rows.jsonl": alpaca("fine") + "{broken\n"},
        "team/pairs": {"pairs.jsonl": lines({"prompt": "Q", "chosen": "good", "rejected": "bad"})},
        "team/info": {
            "dataset_info.json": json.dumps(INFO),
            "deep/rows.jsonl": lines({"question": "Q", "output": "A"}),
            "deep/rows.pkl": "pickle",
        },
    }


# Runs in its own process, since the client reads its environment when it is imported.
CLIENT = """
import json, os, sys
from megatune.data.sources import resolve_datasets
from megatune.errors import MegatuneError

for name, dataset_dir, stage, environment in json.load(sys.stdin):
    os.environ.update(environment)
    try:
        (source,) = resolve_datasets([name], dataset_dir, stage)
        rows = [row.error.code if row.error else list(row.fields.values())[-1] for row in source.rows()]
        result = {"rows": rows, "format": type(source.format).__name__, "num_samples": source.num_samples,
                  "prompt": source.format.columns.prompt, "where": [row.where for row in source.rows()][-1]}
    except MegatuneError as error:
        result = {"error": str(error), "code": int(error.exit_code)}
    for key in environment:
        del os.environ[key]
    print(json.dumps(result))
"""

Case = tuple[str, str, str, dict[str, str]]


def case(name: str, dataset_dir: str = "nowhere", stage: str = "sft", **environment: str) -> Case:
    return name, dataset_dir, stage, environment


READ: list[tuple[Case, list[str]]] = [
    (case("team/plain"), ["one", "two", "three"]),
    (case("hf::team/plain#5"), ["one", "two", "three"]),
    (case("team/plain", "ONLINE"), ["one", "two", "three"]),
    (case("solo", "ONLINE"), ["solo train"]),
    (case("hf::solo"), ["solo train"]),
    (case("team/cards:en"), ["en 1", "en 2"]),
    (case("team/cards:zh/en"), ["zh", "en 1", "en 2"]),
    (case("team/cards:all#2"), ["en 1", "en 2", "zh"]),
    (case("team/shards"), ["first", "second"]),
    (case("team/halves:en"), ["half"]),
    (case("here", "REMOTE:team/info"), ["A"]),
    (case("folder", "REMOTE:team/info"), ["A"]),
    (case("there", "REMOTE:team/info"), ["en check"]),
    (case("team/badrow"), ["fine", "invalid-json"]),
    (case("team/pairs", stage="dpo"), ["bad"]),
]
SCRIPT = "its rows are generated by a script, {}\n    why: data set code is never run\n    fix: {}"
DOWNLOAD = "download it to a folder, and name its files in dataset"
NO_LOCAL = "dataset: there is no local file or folder {0}, and "
MIRROR = (
    "\n    fix: set HF_ENDPOINT to a mirror that answers, or download the data set on a machine with "
    "network access, and set file_name or a path to its files"
)
REFUSED: list[tuple[Case, str, int]] = [
    (case("team/script"), f"team/script on HOST: {SCRIPT.format('script.py', DOWNLOAD)}", 66),
    (case("team/helped"), f"team/helped on HOST: {SCRIPT.format('helped.py', DOWNLOAD)}", 66),
    (
        case("team/pickled"),
        f"team/pickled on HOST: no data files; .bin, .pkl, .pt files are not supported\n    fix: {DOWNLOAD}",
        66,
    ),
    (case("team/mixed"), f"team/mixed on HOST: data files of several types: .csv and .jsonl\n    fix: {DOWNLOAD}", 66),
    (
        case("team/separated"),
        "team/separated on HOST: subset default needs the reading options sep\n"
        "    why: such options are not supported\n    "
        f"fix: {DOWNLOAD}",
        66,
    ),
    (case("team/broken"), "team/broken on HOST: README.md:2: the card is not YAML", 66),
    (
        case("team/cards"),
        "team/cards on HOST: it has several subsets, but none was chosen\n    fix: write NAME:en, or NAME:all for all "
        "of them; its subsets are en, zh",
        64,
    ),
    (case("team/cards:fr"), "team/cards on HOST: no subset fr\n    fix: its subsets are en, zh", 64),
    (case("team/plain:fr"), "team/plain on HOST: no subset fr\n    fix: it has no subsets", 64),
    (
        case("gone", "REMOTE:team/info"),
        f"team/info on HOST: gone.jsonl: no data files\n    fix: {DOWNLOAD}",
        66,
    ),
    (
        case("pickle", "REMOTE:team/info"),
        "team/info/deep/rows.pkl: .pkl files are not supported\n    why: loading one may run code that it contains\n"
        "    fix: save the rows as .jsonl or .parquet",
        66,
    ),
    (case("x", "REMOTE:team/plain"), "dataset_dir: team/plain on HOST has no dataset_info.json", 66),
    (case("a b", "ONLINE"), "dataset: 'a b' is not the id of a data set on a hub\n    fix: write OWNER/NAME", 64),
    (case("hf::a--b/c"), "dataset: 'a--b/c' is not the id of a data set on a hub\n    fix: write OWNER/NAME", 64),
    (case("team/outside"), f"team/outside on HOST: no data files\n    fix: {DOWNLOAD}", 66),
    (
        case("team/missing"),
        f"{NO_LOCAL.format('team/missing')}no data set team/missing on HOST, or it is private\n    fix: check the "
        "name; for a private one log in: hf auth login, or set HF_TOKEN",
        66,
    ),
    (
        case("hf::team/gated"),
        "dataset: access to team/gated on HOST must be requested\n    fix: request access on its page, then log in: "
        "hf auth login, or set HF_TOKEN",
        66,
    ),
    (
        case("hf::team/down"),
        f"dataset: cannot get team/down from HOST\n    why: it answered HTTP 500{MIRROR}",
        69,
    ),
    (
        case("hf::team/dropped"),
        f"dataset: cannot get team/dropped from HOST\n    why: it closes the connection{MIRROR}",
        69,
    ),
    (
        case("team/pairs"),
        "dataset: team/pairs: its rows are preference pairs, which stage sft does not train\n"
        "    fix: write stage: dpo, or rm",
        64,
    ),
]
WITHOUT_NETWORK = (
    "from HOST\n    why: HF_HUB_OFFLINE is set, and the cache is incomplete\n"
    "    fix: unset HF_HUB_OFFLINE to fetch it (a gated repository also needs HF_TOKEN), or download the data set "
    "on a machine with network access, and set file_name or a path to its files"
)
OFFLINE: list[tuple[Case, str, int]] = [
    (case("hf::team/never"), f"dataset: cannot get team/never {WITHOUT_NETWORK}", 69),
    (case("team/halves:zh"), f"dataset: cannot get team/halves {WITHOUT_NETWORK}", 69),
]


class Session:
    """A hub, and what its clients were told by it."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder = folder
        self.hub = hub
        self.canary = folder / "canary"
        self.stderr = ""

    def ask(self, cases: list[Case], **environment: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT],
            input=json.dumps(cases),
            env=self.hub.environment(self.folder, **environment),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.stderr = done.stderr
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr
        host = self.hub.url.removeprefix("http://")
        return [json.loads(line.replace(host, "HOST")) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("hub")
    with running(Hub(repositories(folder / "canary"))) as hub:
        yield Session(folder, hub)


@pytest.fixture(scope="module")
def online(session: Session) -> tuple[list[dict[str, Any]], str, list[str]]:
    """What each case gave, standard error, and what was asked of the hub."""
    results = session.ask([*(each for each, _ in READ), *(each for each, *_ in REFUSED)])
    return results, session.stderr, list(session.hub.asked)


@pytest.mark.parametrize("index", range(len(READ)), ids=[f"{c[0]} in {c[1]}" for c, _ in READ])
def test_a_hub_is_read(online: tuple[list[dict[str, Any]], str, list[str]], index: int) -> None:
    result = online[0][index]
    assert result.get("rows") == READ[index][1], result


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=[each[0][0] for each in REFUSED])
def test_what_a_hub_does_not_have(online: tuple[list[dict[str, Any]], str, list[str]], index: int) -> None:
    _, message, code = REFUSED[index]
    assert online[0][len(READ) + index] == {"error": message, "code": code}


def test_details_of_what_was_read(online: tuple[list[dict[str, Any]], str, list[str]], session: Session) -> None:
    results, stderr, asked = online
    by_name = {each[0]: result for (each, _), result in zip(READ, results, strict=False)}
    assert by_name["hf::team/plain#5"]["num_samples"] == 5
    assert (by_name["here"]["num_samples"], by_name["here"]["prompt"]) == (4, "question")
    assert by_name["team/badrow"]["where"].endswith("rows.jsonl:2")
    host = re.escape(session.hub.url.removeprefix("http://"))
    assert not re.search(rf"fetching 3 files \(.*\) of team/cards from {host}\n", stderr)  # each file is fetched once
    assert re.search(rf"fetching 2 files \(1\d\d bytes\) of team/cards from {host}\n", stderr)
    # Nothing but data and cards is fetched, and nothing is run.
    assert not [path for path in asked if path.endswith((".py", ".pkl", ".bin", ".pt"))]
    assert not session.canary.exists()


def test_without_a_network_the_cache_is_read_and_must_be_whole(
    online: tuple[list[dict[str, Any]], str, list[str]], session: Session
) -> None:
    before = len(session.hub.asked)
    cached = [each for each in READ if each[0][0] in ("team/plain", "team/cards:zh/en", "team/halves:en", "here")]
    results = session.ask([*(each for each, _ in cached), *(each for each, *_ in OFFLINE)], HF_HUB_OFFLINE="1")
    assert [result.get("rows") for result in results[: len(cached)]] == [rows for _, rows in cached]
    assert results[len(cached) :] == [{"error": message, "code": code} for _, message, code in OFFLINE]
    assert session.hub.asked[before:] == []
    assert "of team/plain from" not in session.stderr


def test_modelscope(session: Session) -> None:
    wanted = [case("ms::team/plain#2"), case("team/cards:en", USE_MODELSCOPE_HUB="1"), case("ms::team/missing")]
    results = session.ask(wanted)
    try:
        import modelscope_hub  # noqa: F401
    except ImportError:
        what = "dataset: {}: the library of ModelScope's hub is not installed\n    fix: pip install "
        fix = "'megatune[modelscope]', or take the data set from Hugging Face: hf::OWNER/NAME"
        assert results[0] == {"error": what.format("team/plain") + fix, "code": 69}
        assert {result["code"] for result in results} == {69}
        return
    assert [result.get("rows") for result in results] == [["one", "two", "three"], ["en 1", "en 2"], None], results
    assert results[2]["error"].startswith("dataset: no data set team/missing on HOST, or it is private")
