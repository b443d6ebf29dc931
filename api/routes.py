"""The URL table: every path the gateway serves, and by which handler."""

from __future__ import annotations

from aiohttp import web

from api.surfaces import oip, openai, operations, requests, schema_candidates, schema_registry, usage

ROUTES = (
    # Open Inference Protocol; paths are tried in this order, so the busiest ones come first
    web.post("/v2/models/{model}/infer", oip.infer),
    web.post("/v2/models/{model}/versions/{version}/infer", oip.infer),
    web.get("/v2", oip.server_metadata),
    web.get("/v2/health/live", oip.live),
    web.get("/v2/health/ready", oip.ready),
    web.get("/v2/models/{model}", oip.model_metadata),
    web.get("/v2/models/{model}/ready", oip.model_ready),
    web.get("/v2/models/{model}/versions/{version}", oip.model_metadata),
    web.get("/v2/models/{model}/versions/{version}/ready", oip.model_ready),
    # OpenAI
    web.post("/v1/embeddings", openai.embeddings),
    web.get("/v1/models", openai.models),
    web.get("/v1/models/{id}", openai.model),
    # Customers
    web.get("/v1/usage", usage.usage),
    web.get("/v1/requests/{id}", requests.request_status),
    # Analysts' tools: under /registry, as Confluent's registry answers
    *schema_registry.READS,
    *schema_candidates.CHECKS,
    *schema_registry.WRITES,
    # Operations
    web.get("/healthz", operations.healthz),
    web.get("/readyz", operations.readyz),
)
