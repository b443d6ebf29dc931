-- Customers, their keys, and which version of a model answers. One writer: the operator's commands.

CREATE TABLE customers (
    customer_id         text PRIMARY KEY,
    name                text NOT NULL UNIQUE,
    -- Limits of the customer as a whole; a key may have narrower ones.
    requests_per_s      integer NOT NULL CHECK (requests_per_s BETWEEN 1 AND 1000000),
    burst               integer NOT NULL CHECK (burst BETWEEN 1 AND 1000000),
    stripe_customer_id  text UNIQUE,          -- null until the reporter has created it at Stripe
    created_at          timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE api_keys (
    key_id          text PRIMARY KEY,
    customer_id     text NOT NULL REFERENCES customers,
    secret_sha256   bytea NOT NULL CHECK (length(secret_sha256) = 32),
    label           text NOT NULL,
    requests_per_s  integer NOT NULL CHECK (requests_per_s BETWEEN 1 AND 1000000),
    burst           integer NOT NULL CHECK (burst BETWEEN 1 AND 1000000),
    created_at      timestamptz NOT NULL DEFAULT now(),
    expires_at      timestamptz,              -- null: does not expire
    revoked_at      timestamptz               -- null: not revoked
);
CREATE INDEX api_keys_customer ON api_keys (customer_id);

CREATE TABLE prices (
    price_id       text NOT NULL,
    meter          text NOT NULL,
    amount_micros  bigint NOT NULL CHECK (amount_micros >= 0),  -- millionths of the currency's main unit per unit
    currency       text NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (price_id, meter)
);

CREATE TABLE models (
    model       text PRIMARY KEY CHECK (model ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$'),
    task        text NOT NULL CHECK (task IN ('TENSORS', 'EMBEDDINGS')),
    created_at  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE model_versions (
    version       text NOT NULL CHECK (version ~ '^[0-9a-f]{64}$'),
    model         text NOT NULL REFERENCES models,
    manifest      text NOT NULL,              -- the canonical JSON whose sha256 is the version
    artifact_uri  text NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (model, version)
);

CREATE TABLE routes (
    model       text PRIMARY KEY REFERENCES models,
    version     text NOT NULL,
    pool        text NOT NULL,
    spread      integer NOT NULL CHECK (spread BETWEEN 1 AND 8),
    price_id    text NOT NULL,
    updated_at  timestamptz NOT NULL DEFAULT now(),
    FOREIGN KEY (model, version) REFERENCES model_versions (model, version)
);

INSERT INTO prices (price_id, meter, amount_micros, currency) VALUES
    ('standard-v1', 'requests', 0, 'usd'),
    ('standard-v1', 'items', 100, 'usd'),
    ('standard-v1', 'tokens', 2, 'usd');
