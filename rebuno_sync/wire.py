"""What goes over the wire: headers, routes, JSON both ways, frozen models (PROTOCOL 4, 9)."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import json
import math
import re
import uuid
from collections.abc import Awaitable, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import quote

from . import long_integers
from .errors import safe_text

AGENT_ID_HEADER: Final = "Rebuno-Agent-Id"
SIGNATURE_HEADER: Final = "Rebuno-Signature"
TIMESTAMP_HEADER: Final = "Rebuno-Timestamp"
DISPATCH_ID_HEADER: Final = "Rebuno-Dispatch-Id"
DISPATCH_ATTEMPT_HEADER: Final = "Rebuno-Dispatch-Attempt"
EXECUTION_ID_HEADER: Final = "Rebuno-Execution-Id"

#: The kernel refuses request bodies over this many bytes.
MAX_BODY_BYTES: Final = 10 * 1024 * 1024
#: What a result, an error or an output may have, so that the body around it fits.
MAX_VALUE_BYTES: Final = MAX_BODY_BYTES - 1024
#: The longest text of one live delta, in bytes of UTF-8.
MAX_STREAM_BYTES: Final = 7000
#: Deeper values are refused: other JSON readers on the way would refuse them later.
MAX_DEPTH: Final = 200

TERMINAL_EXECUTION: Final = frozenset({"completed", "failed", "cancelled"})
TERMINAL_STEP: Final = frozenset({"succeeded", "failed", "denied", "cancelled"})


class Kind(str, enum.Enum):
    """The kind of a step."""

    TOOL_CALL = "tool_call"
    LLM_CALL = "llm_call"
    LOCAL = "local"


class Idempotency(str, enum.Enum):
    """What the kernel may do with a step whose outcome was lost."""

    SAFE_TO_RETRY = "safe_to_retry"
    AT_MOST_ONCE = "at_most_once"


def check_size(size: int, what: str, limit: int = MAX_BODY_BYTES) -> None:
    """Refuse what the kernel would not take.

    Args:
        size: the size of its JSON, in bytes.
        what: what it is, for the message.
        limit: the most that may be sent, in bytes.

    Raises:
        ValueError: it is too large; the message says what it is, its size, and what to do.
    """
    if size > limit:
        raise ValueError(
            f"{what} has {size} bytes of JSON, and the kernel takes {MAX_BODY_BYTES}; store the "
            "data elsewhere and pass a reference to it"
        )


# Routes


def execution_path(execution_id: str, *parts: str) -> str:
    """Return the path of an execution or of something below it, each part escaped."""
    return "/v0/executions/" + "/".join(segment(p) for p in (execution_id, *parts))


def route_of(path: str) -> str:
    """Return a path without its query and with ``{id}`` for each id, of which there are many.

    Collections and ids take turns in all routes but that of checkpoints.
    """
    parts = path.partition("?")[0].strip("/").split("/")
    ids = range(2, len(parts), 2)
    named = ("{id}" if n in ids and parts[n] != "checkpoints" else p for n, p in enumerate(parts))
    return "/" + "/".join(named)


@functools.lru_cache(maxsize=512)  # for executions; a step's id is hardly used twice
def segment(text: str) -> str:
    """Escape one path segment; an id can never reach another route."""
    if text in ("", ".", ".."):
        raise ValueError(f"{text!r} is not an id")
    return quote(text, safe="")


# JSON


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode(value: Any, root: str) -> bytes:
    """Encode ``value`` as JSON, to the same bytes in every version of this package.

    Objects keep their order, text is raw UTF-8, floats have the shortest text that reads back
    the same, integers have up to 100000 digits. Values beyond plain JSON are written so: tuples as
    lists; dataclasses and pydantic models as objects; enum members as their value; ``datetime``,
    ``date`` and ``time`` as ISO 8601; ``UUID`` and ``Decimal`` as text. Sets have no form, in a
    model neither: their order differs between processes.

    Args:
        value: what to encode.
        root: the name that the path in an error begins with, such as ``args``.

    Raises:
        TypeError: part of ``value`` has no JSON form; the message names the path to it.
    """
    plain = to_plain(value, root)
    try:
        return _ENCODER.encode(plain).encode("utf-8")
    except ValueError:  # an integer longer than sys.get_int_max_str_digits()
        return long_integers.encode(plain, root, _ENCODER.encode).encode("utf-8")


def to_plain(value: Any, path: str, depth: int = 0) -> Any:
    """Return ``value`` as dicts, lists, text, numbers, booleans and ``None``.

    Raises:
        TypeError: see :func:`encode`.
    """
    kind = type(value)
    if kind is str:
        if not value.isascii():
            _check_text(value, path)
        return value
    if value is None or kind is bool or kind is int:
        return value
    if kind is float:
        if not math.isfinite(value):
            raise TypeError(f"{path} is {value!r}; JSON has no such number")
        return value
    if depth > MAX_DEPTH:
        raise TypeError(f"{path[:80]}… is nested deeper than {MAX_DEPTH} levels, or holds itself")
    if kind is dict:
        return {_key(k, path): to_plain(v, f"{path}.{k}", depth + 1) for k, v in value.items()}
    if kind is list or kind is tuple:
        return [to_plain(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
    try:
        simpler = _convert(value)
    except Exception as exc:
        # A property, a lazy field of an ORM object, a serializer: they raise what they like.
        raise TypeError(
            f"{path} is a {kind.__name__}, and reading it raised {type(exc).__name__}: "
            f"{safe_text(exc)}"
        ) from exc
    if simpler is _NO_FORM:
        raise TypeError(f"{path} is a {kind.__name__}, which has no JSON form{_advice(value)}")
    return to_plain(simpler, path, depth + 1)


_NO_FORM: Final = object()


def _convert(value: Any) -> Any:
    """Take one step from a richer type towards JSON; ``_NO_FORM`` when there is none."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (uuid.UUID, decimal.Decimal)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if hasattr(type(value), "__pydantic_validator__") and hasattr(value, "model_dump"):
        _refuse_sets(value.model_dump(), type(value).__name__)
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return list(value)
    return _NO_FORM


