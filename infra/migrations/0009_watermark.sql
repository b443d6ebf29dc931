-- Up to which time the ledger is complete, partition by partition. Written by the ledger itself, which knows the log; read
-- by the gateway, which need not ask it.

CREATE TABLE usage_watermarks (
    consumer_group  text NOT NULL,
    topic           text NOT NULL,
    partition       integer NOT NULL,
    complete_until  timestamptz,              -- the sums before are whole; only ever moves forward; null: not known yet
    seen_at         timestamptz NOT NULL,     -- when a ledger last looked; stands still when none runs
    PRIMARY KEY (consumer_group, topic, partition)
) WITH (fillfactor = 50);                     -- a few rows, each updated every other second
