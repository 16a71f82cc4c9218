"""Every command line of README and docs/*.md, run as it is written.

Commands of megatune run in this process, with stand-ins for what only a hub, a user or an hour could give
(`doc_stand_ins.py`). Where a command would start ranks that train, it ends there, once all of its checks have passed;
`start.md` trains for real, and so do the pages of `TRAINED` with every case.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from doc_commands import PAGES, ROOT, Shell, commands_of, files_of
from doc_stand_ins import copy_runs, link_repository, write_data, write_models, write_rl_files
from pool import RankPool
from pool_launch import CommandLine

_ANOTHER = "a program of another project, shown for comparison"
_CLUSTER = "sets variables of a cluster in the user's shell"
_PLACEHOLDERS = "its flags are left to the reader"
# Command lines that nothing here can run, each with the reason; every other one runs.
EXCEPTIONS = {
    "USE_MCA=1 llamafactory-cli train run.yaml": _ANOTHER,
    "NPROC_PER_NODE=2 megatron sft --load ... --dataset ...": _ANOTHER,
    "NPROC_PER_NODE=2 megatune megatron sft --load ... --dataset ...": _PLACEHOLDERS,
    "python examples/start_rlvr_pipeline.py --config_path qwen3-8B-rlvr_megatron --config_name rlvr_config": _ANOTHER,
    "python3 -m venv .venv": "makes an environment",
    "source .venv/bin/activate": "changes the user's shell",
    "python -m venv ../audit": "makes an environment",
    "../audit/bin/pip-audit -r constraints.txt --no-deps --disable-pip": "asks a service on the network",
    "megatune evaluate out/first --tasks gsm8k --num_fewshot 5 --limit 100": "reads its questions from a hub",
    "megatune evaluate --adapters out/lora --tasks my_task --include_path tasks/": _PLACEHOLDERS,
    "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32)": _CLUSTER,
    "export RAY_ADDRESS=FIRST:6379": _CLUSTER,
}
ALONE = ("README.md", "start.md")  # these need only what they make themselves
TRAINED = ("README.md", "train.md", "preference.md", "layouts.md", "recipes.md")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    """The folder of a user who has followed train.md and lora.md in a clone, and has what other pages name."""
    folder = tmp_path_factory.mktemp("made") / "desk"
    folder.mkdir()
    link_repository(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MEGATUNE_CACHE", str(folder / "cache"))
        write_models(folder)
        write_data(folder)
        write_rl_files(folder)
        _write_files_of("train.md", folder)
        megatune = CommandLine(pool, patch)
        for words in (["max_steps=4"], ["output_dir=out/lora", "finetuning_type=lora", "max_steps=1"]):
            ended = megatune("train", "run.yaml", *words)
            assert ended.returncode == 0, ended.stderr
        copy_runs(folder)
    return folder


def _write_files_of(page: str, folder: Path) -> None:
    for name, text in files_of(next(path for path in PAGES if path.name == page)).items():
        (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture
def opened(desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(desk, tmp_path / "desk", symlinks=True)
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # pages calibrate
    monkeypatch.setattr("megatune.rl.reading.missing_engines", lambda *_: [])  # as where vLLM is installed
    return tmp_path / "desk"


def _failures(page: str, shell: Shell) -> list[str]:
    """Run a page's command lines in their order; return those that end as they should not."""
    _write_files_of(page, Path())
    failed = []
    for command in commands_of(next(path for path in PAGES if path.name == page)):
        if command.bare in EXCEPTIONS:
            continue
        try:
            shell(command.text)
        except AssertionError as error:
            failed.append(f"{page}:{command.line}: {error}")
    return failed


@pytest.mark.parametrize("page", [page.name for page in PAGES if commands_of(page)])
def test_commands_run_as_written(page: str, opened: Path, command_line, monkeypatch) -> None:
    trains = page == "start.md"
    if page in ALONE:
        shutil.rmtree("out" if trains else "out/demo-model")
    failed = _failures(page, Shell(command_line, monkeypatch, trains=trains))
    assert not failed, "\n\n".join(failed)


@pytest.mark.extended
@pytest.mark.parametrize("page", TRAINED)
def test_pages_that_train_do(page: str, opened: Path, command_line, monkeypatch) -> None:
    if page in ALONE:
        shutil.rmtree("out")
    failed = _failures(page, Shell(command_line, monkeypatch, trains=True))
    assert not failed, "\n\n".join(failed)


def test_exceptions_are_there() -> None:
    written = {command.bare for page in PAGES for command in commands_of(page)}
    assert not [text for text in EXCEPTIONS if text not in written]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("megatune train run.yaml learning_rat=1e-5", "learning_rate"),
        ("megatune train nobody.yaml", "nobody.yaml"),
        ("megatune sft --model_name_or_path out/demo-model --dataset identity --output_dir out/x", "dataset"),
        ("megatune sft --model_name_or_path out/demo-model --dataset_dir nowhere --dataset identity", "nowhere"),
        ("megatune trian run.yaml", "train"),
        ("megatune plan run.yaml --gpu h1000", "h1000"),
        ("megatune infer out/first --promt Hi", "--prompt"),
        ("megatune verify out/demo-model --expert_model_parallel_size 2", "no experts"),
        ("megatune data preview run.yaml templat=qwen", "template"),
        ("megatune rehearse run.yaml --gpu", "--gpu"),
        ("megatune doctor nobody.yaml", "nobody.yaml"),
        ("megatune serve out/first --prot 8000", "--port"),
        ("megatune rl rlvr.yaml max_step=3", "max_steps"),
        ("megatune export --model out/demo-model --to_mcor true", "to_mcore"),
        ("make dmeo", "dmeo"),
        ("pip install -c constraint.txt -e .", "constraint.txt"),
        ("pip install 'megatune[servr]'", "servr"),
        ("pip install --constrain constraints.txt -e .", "--constrain"),
        ("python benchmarks/soak.py --sed 3", "--sed"),
        ("python examples/nothing.py", "nothing.py"),
        ("torchrun --nproc 4 -m megatune train nobody.yaml", "nobody.yaml"),
        ("torchrun --nproc_per_nod 4 --bad -m megatune train run.yaml", "bad"),
        ("ray start --haed", "--haed"),
        ("megatun train run.yaml", "megatun"),
    ],
)
def test_a_fault_in_a_command_line_is_found(text: str, says: str, opened: Path, command_line, monkeypatch) -> None:
    """Misspelt flags, keys, files, verbs and programs."""
    if "--dataset identity --output_dir" in text:
        shutil.rmtree("data")  # which is a stand-in for LLaMA-Factory's
    with pytest.raises(AssertionError, match=says):
        Shell(command_line, monkeypatch)(text)


def test_blocks_are_read() -> None:
    page = ROOT / "docs" / "infer.md"
    commands = commands_of(page)
    assert [command.bare for command in commands if command.bare.startswith("curl")] == [
        "curl http://localhost:8000/v1/chat/completions -H 'Content-Type: application/json' "
        """-d '{"model": "first", "messages": [{"role": "user", "content": "Who are you?"}]}'"""
    ]
    line = page.read_text(encoding="utf-8").splitlines()[commands[0].line - 1]
    assert line.startswith(commands[0].bare)
