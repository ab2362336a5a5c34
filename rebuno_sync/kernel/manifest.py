"""Manifests: the agents of a development kernel in one YAML file.

::

    agents:
      - id: researcher
        webhook_url: http://127.0.0.1:5000/webhook
        secret: orchard-secret
        lease_timeout_seconds: 60      # optional
        policy_file: researcher.yaml   # optional; or policy, the bundle itself

It says what is: an agent without a policy in it has none after a start, whatever was set before.
Agents that it does not name are left alone.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rebuno_sync.kernel import registry
from rebuno_sync.kernel.policy import Bundle, BundleError
from rebuno_sync.kernel.store import Transaction

_LONGEST = 1 << 20
_KEYS = ("id", "webhook_url", "secret", "lease_timeout_seconds", "policy", "policy_file")


class ManifestError(ValueError):
    """A manifest cannot be used; the message names the key."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One agent of a manifest; ``policy`` is the text of its bundle, ``None`` for none."""

    agent: registry.NewAgent
    policy: str | None


def load(manifest: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Entry, ...]:
    """Read and check a manifest.

    Args:
        manifest: the path of a YAML file, beside which policy files are looked for, or what such
            a file would hold; policy files are looked for in the working directory then.

    Raises:
        ManifestError: it cannot be read, or something in it will not do.
    """
    if isinstance(manifest, Mapping):
        return _entries(manifest, Path())
    path = Path(manifest)
    try:
        text = path.read_text("utf-8")
        if len(text) > _LONGEST:
            raise ManifestError(f"the manifest {path} is longer than {_LONGEST} characters")
        content = yaml.safe_load(text)
    except ManifestError:
        raise
    except OSError as exc:
        raise ManifestError(f"cannot read the manifest {path}: {exc.strerror}") from exc
    except RecursionError:
        raise ManifestError(f"the manifest {path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as exc:
        # PyYAML lets the latter two out for impossible dates, numbers and escapes.
        raise ManifestError(f"the manifest {path} is not YAML: {exc}") from exc
    try:
        return _entries(content, path.parent)
    except ManifestError as exc:
        raise ManifestError(f"{path}: {exc}") from exc.__cause__


def apply(tx: Transaction, entries: tuple[Entry, ...]) -> None:
    """Register the agents; those that are there get the URL, secret and policy of the manifest."""
    for entry in entries:
        registry.register(tx, entry.agent)
        if entry.policy is None:
            registry.clear_policy(tx, entry.agent.id)
        else:
            registry.set_policy(tx, entry.agent.id, entry.policy)


def _entries(content: Any, folder: Path) -> tuple[Entry, ...]:
    _check_keys(content, "the manifest", ("agents",))
    agents = content.get("agents")
    if agents is None:
        return ()
    if not isinstance(agents, list):
        raise ManifestError("agents must be a list")
    entries = tuple(_entry(agent, f"agents[{i}]", folder) for i, agent in enumerate(agents))
    ids = [entry.agent.id for entry in entries]
    for i, id in enumerate(ids):
        if id in ids[:i]:
            raise ManifestError(f"agents[{i}].id: {id!r} is there twice")
    return entries


def _entry(content: Any, where: str, folder: Path) -> Entry:
    _check_keys(content, where, _KEYS)
    for key in ("id", "webhook_url", "secret"):
        if not isinstance(content.get(key), str) or not content[key]:
            raise ManifestError(f"{where}.{key} must be text; quote it if it looks like a number")
    timeout = content.get("lease_timeout_seconds")
    if timeout is not None and type(timeout) not in (int, float):
        raise ManifestError(f"{where}.lease_timeout_seconds must be a number of seconds")
    try:
        agent = registry.NewAgent(content["id"], content["webhook_url"], content["secret"], timeout)
    except ValueError as exc:
        raise ManifestError(f"{where}.{exc}") from None
    return Entry(agent, _policy(content, where, folder))


def _policy(content: Mapping[str, Any], where: str, folder: Path) -> str | None:
    inline, file = content.get("policy"), content.get("policy_file")
    if inline is not None and file is not None:
        raise ManifestError(f"{where} has both policy and policy_file; keep one")
    key = "policy" if file is None else "policy_file"
    if file is not None:
        if not isinstance(file, str):
            raise ManifestError(f"{where}.policy_file must be a path")
        try:
            text = (folder / file).read_text("utf-8")
        except (OSError, ValueError) as exc:  # the latter for what is no text, and no path
            raise ManifestError(f"{where}.policy_file: cannot read {folder / file}: {exc}") from exc
    elif inline is None:
        return None
    elif isinstance(inline, str):
        text = inline
    elif isinstance(inline, Mapping):
        text = yaml.safe_dump(dict(inline), sort_keys=False, allow_unicode=True)
    else:
        raise ManifestError(f"{where}.policy must be a bundle: text or a mapping")
    try:
        Bundle.parse(text)
    except BundleError as exc:
        raise ManifestError(f"{where}.{key}: {exc}") from exc
    return text


def _check_keys(content: Any, where: str, known: tuple[str, ...]) -> None:
    if not isinstance(content, Mapping):
        raise ManifestError(f"{where} must be a mapping with {', '.join(known)}")
    for key in content:
        if key not in known:
            raise ManifestError(
                f"{where} has the unknown key {key!r}; it may have {', '.join(known)}"
            )
