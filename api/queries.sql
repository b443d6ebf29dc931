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

-- name: usage
-- $2: where each period begins, in order; $3: where the last one ends. Beside a page come the totals of the whole range, as
-- period 0. Columns that are not asked for by $4 are empty.
WITH sums AS MATERIALIZED (
    SELECT width_bucket(hour, $2::timestamptz[]) AS period,
           CASE WHEN 'model' = ANY ($4::text[]) THEN model ELSE '' END AS model,
           CASE WHEN 'version' = ANY ($4) THEN version ELSE '' END AS version,
           CASE WHEN 'price_id' = ANY ($4) THEN price_id ELSE '' END AS price_id,
           meter, sum(quantity) AS quantity
    FROM usage_hourly
    WHERE customer_id = $1 AND hour >= ($2::timestamptz[])[1] AND hour < $3
      AND ($5::text IS NULL OR model = $5) AND ($6::text IS NULL OR starts_with(version, $6))
      AND ($7::text IS NULL OR price_id = $7) AND ($8::text IS NULL OR meter = $8)
    GROUP BY 1, 2, 3, 4, 5
), page AS (
    SELECT * FROM sums
    WHERE (period, model, version, price_id, meter) > ($9::int, $10::text, $11::text, $12::text, $13::text)
    ORDER BY period, model, version, price_id, meter
    LIMIT $14
)
SELECT * FROM page
UNION ALL
SELECT 0, '', '', '', meter, sum(quantity) FROM sums GROUP BY meter
ORDER BY period, model, version, price_id, meter;

-- name: usage_watermark
-- Of one partition: others move at their own pace and say nothing about it.
SELECT statement_timestamp() AS as_of, w.complete_until, w.seen_at
FROM (SELECT) AS always LEFT JOIN usage_watermarks w ON w.consumer_group = $1 AND w.topic = $2 AND w.partition = $3;

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
