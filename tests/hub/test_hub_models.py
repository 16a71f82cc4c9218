"""Models on hubs: the real clients, and the verbs that read a model, against a small hub on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, OLDER, TOKEN, Files, Hub, running

from megatune.demo.checkpoint import make_checkpoint
from megatune.hub.repository import FetchProgress

DEMO = Path(__file__).parents[2] / "examples" / "demo"
CODE = 'open("canary", "w").write("code ran")\n'
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
SHARDED = {
    "config.json": "{}",
    "model.safetensors.index.json": INDEX,
    "model-00001-of-00002.safetensors": b"first" * 50_000,
    "model-00002-of-00002.safetensors": b"second" * 50_000,
    "consolidated.safetensors": b"the same again",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "merges.txt": "a b",
}
LARGE = bytes(range(250)) * 100_000
# What no run reads, and what must never be fetched.
BESIDE = {
    "README.md": "# a model",
    "modeling.py": CODE,
    "pytorch_model.bin": b"pickle",
    "pytorch_model.bin.index.json": "{}",
    "training_args.bin": b"pickle",
    "original/params.json": "{}",
    "original/consolidated.00.pth": b"pickle",
}
FETCHED = sorted(set(SHARDED) - {"consolidated.safetensors"})

# Runs in its own process, since the client reads its environment when it is imported.
CLIENT = """
import json, os, sys
from megatune.errors import MegatuneError
from megatune.hub.models import open_model

for method, name, revision, cache_dir in json.load(sys.stdin):
    try:
        model = open_model(name, revision, cache_dir)
        folder = getattr(model, method)()
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        result = {"folder": str(folder), "files": files, "commit": model.commit}
    except MegatuneError as error:
        result = {"error": str(error), "code": int(error.exit_code)}
    print(json.dumps(result))
