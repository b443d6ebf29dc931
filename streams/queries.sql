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

-- name: usage_days
-- The UTC days of which there is any usage, one look into the index for each; times that no calendar has are not among them.
WITH RECURSIVE days (hour) AS (
    SELECT min(hour) FROM usage_hourly WHERE hour >= coalesce($1::timestamptz, $3) AND hour < coalesce($2::timestamptz, $4)
    UNION ALL
    SELECT (
        SELECT min(u.hour) FROM usage_hourly u
        WHERE u.hour >= date_trunc('day', days.hour, 'UTC') + interval '1 day' AND u.hour < coalesce($2, $4::timestamptz)
    )
    FROM days WHERE days.hour IS NOT NULL
)
SELECT date_trunc('day', hour, 'UTC') AS day FROM days WHERE hour IS NOT NULL

-- name: usage
-- $1: where each period begins, in order; what lies before the first is period 0. Columns not asked for by $4 are empty.
WITH sums AS (
    SELECT width_bucket(hour, $1::timestamptz[]) AS period,
           CASE WHEN 'customer' = ANY ($4::text[]) THEN customer_id ELSE '' END AS customer_id,
           CASE WHEN 'model' = ANY ($4) THEN model ELSE '' END AS model,
           CASE WHEN 'version' = ANY ($4) THEN version ELSE '' END AS version,
           CASE WHEN 'price_id' = ANY ($4) THEN price_id ELSE '' END AS price_id,
           meter, sum(quantity) AS quantity
    FROM usage_hourly
    WHERE ($2::timestamptz IS NULL OR hour >= $2) AND ($3::timestamptz IS NULL OR hour < $3)
      AND ($5::text[] IS NULL OR customer_id = ANY ($5)) AND ($6::text IS NULL OR model = $6)
      AND ($7::text IS NULL OR starts_with(version, $7)) AND ($8::text IS NULL OR price_id = $8)
      AND ($9::text IS NULL OR meter = $9)
    GROUP BY 1, 2, 3, 4, 5, 6
)
SELECT s.period, s.customer_id, coalesce(c.name, '') AS customer, s.model, s.version, s.price_id, s.meter, s.quantity
FROM sums s LEFT JOIN customers c USING (customer_id)
ORDER BY s.period, customer, s.customer_id, s.model, s.version, s.price_id, s.meter

-- name: usage_patience
-- For one transaction: what it may take of the server, in milliseconds.
SELECT set_config('statement_timeout', $1, true), set_config('idle_in_transaction_session_timeout', $1, true)

-- name: usage_customers
-- Whom a name or an id means; usage may be of somebody who was never registered.
SELECT $1::text AS customer_id UNION SELECT customer_id FROM customers WHERE name = $1

-- name: known_names
-- Whether anybody is or was called $1, and any model $2.
SELECT EXISTS (SELECT 1 FROM customers WHERE customer_id = $1 OR name = $1)
       OR EXISTS (SELECT 1 FROM usage_hourly WHERE customer_id = $1) AS customer,
       EXISTS (SELECT 1 FROM models WHERE model = $2)
       OR EXISTS (SELECT 1 FROM usage_hourly WHERE model = $2) AS model

-- name: watermarks
SELECT partition, complete_until, seen_at
FROM usage_watermarks WHERE consumer_group = $1 AND topic = $2

-- name: usage_now
SELECT statement_timestamp()

-- name: move_watermarks
-- In the order of their keys, and forward only; null leaves what is known.
INSERT INTO usage_watermarks AS w (consumer_group, topic, partition, complete_until, seen_at)
SELECT $1, $2, partition, complete_until, statement_timestamp()
FROM unnest($3::integer[], $4::timestamptz[]) AS new (partition, complete_until)
ORDER BY partition
ON CONFLICT (consumer_group, topic, partition)
DO UPDATE SET complete_until = greatest(w.complete_until, excluded.complete_until),
              seen_at = greatest(w.seen_at, excluded.seen_at)

-- Of the outbox: facts about rows that are older than it. The statements for slices give, of the rows that are as old as
-- $1, up to $2 that come before what is told of their table, the newest first: when each came to be, and what it is.

-- name: backfill_begin
INSERT INTO outbox_backfill (source, completed_at)
VALUES ('prices', NULL), ('model_versions', NULL), ('routes', NULL), ('api_keys', NULL)
ON CONFLICT (source) DO NOTHING

-- name: backfill_open
-- The tables of which rows are still to be told.
SELECT source FROM outbox_backfill WHERE completed_at IS NULL

-- name: backfill_turn
-- Whether rows of a table are still to be told; nobody else tells them until the transaction ends.
SELECT completed_at IS NULL FROM outbox_backfill WHERE source = $1 FOR UPDATE

