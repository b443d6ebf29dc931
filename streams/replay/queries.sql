-- name: positions
SELECT partition, next_offset FROM consumer_offsets WHERE consumer_group = $1 AND topic = $2

-- name: dead
SELECT partition, "offset" FROM dead_letters WHERE topic = $1

-- name: rows
SELECT customer_id, hour, model, version, price_id, meter, quantity FROM usage_hourly
WHERE $1::timestamptz IS NULL OR hour >= $1

-- name: processed
SELECT request_id FROM processed_requests WHERE $1::timestamptz IS NULL OR occurred_at >= $1

-- name: billed
SELECT request_id FROM processed_requests WHERE request_id = ANY($1::uuid[])

-- name: customer
-- By id or by name; an id wins.
SELECT customer_id FROM customers WHERE customer_id = $1 OR name = $1
ORDER BY (customer_id = $1) DESC LIMIT 1
