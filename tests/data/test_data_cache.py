"""The cache of prepared rows, with real processes: built once, whole or not there, and what happens where it cannot be
written."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatune.config.groups.data import DataSettings
from megatune.config.settings import Settings
from megatune.data import cache as cache_folder
from megatune.data.cache import files, mark_damaged
from megatune.data.streaming.producer import StreamFolder, _as_finding
from megatune.errors import ExitCode, MegatuneError
from megatune.hub.digests import cache_dir

# Writes one line for each build; holds it until the file `go` is there, or for ever.
BUILDER = """
import json, sys, time
from pathlib import Path
from megatune.config.settings import Settings
from megatune.data.cache import files
from megatune.data.cache import get_or_build
files.REPORT_AFTER = 0.2
log, go = map(Path, sys.argv[1:3])
settings = Settings(data=json.loads(sys.argv[3]))
def build(folder):
    (folder / "tokens.bin").write_bytes(b"1234")
    with log.open("a") as file:
        file.write("build\\n")
    while not go.exists():
        time.sleep(0.01)
print(get_or_build(settings, "k", build, lambda folder: (folder / "tokens.bin").read_text()))
"""
NOWHERE = Path("/proc/megatune")  # nobody can make a folder there, not even root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The rows' folder of a cache of this test's own."""
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / "cache" / "rows"


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that builds the key "k" with these data settings; all that still run are killed at the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(**data: object) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", BUILDER, str(tmp_path / "log"), str(tmp_path / "go"), json.dumps(data)]
        processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def get_or_build(settings: Settings, key: str, build: Callable[[Path], None]) -> Path:
    """The folder itself."""
    return cache_folder.get_or_build(settings, key, build, lambda folder: folder)


def with_data(**data: object) -> Settings:
    return Settings(data=DataSettings(**data))


def tokens(text: str, counter: list[str] | None = None) -> Callable[[Path], None]:
    """Builds a folder with one file; every build is noted."""

    def build(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "part").mkdir()
        (folder / "part" / "tokens.bin").write_text(text)
        if counter is not None:
            counter.append(text)

    return build


def no_build(folder: Path) -> None:
    raise AssertionError("made again")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rows_are_built_once(cache: Path) -> None:
    folder = get_or_build(Settings(), "k", tokens("1234"))
    assert folder == cache / "k"
    assert (folder / "part" / "tokens.bin").read_text() == "1234"
    assert (folder / "key.txt").read_text() == "k\n"
    assert [path.name for path in cache.iterdir()] == ["k"], "neither a lock nor a partial folder is left"
    assert get_or_build(Settings(), "k", no_build) == folder
    assert get_or_build(Settings(), "other", tokens("5")) != folder


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATUNE_CACHE", "")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/.cache/megatune")


def test_two_at_once_build_once(tmp_path: Path, start: Start) -> None:
    log = tmp_path / "log"
    first = start()
    wait_for(log.exists)
    second = start()
    assert second.stderr is not None
    line = second.stderr.readline()
    assert line.startswith(f"waiting for process {first.pid} on ")
    assert line.endswith(f", which prepares the same rows in {tmp_path / 'cache/rows/k'}\n")
    (tmp_path / "go").touch()
    for process in (first, second):
        out, error = process.communicate(timeout=30)
        assert (process.returncode, out, error) == (0, "1234\n", "")
    assert log.read_text() == "build\n"


def test_a_killed_builder_leaves_nothing_in_the_way(tmp_path: Path, cache: Path, start: Start) -> None:
    first = start()
    wait_for((tmp_path / "log").exists)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not (cache / "k").exists()
    assert any("partial" in path.name for path in cache.iterdir())
    get_or_build(Settings(), "another", tokens("1"))
    assert sorted(path.name for path in cache.iterdir() if "partial" in path.name) == []
    began = time.monotonic()
    get_or_build(Settings(), "k", tokens("1234"))
    assert time.monotonic() - began < 5
    assert sorted(path.name for path in cache.iterdir()) == ["another", "k"]


@pytest.mark.parametrize(("age", "left"), [(23 * 3600, True), (25 * 3600, False)])
def test_partial_folders_of_other_machines_go_when_they_are_old(cache: Path, age: int, left: bool) -> None:
    partial = cache / ".k.megatune-partial-elsewhere-1-77"
    partial.mkdir(parents=True)
    (partial / "tokens.bin").touch()
    for path in (partial / "tokens.bin", partial):
        os.utime(path, (time.time() - age,) * 2)
    get_or_build(Settings(), "other", tokens("1"))
    assert partial.exists() is left


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), MegatuneError("x", ExitCode.DATA)])
def test_a_build_that_fails_leaves_nothing(cache: Path, error: BaseException) -> None:
    def build(folder: Path) -> None:
        (folder / "tokens.bin").touch()
        raise error

    with pytest.raises(type(error)):
        get_or_build(Settings(), "k", build)
    assert list(cache.iterdir()) == []


