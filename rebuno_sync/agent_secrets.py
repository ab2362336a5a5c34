"""The secrets of one agent: several while one is being replaced, from a file if that suits."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from . import signing

log = logging.getLogger(__name__)

SECRET_VARIABLE = "REBUNO_AGENT_SECRET"  # a name  # nosec B105
FILE_VARIABLE = "REBUNO_AGENT_SECRET_FILE"

_HOW = f"pass secret=… or set {SECRET_VARIABLE} in the environment (or {FILE_VARIABLE})"
#: What an agent takes as its secret: one, several, or the file that has them.
Given = str | Sequence[str] | os.PathLike[str] | None


class Secrets:
    """Every secret verifies a webhook, the first signs requests (PROTOCOL 3).

    Args:
        given: one secret; several, the newest first; a :class:`pathlib.Path` of a file with one
            secret a line, which is read again when it changes; ``None`` for what
            ``REBUNO_AGENT_SECRET`` holds or ``REBUNO_AGENT_SECRET_FILE`` names.

    Raises:
        ValueError: there is no secret, or not one that can sign, or the file cannot be read.
    """

    def __init__(self, given: Given) -> None:
        self._file: Path | None = None
        self._stamp: tuple[int, ...] = ()
        if given is None:
            given = _from_environment()
        if isinstance(given, os.PathLike):
            self._file = Path(given)
            try:
                self._stamp = _stamp(self._file)
                self._held = _read(self._file)
            except OSError as exc:
                raise ValueError(
                    f"the file of secrets {self._file} cannot be read: {exc.strerror}; "
                    f"secret=… or {FILE_VARIABLE} names it"
                ) from exc
        else:
            self._held = _checked([given] if isinstance(given, str) else given)

    def __repr__(self) -> str:
        source = "" if self._file is None else f" of {str(self._file)!r}"
        return f"<{len(self._held)} secret(s){source}>"

    def all(self) -> tuple[str, ...]:
        """Return the secrets as they are now, the one that signs first."""
        if self._file is not None:
            self._read_again(self._file)
        return self._held

    def verify(self, body: bytes, given: str) -> bool:
        """Tell whether ``given`` is the signature of ``body`` by any of the secrets."""
        found = False
        for secret in self.all():
            # Each is compared, so that the time taken does not tell which one it was.
            found |= signing.verify_body(secret, body, given)
        return found

    def _read_again(self, file: Path) -> None:
        before = self._stamp
        try:
            self._stamp = ()
            # Taken before it is read: what changes meanwhile is read once more.
            self._stamp = stamp = _stamp(file)
            if stamp != before:
                self._held = _read(file)
        except (OSError, ValueError) as exc:
            # Whoever replaces the file may be half-way through it.
            if self._stamp != before:
                log.warning("the secrets read before stay in use: %s", exc)


def _from_environment() -> str | Path:
    secret, file = os.environ.get(SECRET_VARIABLE), os.environ.get(FILE_VARIABLE)
    if secret and file:
        raise ValueError(
            f"{SECRET_VARIABLE} and {FILE_VARIABLE} are both set in the environment; unset one"
        )
    if file:
        return Path(file)
    if not secret:
        raise ValueError(f"the agent has no secret; {_HOW}")
    return secret


def _stamp(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as exc:
        raise ValueError(f"{file} is no text in UTF-8, and a file of secrets is: {exc}") from exc
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ValueError(f"{file} has no secret in it; it holds one a line, the newest first")
    return _checked(found)


def _checked(given: Sequence[object]) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"secret is text, a list of texts or a Path, not {type(given).__name__}")
    found: dict[str, None] = {}
    for secret in given:
        # The value itself is never part of a message.
        if not isinstance(secret, str) or not secret:
            raise ValueError(f"a secret is not text, or empty; {_HOW}")
        found[secret] = None
    if not found:
        raise ValueError(f"there is no secret in the list; {_HOW}")
    return tuple(found)
