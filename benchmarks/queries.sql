-- Of `make bench-ledger-size`.

-- name: fill_processed
-- Requests number $1 to $2: one every $4 ms from the Unix time $3 (ms) on, up to 2 s out of order, with ids as gateways
-- make them (UUID version 7).
INSERT INTO processed_requests (request_id, occurred_at, content_digest)
SELECT (lpad(to_hex(ms), 12, '0') || '7' || substr(random, 1, 3) || '8' || substr(random, 4, 15))::uuid,
       to_timestamp(ms / 1000.0), decode(random, 'hex')
FROM (
    SELECT md5(n::text) AS random, $3::bigint + (n * $4::float8)::bigint + (n * 7919) % 2000 AS ms
    FROM generate_series($1::bigint, $2::bigint) AS n
) AS made

-- name: fill_hourly
-- The hours of all customers of which each used every meter, from $2 on.
INSERT INTO usage_hourly (customer_id, hour, model, version, price_id, meter, quantity)
SELECT 'cust_' || lpad(c::text, 4, '0'), hour, 'digits', repeat('d1', 32), 'standard-v1', meter, 1000
FROM generate_series(0, $1::int - 1) AS c,
     generate_series(date_trunc('hour', $2::timestamptz, 'UTC'), date_trunc('hour', now(), 'UTC'), interval '1 hour') AS hour,
     unnest(ARRAY['requests', 'items', 'tokens']) AS meter

-- name: settle
VACUUM (ANALYZE) processed_requests, usage_hourly

-- name: checkpoint
CHECKPOINT

-- name: sizes
SELECT pg_table_size('processed_requests') AS table_bytes, pg_indexes_size('processed_requests') AS index_bytes,
       pg_database_size(current_database()) AS database_bytes

-- name: complete
INSERT INTO usage_watermarks (consumer_group, topic, partition, complete_until, seen_at)
SELECT $1, $2, partition, now(), now() FROM generate_series(0, $3::int - 1) AS partition

-- Of `make bench-scale`: customers, keys and versions in bulk, as the commands would have left them.

-- name: scale_customers
INSERT INTO customers (customer_id, name, requests_per_s, burst, created_at)
SELECT id, id, 100000, 100000, $2 FROM unnest($1::text[]) AS id

-- name: scale_keys
INSERT INTO api_keys (key_id, customer_id, secret_sha256, label, requests_per_s, burst, created_at)
SELECT key_id, customer_id, secret_sha256, 'bench', 100000, 100000, $4
FROM unnest($1::text[], $2::text[], $3::bytea[]) AS made (key_id, customer_id, secret_sha256)

-- name: scale_models
INSERT INTO models (model, task) SELECT model, 'TENSORS' FROM unnest($1::text[]) AS model

-- name: scale_versions
INSERT INTO model_versions (version, model, manifest, artifact_uri, created_at, warmed_up_at)
SELECT version, model, manifest, 's3://inferlog/sha256/' || version || '/', $4, $4
FROM unnest($1::text[], $2::text[], $3::text[]) AS made (version, model, manifest)

-- name: scale_routes
INSERT INTO route_revisions (model, revision, change, effective_at, version, pool, spread, price_id, actor, made_at)
SELECT model, 1, 'ROUTED', $3, version, 'default', 2, 'standard-v1', 'bench', $3
FROM unnest($1::text[], $2::text[]) AS made (model, version)