def test_a_damaged_folder_is_made_again(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that cannot be read, and one that was marked as a run read it."""

    def read(folder: Path) -> str:
        if (text := (folder / "part/tokens.bin").read_text()) != "1234":
            raise MegatuneError("not whole", ExitCode.INPUT)
        return text

    folder = get_or_build(Settings(), "k", tokens("1234"))
    for damage in (lambda: os.truncate(folder / "part/tokens.bin", 2), lambda: mark_damaged(folder)):
        damage()
        made: list[str] = []
        assert cache_folder.get_or_build(Settings(), "k", tokens("1234", made), read) == "1234"
        assert made == ["1234"]
        assert capsys.readouterr().err == f"the prepared rows in {folder} are damaged and are recreated\n"
    assert cache_folder.get_or_build(Settings(), "k", no_build, read) == "1234"
    assert [path.name for path in cache.iterdir()] == ["k"]


def test_what_was_made_and_cannot_be_read_is_refused(cache: Path) -> None:
    """It is not made again and again."""
    made: list[str] = []

    def read(folder: Path) -> None:
        raise MegatuneError("not whole", ExitCode.INPUT)

    with pytest.raises(MegatuneError, match="not whole"):
        cache_folder.get_or_build(Settings(), "k", tokens("1", made), read)
    assert made == ["1"]


def test_rows_that_are_there_need_no_writing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = get_or_build(Settings(), "k", tokens("1234"))
    before = folder.parent.stat().st_mtime_ns

    def refuse(*args: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(files, "_acquire", refuse)
    assert get_or_build(Settings(), "k", no_build) == folder
    assert folder.parent.stat().st_mtime_ns == before


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATUNE_CACHE", str(NOWHERE))
    temporary = tmp_path / f"megatune-{os.getuid()}"
    folder = get_or_build(Settings(), "k", tokens("1234"))
    assert folder == temporary / "rows" / "k"
    assert capsys.readouterr().err == (
        f"cannot write {NOWHERE}/rows/k: No such file or directory; prepared rows are written to {folder}\n"
    )
    assert temporary.stat().st_mode & 0o777 == 0o700
    assert get_or_build(Settings(), "k", no_build) == folder


def test_a_disk_that_fills_up_is_done_without(tmp_path: Path, cache: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "tokens.bin").write_text("1234")
        if folder.is_relative_to(cache):
            with open("/dev/full", "w") as full:
                full.write("1")

    assert get_or_build(Settings(), "k", build).is_relative_to(tmp_path / f"megatune-{os.getuid()}")
    assert list(cache.iterdir()) == []


def test_temporary_folders_of_other_users_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link stands for a folder that somebody else has put there first."""
    monkeypatch.setenv("MEGATUNE_CACHE", str(NOWHERE))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / f"megatune-{os.getuid()}").symlink_to(theirs)
    with pytest.raises(MegatuneError, match="belongs to another user") as caught:
        get_or_build(Settings(), "k", tokens("1234"))
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE
    assert list(theirs.iterdir()) == []


def test_nowhere_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATUNE_CACHE", str(NOWHERE))
    monkeypatch.setenv("TMPDIR", "/proc")
    with pytest.raises(MegatuneError) as caught:
        get_or_build(Settings(), "k", no_build)
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE
    assert str(caught.value).splitlines()[:3] == [
        f"{NOWHERE}/rows/k: cannot write the prepared rows",
        "    why: No such file or directory",
        "    fix: name a writable folder as $MEGATUNE_CACHE",
    ]
    with pytest.raises(MegatuneError, match="as tokenized_path") as caught:
        get_or_build(with_data(tokenized_path=str(NOWHERE)), "k", no_build)
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE


def test_failures_to_read_are_not_failures_to_write(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "data.jsonl"))

    with pytest.raises(PermissionError):
        get_or_build(Settings(), "k", build)


