-- What a key may do, further limits of keys and customers, caps of what customers spend, and a mark by which gateways
-- follow changes of keys and customers.

ALTER TABLE api_keys
    ADD COLUMN models text[] NOT NULL DEFAULT '{}',      -- it may call these models; empty: every model
    ADD COLUMN operations text[] NOT NULL DEFAULT '{}',  -- and do these things; empty: everything
    ADD COLUMN max_concurrent integer                    -- unfinished requests at once; null: no such limit
        CHECK (max_concurrent BETWEEN 1 AND 1000000);

ALTER TABLE customers
    ADD COLUMN max_concurrent integer CHECK (max_concurrent BETWEEN 1 AND 1000000),
    -- The most that is spent in a calendar month (UTC), in millionths of the currency's main unit; null: no cap.
    ADD COLUMN cap_micros bigint CHECK (cap_micros >= 0),
    ADD COLUMN cap_currency text CHECK (cap_currency ~ '^[a-z]{3}$'),
    ADD CHECK ((cap_micros IS NULL) = (cap_currency IS NULL));

-- Customers are facts from here on, so their times are held to what a record can carry, as those of keys are.
UPDATE customers
SET created_at = CASE WHEN created_at < '2000-01-01T00:00:00Z' THEN '2000-01-01T00:00:00Z' ELSE now() END
WHERE NOT is_moment(created_at);
ALTER TABLE customers ADD CHECK (is_moment(created_at));
CREATE INDEX customers_created ON customers (created_at);

-- Limits beside requests_per_s and burst: `amount` units per `window_s` seconds, `burst` of them at once.
CREATE TABLE rate_limits (
    customer_id  text NOT NULL REFERENCES customers,
    key_id       text REFERENCES api_keys,    -- null: of all the customer's keys together
    unit         text NOT NULL CHECK (unit IN ('requests', 'items', 'tokens')),
    model        text REFERENCES models,      -- null: of every model
    amount       bigint NOT NULL,
    window_s     integer NOT NULL CHECK (window_s BETWEEN 1 AND 31 * 86400),
    burst        bigint NOT NULL CHECK (burst BETWEEN 1 AND 1000000000000),
    CHECK (key_id IS NULL OR model IS NULL),
    -- The limiter reckons in whole microseconds below 2^53: one unit takes at least one of them, and the time in which an
    -- empty bucket fills leaves room for the time of day.
    CHECK (amount BETWEEN 1 AND window_s::bigint * 1000000),
    CHECK (burst * ceil(window_s * 1000000.0 / amount) <= 100000000000000)
);
CREATE UNIQUE INDEX rate_limits_one ON rate_limits (customer_id, coalesce(key_id, ''), unit, coalesce(model, ''));

-- The transaction that changed a row last; null: not since this column. Whoever keeps a snapshot (pg_current_snapshot)
-- asks for the rows of transactions that it did not see, and so misses none, however late it was committed. Set by
-- triggers, so that no writer can forget it.
ALTER TABLE api_keys ADD COLUMN changed_in xid8;
ALTER TABLE customers ADD COLUMN changed_in xid8;
CREATE INDEX api_keys_changed ON api_keys (changed_in);
CREATE INDEX customers_changed ON customers (changed_in);

CREATE FUNCTION note_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.changed_in := pg_current_xact_id();
    RETURN NEW;
END $$;
CREATE TRIGGER note_change BEFORE INSERT OR UPDATE ON api_keys FOR EACH ROW EXECUTE FUNCTION note_change();
CREATE TRIGGER note_change BEFORE INSERT OR UPDATE ON customers FOR EACH ROW EXECUTE FUNCTION note_change();

CREATE FUNCTION note_change_of_limit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE api_keys SET changed_in = NULL WHERE key_id IN (OLD.key_id, NEW.key_id);
    UPDATE customers SET changed_in = NULL
    WHERE (OLD.key_id IS NULL AND customer_id = OLD.customer_id) OR (NEW.key_id IS NULL AND customer_id = NEW.customer_id);
    RETURN NULL;
END $$;
CREATE TRIGGER note_change AFTER INSERT OR UPDATE OR DELETE ON rate_limits
    FOR EACH ROW EXECUTE FUNCTION note_change_of_limit();

-- What is not there any more tells nobody, and gateways would go on with what they remember.
CREATE FUNCTION refuse_removal() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE 'key % may be removed only a minute after it was revoked: gateways remember it', OLD.key_id
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER refuse_removal BEFORE DELETE ON api_keys FOR EACH ROW
    WHEN (OLD.revoked_at IS NULL OR OLD.revoked_at > clock_timestamp() - interval '1 minute')
    EXECUTE FUNCTION refuse_removal();
