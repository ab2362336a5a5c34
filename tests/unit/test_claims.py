"""One runner for each delivery among processes."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rebuno_sync import claims as claims_module
from rebuno_sync.claims import Claims
from tests.scripted import wait_until
from tests.unit.support import dispatch

URL = "http://kernel:8080"


def claims(tmp_path: Path, agent: str = "a1", url: str = URL) -> Claims:
    return Claims(agent, url, tmp_path / "claims")


def test_the_first_has_it(tmp_path: Path) -> None:
    one, other = claims(tmp_path), claims(tmp_path)
    assert one.take(dispatch(1))
    assert not other.take(dispatch(1))
    assert not one.take(dispatch(1))
    assert other.take(dispatch(2)), "the next attempt is anybody's"
    assert not one.take(dispatch(1)), "an older attempt that comes late is nobody's"
    assert one.take(dispatch(1, dispatch_id="d2"))


def test_agents_and_kernels_are_kept_apart(tmp_path: Path) -> None:
    assert claims(tmp_path).take(dispatch(1))
    assert claims(tmp_path, agent="a2").take(dispatch(1))
    assert claims(tmp_path, url="http://other:8080").take(dispatch(1))


def test_generation_1_has_no_attempts(tmp_path: Path) -> None:
    assert claims(tmp_path).take(dispatch(None))
    assert claims(tmp_path).take(dispatch(None)), "it may be the next attempt"


def test_any_attempt_that_a_kernel_may_send(tmp_path: Path) -> None:
    assert claims(tmp_path).take(dispatch(2**63 - 1))
    assert not claims(tmp_path).take(dispatch(2**63 - 1))


def test_the_oldest_entry_makes_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "_BUCKETS", 1)
    now = iter(range(1, 100))
    monkeypatch.setattr(claims_module.time, "time", lambda: next(now))
    one = claims(tmp_path)
    names = [f"d{n}" for n in range(claims_module._SLOTS + 1)]
    assert all(one.take(dispatch(1, dispatch_id=name)) for name in names)
    assert not any(one.take(dispatch(1, dispatch_id=name)) for name in names[1:])
    (file,) = (tmp_path / "claims").iterdir()
    assert file.stat().st_size == claims_module._BUCKET_BYTES
    assert one.take(dispatch(1, dispatch_id=names[0]))


TAKE_ALL = """
import sys
from pathlib import Path
from rebuno_sync.claims import Claims
from rebuno_sync.wire import Dispatch

mine = Claims("a1", "http://kernel:8080", Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print([n for n in range(300) if mine.take(Dispatch("e", f"d{n}", 1))])
"""


def test_many_processes_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKE_ALL, str(tmp_path / "claims")]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    shares = [process.communicate(timeout=60)[0] for process in processes]
    granted = [int(n) for share in shares for n in share.strip("[]\n").split(", ") if n]
    assert sorted(granted) == list(range(300))


def test_a_process_killed_with_the_file_in_hand_lets_go(tmp_path: Path) -> None:
    one = claims(tmp_path)
    assert one.take(dispatch(1))
    (file,) = (tmp_path / "claims").iterdir()
    child = os.fork()
    if child == 0:
        held = os.open(file, os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)
        (tmp_path / "held").touch()
        signal.pause()
        os._exit(0)
    wait_until(lambda: (tmp_path / "held").exists())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert one.take(dispatch(2))
    assert not one.take(dispatch(1))


def test_the_environment_names_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REBUNO_CLAIMS_DIR", str(tmp_path / "run" / "claims"))
    assert Claims("a1", URL).take(dispatch(1))
    assert not Claims("a1", URL).take(dispatch(1))
    (directory,) = (tmp_path / "run").iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    (file,) = directory.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_each_user_has_a_directory_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REBUNO_CLAIMS_DIR", raising=False)
    monkeypatch.setattr(claims_module.tempfile, "gettempdir", lambda: str(tmp_path))
    assert Claims("a1", URL).take(dispatch(1))
    assert [path.name for path in tmp_path.iterdir()] == [f"rebuno-sync-{os.getuid()}"]


def _open_to_all(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)


def _a_link(directory: Path) -> None:
    elsewhere = directory.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    directory.symlink_to(elsewhere)


def _a_file(directory: Path) -> None:
    directory.touch()


def _a_linked_file(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    Claims("a1", URL, directory)._file.symlink_to(directory.with_name("victim"))


@pytest.mark.parametrize("prepare", [_open_to_all, _a_link, _a_file, _a_linked_file])
def test_a_place_that_is_not_ours_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prepare: Callable[[Path], None]
) -> None:
    prepare(tmp_path / "claims")
    one = claims(tmp_path)
    with caplog.at_level(logging.WARNING, "rebuno_sync.claims"):
        assert one.take(dispatch(1))
        assert one.take(dispatch(1)), "the agent works all the same"
    assert len(caplog.records) == 1, "said once"
    assert "REBUNO_CLAIMS_DIR names the directory" in caplog.text
    assert not (tmp_path / "victim").exists()


def test_a_failure_that_passes_turns_nothing_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a full disk, or a process without a file to open, for a moment."""
    monkeypatch.delenv("REBUNO_CLAIMS_DIR")
    one, other = claims(tmp_path), claims(tmp_path)
    (tmp_path / "claims").touch()
    with caplog.at_level(logging.WARNING, "rebuno_sync.claims"):
        assert one.take(dispatch(1))
        assert other.take(dispatch(1))
        assert "REBUNO_CLAIMS_DIR can name another directory" in caplog.text
        (tmp_path / "claims").unlink()
        assert one.take(dispatch(2))
        assert not other.take(dispatch(2))
    assert [r.getMessage() for r in caplog.records][2:] == [
        "deliveries are claimed among the processes of this machine again"
    ] * 2


def test_a_failure_that_lasts_is_told_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "claims").touch()
    now = [100.0]
    monkeypatch.setattr(claims_module.time, "monotonic", lambda: now[0])
    one = claims(tmp_path)
    with caplog.at_level(logging.WARNING, "rebuno_sync.claims"):
        for _ in range(3):
            one.take(dispatch(1))
            one.take(dispatch(1))
            now[0] += claims_module._QUIET_SECONDS
    assert len(caplog.records) == 3


def test_a_directory_that_is_named_may_be_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("REBUNO_CLAIMS_DIR", str(tmp_path / "link"))
    assert Claims("a1", URL).take(dispatch(1))
    assert not Claims("a1", URL).take(dispatch(1))
