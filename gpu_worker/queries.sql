-- The model registry, as the publish commands write and read it.

-- name: insert_model
INSERT INTO models (model, task) VALUES ($1, $2) ON CONFLICT (model) DO NOTHING

-- name: model_task
SELECT task FROM models WHERE model = $1

-- name: lock_model
-- Changes of one model take turns from here to the end of the transaction; readers and foreign keys do not wait.
SELECT task FROM models WHERE model = $1 FOR NO KEY UPDATE

-- name: insert_version
-- Whoever registers a version has just seen it run. No row when it was there, and had run before. The time is that of the
-- statement, so that it follows the order of the lock.
INSERT INTO model_versions (version, model, manifest, artifact_uri, created_at, warmed_up_at)
VALUES ($1, $2, $3, $4, clock_timestamp(), clock_timestamp())
ON CONFLICT (model, version) DO UPDATE SET warmed_up_at = excluded.warmed_up_at WHERE model_versions.warmed_up_at IS NULL
RETURNING created_at, xmax = 0 AS is_new

-- name: version_exists
-- Registered, and has run.
SELECT EXISTS (SELECT 1 FROM model_versions WHERE model = $1 AND version = $2 AND warmed_up_at IS NOT NULL)

-- name: cold_versions
-- Those of $2 that are not this model's, or have never run.
SELECT n.version FROM unnest($2::text[]) AS n (version)
WHERE NOT EXISTS (
    SELECT FROM model_versions v WHERE v.model = $1 AND v.version = n.version AND v.warmed_up_at IS NOT NULL
)
ORDER BY n.version

-- name: price_exists
SELECT EXISTS (SELECT 1 FROM prices WHERE price_id = $1)

-- name: now
SELECT clock_timestamp()

-- name: revisions
-- $1: one model, or null for all.
SELECT model, revision, change, effective_at, version, pool, spread, price_id, canaries, pins, restores,
       actor, reason, made_at, withdrawn_at, withdrawn_by
FROM route_revisions WHERE $1::text IS NULL OR model = $1
ORDER BY model, revision

-- name: insert_revision
INSERT INTO route_revisions (model, revision, change, effective_at, version, pool, spread, price_id, canaries, pins,
                             restores, actor, reason, made_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)

-- name: withdraw_revision
UPDATE route_revisions SET withdrawn_at = $3, withdrawn_by = $4 WHERE model = $1 AND revision = $2

-- name: alias
SELECT version FROM route_aliases WHERE model = $1 AND alias = $2

-- name: aliases
-- $1: one model, or null for all.
SELECT model, alias, version FROM route_aliases
WHERE ($1::text IS NULL OR model = $1) AND version IS NOT NULL
ORDER BY model, alias

-- name: set_alias
INSERT INTO route_aliases (model, alias, version, updated_at) VALUES ($1, $2, $3, $4)
ON CONFLICT (model, alias) DO UPDATE SET version = excluded.version, updated_at = excluded.updated_at

-- name: customer_id
-- By id or by name; an id wins.
SELECT customer_id FROM customers WHERE customer_id = $1 OR name = $1 ORDER BY (customer_id = $1) DESC LIMIT 1

-- name: models_named
SELECT model FROM models WHERE $1::text IS NULL OR model = $1 ORDER BY model

-- name: versions_by_prefix
SELECT version FROM model_versions WHERE model = $1 AND starts_with(version, $2) ORDER BY created_at

-- name: list_versions
SELECT v.model, m.task, v.version, v.created_at, v.artifact_uri,
       r.version IS NOT NULL AS routed, r.pool, r.spread, r.price_id
FROM model_versions v
JOIN models m USING (model)
LEFT JOIN routes r ON r.model = v.model AND r.version = v.version
ORDER BY v.model, v.created_at, v.version
