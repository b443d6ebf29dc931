-- Of the benchmark. {database} is replaced by a name of its own making.

-- name: create_database
CREATE DATABASE {database} TEMPLATE {template}

-- name: drop_database
DROP DATABASE IF EXISTS {database} WITH (FORCE)

-- name: checkpoint
CHECKPOINT

-- name: sums
SELECT customer_id, extract(epoch FROM hour)::bigint AS hour, meter, sum(quantity)::bigint AS quantity
FROM usage_hourly GROUP BY 1, 2, 3

-- name: position
SELECT coalesce(sum(next_offset), 0)::bigint FROM consumer_offsets WHERE consumer_group = $1 AND topic = $2

-- name: counted
SELECT count(*) FROM processed_requests

-- name: note_positions
INSERT INTO consumer_offsets AS c (consumer_group, topic, partition, next_offset)
SELECT $1, $2, partition, next_offset FROM unnest($3::integer[], $4::bigint[]) AS new (partition, next_offset)
ON CONFLICT (consumer_group, topic, partition) DO UPDATE SET next_offset = excluded.next_offset, updated_at = now()
