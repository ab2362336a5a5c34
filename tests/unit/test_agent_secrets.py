"""The secrets of an agent: several at once, from a file, never shown."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from rebuno_sync import signing
from rebuno_sync.agent_secrets import Secrets

BODY = b'{"execution_id": "e"}'


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REBUNO_AGENT_SECRET", "REBUNO_AGENT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


def verifies(secrets: Secrets, secret: str) -> bool:
    return secrets.verify(BODY, signing.sign_body(secret, BODY))


def replace(path: Path, text: str) -> None:
    """Put another file in its place, as those who mount secrets do."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def test_each_verifies_and_the_first_signs() -> None:
    secrets = Secrets(["new", "old", "new"])
    assert secrets.all() == ("new", "old")
    assert verifies(secrets, "new")
    assert verifies(secrets, "old")
    assert not verifies(secrets, "other")
    assert not secrets.verify(BODY, "")


def test_the_time_taken_does_not_tell_which_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    verify = signing.verify_body

    def counting(secret: str, body: bytes, given: str) -> bool:
        tried.append(secret)
        return verify(secret, body, given)

    monkeypatch.setattr(signing, "verify_body", counting)
    assert verifies(Secrets(["new", "old"]), "new")
    assert tried == ["new", "old"]


def test_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REBUNO_AGENT_SECRET", "plain")
    assert Secrets(None).all() == ("plain",)
    assert Secrets("given").all() == ("given",)
    file = tmp_path / "secret"
    file.write_text("new\r\n\n  old \n", encoding="utf-8")
    monkeypatch.setenv("REBUNO_AGENT_SECRET_FILE", str(file))
    with pytest.raises(ValueError, match="are both set in the environment; unset one"):
        Secrets(None)
    monkeypatch.delenv("REBUNO_AGENT_SECRET")
    assert Secrets(None).all() == ("new", "old")


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("old\n", encoding="utf-8")
    secrets = Secrets(file)
    assert secrets.all() == ("old",)
    replace(file, "new\nold\n")
    assert verifies(secrets, "new")
    assert secrets.all() == ("new", "old")
    replace(file, "new\n")
    assert not verifies(secrets, "old")


@pytest.mark.parametrize("how", ["empty", "gone"])
def test_a_file_that_is_being_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    file = tmp_path / "secret"
    file.write_text("old\n", encoding="utf-8")
    secrets = Secrets(file)
    if how == "gone":
        file.unlink()
    else:
        replace(file, "\n")
    with caplog.at_level(logging.WARNING, "rebuno_sync.agent_secrets"):
        assert secrets.all() == ("old",)
        assert secrets.all() == ("old",)
    assert len(caplog.records) == 1
    assert "the secrets read before stay in use" in caplog.text
    replace(file, "new\n")
    assert secrets.all() == ("new",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "the agent has no secret; pass secret=… or set REBUNO_AGENT_SECRET"),
        ("", "a secret is not text, or empty"),
        (["s3cret", None], "a secret is not text, or empty"),
        ((), "there is no secret in the list"),
        (b"s3cret", "secret is text, a list of texts or a Path, not bytes"),
        ({"s3cret"}, "secret is text, a list of texts or a Path, not set"),
    ],
)
def test_no_secret_at_all(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Secrets(given)
    assert "s3cret" not in str(caught.value)


def test_a_file_with_no_secret_in_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    message = "cannot be read: {}; secret=… or REBUNO_AGENT_SECRET_FILE names it"
    with pytest.raises(ValueError, match=message.format("No such file or directory")):
        Secrets(file)
    with pytest.raises(ValueError, match=message.format("Is a directory")):
        Secrets(tmp_path)
    file.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no secret in it; it holds one a line"):
        Secrets(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is no text in UTF-8"):
        Secrets(file)


def test_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s3cret\n", encoding="utf-8")
    assert repr(Secrets(["s3cret", "s3cret2"])) == "<2 secret(s)>"
    assert repr(Secrets(file)) == f"<1 secret(s) of {str(file)!r}>"
