"""For whoever runs the gateway: is it alive, and can it serve."""

from __future__ import annotations

from aiohttp import web

from api.services import HEALTH
from api.surfaces.http import json_answer


async def healthz(_request: web.Request) -> web.Response:
    """`GET /healthz`: 200 while the event loop runs."""
    return json_answer({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """`GET /readyz`: 200 when Kafka, Redis and Postgres answered recently and routes are loaded, else 503 and why.

    `degraded` is what only some requests notice, such as S3 for large tensors; `counts` belongs to it, since the start.
    """
    health = request.app[HEALTH]
    reasons = health.reasons()
    document = {"ready": not reasons, "reasons": reasons, "degraded": health.degraded(), "counts": health.counts()}
    return json_answer(document, status=503 if reasons else 200)
