-- A rotated key has one successor, which is rotated in its place from then on.

ALTER TABLE api_keys ADD COLUMN replaces_key_id text UNIQUE REFERENCES api_keys;  -- null: succeeds none
