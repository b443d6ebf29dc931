-- What may stop the relay is kept out of its tables, how far it came is known of which topic, and rows older than the
-- outbox are told a slice at a time.

-- Which topic of that name next_offset is of; null: noted before this column, or by a broker without ids. Not trusted.
ALTER TABLE outbox_topics ADD COLUMN topic_id uuid;

-- Of each table the rows are told from the newest to the oldest: what is at or above (below_at, below_id) is told.
ALTER TABLE outbox_backfill ALTER COLUMN completed_at DROP NOT NULL;  -- null: some rows are still to be told
ALTER TABLE outbox_backfill ADD COLUMN below_at timestamptz NOT NULL DEFAULT 'infinity';
ALTER TABLE outbox_backfill ADD COLUMN below_id text COLLATE "C" NOT NULL DEFAULT '';
CREATE INDEX api_keys_created ON api_keys (created_at);
CREATE INDEX api_keys_revoked ON api_keys (revoked_at);

-- Rows that no fact can carry. They stay here until a person has mended and told them and removes them.
CREATE TABLE outbox_untold (
    source    text NOT NULL,                  -- the table
    id        text NOT NULL,                  -- what names it there
    reason    text NOT NULL,
    noted_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source, id)
);

-- Headers are names with texts. What had others could never be sent.
CREATE FUNCTION are_headers(headers jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN jsonb_typeof(headers) = 'object' AND NOT jsonb_path_exists(headers, 'strict $.* ? (@.type() != "string")');
UPDATE outbox SET headers = '{}' WHERE NOT are_headers(headers);
ALTER TABLE outbox ADD CHECK (are_headers(headers));

-- Times that a record can carry (schemas/ranges.py). An expiry later than these is none. Any other later time is taken
-- to be when the outbox came, so that the row is told as one that was there before.
CREATE FUNCTION is_moment(at timestamptz) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN at BETWEEN '2000-01-01T00:00:00Z'::timestamptz AND '2200-01-01T00:00:00Z'::timestamptz;
CREATE FUNCTION pg_temp.mended(at timestamptz) RETURNS timestamptz LANGUAGE sql
    RETURN CASE WHEN is_moment(at) THEN at
                WHEN at < '2000-01-01T00:00:00Z' THEN '2000-01-01T00:00:00Z'
                WHEN at IS NOT NULL THEN (SELECT applied_at FROM schema_migrations WHERE name = '0005_facts.sql') END;

UPDATE api_keys
SET created_at = pg_temp.mended(created_at), revoked_at = pg_temp.mended(revoked_at),
    expires_at = CASE WHEN expires_at <= '2200-01-01T00:00:00Z' THEN pg_temp.mended(expires_at) END
WHERE NOT (is_moment(created_at) AND coalesce(is_moment(expires_at), true) AND coalesce(is_moment(revoked_at), true));
UPDATE prices SET created_at = pg_temp.mended(created_at) WHERE NOT is_moment(created_at);
UPDATE model_versions SET created_at = pg_temp.mended(created_at) WHERE NOT is_moment(created_at);
UPDATE routes SET updated_at = pg_temp.mended(updated_at) WHERE NOT is_moment(updated_at);

ALTER TABLE api_keys
    ADD CHECK (is_moment(created_at)), ADD CHECK (is_moment(expires_at)), ADD CHECK (is_moment(revoked_at));
ALTER TABLE prices ADD CHECK (is_moment(created_at));
ALTER TABLE model_versions ADD CHECK (is_moment(created_at));
ALTER TABLE routes ADD CHECK (is_moment(updated_at));

-- Bills may name an entry of another currency, so those that are there stay as they are.
ALTER TABLE prices ADD CHECK (currency ~ '^[a-z]{3}$') NOT VALID;
