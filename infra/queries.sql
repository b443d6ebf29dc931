-- Migrations, and turns taken by whoever provisions.

-- name: take_turn
-- Held by the connection until it closes.
SELECT pg_advisory_lock($1)

-- name: try_turn
-- The same, if nobody else has it.
SELECT pg_try_advisory_lock($1)

-- name: migrations_table
CREATE TABLE IF NOT EXISTS schema_migrations (
    name text PRIMARY KEY,
    digest text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)

-- name: migrations_known
SELECT to_regclass('schema_migrations') IS NOT NULL

-- name: migrations_applied
SELECT name, digest FROM schema_migrations

-- name: migration_add
INSERT INTO schema_migrations (name, digest) VALUES ($1, $2)

-- name: text_digest
SELECT encode(sha256(convert_to($1, 'UTF8')), 'hex')

-- The outbox, as whoever changes a table writes it.

-- name: outbox_order
-- Both until the end of the transaction.
SELECT set_config('idle_in_transaction_session_timeout', $2, true), pg_advisory_xact_lock($1)

-- name: outbox_add
INSERT INTO outbox (event_id, topic, key, value, headers)
SELECT event_id, $2, key, value, headers
FROM unnest($1::uuid[], $3::bytea[], $4::bytea[], $5::jsonb[]) WITH ORDINALITY
    AS new (event_id, key, value, headers, number)
ORDER BY number

-- name: outbox_add_earlier
-- Before every fact that waits, and never at a position that a command's fact may have.
INSERT INTO outbox (position, event_id, topic, key, value, headers) OVERRIDING SYSTEM VALUE
SELECT least((SELECT min(position) FROM outbox), 1) - 1 - count(*) OVER () + number,
       event_id, topic, key, value, headers
FROM unnest($1::uuid[], $2::text[], $3::bytea[], $4::bytea[], $5::jsonb[]) WITH ORDINALITY
    AS new (event_id, topic, key, value, headers, number)

-- The outbox, as the relay empties it.

-- name: outbox_session
-- A relay that is frozen loses its session, and with it the lock; one that waits for a row does not wait for long.
SELECT set_config('idle_session_timeout', $1, false), set_config('idle_in_transaction_session_timeout', $1, false),
       set_config('lock_timeout', '5000', false), set_config('application_name', $2, false)

-- name: outbox_topics_waiting
SELECT topic, topic_id, coalesce(next_offset, 0) AS next_offset
FROM (SELECT DISTINCT topic FROM outbox) AS waiting LEFT JOIN outbox_topics USING (topic)
ORDER BY topic

-- name: outbox_first
SELECT position, event_id, topic, key, value, headers
FROM (
    SELECT *, sum(bytes) OVER (ORDER BY position) - bytes AS bytes_before
    FROM (
        SELECT *, octet_length(key) + octet_length(value) + octet_length(headers::text) AS bytes
        FROM outbox
        WHERE topic <> ALL ($3::text[])
        ORDER BY position
        LIMIT $1
    ) AS sized
) AS oldest
WHERE bytes_before = 0 OR bytes_before + bytes <= $2
ORDER BY position

-- name: outbox_settle
WITH removed AS (
    DELETE FROM outbox
    WHERE event_id = ANY ($1::uuid[]) AND EXISTS (
        SELECT FROM unnest($1::uuid[], $2::text[], $3::bytea[], $4::bytea[]) AS seen (event_id, topic, key, value_sha256)
        WHERE seen.event_id = outbox.event_id AND seen.topic = outbox.topic AND seen.key = outbox.key
          AND seen.value_sha256 = sha256(outbox.value)
    )
    RETURNING position
), reached AS (
    INSERT INTO outbox_topics (topic, topic_id, next_offset)
    SELECT topic, topic_id, next_offset
    FROM unnest($5::text[], $6::uuid[], $7::bigint[]) AS reached (topic, topic_id, next_offset)
    ON CONFLICT (topic) DO UPDATE SET topic_id = excluded.topic_id, next_offset = excluded.next_offset
)
SELECT count(*) FROM removed

-- The outbox, as `inferlog outbox list` shows it.

-- name: outbox_standing
-- Per topic: how many facts wait, since when the oldest does, and how large the first one is.
SELECT topic, count(*) AS waiting, min(created_at) AS oldest_at,
       (array_agg(octet_length(key) + octet_length(value) + octet_length(headers::text) ORDER BY position))[1]
           AS first_size_bytes
FROM outbox
GROUP BY topic
ORDER BY topic

-- name: outbox_relay_session
-- The session that holds the relay's lock $1 here.
SELECT a.pid, a.client_addr::text AS client, a.backend_start
FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.classid = 0 AND l.objid = $1::bigint::oid AND l.objsubid = 1
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
