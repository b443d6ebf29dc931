"""`python -m infra.stripe_standin`: one stand-in in the foreground, until it is told to stop.

Exits with 2 and one sentence when its folder is in use or damaged, or its port is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from infra.stripe_standin.account import Account
from infra.stripe_standin.control import create_app
from infra.stripe_standin.journal import JournalDamagedError
from infra.stripe_standin.server import Standin


async def serve(*, host: str, port: int, api_key: str, state_dir: Path) -> None:
    """Serve until SIGINT or SIGTERM; prints one line with the address once calls are answered."""
    account = Account(state_dir)
    runner = web.AppRunner(create_app(Standin(account, api_key=api_key)), access_log=None, shutdown_timeout=2)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        address = runner.addresses[0]
        sys.stdout.write(f"stripe stand-in listening on http://{address[0]}:{address[1]}\n")
        sys.stdout.flush()
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await stopped.wait()
    finally:
        await runner.cleanup()


def main() -> int:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m infra.stripe_standin", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one; the first line says which")
    parser.add_argument("--state", type=Path, required=True, help="folder of the journal; made if absent")
    args = parser.parse_args()
    # Only from the environment: every user of the machine can list arguments.
    api_key = os.environ.get("INFERLOG_STRIPE_API_KEY")
    if not api_key:
        parser.error("set INFERLOG_STRIPE_API_KEY, the only key that will be accepted")
    try:
        asyncio.run(serve(host=args.host, port=args.port, api_key=api_key, state_dir=args.state))
    except (OSError, JournalDamagedError) as error:
        sys.stderr.write(f"stripe stand-in: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
