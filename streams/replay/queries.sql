-- name: positions
SELECT partition, next_offset FROM consumer_offsets WHERE consumer_group = $1 AND topic = $2

-- name: first_id
-- Rows of requests with lesser ids may have been let go of; null: no row was.
SELECT first_id FROM ledger_dedup

-- name: dead
SELECT partition, "offset", state FROM dead_letters WHERE topic = $1

-- name: discarded
SELECT topic, partition, "offset" FROM dead_letters WHERE state = 'discarded'

-- name: discarded_of
SELECT partition, "offset" FROM dead_letters WHERE topic = $1 AND state = 'discarded'

-- name: open_letters
SELECT topic, count(*) AS letters FROM dead_letters WHERE state = 'open' GROUP BY topic ORDER BY topic

-- name: rows
SELECT customer_id, hour, model, version, price_id, meter, quantity FROM usage_hourly
WHERE ($1::timestamptz IS NULL OR hour >= $1) AND hour >= '0001-01-01T00:00Z' AND hour < '10000-01-01T00:00Z'

-- name: rows_outside
-- Rows of hours that no calendar has, as Postgres writes them.
SELECT customer_id, hour::text AS hour, model, meter, quantity FROM usage_hourly
WHERE hour < '0001-01-01T00:00Z' OR hour >= '10000-01-01T00:00Z'

-- name: processed
SELECT request_id FROM processed_requests WHERE $1::timestamptz IS NULL OR occurred_at >= $1

-- name: billed
SELECT request_id FROM processed_requests WHERE request_id = ANY($1::uuid[])

-- name: customer
-- By id or by name; an id wins.
SELECT customer_id FROM customers WHERE customer_id = $1 OR name = $1
ORDER BY (customer_id = $1) DESC LIMIT 1
