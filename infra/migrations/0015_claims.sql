-- The book of claims: calls that said of themselves which call they are, so that a repetition is given the first one's
-- outcome instead of being run and billed again.

CREATE TABLE claims (
    -- By an Idempotency-Key, else by a client that counts its own repetitions.
    is_keyed      boolean NOT NULL,
    request_id    uuid NOT NULL,              -- version 7: the key orders claims by age, so the oldest are found first
    -- What repetitions have in common: a digest of customer and Idempotency-Key, or of API key and call.
    sameness      bytea NOT NULL CHECK (length(sameness) = 32),
    customer_id   text NOT NULL,
    digest        bytea NOT NULL CHECK (length(digest) = 32),   -- of the call: its target and body
    -- What was decided at the first admission; whoever finishes it decides the same.
    admitted_at   timestamptz NOT NULL,
    deadline_at   timestamptz NOT NULL,
    version       text NOT NULL,
    price_id      text NOT NULL,
    -- The rest is by the clock of Postgres.
    entered_at    timestamptz NOT NULL,
    seen_at       timestamptz NOT NULL,       -- when the last call that holds or joined it came
    takeovers     integer NOT NULL DEFAULT 0, -- how often another call went on with its admission
    retries       integer NOT NULL,           -- the highest count of repetitions that was seen
    patience_s    double precision NOT NULL,  -- how long the client waits for an answer before it repeats the call
    accepted_at   timestamptz,                -- null: not known to be on the log
    answered_at   timestamptz,                -- null: the last call that came was not answered in whole
    PRIMARY KEY (is_keyed, request_id)
) WITH (fillfactor = 70);  -- what changes is in no index, so a change stays on its page

CREATE UNIQUE INDEX claims_keyed ON claims (sameness) WHERE is_keyed;
CREATE INDEX claims_counted ON claims (sameness) WHERE NOT is_keyed;