-- name: backfill_move
UPDATE outbox_backfill SET below_at = $2, below_id = $3 WHERE source = $1

-- name: backfill_complete
UPDATE outbox_backfill SET completed_at = now() WHERE source = $1

-- name: outbox_since
-- When the outbox came to be: changes after that wrote their facts themselves.
SELECT applied_at FROM schema_migrations WHERE name = '0005_facts.sql'

-- name: old_prices
SELECT p.* FROM outbox_backfill b, (
    SELECT min(created_at) AS at, jsonb_build_array(price_id, currency)::text COLLATE "C" AS id, price_id, currency,
           jsonb_object_agg(meter, amount_micros) AS amounts_micros
    FROM prices WHERE created_at <= $1
    GROUP BY price_id, currency
) AS p
WHERE b.source = 'prices' AND (p.at, p.id) < (b.below_at, b.below_id)
ORDER BY p.at DESC, p.id DESC
LIMIT $2

-- name: old_versions
-- Fewer when their manifests are more than 8 MiB.
SELECT * FROM (
    SELECT *, sum(octet_length(manifest)) OVER (ORDER BY at DESC, id DESC) - octet_length(manifest) AS bytes_before
    FROM (
        SELECT v.* FROM outbox_backfill b, (
            SELECT v.created_at AS at, (v.model || '/' || v.version) COLLATE "C" AS id,
                   v.version, v.model, v.manifest, v.artifact_uri, m.task
            FROM model_versions v JOIN models m USING (model)
            WHERE v.created_at <= $1
        ) AS v
        WHERE b.source = 'model_versions' AND (v.at, v.id) < (b.below_at, b.below_id)
        ORDER BY v.at DESC, v.id DESC
        LIMIT $2
    ) AS slice
) AS sized
WHERE bytes_before < 8388608
ORDER BY at DESC, id DESC

-- name: old_routes
SELECT r.* FROM outbox_backfill b, (
    SELECT updated_at AS at, model COLLATE "C" AS id, model, version, pool, spread, price_id
    FROM routes WHERE updated_at <= $1
) AS r
WHERE b.source = 'routes' AND (r.at, r.id) < (b.below_at, b.below_id)
ORDER BY r.at DESC, r.id DESC
LIMIT $2

-- name: old_keys
-- A row for the creation of a key, and one for its revocation. A rotation ends a key before its time, and its successors
-- live as long as it was given at first. So the last of them, which no rotation has ended, tells how long that was; keys
-- that succeed each other in a circle have no last one. However many keys there are, indexes find those of the slice.
WITH told AS (
    SELECT below_at, below_id FROM outbox_backfill WHERE source = 'api_keys'
), slice AS (
    (SELECT created_at AS at, (key_id || '/CREATED') COLLATE "C" AS id, 'CREATED' AS change, key_id, customer_id, label,
            requests_per_s, burst, created_at, NULL::timestamptz AS revoked_at
     FROM api_keys
     WHERE created_at <= $1
       AND (created_at, (key_id || '/CREATED') COLLATE "C") < (SELECT below_at, below_id FROM told)
     ORDER BY at DESC, id DESC
     LIMIT $2)
    UNION ALL
    (SELECT revoked_at, (key_id || '/REVOKED') COLLATE "C" AS id, 'REVOKED', key_id, customer_id, label,
            requests_per_s, burst, created_at, revoked_at
     FROM api_keys
     WHERE revoked_at <= $1 AND created_at <= $1
       AND (revoked_at, (key_id || '/REVOKED') COLLATE "C") < (SELECT below_at, below_id FROM told)
     ORDER BY revoked_at DESC, id DESC
     LIMIT $2)
    ORDER BY at DESC, id DESC
    LIMIT $2
)
SELECT slice.*, last_created_at, last_expires_at
FROM slice LEFT JOIN LATERAL (
    WITH RECURSIVE line AS (
        SELECT slice.key_id
        UNION  -- and not ALL, so that a circle comes to an end
        SELECT next.key_id FROM line JOIN api_keys next ON next.replaces_key_id = line.key_id
    )
    SELECT k.created_at AS last_created_at, k.expires_at AS last_expires_at
    FROM line JOIN api_keys k USING (key_id)
    WHERE NOT EXISTS (SELECT FROM api_keys WHERE replaces_key_id = k.key_id)
    LIMIT 1
) AS last ON true
ORDER BY at DESC, id DESC

-- name: untold_add
INSERT INTO outbox_untold (source, id, reason)
SELECT $1, id, reason FROM unnest($2::text[], $3::text[]) AS new (id, reason)

-- name: untold
SELECT count(*) OVER () AS rows, source, id, reason FROM outbox_untold ORDER BY noted_at, source, id LIMIT $1
