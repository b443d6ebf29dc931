-- Dead letters as an operator asks for them and settles them. A selection is always $1 topic, $2 state, $3 kind, $4 since,
-- $5 until; letters come in the order (seen_at, place), and a page begins after the place it is given.

-- name: page
SELECT topic, partition, "offset", kind, state, reason, seen_at,
       coalesce(value_size_bytes, octet_length(value)) AS size_bytes
FROM dead_letters
WHERE ($1::text IS NULL OR topic = $1) AND ($2::text IS NULL OR state = $2) AND ($3::text IS NULL OR kind = $3)
  AND ($4::timestamptz IS NULL OR seen_at >= $4) AND ($5::timestamptz IS NULL OR seen_at < $5)
  AND ($6::text IS NULL OR (seen_at, topic, partition, "offset") > (
          (SELECT seen_at FROM dead_letters WHERE topic = $6 AND partition = $7 AND "offset" = $8), $6, $7::int, $8::bigint))
ORDER BY seen_at, topic, partition, "offset"
LIMIT $9

-- name: evidence
-- The same, with what is kept of the records; at most $10 bytes of values together, unless the first has more.
SELECT * FROM (
    SELECT d.*, coalesce(d.value_size_bytes, octet_length(d.value)) AS size_bytes,
           sum(coalesce(d.value_size_bytes, octet_length(d.value), 0))
               OVER (ORDER BY seen_at, topic, partition, "offset") AS bytes_so_far,
           row_number() OVER (ORDER BY seen_at, topic, partition, "offset") AS number
    FROM (
        SELECT * FROM dead_letters
        WHERE ($1::text IS NULL OR topic = $1) AND ($2::text IS NULL OR state = $2) AND ($3::text IS NULL OR kind = $3)
          AND ($4::timestamptz IS NULL OR seen_at >= $4) AND ($5::timestamptz IS NULL OR seen_at < $5)
          AND ($6::text IS NULL OR (seen_at, topic, partition, "offset") > (
                  (SELECT seen_at FROM dead_letters WHERE topic = $6 AND partition = $7 AND "offset" = $8),
                  $6, $7::int, $8::bigint))
        ORDER BY seen_at, topic, partition, "offset"
        LIMIT $9
    ) AS d
) AS page
WHERE number = 1 OR bytes_so_far <= $10
ORDER BY number

-- name: counted
SELECT count(*) FROM dead_letters
WHERE ($1::text IS NULL OR topic = $1) AND ($2::text IS NULL OR state = $2) AND ($3::text IS NULL OR kind = $3)
  AND ($4::timestamptz IS NULL OR seen_at >= $4) AND ($5::timestamptz IS NULL OR seen_at < $5)

-- name: summary
-- Ids, digests, bytes and numbers differ from letter to letter and say nothing about how many there are of a sort.
SELECT topic, state, kind, regexp_replace(
           reason,
           '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\m[0-9a-f]{8,}\M|\m[0-9a-f]*[0-9][0-9a-f]*\M|(?<=found )[0-9a-f]+$|[0-9]+',
           '#', 'g') AS reason,
       count(*) AS letters, min(seen_at) AS first_seen_at, max(seen_at) AS last_seen_at
FROM dead_letters
WHERE ($1::text IS NULL OR topic = $1) AND ($2::text IS NULL OR state = $2) AND ($3::text IS NULL OR kind = $3)
  AND ($4::timestamptz IS NULL OR seen_at >= $4) AND ($5::timestamptz IS NULL OR seen_at < $5)
GROUP BY 1, 2, 3, 4
ORDER BY letters DESC, 1, 2, 3, 4
LIMIT $6

-- name: letter
SELECT *, coalesce(value_size_bytes, octet_length(value)) AS size_bytes
FROM dead_letters WHERE topic = $1 AND partition = $2 AND "offset" = $3

-- name: actions
SELECT action, outcome, accepted, actor, reason, acted_at FROM dead_letter_actions
WHERE topic = $1 AND partition = $2 AND "offset" = $3
ORDER BY action_id

-- name: name_kinds
-- Kinds of at most $3 letters that have none, by the first of the patterns $2 that fits; returns whether there were any.
WITH unnamed AS (
    SELECT topic, partition, "offset" FROM dead_letters WHERE kind IS NULL
    LIMIT $3 FOR UPDATE SKIP LOCKED
), named AS (
    UPDATE dead_letters d SET kind = (
        SELECT said.kind FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS said (kind, pattern, number)
        WHERE d.reason ~ said.pattern ORDER BY number LIMIT 1)
    FROM unnamed u WHERE d.topic = u.topic AND d.partition = u.partition AND d."offset" = u."offset"
    RETURNING 1
)
SELECT EXISTS (SELECT FROM named)

-- name: reached
-- How far the dead-letter topic has been read into the table.
SELECT partition, next_offset FROM consumer_offsets WHERE consumer_group = $1 AND topic = $2

-- name: reach
-- Also backwards: a topic that was deleted and made anew begins at 0, and reading a letter again adds nothing.
INSERT INTO consumer_offsets (consumer_group, topic, partition, next_offset) VALUES ($1, $2, $3, $4)
ON CONFLICT (consumer_group, topic, partition)
DO UPDATE SET next_offset = excluded.next_offset, updated_at = now()

-- name: hold
-- The letters, locked to the end of the transaction and each in its state of now; in the order of places, so that two
-- operators wait for each other and not in a circle. A session that is frozen meanwhile ends, and lets go of the hours.
SELECT set_config('idle_in_transaction_session_timeout', '5000', true), d.topic, d.partition, d."offset", d.state
FROM dead_letters d
JOIN unnest($1::text[], $2::int[], $3::bigint[]) AS said (topic, partition, "offset") USING (topic, partition, "offset")
ORDER BY d.topic, d.partition, d."offset"
FOR UPDATE OF d

-- name: settle
WITH said AS (
    SELECT topic, partition, "offset", outcome, accepted
    FROM unnest($1::text[], $2::int[], $3::bigint[], $4::text[], $5::text[])
        AS said (topic, partition, "offset", outcome, accepted)
), settled AS (
    UPDATE dead_letters d SET state = $6 FROM said
    WHERE d.topic = said.topic AND d.partition = said.partition AND d."offset" = said."offset"
)
INSERT INTO dead_letter_actions (topic, partition, "offset", action, outcome, accepted, actor, reason)
SELECT topic, partition, "offset", $6, outcome, accepted, $7, $8 FROM said
