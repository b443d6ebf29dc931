-- name: now
SELECT clock_timestamp();

-- name: insert_customer
INSERT INTO customers (customer_id, name, requests_per_s, burst, max_concurrent, cap_micros, cap_currency, created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8);

-- name: customers
SELECT c.customer_id, c.name, c.requests_per_s, c.burst, c.max_concurrent, c.cap_micros, c.cap_currency, c.created_at,
       count(k.key_id) FILTER (WHERE k.revoked_at IS NULL)::int AS keys
FROM customers c LEFT JOIN api_keys k USING (customer_id)
WHERE $1::text IS NULL OR c.customer_id = $1
GROUP BY c.customer_id
ORDER BY c.created_at, c.customer_id;

-- name: customer
-- By id or by name; an id wins.
SELECT customer_id, name, requests_per_s, burst
FROM customers WHERE customer_id = $1 OR name = $1
ORDER BY (customer_id = $1) DESC LIMIT 1;

-- name: lock_customer
-- Changes of one customer take turns from here to the end of the transaction; the gateway's look-ups do not wait.
SELECT customer_id, name, requests_per_s, burst, max_concurrent, cap_micros, cap_currency, created_at
FROM customers WHERE customer_id = $1
FOR NO KEY UPDATE;

-- name: update_customer
UPDATE customers SET requests_per_s = $2, burst = $3, max_concurrent = $4, cap_micros = $5, cap_currency = $6
WHERE customer_id = $1;

-- name: limits
-- A statement of its own after the lock, so that it sees what was committed while that waited. $2 null: the customer's.
SELECT unit, model, amount, window_s, burst
FROM rate_limits WHERE customer_id = $1 AND key_id IS NOT DISTINCT FROM $2
ORDER BY unit, model NULLS FIRST;

-- name: all_limits
-- Of all keys and customers, or of those of customer $1.
SELECT customer_id, key_id, unit, model, amount, window_s, burst
FROM rate_limits WHERE $1::text IS NULL OR customer_id = $1
ORDER BY unit, model NULLS FIRST;

-- name: delete_limits
DELETE FROM rate_limits WHERE customer_id = $1 AND key_id IS NOT DISTINCT FROM $2;

-- name: insert_limits
INSERT INTO rate_limits (customer_id, key_id, unit, model, amount, window_s, burst)
SELECT $1, $2, * FROM unnest($3::text[], $4::text[], $5::bigint[], $6::int[], $7::bigint[]);

-- name: models_missing
-- Those of $1 that were never published.
SELECT name FROM unnest($1::text[]) AS asked (name) WHERE name NOT IN (SELECT model FROM models) ORDER BY name;

-- name: has_currency
SELECT EXISTS (SELECT FROM prices WHERE currency = $1);

-- name: lock_key
-- Changes of one key take turns from here to the end of the transaction; the gateway's look-ups do not wait.
SELECT key_id, customer_id, label, requests_per_s, burst, max_concurrent, models, operations, created_at, expires_at,
       revoked_at, replaces_key_id
FROM api_keys WHERE key_id = $1
FOR NO KEY UPDATE;

-- name: successor
-- A statement of its own after lock_key, so that it sees what was committed while that waited.
SELECT key_id FROM api_keys WHERE replaces_key_id = $1;

-- name: insert_key
INSERT INTO api_keys (key_id, customer_id, secret_sha256, label, requests_per_s, burst, max_concurrent, models,
                      operations, created_at, expires_at, replaces_key_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12);

-- name: keys
-- All, or those of customer $1, or the one with the id $2.
SELECT k.key_id, k.customer_id, c.name AS customer, k.label, k.requests_per_s, k.burst,
       k.created_at, k.expires_at, k.revoked_at, k.replaces_key_id, k.max_concurrent, k.models, k.operations
FROM api_keys k JOIN customers c USING (customer_id)
WHERE ($1::text IS NULL OR k.customer_id = $1) AND ($2::text IS NULL OR k.key_id = $2)
ORDER BY k.created_at, k.key_id;

-- name: slower_keys
-- Those of customer $1 that may still call, and whose own rate or burst is below $2 or $3.
SELECT key_id FROM api_keys
WHERE customer_id = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())
  AND (requests_per_s < $2 OR burst < $3)
ORDER BY created_at, key_id;

-- name: living_successor
-- The key that replaces $1, if it may still call.
SELECT key_id FROM api_keys
WHERE replaces_key_id = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp());

-- name: update_key
UPDATE api_keys
SET requests_per_s = $2, burst = $3, max_concurrent = $4, models = $5, operations = $6, expires_at = $7
WHERE key_id = $1;

-- name: revoke_key
UPDATE api_keys SET revoked_at = $2 WHERE key_id = $1;

-- Claims: calls that say which call they are. Times of the book are by the clock of Postgres.
