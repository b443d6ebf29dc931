-- How far back the ledger can tell what it has counted. Rows of processed_requests below it are let go of, so that the table
-- does not grow for ever: docs/decisions/0014-the-dedup-horizon.md.

CREATE TABLE ledger_dedup (
    only_row     boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    counts_from  timestamptz CHECK (isfinite(counts_from)),  -- only ever moves forward; null: nothing was ever let go of
    first_id     uuid,           -- the least id (UUID version 7) of a request made then: rows with lesser ids may be gone
    moved_at     timestamptz,
    CHECK ((counts_from IS NULL) = (first_id IS NULL))
);
INSERT INTO ledger_dedup DEFAULT VALUES;

-- True: counted by somebody's decision although its id lay below first_id; such a row is never let go of. Else null.
ALTER TABLE processed_requests ADD COLUMN kept boolean;

-- A fiftieth of a large table is a great deal already; by default a fifth is waited for.
ALTER TABLE processed_requests SET (autovacuum_vacuum_scale_factor = 0.02);
