-- The gateway's statements, loaded by name. It reads the model registry and the ledger; the operator's commands below
-- write customers and keys.

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

-- name: usage
-- $2: where each period begins, in order; $3: where the last one ends. Beside a page come the totals of the whole range, as
-- period 0. Columns that are not asked for by $4 are empty.
WITH sums AS MATERIALIZED (
    SELECT width_bucket(hour, $2::timestamptz[]) AS period,
           CASE WHEN 'model' = ANY ($4::text[]) THEN model ELSE '' END AS model,
           CASE WHEN 'version' = ANY ($4) THEN version ELSE '' END AS version,
           CASE WHEN 'price_id' = ANY ($4) THEN price_id ELSE '' END AS price_id,
           meter, sum(quantity) AS quantity
    FROM usage_hourly
    WHERE customer_id = $1 AND hour >= ($2::timestamptz[])[1] AND hour < $3
      AND ($5::text IS NULL OR model = $5) AND ($6::text IS NULL OR starts_with(version, $6))
      AND ($7::text IS NULL OR price_id = $7) AND ($8::text IS NULL OR meter = $8)
    GROUP BY 1, 2, 3, 4, 5
), page AS (
    SELECT * FROM sums
    WHERE (period, model, version, price_id, meter) > ($9::int, $10::text, $11::text, $12::text, $13::text)
    ORDER BY period, model, version, price_id, meter
    LIMIT $14
)
SELECT * FROM page
UNION ALL
SELECT 0, '', '', '', meter, sum(quantity) FROM sums GROUP BY meter
ORDER BY period, model, version, price_id, meter;

-- name: usage_watermark
-- Of one partition: others move at their own pace and say nothing about it.
SELECT statement_timestamp() AS as_of, w.complete_until, w.seen_at
FROM (SELECT) AS always LEFT JOIN usage_watermarks w ON w.consumer_group = $1 AND w.topic = $2 AND w.partition = $3;

-- name: now
SELECT clock_timestamp();

-- name: insert_customer
INSERT INTO customers (customer_id, name, requests_per_s, burst, max_concurrent, cap_micros, cap_currency, created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8);

-- name: customers
SELECT c.customer_id, c.name, c.requests_per_s, c.burst, c.max_concurrent, c.cap_micros, c.cap_currency, c.created_at,
       count(k.key_id) FILTER (WHERE k.revoked_at IS NULL)::int AS keys
FROM customers c LEFT JOIN api_keys k USING (customer_id)
WHERE $1::text IS NULL OR c.customer_id = $1
GROUP BY c.customer_id
ORDER BY c.created_at, c.customer_id;

-- name: customer
-- By id or by name; an id wins.
SELECT customer_id, name, requests_per_s, burst
FROM customers WHERE customer_id = $1 OR name = $1
ORDER BY (customer_id = $1) DESC LIMIT 1;

-- name: lock_customer
-- Changes of one customer take turns from here to the end of the transaction; the gateway's look-ups do not wait.
SELECT customer_id, name, requests_per_s, burst, max_concurrent, cap_micros, cap_currency, created_at
FROM customers WHERE customer_id = $1
FOR NO KEY UPDATE;

-- name: update_customer
UPDATE customers SET requests_per_s = $2, burst = $3, max_concurrent = $4, cap_micros = $5, cap_currency = $6
WHERE customer_id = $1;

-- name: limits
-- A statement of its own after the lock, so that it sees what was committed while that waited. $2 null: the customer's.
SELECT unit, model, amount, window_s, burst
FROM rate_limits WHERE customer_id = $1 AND key_id IS NOT DISTINCT FROM $2
ORDER BY unit, model NULLS FIRST;

-- name: all_limits
-- Of all keys and customers, or of those of customer $1.
SELECT customer_id, key_id, unit, model, amount, window_s, burst
FROM rate_limits WHERE $1::text IS NULL OR customer_id = $1
ORDER BY unit, model NULLS FIRST;

-- name: delete_limits
DELETE FROM rate_limits WHERE customer_id = $1 AND key_id IS NOT DISTINCT FROM $2;

-- name: insert_limits
INSERT INTO rate_limits (customer_id, key_id, unit, model, amount, window_s, burst)
SELECT $1, $2, * FROM unnest($3::text[], $4::text[], $5::bigint[], $6::int[], $7::bigint[]);

