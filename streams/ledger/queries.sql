-- name: opening
-- What a transaction judges times by, and where its partitions stand; one that was never read has no position.
SELECT d.counts_from, d.first_id, statement_timestamp() AS now, c.topic, c.partition, c.next_offset
FROM ledger_dedup d
LEFT JOIN (
    consumer_offsets c JOIN unnest($2::text[], $3::integer[]) AS asked (topic, partition) USING (topic, partition)
) ON c.consumer_group = $1

-- name: insert_processed
-- Rows below the horizon come by an operator's decision alone; they are kept, so that it is made once.
INSERT INTO processed_requests (request_id, occurred_at, content_digest, kept)
SELECT request_id, occurred_at, content_digest,
       CASE WHEN request_id < (SELECT first_id FROM ledger_dedup) THEN true END
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

-- name: forget
-- Requests that this transaction put in, and whose usage was then refused.
DELETE FROM processed_requests WHERE request_id = ANY($1::uuid[])

-- name: letters_at
SELECT topic, partition, "offset" FROM dead_letters
JOIN unnest($1::text[], $2::integer[], $3::bigint[]) AS said (topic, partition, "offset")
    USING (topic, partition, "offset")

-- name: set_aside
INSERT INTO dead_letters (topic, partition, "offset", key, value, value_size_bytes, value_sha256, reason, seen_at, kind)
SELECT topic, partition, "offset", key, value, value_size_bytes, value_sha256, reason, seen_at, kind
FROM unnest(
    $1::text[], $2::integer[], $3::bigint[], $4::bytea[], $5::bytea[], $6::bigint[], $7::text[], $8::text[],
    $9::timestamptz[], $10::text[]
) AS new (topic, partition, "offset", key, value, value_size_bytes, value_sha256, reason, seen_at, kind)
ON CONFLICT (topic, partition, "offset") DO NOTHING
RETURNING topic, partition, "offset"

-- name: advance
-- Rows are locked in the order of their keys; a position that another writer has moved since the opening is left as it is.
WITH known AS (
    SELECT c.topic, c.partition, new.reach
    FROM consumer_offsets c
    JOIN unnest($2::text[], $3::integer[], $4::bigint[], $5::bigint[]) AS new (topic, partition, stood, reach)
        USING (topic, partition)
    WHERE c.consumer_group = $1 AND c.next_offset = new.stood
    ORDER BY c.topic, c.partition
    FOR UPDATE OF c
)
UPDATE consumer_offsets c
SET next_offset = greatest(c.next_offset, known.reach), updated_at = now()
FROM known
WHERE c.consumer_group = $1 AND c.topic = known.topic AND c.partition = known.partition
RETURNING c.topic, c.partition

-- name: begin
-- Positions of partitions that have none; who meets a row that another just made was overtaken.
INSERT INTO consumer_offsets (consumer_group, topic, partition, next_offset)
SELECT $1, topic, partition, reach FROM unnest($2::text[], $3::integer[], $4::bigint[]) AS new (topic, partition, reach)
ON CONFLICT (consumer_group, topic, partition) DO NOTHING
RETURNING topic, partition

-- name: move
-- The only statement that moves a position backwards, where a topic was made anew. One that has moved meanwhile stays.
WITH new AS (
    SELECT partition, was, next_offset
    FROM unnest($3::integer[], $4::bigint[], $5::bigint[]) AS new (partition, was, next_offset)
), moved AS (
    UPDATE consumer_offsets c SET next_offset = new.next_offset, updated_at = now()
    FROM new
    WHERE c.consumer_group = $1 AND c.topic = $2 AND c.partition = new.partition AND c.next_offset = new.was
)
INSERT INTO consumer_offsets (consumer_group, topic, partition, next_offset)
SELECT $1, $2, partition, next_offset FROM new WHERE was IS NULL
ON CONFLICT (consumer_group, topic, partition) DO NOTHING

-- name: topic_id
SELECT topic_id FROM consumer_topics WHERE consumer_group = $1 AND topic = $2

-- name: note_topic
INSERT INTO consumer_topics (consumer_group, topic, topic_id) VALUES ($1, $2, $3)
ON CONFLICT (consumer_group, topic) DO UPDATE SET topic_id = excluded.topic_id

-- name: positions
SELECT partition, next_offset FROM consumer_offsets WHERE consumer_group = $1 AND topic = $2

-- Of letting go. One session at a time does it, outside of transactions, in the order of the steps below.

-- name: dedup_session
-- Nothing here may wait for long, and a session that is frozen ends. The plans of slices must know the ids.
SELECT set_config('application_name', $1, false), set_config('lock_timeout', '1s', false),
       set_config('statement_timeout', '5s', false), set_config('idle_session_timeout', '60s', false),
       set_config('plan_cache_mode', 'force_custom_plan', false)

-- name: dedup_move
-- To a whole hour $4 before all of the ledger's sums were whole, but not before $4 ago; nowhere while a partition's
-- watermark is not known. $3: how many partitions there are.
WITH complete AS (
    SELECT least(min(complete_until), now()) AS until FROM usage_watermarks
    WHERE consumer_group = $1 AND topic = $2
    HAVING count(complete_until) = count(*) AND count(*) >= $3
), target AS (
    SELECT date_trunc('hour', until - $4::interval, 'UTC') AS counts_from FROM complete
)
UPDATE ledger_dedup d
SET counts_from = t.counts_from, moved_at = now(),
    first_id = (lpad(to_hex((extract(epoch FROM t.counts_from) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid
FROM target t
WHERE t.counts_from > coalesce(d.counts_from, '1970-01-01T00:00Z')

-- name: dedup_known
SELECT counts_from, first_id, (
    SELECT count(complete_until) FROM usage_watermarks WHERE consumer_group = $1 AND topic = $2
) AS watermarks
FROM ledger_dedup

-- name: dedup_open
-- The transactions of this database that are open. Each has locked its own id from before its first snapshot to its end.
SELECT l.virtualtransaction AS transaction
FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'virtualxid' AND l.granted AND l.mode = 'ExclusiveLock'
  AND a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND a.usesysid IS NOT NULL  -- nobody's, like vacuum's, counts nothing

-- name: dedup_slice
-- The rows of the next 1000 ids after $1 and below $2, without those that are kept and those whose id has no time.
WITH slice AS (
    SELECT request_id, kept FROM processed_requests
    WHERE request_id > $1 AND request_id < $2
    ORDER BY request_id LIMIT 1000
), gone AS (
    DELETE FROM processed_requests p USING slice s
    WHERE p.request_id = s.request_id AND s.kept IS NULL AND get_byte(uuid_send(s.request_id), 6) >> 4 = 7
      AND EXISTS (SELECT FROM ledger_dedup WHERE first_id >= $2)
    RETURNING 1
)
SELECT (SELECT request_id FROM slice ORDER BY request_id DESC LIMIT 1) AS reached, (SELECT count(*) FROM gone) AS gone
