"""What handlers find in the application and in a request: one typed key each, filled by `app.py` and the middleware."""

from __future__ import annotations

from uuid import UUID

from aiohttp import web

from api.admission.deadlines import Queues
from api.door.bodies import Bodies
from api.door.connections import Connections
from api.door.pace import Pace
from api.gate import Gate
from api.health import Health
from api.inference import Inference
from api.large_tensors import LargeTensors
from api.registry_catalogue import Catalogue
from api.results.status import RequestStatus
from api.routing.versions import Versions
from api.turns import Turns
from infra.postgres import Pool
from infra.settings import ApiSettings

SETTINGS = web.AppKey("settings", ApiSettings)
GATE = web.AppKey("gate", Gate)
INFERENCE = web.AppKey("inference", Inference)
LARGE = web.AppKey("large", LargeTensors)
REQUESTS = web.AppKey("requests", RequestStatus)
QUEUES = web.AppKey("queues", Queues)
HEALTH = web.AppKey("health", Health)
VERSIONS = web.AppKey("versions", Versions)
CATALOGUE = web.AppKey("catalogue", Catalogue)
TURNS = web.AppKey("turns", Turns)
STRANGERS = web.AppKey("strangers", Pace)
FREE = web.AppKey("free", Pace)
CONNECTIONS = web.AppKey("connections", Connections)
BODIES = web.AppKey("bodies", Bodies)
LEDGER = web.AppKey("ledger", Pool)

REQUEST_ID = web.RequestKey("request_id", UUID)
#: The caller's W3C trace context, None when it sent no valid one.
TRACEPARENT: web.RequestKey[str | None] = web.RequestKey("traceparent")
#: Whether the call took tokens, and so is bounded by its key's own limits.
TOOK_TOKENS = web.RequestKey("took_tokens", bool)
