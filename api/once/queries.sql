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
-- Answered and not accepted is withdrawn, here and below: it has ended, and is kept for the next repetition of its call.
SELECT is_keyed, request_id, sameness, customer_id, digest, admitted_at, deadline_at, version, price_id, retries,
       takeovers, accepted_at IS NOT NULL AS is_accepted,
       extract(epoch FROM now() - entered_at)::double precision AS age_s,
       extract(epoch FROM now() - seen_at)::double precision AS quiet_s
FROM claims WHERE is_keyed = $1 AND request_id = $2 AND (accepted_at IS NOT NULL OR answered_at IS NULL);

-- name: rejoin_claim
-- $3: how many repetitions this call is; $4: the horizon, $5: how long after it an answer may have been lost
-- and $7: for how long a refused call is repeated (api.once.claims.fit). A row that is neither `joined` nor `used_up`:
-- another call was faster, ask again.
WITH closest AS (
    SELECT request_id, accepted_at IS NULL AND answered_at IS NOT NULL AS is_withdrawn FROM claims
    WHERE NOT is_keyed AND sameness = $1 AND customer_id = $2 AND retries < $3
      AND seen_at >= now() - make_interval(secs => $4 + patience_s)
      AND CASE WHEN answered_at IS NULL THEN true
               WHEN accepted_at IS NULL THEN answered_at > now() - make_interval(secs => $7)
               ELSE answered_at > now() - make_interval(secs => $5)
                    OR (patience_s > 0 AND seen_at <= now() - make_interval(secs => patience_s)
                        AND seen_at > now() - make_interval(secs => patience_s + $5))
          END
    ORDER BY CASE WHEN answered_at IS NULL THEN 1 WHEN accepted_at IS NULL THEN 2 ELSE 3 END,
             retries DESC, seen_at DESC, request_id DESC
    LIMIT 1
), used_up AS (
    DELETE FROM claims USING closest
    WHERE closest.is_withdrawn AND NOT claims.is_keyed AND claims.request_id = closest.request_id
    RETURNING claims.request_id
), joined AS (
    UPDATE claims SET retries = $3, patience_s = $6, answered_at = NULL,
           -- Of one that is being admitted the owner's time goes on to count.
           seen_at = CASE WHEN accepted_at IS NULL THEN seen_at ELSE now() END
    FROM closest
    WHERE NOT claims.is_keyed AND claims.request_id = closest.request_id AND claims.retries < $3
      -- It may have been withdrawn since it was found.
      AND (claims.accepted_at IS NOT NULL OR claims.answered_at IS NULL)
    RETURNING claims.*
)
SELECT joined.request_id IS NOT NULL AS joined, used_up.request_id IS NOT NULL AS used_up, is_keyed,
       closest.request_id, sameness, customer_id, digest, admitted_at, deadline_at, version, price_id, retries,
       takeovers, accepted_at IS NOT NULL AS is_accepted,
       extract(epoch FROM now() - entered_at)::double precision AS age_s,
       extract(epoch FROM now() - seen_at)::double precision AS quiet_s
FROM closest LEFT JOIN joined USING (request_id) LEFT JOIN used_up USING (request_id);

-- name: take_over_claim
UPDATE claims SET takeovers = takeovers + 1, seen_at = now()
WHERE is_keyed = $1 AND request_id = $2 AND takeovers = $3 AND accepted_at IS NULL AND answered_at IS NULL
RETURNING request_id;

-- name: note_claims
UPDATE claims SET accepted_at = coalesce(claims.accepted_at, now()),
       answered_at = CASE WHEN note.answered AND claims.retries = note.retries THEN now() ELSE claims.answered_at END
FROM unnest($1::boolean[], $2::uuid[], $3::integer[], $4::boolean[]) AS note (is_keyed, request_id, retries, answered)
WHERE claims.is_keyed = note.is_keyed AND claims.request_id = note.request_id;

-- name: end_claims
-- $4: void, else withdrawn. Of a claim that was taken over another owner may have put the request on the log. One without
-- a key is kept as withdrawn for the next repetition of its call; if that came already it waits, and will enter itself, so
-- no other may find this any more.
WITH note AS (
    SELECT * FROM unnest($1::boolean[], $2::uuid[], $3::integer[], $4::boolean[])
        AS note (is_keyed, request_id, retries, void)
), withdrawn AS (
    UPDATE claims SET answered_at = CASE WHEN claims.retries <= note.retries THEN now() ELSE '-infinity' END FROM note
    WHERE NOT claims.is_keyed AND NOT note.is_keyed AND claims.request_id = note.request_id AND NOT note.void
      AND claims.takeovers = 0 AND claims.accepted_at IS NULL
)
DELETE FROM claims USING note
WHERE claims.is_keyed = note.is_keyed AND claims.request_id = note.request_id
  AND (note.void OR (claims.is_keyed AND claims.takeovers = 0 AND claims.accepted_at IS NULL));

-- name: prune_claims
-- $2: an id of the time before which claims may be old enough, which is where the key of the table begins. $6: how long
-- withdrawn ones are kept. They are refused calls, which cost their sender nothing and so may be many. Null: another
-- process lets go of claims now.
WITH turn AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock($5) AS is_ours
), gone AS (
    DELETE FROM claims
    WHERE (is_keyed, request_id) IN (
        SELECT is_keyed, request_id FROM claims
        WHERE (SELECT is_ours FROM turn) AND is_keyed = $1 AND request_id < $2
          AND (seen_at < now() - make_interval(secs => $3 + patience_s)
               OR (accepted_at IS NULL AND answered_at < now() - make_interval(secs => $6)))
        ORDER BY request_id LIMIT $4
    ) RETURNING 1
)
SELECT is_ours, (SELECT count(*) FROM gone) AS gone FROM turn;
