-- name: insert_processed
INSERT INTO processed_requests (request_id, occurred_at, content_digest)
SELECT request_id, occurred_at, content_digest
FROM unnest($1::uuid[], $2::timestamptz[], $3::bytea[]) AS new (request_id, occurred_at, content_digest)
ON CONFLICT (request_id) DO NOTHING
RETURNING request_id

-- name: contradicting
SELECT known.request_id
FROM processed_requests known
JOIN unnest($1::uuid[], $2::bytea[]) AS said (request_id, content_digest) USING (request_id)
WHERE known.content_digest <> said.content_digest  -- never true of a row without a digest

-- name: add_usage
INSERT INTO usage_hourly AS u (customer_id, hour, model, version, price_id, meter, quantity)
SELECT customer_id, hour, model, version, price_id, meter, quantity
FROM unnest($1::text[], $2::timestamptz[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[])
    AS new (customer_id, hour, model, version, price_id, meter, quantity)
ON CONFLICT (customer_id, hour, model, version, price_id, meter)
DO UPDATE SET quantity = u.quantity + excluded.quantity, updated_at = now()

-- name: set_aside
INSERT INTO dead_letters (topic, partition, "offset", key, value, value_size_bytes, value_sha256, reason, seen_at)
SELECT topic, partition, "offset", key, value, value_size_bytes, value_sha256, reason, seen_at
FROM unnest(
    $1::text[], $2::integer[], $3::bigint[], $4::bytea[], $5::bytea[], $6::bigint[], $7::text[], $8::text[],
    $9::timestamptz[]
) AS new (topic, partition, "offset", key, value, value_size_bytes, value_sha256, reason, seen_at)
ON CONFLICT (topic, partition, "offset") DO NOTHING
RETURNING topic, partition, "offset"

-- name: advance
INSERT INTO consumer_offsets AS c (consumer_group, topic, partition, next_offset)
SELECT $1, topic, partition, next_offset
FROM unnest($2::text[], $3::integer[], $4::bigint[]) AS new (topic, partition, next_offset)
ON CONFLICT (consumer_group, topic, partition)
DO UPDATE SET next_offset = excluded.next_offset, updated_at = now()
WHERE c.next_offset < excluded.next_offset

-- name: positions
SELECT partition, next_offset FROM consumer_offsets WHERE consumer_group = $1 AND topic = $2

-- name: usage
SELECT u.customer_id, coalesce(max(c.name), '') AS customer, date_trunc($1, u.hour, 'UTC') AS since,
       u.model, u.meter, sum(u.quantity) AS quantity
FROM usage_hourly u LEFT JOIN customers c USING (customer_id)
WHERE ($2::text IS NULL OR u.customer_id = $2 OR c.name = $2)
  AND ($3::timestamptz IS NULL OR u.hour >= $3)
  AND ($4::timestamptz IS NULL OR u.hour < $4)
  AND ($5::text IS NULL OR u.model = $5)
  AND ($6::text IS NULL OR u.meter = $6)
GROUP BY u.customer_id, 3, u.model, u.meter
ORDER BY since, customer, u.customer_id, u.model, u.meter

-- name: known_names
-- Whether anybody is or was called $1, and any model $2.
SELECT EXISTS (SELECT 1 FROM customers WHERE customer_id = $1 OR name = $1)
       OR EXISTS (SELECT 1 FROM usage_hourly WHERE customer_id = $1) AS customer,
       EXISTS (SELECT 1 FROM models WHERE model = $2)
       OR EXISTS (SELECT 1 FROM usage_hourly WHERE model = $2) AS model

-- Of the outbox: facts about rows that are older than it.

-- name: backfill_claim
-- The tables whose rows have not been told, now taken; a second taker waits for the first and gets none.
INSERT INTO outbox_backfill (source)
VALUES ('prices'), ('model_versions'), ('routes'), ('api_keys')
ON CONFLICT (source) DO NOTHING
RETURNING source

-- name: outbox_since
-- When the outbox came to be: changes after that wrote their facts themselves.
SELECT applied_at FROM schema_migrations WHERE name = '0005_facts.sql'

-- name: old_prices
SELECT price_id, currency, min(created_at) AS created_at, jsonb_object_agg(meter, amount_micros) AS amounts_micros
FROM prices WHERE created_at <= $1
GROUP BY price_id, currency
ORDER BY price_id, currency

-- name: old_versions
SELECT v.version, v.model, v.manifest, v.artifact_uri, v.created_at, m.task
FROM model_versions v JOIN models m USING (model)
WHERE v.created_at <= $1
ORDER BY v.model, v.version

-- name: old_routes
SELECT model, version, pool, spread, price_id, updated_at FROM routes WHERE updated_at <= $1 ORDER BY model

-- name: old_keys
-- A rotation ends a key before its time, and its successors live as long as it was given at first. So the last of them,
-- which no rotation has ended, tells how long that was.
WITH RECURSIVE line AS (
    SELECT key_id, key_id AS last FROM api_keys WHERE created_at <= $1
    UNION ALL
    SELECT line.key_id, next.key_id FROM line JOIN api_keys next ON next.replaces_key_id = line.last
)
SELECT k.key_id, k.customer_id, k.label, k.requests_per_s, k.burst, k.created_at, k.revoked_at,
       l.created_at AS last_created_at, l.expires_at AS last_expires_at
FROM line JOIN api_keys k USING (key_id) JOIN api_keys l ON l.key_id = line.last
WHERE NOT EXISTS (SELECT FROM api_keys WHERE replaces_key_id = line.last)
ORDER BY k.key_id
