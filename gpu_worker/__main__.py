"""`python -m gpu_worker`: one worker in the foreground."""

from __future__ import annotations

import sys

from gpu_worker.app import main
from infra.settings import SettingsError

if __name__ == "__main__":
    try:
        main()
    except SettingsError as mistake:
        sys.exit(f"Error: {mistake}")
