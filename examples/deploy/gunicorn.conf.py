# gunicorn.conf.py
from rebuno_sync.serving.gunicorn_hooks import *

wsgi_app = "shop:app"
bind = "127.0.0.1:8000"  # not used where systemd hands over a socket
workers = 2
worker_class = "gthread"
threads = 8
graceful_timeout = 30  # seconds; longer than the agent's shutdown_timeout
timeout = 60  # likewise
max_requests = 20_000
max_requests_jitter = 2_000
worker_tmp_dir = "/dev/shm"  # signs of life need no disk
control_socket_disable = True  # it would lie in the home of a user who has none

logconfig_dict = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {
        "execution": {"()": "rebuno_sync.logs.ExecutionFilter", "absent": "-"},
    },
    "formatters": {
        "line": {
            "format": "%(levelname)s %(process)d %(execution_id)s %(dispatch_attempt)s"
            " %(name)s: %(message)s"
        },
    },
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "line",
            "filters": ["execution"],
        },
    },
    "root": {"level": "INFO", "handlers": ["stderr"]},
    "loggers": {
        "gunicorn.error": {"level": "INFO", "handlers": [], "propagate": True},
        "gunicorn.access": {"level": "WARNING", "handlers": [], "propagate": True},  # nginx has it
    },
}
