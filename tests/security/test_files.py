"""What the kernel leaves on disk, and what it reads from there."""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import rebuno_sync
from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel, manifest
from rebuno_sync.kernel.policy import Bundle, BundleError
from rebuno_sync.kernel.policy_match import LONGEST_PATTERN, compile_glob, compile_regex
from rebuno_sync.kernel.policy_yaml import LONGEST

PACKAGE = Path(rebuno_sync.__file__).parent


@pytest.mark.skipif(sys.platform == "win32", reason="modes are POSIX's")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_database_is_for_its_owner_alone(
    umask: int, tmp_path: Path, kernels: Callable[..., EmbeddedKernel]
) -> None:
    before = os.umask(umask)
    try:
        kernel = kernels(tmp_path / "k.sqlite3")
        with Client(kernel.url) as client:
            client.register_agent("a1", "http://127.0.0.1:9/", "orchard-secret")
            files = sorted(tmp_path.iterdir())
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(
        ("k.sqlite3", "k.sqlite3-shm", "k.sqlite3-wal", "k.sqlite3.lock"), 0o600
    )


def test_a_database_that_was_opened_to_others_stays_so(
    tmp_path: Path, kernels: Callable[..., EmbeddedKernel]
) -> None:
    path = tmp_path / "k.sqlite3"
    kernels(path).stop()
    path.chmod(0o640)
    kernels(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


# YAML


def test_yaml_is_read_by_safe_loaders_alone() -> None:
    loading = re.compile(r"yaml\.(load|compose|full_load|unsafe_load|load_all|safe_load)\b[^\n]*")
    found = {
        match[0].strip()
        for path in PACKAGE.rglob("*.py")
        for match in loading.finditer(path.read_text("utf-8"))
    }
    for call in found:
        assert re.search(r"safe_load\(|SafeLoader|BaseLoader|_JsonLoader", call), call


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!x"]
)
def test_no_tag_makes_an_object(tag: str, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(f"agents: {tag} ['touch {tmp_path}/made']")
    with pytest.raises(manifest.ManifestError):
        manifest.load(tmp_path / "m.yaml")
    with pytest.raises(BundleError):
        Bundle.parse(f"rules: {tag} ['touch {tmp_path}/made']")
    assert not (tmp_path / "made").exists()


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)
RULE = "default_action: deny\nrules:\n  - &r\n    id: r\n    then: {decision: allow}\n"
BOMBS = {
    "laughs": LAUGHS,
    "laughs in a rule": RULE + "    when:\n" + re.sub(r"(?m)^", "      ", LAUGHS),
    "merged again and again": RULE
    + f"    when: {{targets: [{','.join(f'a{i}' for i in range(1000))}]}}\n"
    + "".join(f"  - {{<<: *r, id: r{i}}}\n" for i in range(100)),
    "a value within itself": "rules: &r [*r, *r]",
    "depth": "rules: " + "[" * 20_000,
    "depth of a block": "- " * 20_000,
    "length": RULE + "#" * LONGEST,
    "a long glob": "rules: [{id: a, when: {target: '%s'}, then: {decision: allow}}]" % ("*a" * 501),
    "a large expression": (
        "rules: [{id: a, when: {arguments: {x: {regex: '((a{9}){9}){99999}'}}}, "
        "then: {decision: allow}}]"
    ),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_policy_that_is_made_to_cost_is_refused(bomb: str) -> None:
    begin = time.process_time()
    with pytest.raises(BundleError):
        Bundle.parse(bomb)
    # Far from what it would come to: hours, or all memory.
    assert time.process_time() - begin < 20


def test_aliases_are_for_what_people_write() -> None:
    many = "".join(f"  - {{<<: *r, id: r{i}}}\n" for i in range(100))
    assert len(Bundle.parse(RULE + many).rules) == 101


def test_patterns_have_a_limit() -> None:
    for compiled in (compile_glob, compile_regex):
        assert compiled("a" * LONGEST_PATTERN)("a" * LONGEST_PATTERN)
        with pytest.raises(ValueError, match="more than 1000 characters"):
            compiled("a" * (LONGEST_PATTERN + 1))


@pytest.mark.parametrize(
    "text",
    [
        "agents: [{id: 2020-99-99}]",
        "agents: " + "9" * 5000,
        "[" * 5000,
        "agents: !!int x",
        "agents: !!float x",
        'a: "\\UFFFFFFFF"',
        "%YAML 9.1\n---\na",
        "? [a]\n: b",
        "a\0b",
        "agents:\n" + "#" * (1 << 20),
        'agents: [{id: a, webhook_url: "http://h/", secret: "\\ud800"}]',
        'agents: [{id: a, webhook_url: "http://h/\\r\\nX: y", secret: s}]',
        'agents: [{id: a, webhook_url: "http://h/", secret: s, policy_file: "a\\0b"}]',
        LAUGHS,
    ],
    ids=lambda text: ascii(text[:30]),
)
def test_a_manifest_that_cannot_be_used_says_so(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(manifest.ManifestError) as refused:
        manifest.load(tmp_path / "m.yaml")
    assert "m.yaml" in str(refused.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["a", "b"]) | VALUES,
        "webhook_url": st.just("http://h/") | VALUES,
        "secret": st.text(max_size=4) | VALUES,
        "lease_timeout_seconds": st.sampled_from([1, 1e400, -1, True]) | VALUES,
        "policy": st.just({"default_action": "allow"}) | VALUES,
        "policy_file": st.just("m.yaml") | VALUES,
    },
)
SYNTAX = st.lists(
    st.sampled_from(
        ["agents", "id", ": ", "- ", "{", "}", "[", "]", "&a ", "*a", "<<", "!!set ", "'"]
    )
    | st.sampled_from(
        ["\n", "  ", "2020-02-30", "1:2:3", "0x", "0b2", ".inf", "!!binary ", "\\x", '"']
    )
    | st.text(max_size=2),
    max_size=20,
).map("".join)


@settings(
    max_examples=250,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    text=SYNTAX
    | st.builds(
        lambda entries: yaml.safe_dump({"agents": entries}, allow_unicode=True),
        st.lists(ENTRIES, max_size=2),
    )
)
@example(text="agents: [{id: a, webhook_url: 'http://h/', secret: s, policy: &p {x: *p}}]")
def test_any_manifest_is_read_or_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        entries = manifest.load(path)
    except manifest.ManifestError:
        return
    for entry in entries:
        assert entry.agent.id
        assert entry.agent.secret.encode()


@settings(max_examples=150, derandomize=True, database=None)
@given(VALUES | st.fixed_dictionaries({"agents": st.lists(ENTRIES, max_size=2) | VALUES}))
def test_any_mapping_is_read_or_refused(content: Any) -> None:
    if not isinstance(content, dict):
        return
    try:
        manifest.load(content)
    except manifest.ManifestError:
        return
