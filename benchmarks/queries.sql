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