def _refuse_sets(dumped: Any, path: str) -> None:
    # Pydantic writes a set in its own order, which differs between processes: the arguments
    # would name another step after a restart.
    if isinstance(dumped, (set, frozenset)):
        raise TypeError(f"{path} is a {type(dumped).__name__}; serialize it as a sorted list")
    if isinstance(dumped, dict):
        for key, value in dumped.items():
            _refuse_sets(value, f"{path}.{key}")
    elif isinstance(dumped, (list, tuple)):
        for i, value in enumerate(dumped):
            _refuse_sets(value, f"{path}[{i}]")


def _advice(value: Any) -> str:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "; decode it, or encode it as base64 text"
    if isinstance(value, (set, frozenset)):
        return "; a sorted list has one"
    if isinstance(value, Awaitable):
        return "; await it within asyncio.run(), and use the result"
    if callable(value):
        return "; pass the data it would need instead"
    return "; convert it to text, numbers, lists or dicts first"


def _key(key: Any, path: str) -> str:
    if type(key) is not str:
        if isinstance(key, str):
            return _key(str(key.value if isinstance(key, enum.Enum) else str.__str__(key)), path)
        raise TypeError(f"{path} has the key {key!r}, a {type(key).__name__}; JSON keys are text")
    if not key.isascii():
        _check_text(key, f"a key of {path}")
    return key


def _check_text(text: str, path: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise TypeError(
            f"{path} has a lone surrogate at character {exc.start}; JSON text is Unicode"
        ) from None


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_LONG_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_int=long_integers.parse)


def decode(data: bytes) -> Any:
    """Decode JSON; integers of up to 100000 digits and floats come back exactly.

    Numbers beyond what can be held are infinite, as in the standard library.

    Raises:
        ValueError: ``data`` is not JSON in UTF-8.
    """
    text = data.decode("utf-8")
    try:
        try:
            return _DECODER.decode(text)
        except json.JSONDecodeError:
            raise
        except ValueError:  # an integer longer than sys.get_int_max_str_digits(), or NaN
            return _LONG_DECODER.decode(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


# Models


M = TypeVar("M", bound="Model")


@dataclasses.dataclass(frozen=True)
class Model:
    """What the kernel answered; fields this version does not know are kept in ``extra``."""

    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, kw_only=True)

    @classmethod
    def from_json(cls: type[M], data: Any) -> M:
        """Build the model from a decoded JSON object; absent fields take their default.

        Raises:
            ValueError: ``data`` is not an object, or a field that must be there is not.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"expected a JSON object for {cls.__name__}, got {data!r:.80}")
        known = _known_fields(cls)  # type: ignore[arg-type]
        fields = {n: v for n, v in data.items() if n in known and v is not None}
        if len(fields) < len(data):
            fields["extra"] = {n: v for n, v in data.items() if n not in known}
        try:
            return cls(**fields)
        except TypeError:
            missing = [name for name, needed in known.items() if needed and name not in fields]
            raise ValueError(f"{cls.__name__} came without {', '.join(missing)}") from None


@functools.cache
def _known_fields(model: type[Model]) -> Mapping[str, bool]:
    """Return the fields of a model, and whether each must be there."""
    return {
        f.name: f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        for f in dataclasses.fields(model)
        if f.name != "extra"
    }


@dataclasses.dataclass(frozen=True)
class Execution(Model):
    """One run of an agent on one input. Times are RFC 3339 text."""

    id: str
    agent_id: str
    status: str
    input: Any = None
    output: Any = None
    failure_reason: str = ""
    created_at: str = ""
    updated_at: str = ""
    deadline_at: str | None = None
    session: str = ""
    parent_execution_id: str = ""

    @property
    def done(self) -> bool:
        """Whether the execution has ended: completed, failed or cancelled."""
        return self.status in TERMINAL_EXECUTION


@dataclasses.dataclass(frozen=True)
class Step(Model):
    """One effect of an execution. Times are RFC 3339 text."""

    step_id: str
    kind: str
    target: str
    status: str
    execution_id: str = ""
    args_hash: str = ""
    occurrence: int = 0
    idempotency: str = Idempotency.SAFE_TO_RETRY.value
    args: Any = None
    result: Any = None
    error: Any = None
    started_at: str | None = None
    completed_at: str | None = None


@dataclasses.dataclass(frozen=True)
class Event(Model):
    """One line of an execution's log. ``event_seq`` starts at 1 and has no gaps."""

    event_seq: int
    type: str
    execution_id: str = ""
    payload: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    occurred_at: str = ""


