"""The ``wsgi.py`` of docs/serving.md, for the project of :mod:`.django_project`."""

from __future__ import annotations

import sys
import types
from typing import Any

from tests.documentation.pages import ROOT, blocks
from tests.integration.hosts.agents import make_agent
from tests.integration.hosts.django_project import ask_database

agents = types.ModuleType("shop.agents")
agents.agent = make_agent("shop", ask_database)  # type: ignore[attr-defined]
sys.modules["shop"] = types.ModuleType("shop")
sys.modules["shop.agents"] = agents

(page,) = (b for b in blocks(ROOT / "docs" / "serving.md") if "DispatcherMiddleware" in b.text)
names: dict[str, Any] = {}
exec(page.text, names)
app = names["application"]
