-- Facts about rows that are older than it. The statements for slices give, of the rows that are as old as
-- $1, up to $2 that come before what is told of their table, the newest first: when each came to be, and what it is.

-- name: backfill_begin
INSERT INTO outbox_backfill (source, completed_at)
VALUES ('prices', NULL), ('model_versions', NULL), ('routes', NULL), ('customers', NULL), ('api_keys', NULL)
ON CONFLICT (source) DO NOTHING

-- name: backfill_open
-- The tables of which rows are still to be told.
SELECT source FROM outbox_backfill WHERE completed_at IS NULL

-- name: backfill_turn
-- Whether rows of a table are still to be told; nobody else tells them until the transaction ends.
SELECT completed_at IS NULL FROM outbox_backfill WHERE source = $1 FOR UPDATE

-- name: backfill_move
UPDATE outbox_backfill SET below_at = $2, below_id = $3 WHERE source = $1

-- name: backfill_complete
UPDATE outbox_backfill SET completed_at = now() WHERE source = $1

-- name: told_since
-- When the migration $1 was applied: changes after that wrote their facts themselves.
SELECT applied_at FROM schema_migrations WHERE name = $1

-- name: old_prices
SELECT p.* FROM outbox_backfill b, (
    SELECT min(created_at) AS at, jsonb_build_array(price_id, currency)::text COLLATE "C" AS id, price_id, currency,
           jsonb_object_agg(meter, amount_micros) AS amounts_micros
    FROM prices WHERE created_at <= $1
    GROUP BY price_id, currency
) AS p
WHERE b.source = 'prices' AND (p.at, p.id) < (b.below_at, b.below_id)
ORDER BY p.at DESC, p.id DESC
LIMIT $2

-- name: old_versions
-- Fewer when their manifests are more than 8 MiB.
SELECT * FROM (
    SELECT *, sum(octet_length(manifest)) OVER (ORDER BY at DESC, id DESC) - octet_length(manifest) AS bytes_before
    FROM (
        SELECT v.* FROM outbox_backfill b, (
            SELECT v.created_at AS at, (v.model || '/' || v.version) COLLATE "C" AS id,
                   v.version, v.model, v.manifest, v.artifact_uri, m.task
            FROM model_versions v JOIN models m USING (model)
            WHERE v.created_at <= $1
        ) AS v
        WHERE b.source = 'model_versions' AND (v.at, v.id) < (b.below_at, b.below_id)
        ORDER BY v.at DESC, v.id DESC
        LIMIT $2
    ) AS slice
) AS sized
WHERE bytes_before < 8388608
ORDER BY at DESC, id DESC

-- name: old_routes
-- The first revision of a model is its route as it was when routes got a history, whatever came after it.
SELECT r.* FROM outbox_backfill b, (
    SELECT made_at AS at, model COLLATE "C" AS id, model, version, pool, spread, price_id
    FROM route_revisions WHERE revision = 1 AND made_at <= $1
) AS r
WHERE b.source = 'routes' AND (r.at, r.id) < (b.below_at, b.below_id)
ORDER BY r.at DESC, r.id DESC
LIMIT $2

-- name: old_customers
-- As they are now: what a command has changed since is told by that command, too.
SELECT created_at AS at, customer_id COLLATE "C" AS id, customer_id, name, requests_per_s, burst
FROM customers
WHERE created_at <= $1
  AND (created_at, customer_id COLLATE "C") < (SELECT below_at, below_id FROM outbox_backfill WHERE source = 'customers')
ORDER BY created_at DESC, id DESC
LIMIT $2

-- name: old_keys
-- A row for the creation of a key, and one for its revocation. A rotation ends a key before its time, and its successors
-- live as long as it was given at first. So the last of them, which no rotation has ended, tells how long that was; keys
-- that succeed each other in a circle have no last one. However many keys there are, indexes find those of the slice.
WITH told AS (
    SELECT below_at, below_id FROM outbox_backfill WHERE source = 'api_keys'
), slice AS (
    (SELECT created_at AS at, (key_id || '/CREATED') COLLATE "C" AS id, 'CREATED' AS change, key_id, customer_id, label,
            requests_per_s, burst, created_at, NULL::timestamptz AS revoked_at
     FROM api_keys
     WHERE created_at <= $1
       AND (created_at, (key_id || '/CREATED') COLLATE "C") < (SELECT below_at, below_id FROM told)
     ORDER BY at DESC, id DESC
     LIMIT $2)
    UNION ALL
    (SELECT revoked_at, (key_id || '/REVOKED') COLLATE "C" AS id, 'REVOKED', key_id, customer_id, label,
            requests_per_s, burst, created_at, revoked_at
     FROM api_keys
     WHERE revoked_at <= $1 AND created_at <= $1
       AND (revoked_at, (key_id || '/REVOKED') COLLATE "C") < (SELECT below_at, below_id FROM told)
     ORDER BY revoked_at DESC, id DESC
     LIMIT $2)
    ORDER BY at DESC, id DESC
    LIMIT $2
)
SELECT slice.*, last_created_at, last_expires_at
FROM slice LEFT JOIN LATERAL (
    WITH RECURSIVE line AS (
        SELECT slice.key_id
        UNION  -- and not ALL, so that a circle comes to an end
        SELECT next.key_id FROM line JOIN api_keys next ON next.replaces_key_id = line.key_id
    )
    SELECT k.created_at AS last_created_at, k.expires_at AS last_expires_at
    FROM line JOIN api_keys k USING (key_id)
    WHERE NOT EXISTS (SELECT FROM api_keys WHERE replaces_key_id = k.key_id)
    LIMIT 1
) AS last ON true
ORDER BY at DESC, id DESC

-- name: untold_add
INSERT INTO outbox_untold (source, id, reason)
SELECT $1, id, reason FROM unnest($2::text[], $3::text[]) AS new (id, reason)

-- name: untold
SELECT count(*) OVER () AS rows, source, id, reason FROM outbox_untold ORDER BY noted_at, source, id LIMIT $1