"""


def model_files(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "tiny", num_layers=2, hidden_size=32)


@pytest.fixture(scope="module")
def hub(tiny: Path) -> Iterator[Hub]:
    models: dict[str, Files] = {
        "team/sharded": {**SHARDED, **BESIDE},
        "team/tiny": {**model_files(tiny), **BESIDE},
        "team/pickles": {"config.json": "{}", **BESIDE},
        "team/bare": {"model.safetensors": b"weights"},
        "team/short": {**SHARDED, "model.safetensors.index.json": INDEX.replace("00001-of", "00003-of")},
        "team/torn": {**SHARDED, "model.safetensors.index.json": "{"},
        "team/bins": {
            **SHARDED,
            **BESIDE,
            "model.safetensors.index.json": '{"weight_map": {"a": "pytorch_model.bin"}}',
        },
        "team/large": {"config.json": "{}", "model.safetensors": LARGE},
        "team/flipped": {"config.json": "{}", "model.safetensors": b"flipped"},
    }
    with running(Hub(models=models)) as found:
        yield found


@pytest.fixture(autouse=True)
def _unharmed(hub: Hub) -> Iterator[None]:
    yield
    hub.cuts, hub.damaged, hub.sizes = {}, set(), {}
    hub.sent.clear()


def call(
    hub: Hub, folder: Path, script: str, stdin: Any = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(stdin),
        env=hub.environment(folder, **environment),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert TOKEN not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert not (folder / "canary").exists()
    return done


def ask(
    hub: Hub, folder: Path, *names: str, method: str = "fetch", revision: str = "main", cache_dir: str | None = None,
    **environment: str,
) -> list[dict[str, Any]]:  # fmt: skip
    return ask_each(hub, folder, *((method, name, revision, cache_dir) for name in names), **environment)


def ask_each(
    hub: Hub, folder: Path, *cases: tuple[str, str, str, str | None], **environment: str
) -> list[dict[str, Any]]:
    """Ask one process for a method, a name, a revision and a folder after the other."""
    done = call(hub, folder, CLIENT, cases, **environment)
    host = hub.url.removeprefix("http://")
    lines = done.stdout.replace(host, "HOST").splitlines()
    assert len(lines) == len(cases), done.stderr
    return [json.loads(line) for line in lines]


def test_only_what_a_run_reads_is_fetched(hub: Hub, tmp_path: Path) -> None:
    methods = ("config_dir", "tokenizer_dir", "fetch")
    config, tokenizer, whole = ask_each(hub, tmp_path, *((method, "team/sharded", "main", None) for method in methods))
    assert hub.sent[0][0] == "config.json"
    assert config["files"] == ["config.json"]
    assert tokenizer["files"] == [name for name in FETCHED if ".safetensors" not in name]
    assert (whole["files"], whole["commit"]) == (FETCHED, COMMIT)
    assert sorted(path for path, _ in hub.sent) == FETCHED  # each once
    folder = Path(whole["folder"])
    assert folder.is_relative_to(tmp_path / "hf" / "hub")
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == SHARDED["model-00001-of-00002.safetensors"]


def test_without_a_network_the_cache_is_read_and_must_be_whole(hub: Hub, tmp_path: Path) -> None:
    ask(hub, tmp_path, "team/sharded")
    ask(hub, tmp_path, "team/tiny", method="config_dir")
    asked = len(hub.asked)
    whole, part, never = ask(hub, tmp_path, "team/sharded", "team/tiny", "team/never", HF_HUB_OFFLINE="1")
    assert whole["files"] == FETCHED
    for name, result in (("tiny", part), ("never", never)):
        assert result["code"] == 69
        assert f"cannot get team/{name} from HOST\n    why: HF_HUB_OFFLINE is set, and the cache" in result["error"]
        assert "fix: unset HF_HUB_OFFLINE to fetch it (a gated repository also needs HF_TOKEN), or" in result["error"]
    # Fetched by a library that keeps no list of files.
    shutil.rmtree(tmp_path / "hf" / "hub" / "models--team--sharded" / "trees")
    assert ask(hub, tmp_path, "team/sharded", HF_HUB_OFFLINE="1")[0]["files"] == FETCHED
    assert len(hub.asked) == asked


def test_revisions_and_folders_of_the_cache(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    older, none, folder = ask_each(
        hub, tmp_path, ("fetch", "team/large", "v1", "elsewhere"), ("fetch", "team/large", "v2", None),
        ("fetch", "here", "v1", None),
    )  # fmt: skip
    assert older["commit"] == OLDER
    assert Path(older["folder"]).is_relative_to(tmp_path / "elsewhere")
    assert not (tmp_path / "hf" / "hub" / "models--team--large").exists()
    assert none["code"] == 66
    assert none["error"].startswith(
        "model_revision: team/large on HOST has no revision v2\n    fix: write model_revision"
    )
    assert (folder["code"], "here is a folder, which has no revisions" in folder["error"]) == (64, True)


NO_FOLDER = "model_name_or_path: no folder '{0}' here, and "
GIVE = "    fix: give the folder of a Hugging Face checkpoint, or the id of a model on a hub"
REFUSED = {
    "team/missing": (66, "no model team/missing on HOST, or it is private\n    fix: check the name; for a private one"),
    "team/gated": (66, "access to team/gated on HOST must be requested\n    fix: request access on its page, then"),
    "team/denied": (66, "HOST refuses the token for team/denied\n    fix: log in: hf auth login, or set HF_TOKEN"),
    "team/down": (69, "cannot get team/down from HOST\n    why: it answered HTTP 500\n    fix: set HF_ENDPOINT to a"),
    "team/dropped": (69, "cannot get team/dropped from HOST\n    why: it closes the connection"),
    "team/pickles": (66, "team/pickles on HOST has no model.safetensors\n    why: pytorch_model.bin is a pickle"),
    "team/bare": (66, "team/bare on HOST has no config.json"),
    "team/short": (66, "team/short on HOST lacks 1 of 2 weight files: model-00003-of-00002.safetensors"),
    "team/torn": (66, "team/torn on HOST has a model.safetensors.index.json that is not an index of weights"),
    "team/bins": (66, "team/bins on HOST has weights that are not safetensors: pytorch_model.bin"),
    "a--b/c": (64, "'a--b/c' is not the id of a model on a hub\n    fix: write OWNER/NAME"),
    "./team/tiny": (66, f"no folder './team/tiny'\n{GIVE}"),
    "nowhere": (66, f"no folder 'nowhere'\n{GIVE}"),
}  # fmt: skip


def test_what_a_hub_refuses(hub: Hub, tmp_path: Path) -> None:
    for name, result in zip(REFUSED, ask(hub, tmp_path, *REFUSED), strict=True):
        code, text = REFUSED[name]
        assert result["code"] == code, result
        assert text in result["error"], result
        if "on HOST has" not in text and "lacks" not in text and "/" in name and "." not in name:
            assert result["error"].startswith(NO_FOLDER.format(name)), result
    assert not [path for path, _ in hub.sent if path.endswith((".py", ".bin", ".pth"))]


def test_without_a_hub(hub: Hub, tmp_path: Path) -> None:
    (result,) = ask(hub, tmp_path, "team/tiny", HF_ENDPOINT="http://127.0.0.1:1")
    assert result["code"] == 69
    assert "cannot get team/tiny from 127.0.0.1:1\n    why: it refuses the connection" in result["error"]


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.cuts["model.safetensors"] = 1
    (result,) = ask(hub, tmp_path, "team/large")
    # The library writes pieces of 10 MiB.
    assert [start for path, start in hub.sent if path == "model.safetensors"] == [0, 10 << 20]
    assert (Path(result["folder"]) / "model.safetensors").read_bytes() == LARGE


def test_files_that_came_whole_stay_when_a_download_fails(hub: Hub, tmp_path: Path) -> None:
    hub.cuts["model-00002-of-00002.safetensors"] = 1_000
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, env=hub.environment(tmp_path), cwd=tmp_path
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps([("fetch", "team/sharded", "main", None)]).encode())
    process.stdin.close()
    snapshot = tmp_path / "hf" / "hub" / "models--team--sharded" / "snapshots" / COMMIT
    while not (snapshot / "model-00001-of-00002.safetensors").exists():
        assert process.poll() is None
    process.kill()
    process.wait()
    hub.cuts.clear()
    hub.sent.clear()
    assert ask(hub, tmp_path, "team/sharded")[0]["files"] == FETCHED
    sent = [path for path, _ in hub.sent]
    assert "model-00002-of-00002.safetensors" in sent
    assert "model-00001-of-00002.safetensors" not in sent


def test_damage(hub: Hub, tmp_path: Path) -> None:
    hub.damaged.add("model.safetensors")
    (result,) = ask(hub, tmp_path, "team/flipped")
    assert result["code"] == 69
    assert "model.safetensors of team/flipped from HOST is damaged" in result["error"]
    hub.damaged.clear()
    (whole,) = ask(hub, tmp_path, "team/flipped")  # what was damaged is not taken from the cache
    weights = Path(whole["folder"]) / "model.safetensors"
    assert weights.read_bytes() == b"flipped"
    weights.write_bytes(b"flip")  # as a crash or a full disk leaves it
    ask(hub, tmp_path, "team/flipped")
    assert weights.read_bytes() == b"flipped"


def test_a_full_disk(hub: Hub, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 10**18
    (result,) = ask(hub, tmp_path, "team/large")
    assert result["code"] == 73
    assert "no disk space for team/large: 1000000.0 TB are needed, and " in result["error"]
    assert "or write cache_dir" in result["error"]
    hub.sizes.clear()
    # The kernel refuses to let a file grow, as a quota does.
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    done = call(hub, tmp_path, limit + CLIENT, [("fetch", "team/sharded", "main", None)])
    result = json.loads(done.stdout)
    assert result["code"] == 73, result
    assert "cannot store the files of team/sharded: File too large" in result["error"]


def test_progress(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar on a terminal, and lines elsewhere."""
    terminal, client = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=client,
        env=hub.environment(tmp_path, TERM="xterm"),
        cwd=tmp_path,
    )
    os.close(client)
    process.communicate(json.dumps([("fetch", "team/large", "main", None)]).encode(), timeout=120)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    os.close(terminal)
    assert b"fetching 1 file (25.0 MB) of team/large from" in shown
    assert b"25.0 MB of 25.0 MB" in shown

    done = call(hub, tmp_path, CLIENT, [("fetch", "team/sharded", "main", None)])
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    progress = FetchProgress("fetching", 25_000_000, name="team/large")
    progress._next_line = 0.0  # ten seconds have passed
    progress.add(5_000_000)
    progress.add(5_000_000)
    assert capsys.readouterr().err == "fetching   5.0 MB of 25.0 MB of team/large\n"