-- name: models_missing
-- Those of $1 that were never published.
SELECT name FROM unnest($1::text[]) AS asked (name) WHERE name NOT IN (SELECT model FROM models) ORDER BY name;

-- name: has_currency
SELECT EXISTS (SELECT FROM prices WHERE currency = $1);

-- name: lock_key
-- Changes of one key take turns from here to the end of the transaction; the gateway's look-ups do not wait.
SELECT key_id, customer_id, label, requests_per_s, burst, max_concurrent, models, operations, created_at, expires_at,
       revoked_at, replaces_key_id
FROM api_keys WHERE key_id = $1
FOR NO KEY UPDATE;

-- name: successor
-- A statement of its own after lock_key, so that it sees what was committed while that waited.
SELECT key_id FROM api_keys WHERE replaces_key_id = $1;

-- name: insert_key
INSERT INTO api_keys (key_id, customer_id, secret_sha256, label, requests_per_s, burst, max_concurrent, models,
                      operations, created_at, expires_at, replaces_key_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12);

-- name: keys
-- All, or those of customer $1, or the one with the id $2.
SELECT k.key_id, k.customer_id, c.name AS customer, k.label, k.requests_per_s, k.burst,
       k.created_at, k.expires_at, k.revoked_at, k.replaces_key_id, k.max_concurrent, k.models, k.operations
FROM api_keys k JOIN customers c USING (customer_id)
WHERE ($1::text IS NULL OR k.customer_id = $1) AND ($2::text IS NULL OR k.key_id = $2)
ORDER BY k.created_at, k.key_id;

-- name: update_key
UPDATE api_keys
SET requests_per_s = $2, burst = $3, max_concurrent = $4, models = $5, operations = $6, expires_at = $7
WHERE key_id = $1;

-- name: revoke_key
UPDATE api_keys SET revoked_at = $2 WHERE key_id = $1;

-- Claims: calls that say which call they are. Times of the book are by the clock of Postgres.

-- name: enter_claims
-- In the order of their names, so that two processes that enter the same ones do not wait for each other crosswise.
INSERT INTO claims (is_keyed, request_id, sameness, customer_id, digest, admitted_at, deadline_at, version, price_id,
                    retries, patience_s, entered_at, seen_at)
SELECT is_keyed, request_id, sameness, customer_id, digest, admitted_at, deadline_at, version, price_id,
       retries, patience_s, now(), now()
FROM unnest($1::boolean[], $2::uuid[], $3::bytea[], $4::text[], $5::bytea[], $6::timestamptz[], $7::timestamptz[],
            $8::text[], $9::text[], $10::integer[], $11::double precision[])
    AS call (is_keyed, request_id, sameness, customer_id, digest, admitted_at, deadline_at, version, price_id,
             retries, patience_s)
ORDER BY sameness, request_id
ON CONFLICT DO NOTHING
RETURNING request_id;

-- name: claims_by_key
SELECT is_keyed, request_id, sameness, customer_id, digest, admitted_at, deadline_at, version, price_id, retries,
       takeovers, accepted_at IS NOT NULL AS is_accepted,
       extract(epoch FROM now() - entered_at)::double precision AS age_s,
       extract(epoch FROM now() - seen_at)::double precision AS quiet_s
FROM claims WHERE is_keyed AND sameness = ANY ($1::bytea[]);

-- name: claim
SELECT is_keyed, request_id, sameness, customer_id, digest, admitted_at, deadline_at, version, price_id, retries,
       takeovers, accepted_at IS NOT NULL AS is_accepted,
       extract(epoch FROM now() - entered_at)::double precision AS age_s,
       extract(epoch FROM now() - seen_at)::double precision AS quiet_s
FROM claims WHERE is_keyed = $1 AND request_id = $2;

