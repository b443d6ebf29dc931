-- What became of a dead letter, by whom and why. The letter itself stays as it was written: it is evidence.

ALTER TABLE dead_letters ADD COLUMN kind text;  -- null: not named yet, see streams.ledger.dead_letters.kind_of
ALTER TABLE dead_letters ADD COLUMN state text NOT NULL DEFAULT 'open'
    CHECK (state IN ('open', 'redriven', 'discarded'));
CREATE INDEX dead_letters_seen ON dead_letters (seen_at, topic, partition, "offset");
CREATE INDEX dead_letters_unnamed ON dead_letters (topic, partition, "offset") WHERE kind IS NULL;

-- Never changed, never removed.
CREATE TABLE dead_letter_actions (
    action_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic       text NOT NULL,
    partition   integer NOT NULL,
    "offset"    bigint NOT NULL,
    action      text NOT NULL CHECK (action IN ('redriven', 'discarded')),
    outcome     text NOT NULL CHECK (outcome IN ('counted', 'already_counted', 'discarded')),
    accepted    text,                      -- kind of the objection that was overruled; null: there was none
    actor       text NOT NULL,
    reason      text NOT NULL CHECK (reason <> ''),
    acted_at    timestamptz NOT NULL DEFAULT now(),
    FOREIGN KEY (topic, partition, "offset") REFERENCES dead_letters
);
CREATE INDEX dead_letter_actions_place ON dead_letter_actions (topic, partition, "offset");
-- The state already keeps a letter from being redriven twice; this keeps the state honest.
CREATE UNIQUE INDEX dead_letter_actions_once ON dead_letter_actions (topic, partition, "offset")
    WHERE action = 'redriven';