def test_modelscope_without_its_library(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/modelscope_hub.py").write_text("raise ImportError(name='modelscope_hub')")
    hidden = os.pathsep.join([str(tmp_path / "hidden"), *filter(None, [os.environ.get("PYTHONPATH")])])
    (result,) = ask(hub, tmp_path, "team/sharded", USE_MODELSCOPE_HUB="1", PYTHONPATH=hidden)
    fix = "pip install 'megatune[modelscope]', or leave USE_MODELSCOPE_HUB unset to take the model from Hugging Face"
    what = f"team/sharded: the library of ModelScope's hub is not installed\n    fix: {fix}"
    assert what in result["error"]
    assert result["code"] == 69


def test_modelscope(hub: Hub, tmp_path: Path) -> None:
    results = ask(hub, tmp_path, "team/sharded", "team/missing", "team/pickles", USE_MODELSCOPE_HUB="1")
    assert results[0]["files"] == FETCHED, results
    assert sorted(path for path, _ in hub.sent) == sorted([*FETCHED, "config.json"])
    assert "no model team/missing at revision master on HOST, or it is private" in results[1]["error"]
    assert "team/pickles on HOST has no model.safetensors" in results[2]["error"]


def test_modelscopes_weights_are_digested_once(hub: Hub, tmp_path: Path) -> None:
    """Its hub's list has the digests that cached files are compared with, at every start."""
    here: dict[str, str] = {"USE_MODELSCOPE_HUB": "1", "MEGATUNE_CACHE": str(tmp_path / "cache")}
    ask(hub, tmp_path, "team/sharded", **here)
    time.sleep(2.1)  # a file that was just written may change within the tick of its time
    ask(hub, tmp_path, "team/sharded", **here)
    notes = {note: json.loads(note.read_text()) for note in (tmp_path / "cache/digests").iterdir()}
    note, said = next((note, said) for note, said in notes.items() if said["path"].endswith("1-of-00002.safetensors"))
    assert said["digest"] == hashlib.sha256(SHARDED["model-00001-of-00002.safetensors"]).hexdigest()
    note.write_text(wrong := json.dumps({**said, "digest": "0" * 64}))
    ask(hub, tmp_path, "team/sharded", **here)
    assert note.read_text() == wrong, "the file was read again"


VERBS = """
import json, sys
from megatune.cli.main import main

for words in json.load(sys.stdin):
    print(">>>", words[0], flush=True)
    print("code", main(words), flush=True)
"""


@pytest.mark.extended
def test_the_verbs_take_an_id(hub: Hub, tmp_path: Path) -> None:
    data = ["--dataset", "identity", "--dataset_dir", str(DEMO), "--template", "qwen3_nothink"]
    sets = ["--model_name", "Tuna", "--model_author", "us"]
    calls = {
        "plan": ["plan", "team/tiny", "--gpus", "2", "--gpu", "h100-80g", "--output", "best.yaml"],
        "preview": ["data", "preview", "--model_name_or_path", "team/tiny", *data, *sets, "--rows", "1", "--no-color"],
        "stats": ["data", "stats", "--model_name_or_path", "team/tiny", *data, *sets],
        "verify": ["verify", "team/tiny", "--samples", "2", "--length", "8", "--model_revision", COMMIT],
        "infer": ["infer", "team/tiny", "--prompt", "Who are you?", "--max_new_tokens", "2", "--raw"],
        "typo": ["infer", "team/tinny", "--prompt", "x"],
        "revision": ["infer", "here", "--prompt", "x", "--model_revision", "v1"],
    }
    sent: dict[str, list[str]] = {}
    done = call(hub, tmp_path, VERBS, [calls["plan"]])
    sent["plan"] = [path for path, _ in hub.sent]
    assert "code 0" in done.stdout, done.stdout + done.stderr
    assert "model_name_or_path: team/tiny" in (tmp_path / "best.yaml").read_text()
    done = call(hub, tmp_path, VERBS, [calls["preview"], calls["stats"]])
    sent["data"] = [path for path, _ in hub.sent]
    assert done.stdout.count("code 0") == 2, done.stdout + done.stderr
    (tmp_path / "here").mkdir()
    done = call(hub, tmp_path, VERBS, [calls["verify"], calls["infer"], calls["typo"], calls["revision"]])
    assert done.stdout.count("code 0") == 2, done.stdout + done.stderr
    assert "code 66" in done.stdout
    assert "code 64" in done.stdout
    assert "no folder 'team/tinny' here, and no model team/tinny on" in done.stderr
    assert sent["plan"] == ["config.json"]
    assert "model.safetensors" not in sent["data"]
    assert sorted(path for path, _ in hub.sent).count("model.safetensors") == 1
    assert set(BESIDE).isdisjoint(path for path, _ in hub.sent)
