"""`python -m gpu_worker`: one worker in the foreground."""

from __future__ import annotations

from gpu_worker.app import main

if __name__ == "__main__":
    main()
