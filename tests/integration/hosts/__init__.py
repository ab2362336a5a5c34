"""WSGI apps that an agent is part of, each for a real gunicorn."""
