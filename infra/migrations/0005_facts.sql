-- Changes of the registry, the price list and the bill are facts on the log: the change and its record are written in
-- one transaction, and one relay publishes the records in the order of the changes.

CREATE TABLE outbox (
    position    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- assigned in commit order: see infra.outbox
    event_id    uuid NOT NULL UNIQUE,
    topic       text NOT NULL,                -- without the installation's namespace
    key         bytea NOT NULL,
    value       bytea NOT NULL,               -- the framed record
    headers     jsonb NOT NULL,               -- name to text
    created_at  timestamptz NOT NULL DEFAULT now()
);

-- How far the relay has looked at each topic: what it published before lies below.
CREATE TABLE outbox_topics (
    topic        text PRIMARY KEY,
    next_offset  bigint NOT NULL
);

-- Facts about rows that are older than the outbox are written once.
CREATE TABLE outbox_backfill (
    source        text PRIMARY KEY,           -- the table whose rows were told
    completed_at  timestamptz NOT NULL DEFAULT now()
);

-- Corrections of what is billed, beside what was used. Never changed, never removed.
CREATE TABLE billing_adjustments (
    adjustment_id  uuid PRIMARY KEY,          -- event_id of its BillingAdjusted
    customer_id    text NOT NULL REFERENCES customers,
    hour           timestamptz NOT NULL CHECK (hour = date_trunc('hour', hour, 'UTC')),
    meter          text NOT NULL,
    units          bigint NOT NULL CHECK (units <> 0),
    actor          text NOT NULL,
    reason         text NOT NULL CHECK (reason <> ''),
    created_at     timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX billing_adjustments_hour ON billing_adjustments (hour);

-- What a dead letter was, where its bytes are too many to keep twice.
ALTER TABLE dead_letters ADD COLUMN value_size_bytes bigint CHECK (value_size_bytes >= 0);
ALTER TABLE dead_letters ADD COLUMN value_sha256 text CHECK (value_sha256 ~ '^[0-9a-f]{64}$');
