-- The model registry, as the publish commands write and read it.

-- name: insert_model
INSERT INTO models (model, task) VALUES ($1, $2) ON CONFLICT (model) DO NOTHING

-- name: model_task
SELECT task FROM models WHERE model = $1

-- name: lock_model
-- Changes of one model take turns from here to the end of the transaction; readers and foreign keys do not wait.
SELECT task FROM models WHERE model = $1 FOR NO KEY UPDATE

-- name: insert_version
-- No row when it was there. The time is that of the statement, so that it follows the order of the lock.
INSERT INTO model_versions (version, model, manifest, artifact_uri, created_at)
VALUES ($1, $2, $3, $4, clock_timestamp())
ON CONFLICT (model, version) DO NOTHING
RETURNING created_at

-- name: version_exists
SELECT EXISTS (SELECT 1 FROM model_versions WHERE model = $1 AND version = $2)

-- name: price_exists
SELECT EXISTS (SELECT 1 FROM prices WHERE price_id = $1)

-- name: upsert_route
-- No row when the route is that already.
INSERT INTO routes (model, version, pool, spread, price_id, updated_at)
VALUES ($1, $2, $3, $4, $5, clock_timestamp())
ON CONFLICT (model) DO UPDATE
SET version = excluded.version, pool = excluded.pool, spread = excluded.spread, price_id = excluded.price_id,
    updated_at = excluded.updated_at
WHERE (routes.version, routes.pool, routes.spread, routes.price_id)
      IS DISTINCT FROM (excluded.version, excluded.pool, excluded.spread, excluded.price_id)
RETURNING updated_at

-- name: current_route
SELECT version, pool, spread, price_id FROM routes WHERE model = $1

-- name: versions_by_prefix
SELECT version FROM model_versions WHERE model = $1 AND starts_with(version, $2) ORDER BY created_at

-- name: list_versions
SELECT v.model, m.task, v.version, v.created_at, v.artifact_uri,
       r.version IS NOT NULL AS routed, r.pool, r.spread, r.price_id
FROM model_versions v
JOIN models m USING (model)
LEFT JOIN routes r ON r.model = v.model AND r.version = v.version
ORDER BY v.model, v.created_at, v.version
