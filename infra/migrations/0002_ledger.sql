-- The usage ledger and what Stripe was told of it. Two writers, of different tables: the stream processor and the reporter.

CREATE TABLE processed_requests (
    request_id   uuid PRIMARY KEY,            -- a request is billed once: this key is the mechanism
    occurred_at  timestamptz NOT NULL
);
CREATE INDEX processed_requests_occurred ON processed_requests USING brin (occurred_at);

CREATE TABLE usage_hourly (
    customer_id  text NOT NULL,
    hour         timestamptz NOT NULL CHECK (hour = date_trunc('hour', hour, 'UTC')),
    model        text NOT NULL,
    version      text NOT NULL,
    price_id     text NOT NULL,
    meter        text NOT NULL,
    quantity     bigint NOT NULL CHECK (quantity >= 0),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (customer_id, hour, model, version, price_id, meter)
);
CREATE INDEX usage_hourly_hour ON usage_hourly (hour);

CREATE TABLE consumer_offsets (
    consumer_group  text NOT NULL,
    topic           text NOT NULL,
    partition       integer NOT NULL,
    next_offset     bigint NOT NULL,          -- the next offset to read; only ever moves forward
    updated_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_group, topic, partition)
);

CREATE TABLE dead_letters (
    topic      text NOT NULL,
    partition  integer NOT NULL,
    "offset"   bigint NOT NULL,
    key        bytea,
    value      bytea,
    reason     text NOT NULL,
    seen_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (topic, partition, "offset")
);

CREATE TABLE stripe_reports (
    customer_id    text NOT NULL REFERENCES customers,
    meter          text NOT NULL,
    hour           timestamptz NOT NULL,
    rev            integer NOT NULL CHECK (rev >= 1),
    total_units    bigint NOT NULL,           -- the ledger's total for the hour when this intent was planned
    delta_units    bigint NOT NULL,           -- what this intent adds to what the earlier ones said; may be negative
    identifier     text NOT NULL UNIQUE,      -- Stripe's dedup key: a function of the primary key
    state          text NOT NULL CHECK (state IN ('planned', 'sending', 'delivered', 'confirmed', 'rejected', 'carried')),
    first_sent_at  timestamptz,
    delivered_at   timestamptz,
    last_error     text,
    created_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (customer_id, meter, hour, rev)
);
CREATE INDEX stripe_reports_open ON stripe_reports (state) WHERE state IN ('planned', 'sending');