@dataclasses.dataclass(frozen=True)
class Approval(Model):
    """A decision that a person must take before a step may run."""

    id: str
    status: str
    step_id: str = ""
    execution_id: str = ""
    approvers: list[str] = dataclasses.field(default_factory=list)
    message: str = ""
    timeout_at: str | None = None
    decided_by: str = ""
    decided_at: str | None = None
    rationale: str = ""
    created_at: str = ""


@dataclasses.dataclass(frozen=True)
class AgentInfo(Model):
    """An agent as it is registered; the secret is never told."""

    id: str
    webhook_url: str = ""
    lease_timeout_seconds: float | None = None
    policy_bundle: str = ""
    registered_at: str = ""

    @classmethod
    def from_json(cls, data: Any) -> AgentInfo:
        """Build the model; generation 1 kernels spell the fields ``ID``, ``WebhookURL``, …."""
        if isinstance(data, Mapping) and "ID" in data:
            data = {_GENERATION_1_FIELDS.get(k, k): v for k, v in data.items() if k != "Secret"}
        return super().from_json(data)


_GENERATION_1_FIELDS: Final = {
    "ID": "id",
    "WebhookURL": "webhook_url",
    "PolicyBundle": "policy_bundle",
    "RegisteredAt": "registered_at",
}


@dataclasses.dataclass(frozen=True)
class ApiKey(Model):
    """A key that lets a client do some things. ``token`` is there only when it was just made."""

    id: str
    name: str = ""
    scopes: list[str] = dataclasses.field(default_factory=list)
    created_at: str = ""
    token: str = dataclasses.field(default="", repr=False)


@dataclasses.dataclass(frozen=True)
class PolicyTest(Model):
    """What a policy says to some cases.

    Attributes:
        results: an object for each case: ``name, agent_id, kind, target, decision, rule, reason``,
            and of what was expected ``expected`` and ``mismatch``, each ``None`` where it is fine.
        mismatches: how many decisions are not the expected ones.
        unreached_rules: the rules that decided none of the cases.
    """

    results: list[dict[str, Any]]
    mismatches: int = 0
    unreached_rules: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Delta(Model):
    """One piece of live output of a step; never stored."""

    step_id: str
    seq: int
    data: str


@dataclasses.dataclass(frozen=True)
class Decision(Model):
    """The kernel's answer to a submission or to the report of an outcome (PROTOCOL 5)."""

    decision: str
    step_id: str = ""
    result: Any = None
    error: Any = None
    reason: str = ""
    rule_id: str = ""
    approval_id: str = ""


#: What can stand in a header and in a path, and is no step up in one.
_ID: Final = re.compile(r"(?!\.{1,2}$)[!-~]{1,200}")


@dataclasses.dataclass(frozen=True)
class Dispatch(Model):
    """The body of a webhook. ``dispatch_attempt`` is ``None`` for generation 1 kernels, and
    ``lease_timeout_seconds`` is ``None`` for generations 1 and 2."""

    execution_id: str
    dispatch_id: str
    dispatch_attempt: int | None = None
    lease_timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("execution_id", "dispatch_id"):
            value = getattr(self, name)
            if not isinstance(value, str) or not _ID.fullmatch(value):
                raise ValueError(f"{name} must be an id in printable ASCII, got {value!r:.80}")
        attempt, lease = self.dispatch_attempt, self.lease_timeout_seconds
        if attempt is not None and (type(attempt) is not int or not 1 <= attempt < 1 << 63):
            shown = attempt if type(attempt) is not int or attempt < 1 else "a number beyond 2⁶³"
            raise ValueError(
                f"dispatch_attempt must be an integer of at least 1, got {shown!r:.80}"
            )
        if lease is not None and (
            type(lease) not in (int, float) or not math.isfinite(lease) or lease <= 0
        ):
            raise ValueError(f"lease_timeout_seconds must be a number above 0, got {lease!r}")
