"""For whoever runs the gateway: is it alive, and can it serve."""

from __future__ import annotations

from aiohttp import web

from api.services import HEALTH
from api.surfaces.http import json_answer


async def healthz(_request: web.Request) -> web.Response:
    """`GET /healthz`: 200 while the event loop runs."""
    return json_answer({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """`GET /readyz`: 200 when Kafka, Redis and Postgres answered recently and routes are loaded, else 503 and why."""
    reasons = request.app[HEALTH].reasons()
    return json_answer({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)
