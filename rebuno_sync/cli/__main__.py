"""``python -m rebuno_sync.cli``."""

from rebuno_sync.cli.main import main

if __name__ == "__main__":
    main()
