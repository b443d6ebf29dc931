-- The outbox, as whoever changes a table writes it.

-- name: outbox_order
SELECT pg_advisory_xact_lock($1)

-- name: outbox_add
INSERT INTO outbox (event_id, topic, key, value, headers)
SELECT event_id, $2, key, value, headers
FROM unnest($1::uuid[], $3::bytea[], $4::bytea[], $5::jsonb[]) WITH ORDINALITY
    AS new (event_id, key, value, headers, number)
ORDER BY number