-- name: rejoin_claim
-- $3: how many repetitions this call is; $4: the horizon, $5: how long after it an answer may have been lost
-- (api.admission.claims.may_be_repeated). A row without a sign of `joined`: another repetition was faster, ask again.
WITH newest AS (
    SELECT request_id FROM claims
    WHERE NOT is_keyed AND sameness = $1 AND customer_id = $2 AND retries < $3
      AND seen_at >= now() - make_interval(secs => $4 + patience_s)
      AND (answered_at IS NULL OR answered_at > now() - make_interval(secs => $5)
           OR (patience_s > 0 AND seen_at <= now() - make_interval(secs => patience_s)
               AND seen_at > now() - make_interval(secs => patience_s + $5)))
    ORDER BY seen_at DESC, request_id DESC LIMIT 1
), joined AS (
    UPDATE claims SET retries = $3, patience_s = $6, answered_at = NULL,
           -- Of one that is being admitted the owner's time goes on to count.
           seen_at = CASE WHEN accepted_at IS NULL THEN seen_at ELSE now() END
    FROM newest
    WHERE NOT claims.is_keyed AND claims.request_id = newest.request_id AND claims.retries < $3
    RETURNING claims.*
)
SELECT joined.request_id IS NOT NULL AS joined, is_keyed, newest.request_id, sameness, customer_id, digest, admitted_at,
       deadline_at, version, price_id, retries, takeovers, accepted_at IS NOT NULL AS is_accepted,
       extract(epoch FROM now() - entered_at)::double precision AS age_s,
       extract(epoch FROM now() - seen_at)::double precision AS quiet_s
FROM newest LEFT JOIN joined ON joined.request_id = newest.request_id;

-- name: take_over_claim
UPDATE claims SET takeovers = takeovers + 1, seen_at = now()
WHERE is_keyed = $1 AND request_id = $2 AND takeovers = $3 AND accepted_at IS NULL
RETURNING request_id;

-- name: note_claims
UPDATE claims SET accepted_at = coalesce(claims.accepted_at, now()),
       answered_at = CASE WHEN note.answered AND claims.retries = note.retries THEN now() ELSE claims.answered_at END
FROM unnest($1::boolean[], $2::uuid[], $3::integer[], $4::boolean[]) AS note (is_keyed, request_id, retries, answered)
WHERE claims.is_keyed = note.is_keyed AND claims.request_id = note.request_id;

-- name: withdraw_claims
DELETE FROM claims USING unnest($1::boolean[], $2::uuid[]) AS note (is_keyed, request_id)
WHERE claims.is_keyed = note.is_keyed AND claims.request_id = note.request_id;

-- name: prune_claims
-- $2: an id of the time before which claims may be old enough, which is where the key of the table begins. Null: another
-- process lets go of claims now.
WITH turn AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock($5) AS is_ours
), gone AS (
    DELETE FROM claims
    WHERE (is_keyed, request_id) IN (
        SELECT is_keyed, request_id FROM claims
        WHERE (SELECT is_ours FROM turn) AND is_keyed = $1 AND request_id < $2
          AND seen_at < now() - make_interval(secs => $3 + patience_s)
        ORDER BY request_id LIMIT $4
    ) RETURNING 1
)
SELECT is_ours, (SELECT count(*) FROM gone) AS gone FROM turn;

-- name: spend_price
SELECT meter, currency, amount_micros FROM prices WHERE price_id = $1;

-- name: spend
-- Of each account: what its usage from `since` on costs in its currency, in the hours before `cut` and in those from it on; a price
-- id of that usage which nobody published; up to when the ledger is complete for it, and how long ago a ledger last said so. One
-- statement, hence one snapshot.
SELECT w.complete_until,
       greatest(0, extract(epoch FROM statement_timestamp() - w.seen_at))::float8 AS said_age_s,
       coalesce(s.closed_micros, 0) AS closed_micros, coalesce(s.open_micros, 0) AS open_micros, s.unpriced
FROM unnest($3::text[], $4::integer[], $5::text[], $6::timestamptz[], $7::timestamptz[], $8::timestamptz[])
     WITH ORDINALITY AS a (customer_id, partition, currency, since, cut, until, place)
LEFT JOIN usage_watermarks w ON w.consumer_group = $1 AND w.topic = $2 AND w.partition = a.partition
CROSS JOIN LATERAL (
    SELECT sum(u.quantity * p.amount_micros) FILTER (WHERE u.is_closed) AS closed_micros,
           sum(u.quantity * p.amount_micros) FILTER (WHERE NOT u.is_closed) AS open_micros,
           min(u.price_id) FILTER (WHERE NOT EXISTS (SELECT FROM prices known WHERE known.price_id = u.price_id)) AS unpriced
    FROM (
        SELECT price_id, meter, hour < a.cut AS is_closed, sum(quantity) AS quantity FROM usage_hourly
        WHERE customer_id = a.customer_id AND hour >= a.since AND hour < a.until
        GROUP BY price_id, meter, is_closed
    ) u LEFT JOIN prices p ON p.price_id = u.price_id AND p.meter = u.meter AND p.currency = a.currency
) s
ORDER BY a.place;
