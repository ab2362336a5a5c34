"""A Django project in one file, with an agent below a path; its steps use Django's database."""

from __future__ import annotations

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.urls import path
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from tests.integration.hosts.agents import make_agent

settings.configure(
    SECRET_KEY="for tests alone",
    ALLOWED_HOSTS=["127.0.0.1"],
    ROOT_URLCONF=__name__,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
django.setup()


def ordinary(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ordinary", content_type="text/plain")


def ask_database() -> str:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 'dja' || 'ngo'")
            return str(cursor.fetchone()[0])
    finally:
        # As at the end of a request: each thread has a connection of its own.
        connection.close()


urlpatterns = [path("", ordinary)]
agent = make_agent("one", ask_database)
app = DispatcherMiddleware(get_wsgi_application(), {"/agents/one": agent.app})