def test_without_locks_the_first_rename_wins(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", unsupported)

    def build(folder: Path) -> None:
        tokens("ours")(folder)
        folder.rename(folder.with_name("ours"))  # both runs are this process, and would use one name
        get_or_build(Settings(), "k", tokens("theirs"))
        folder.with_name("ours").rename(folder)

    folder = get_or_build(Settings(), "k", build)
    assert (folder / "part/tokens.bin").read_text() == "theirs"
    assert [path.name for path in cache.iterdir()] == ["k"]


def test_tokenized_path_is_the_folder_itself(tmp_path: Path) -> None:
    settings = with_data(tokenized_path=str(tmp_path / "mine"))
    folder = get_or_build(settings, "k", tokens("1234"))
    assert folder == tmp_path / "mine"
    assert get_or_build(settings, "k", no_build) == folder
    with pytest.raises(MegatuneError) as caught:
        get_or_build(settings, "other", no_build)
    assert caught.value.exit_code == ExitCode.SETTINGS
    assert str(caught.value) == (
        f"tokenized_path: {folder} has rows that were prepared from other data or settings, or by another version of "
        "megatune\n"
        "    fix: name another folder, or delete this one to prepare its rows again"
    )
    assert (folder / "part/tokens.bin").read_text() == "1234"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_it_says_how_the_rows_of_tokenized_path_differ(tmp_path: Path) -> None:
    settings = with_data(tokenized_path=str(tmp_path / "mine"))
    made_of = {"cutoff_len": 512, "template": None, "the tokenizer": "a", "the file a.json of dataset a": "1"}
    cache_folder.get_or_build(settings, "k", tokens("1"), lambda folder: folder, made_of)
    other = {**made_of, "cutoff_len": 1024, "the tokenizer": "b", "the file b.json of dataset b": "1"}
    del other["the file a.json of dataset a"]
    with pytest.raises(MegatuneError) as caught:
        cache_folder.get_or_build(settings, "other", no_build, lambda folder: folder, other)
    assert caught.value.findings[0].why == (
        "cutoff_len is 1024, but 512 in the folder; the tokenizer differs; the file a.json of dataset a differs; "
        "the file b.json of dataset b differs"
    )


def test_what_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    thesis = tmp_path / "documents" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    for path in (thesis.parent, thesis):
        with pytest.raises(MegatuneError, match="not a folder of prepared rows") as caught:
            get_or_build(with_data(tokenized_path=str(path)), "k", no_build)
        assert caught.value.exit_code == ExitCode.SETTINGS
    assert thesis.read_text() == "years of work"


def test_an_empty_folder_can_be_tokenized_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    settings = with_data(tokenized_path=str(tmp_path / "mine"))
    folder = get_or_build(settings, "k", tokens("1234"))
    assert get_or_build(settings, "k", no_build) == folder
    mark_damaged(folder)
    assert get_or_build(settings, "k", tokens("1234")) == folder


def test_a_full_disk_says_what_was_written_and_what_is_free(cache: Path, tmp_path: Path) -> None:
    """Of both places that were tried; nothing half written stays."""

    def build(folder: Path) -> None:
        (folder / "tokens.bin").write_bytes(bytes(3 * 2**20))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "tokens.bin"))

    with pytest.raises(MegatuneError) as caught:
        get_or_build(with_data(), "k", build)
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE
    assert len(caught.value.findings) == 2
    for finding in caught.value.findings:
        expected = r"No space left on device: 3\.0 MiB were written and more are needed, [\d,.]+ MiB are free"
        assert re.fullmatch(expected, finding.why)
    assert not list(tmp_path.rglob("tokens.bin"))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError("4096 requested and 0 written")])
def test_a_full_disk_ends_what_is_read_ahead(tmp_path: Path, error: OSError) -> None:
    failed = _as_finding(error, tmp_path)
    assert failed.exit_code == ExitCode.CANNOT_WRITE
    assert "no room" in str(failed)
    assert "MiB are free" in str(failed)


@pytest.mark.parametrize(("place", "hours", "left"), [("elsewhere-1-77", 1, True), ("elsewhere-1-77", 25, False)])
def test_folders_of_other_machines_stay_for_a_day(place: str, hours: int, left: bool, tmp_path: Path) -> None:
    folder = tmp_path / f".k-0.megatune-partial-{place}"
    folder.mkdir()
    for path in (folder / "doing.json", folder):
        path.touch()
        os.utime(path, (time.time() - hours * 3600,) * 2)
    StreamFolder.make(tmp_path, "k")
    assert folder.exists() is left


def test_the_folder_of_a_process_that_is_gone_is_removed(tmp_path: Path) -> None:
    alive = StreamFolder.make(tmp_path, "k")
    child = os.fork()
    if not child:
        StreamFolder.make(tmp_path, "k")
        os._exit(0)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2
    second = StreamFolder.make(tmp_path, "k")
    assert set(tmp_path.iterdir()) == {alive.path, second.path}
