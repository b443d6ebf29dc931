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
-- (api.once.claims.may_be_repeated). A row without a sign of `joined`: another repetition was faster, ask again.
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

-- name: delete_claims
-- $3: void, else withdrawn. Of a claim that was taken over another owner may have put the request on the log.
DELETE FROM claims USING unnest($1::boolean[], $2::uuid[], $3::boolean[]) AS note (is_keyed, request_id, void)
WHERE claims.is_keyed = note.is_keyed AND claims.request_id = note.request_id
  AND (note.void OR (claims.takeovers = 0 AND claims.accepted_at IS NULL));

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
