"""Who may see the page and act on it: sessions, form tokens, answer headers.

Every browser gets a cookie with a random id, and every form a token that is worth something only
together with that id. Where the kernel has a bearer token, a browser that showed it, or an API
key, is let in under a fresh id until it logs out, the kernel stops, the key is deleted, or
:data:`SESSION_SECONDS` are over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
import threading
import time
from typing import Final

from flask import Request
from werkzeug.wrappers import Response

from rebuno_sync.kernel import refusals
from rebuno_sync.kernel.hosts import is_own_origin
from rebuno_sync.kernel.keys import EVERYTHING, KeyRing

#: How long a login lasts.
SESSION_SECONDS: Final = 12 * 3600.0
_MOST_SESSIONS: Final = 1000

_ID = re.compile(r"[\w-]{43}", re.ASCII)
_PORT = re.compile(r":([0-9]{1,5})$")

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: under that, browsers send "Origin: null" with our own forms, and the check
    # of the origin would have nothing to hold on to. No other origin is told anything either way.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclasses.dataclass(frozen=True)
class _Session:
    """A browser that is in: until when, what it may do, and by which key if by one."""

    until: float
    scopes: frozenset[str]
    key_id: str | None


class Guard:
    """Lets browsers in, and knows the forms that were given to them.

    Args:
        bearer_token: what has to be shown to log in, if not a key; ``None`` lets everybody in.
        keys: the API keys.
    """

    def __init__(self, bearer_token: str | None, keys: KeyRing) -> None:
        self._token = bearer_token
        self._keys = keys
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._sessions: dict[bytes, _Session] = {}

    @property
    def asks_for_token(self) -> bool:
        """Whether one has to log in."""
        return self._token is not None

    def check_form(self, request: Request) -> None:
        """Refuse a form that this page did not give to this browser.

        Raises:
            ForbiddenError: the form is refused.
        """
        origin = request.headers.get("Origin")
        if origin is None or not is_own_origin(request, origin):
            raise refusals.forbidden("The form was not sent from this page. Nothing was done.")
        id, token = self._id(request), request.form.get("csrf", "")
        if id is None or not _same(self.form_token(id), token):
            raise refusals.forbidden(
                "The form is out of date: the kernel was restarted, or you logged in or out"
                " since. Nothing was done; go back, reload the page and send it again."
            )

    def browser_id(self, request: Request) -> tuple[str, bool]:
        """Return the id of a browser, and whether it is new and has to be given to it."""
        id = self._id(request)
        return (secrets.token_urlsafe(32), True) if id is None else (id, False)

    def form_token(self, browser_id: str) -> str:
        """Return the token that goes into every form for this browser."""
        return hmac.new(self._key, browser_id.encode("ascii"), hashlib.sha256).hexdigest()

    def scopes(self, request: Request) -> frozenset[str]:
        """Return what the sender may do; nothing at all before logging in."""
        if self._token is None:
            return EVERYTHING
        id = self._id(request)
        with self._lock:
            session = None if id is None else self._sessions.get(_digest(id))
        if session is None or session.until <= time.monotonic():
            return frozenset()
        if session.key_id is not None and not self._keys.has(session.key_id):
            return frozenset()
        return session.scopes

    def log_in(self, token: str) -> str | None:
        """Return the id of a new session, ``None`` when ``token`` is neither token nor key."""
        if self._token is not None and _same(self._token, token):
            return self._begin(EVERYTHING, None)
        found = self._keys.find(token)
        return None if found is None else self._begin(found[1], found[0])

    def _begin(self, scopes: frozenset[str], key_id: str | None) -> str:
        id, now = secrets.token_urlsafe(32), time.monotonic()
        with self._lock:
            good = [item for item in self._sessions.items() if item[1].until > now]
            newest = sorted(good, key=lambda item: item[1].until)[1 - _MOST_SESSIONS :]
            self._sessions = dict(newest)
            self._sessions[_digest(id)] = _Session(now + SESSION_SECONDS, scopes, key_id)
        return id

    def log_out(self, request: Request) -> None:
        """End the session of a browser."""
        id = self._id(request)
        if id is not None:
            with self._lock:
                self._sessions.pop(_digest(id), None)

    def _id(self, request: Request) -> str | None:
        id = request.cookies.get(cookie_name(request), "")
        return id if _ID.fullmatch(id) else None


def cookie_name(request: Request) -> str:
    """Return the name of the cookie: one for each port, since browsers tell none apart."""
    port = _PORT.search(request.headers.get("Host", ""))
    return f"rebuno_{port.group(1) if port else 'page'}"


def give_cookie(request: Request, response: Response, id: str) -> None:
    """Have the browser keep its id."""
    response.set_cookie(
        cookie_name(request),
        id,
        path="/",
        secure=request.is_secure,
        httponly=True,
        samesite="Strict",
    )


def lacks_strict_cookies(request: Request) -> bool:
    """Tell whether a person followed a link from another site.

    Browsers keep strict cookies back then; asking once more from this page brings them.
    """
    site = request.headers.get("Sec-Fetch-Site")
    return site in ("cross-site", "same-site") and cookie_name(request) not in request.cookies


def _same(expected: str, given: str) -> bool:
    return hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogatepass"))


def _digest(id: str) -> bytes:
    return hashlib.sha256(id.encode("ascii")).digest()
