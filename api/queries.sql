-- The gateway's statements, loaded by name. It reads the model registry and the ledger; the operator's commands below
-- write customers and keys.

-- name: key
SELECT k.key_id, k.customer_id, k.secret_sha256, k.expires_at, k.revoked_at,
       k.requests_per_s, k.burst,
       c.requests_per_s AS customer_requests_per_s, c.burst AS customer_burst
FROM api_keys k JOIN customers c USING (customer_id)
WHERE k.key_id = $1;

-- name: routes
SELECT r.model, r.version, r.pool, r.spread, r.price_id, m.task, m.created_at
FROM routes r JOIN models m USING (model);

-- name: new_versions
-- Versions are never changed nor removed, so only those registered lately, or not yet known, are read.
SELECT model, version, manifest, artifact_uri, created_at
FROM model_versions
WHERE created_at >= $1 AND (model || '/' || version) <> ALL ($2::text[])
ORDER BY created_at;

-- name: usage_by_hour
SELECT hour AS start, model, meter, sum(quantity)::bigint AS quantity
FROM usage_hourly
WHERE customer_id = $1 AND hour >= $2 AND hour < $3
  AND ($4::text IS NULL OR model = $4) AND ($5::text IS NULL OR meter = $5)
GROUP BY 1, 2, 3
ORDER BY 1, 2, 3;

-- name: usage_by_day
SELECT date_trunc('day', hour, 'UTC') AS start, model, meter, sum(quantity)::bigint AS quantity
FROM usage_hourly
WHERE customer_id = $1 AND hour >= $2 AND hour < $3
  AND ($4::text IS NULL OR model = $4) AND ($5::text IS NULL OR meter = $5)
GROUP BY 1, 2, 3
ORDER BY 1, 2, 3;

-- name: ledger_moved_at
-- Of one partition: others move at their own pace and say nothing about it.
SELECT updated_at AS at FROM consumer_offsets
WHERE consumer_group = $1 AND topic = $2 AND partition = $3;

-- name: insert_customer
INSERT INTO customers (customer_id, name, requests_per_s, burst)
VALUES ($1, $2, $3, $4) RETURNING created_at;

-- name: customers
SELECT c.customer_id, c.name, c.requests_per_s, c.burst, c.created_at,
       count(k.key_id) FILTER (WHERE k.revoked_at IS NULL)::int AS keys
FROM customers c LEFT JOIN api_keys k USING (customer_id)
GROUP BY c.customer_id
ORDER BY c.created_at, c.customer_id;

-- name: customer
-- By id or by name; an id wins.
SELECT customer_id, name, requests_per_s, burst
FROM customers WHERE customer_id = $1 OR name = $1
ORDER BY (customer_id = $1) DESC LIMIT 1;

-- name: now
SELECT clock_timestamp();

-- name: lock_key
-- Changes of one key take turns from here to the end of the transaction; the gateway's look-ups do not wait.
SELECT key_id, customer_id, label, requests_per_s, burst, created_at, expires_at, revoked_at, replaces_key_id
FROM api_keys WHERE key_id = $1
FOR NO KEY UPDATE;

-- name: successor
-- A statement of its own after lock_key, so that it sees what was committed while that waited.
SELECT key_id FROM api_keys WHERE replaces_key_id = $1;

-- name: insert_key
INSERT INTO api_keys (key_id, customer_id, secret_sha256, label, requests_per_s, burst, created_at, expires_at,
                      replaces_key_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9);

-- name: keys
SELECT k.key_id, k.customer_id, c.name AS customer, k.label, k.requests_per_s, k.burst,
       k.created_at, k.expires_at, k.revoked_at, k.replaces_key_id
FROM api_keys k JOIN customers c USING (customer_id)
WHERE $1::text IS NULL OR k.customer_id = $1
ORDER BY k.created_at, k.key_id;

-- name: expire_key
UPDATE api_keys SET expires_at = $2 WHERE key_id = $1;

-- name: revoke_key
UPDATE api_keys SET revoked_at = $2 WHERE key_id = $1;
