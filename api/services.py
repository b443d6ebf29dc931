"""What handlers find in the application: one typed key per service, filled by `app.py`."""

from __future__ import annotations

from aiohttp import web

from api.admission.deadlines import Queues
from api.admission.gate import Gate
from api.inference import Inference
from api.surfaces.health import Health
from infra.postgres import Pool

GATE = web.AppKey("gate", Gate)
INFERENCE = web.AppKey("inference", Inference)
QUEUES = web.AppKey("queues", Queues)
HEALTH = web.AppKey("health", Health)
LEDGER = web.AppKey("ledger", Pool)
