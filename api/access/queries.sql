-- name: key
SELECT k.key_id, k.customer_id, k.secret_sha256, k.expires_at, k.revoked_at,
       k.requests_per_s, k.burst, k.max_concurrent, k.models, k.operations,
       c.requests_per_s AS customer_requests_per_s, c.burst AS customer_burst,
       c.max_concurrent AS customer_max_concurrent, c.cap_micros, c.cap_currency,
       coalesce((
           SELECT json_agg(json_build_array(l.key_id IS NOT NULL, l.unit, l.model, l.amount, l.window_s, l.burst)
                           ORDER BY l.unit, l.model NULLS FIRST)
           FROM rate_limits l
           WHERE l.customer_id = k.customer_id AND (l.key_id IS NULL OR l.key_id = k.key_id)
       ), '[]') AS limits
FROM api_keys k JOIN customers c USING (customer_id)
WHERE k.key_id = $1;

-- name: key_changes
-- What was changed by transactions that the snapshot $1 did not see. Rows that were restored from another server may name
-- transactions that are still to come here; they say nothing. The snapshot and the rows are of one statement.
SELECT pg_current_snapshot()::text AS snapshot, pg_postmaster_start_time() AS server,
       coalesce((
           SELECT json_agg(json_build_array(key_id, customer_id, revoked_at IS NOT NULL))
           FROM api_keys
           WHERE changed_in >= pg_snapshot_xmin($1::text::pg_snapshot)
             AND changed_in < pg_snapshot_xmax(pg_current_snapshot())
             AND NOT pg_visible_in_snapshot(changed_in, $1::text::pg_snapshot)
       ), '[]') AS keys,
       ARRAY(
           SELECT customer_id
           FROM customers
           WHERE changed_in >= pg_snapshot_xmin($1::text::pg_snapshot)
             AND changed_in < pg_snapshot_xmax(pg_current_snapshot())
             AND NOT pg_visible_in_snapshot(changed_in, $1::text::pg_snapshot)
       ) AS customers;

-- name: revoked_keys
-- From the one after $1 on. Those that have expired are refused for that.
SELECT key_id, customer_id
FROM api_keys
WHERE revoked_at IS NOT NULL AND (expires_at IS NULL OR expires_at > now()) AND key_id > $1
ORDER BY key_id
LIMIT $2;
