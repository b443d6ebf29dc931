-- Which version answers has a history: each change of a route is a revision, and what holds at a moment follows from the
-- revisions and the clock, so that a switch for later takes effect while everybody sleeps.

-- When the version was loaded and has run; null: it has not, and no route may name it. Publishing has always tried a
-- version before it registered it.
ALTER TABLE model_versions ADD COLUMN warmed_up_at timestamptz CHECK (is_moment(warmed_up_at));
-- As in 0014: the transaction that changed the row last.
ALTER TABLE model_versions ADD COLUMN changed_in xid8;
CREATE INDEX model_versions_changed ON model_versions (changed_in);
CREATE TRIGGER note_change BEFORE INSERT OR UPDATE ON model_versions FOR EACH ROW EXECUTE FUNCTION note_change();
UPDATE model_versions SET warmed_up_at = created_at;

-- A route that named it would then point at a version that has not run.
CREATE FUNCTION refuse_cooling() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE 'version % has passed its warm-up, which cannot be taken back', OLD.version USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER refuse_cooling BEFORE UPDATE ON model_versions FOR EACH ROW
    WHEN (OLD.warmed_up_at IS NOT NULL AND NEW.warmed_up_at IS NULL) EXECUTE FUNCTION refuse_cooling();

CREATE TABLE route_revisions (
    model         text NOT NULL REFERENCES models,
    revision      integer NOT NULL CHECK (revision > 0),      -- 1, 2, 3, … in the order of the changes
    change        text NOT NULL CHECK (change IN ('ROUTED', 'SCHEDULED', 'ROLLED_BACK')),
    -- It holds from then on, until another one does; of two with one time the later revision.
    effective_at  timestamptz NOT NULL CHECK (is_moment(effective_at)),
    version       text NOT NULL,
    pool          text NOT NULL,
    spread        integer NOT NULL CHECK (spread BETWEEN 1 AND 8),
    price_id      text NOT NULL,
    canaries      jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(canaries) = 'object'),  -- version to hundredths, 0 to 99
    pins          jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(pins) = 'object'),      -- customer to version
    restores      integer,                                    -- the revision that a rollback went back to
    actor         text NOT NULL,
    reason        text,
    made_at       timestamptz NOT NULL CHECK (is_moment(made_at)),
    withdrawn_at  timestamptz,                                -- of one for later that never took effect
    withdrawn_by  text,
    changed_in    xid8,
    PRIMARY KEY (model, revision),
    FOREIGN KEY (model, version) REFERENCES model_versions (model, version),
    FOREIGN KEY (model, restores) REFERENCES route_revisions (model, revision),
    CHECK ((change = 'ROLLED_BACK') = (restores IS NOT NULL)),
    CHECK (withdrawn_at IS NULL OR (change = 'SCHEDULED' AND withdrawn_at < effective_at))
);
CREATE INDEX route_revisions_changed ON route_revisions (changed_in);
CREATE INDEX route_revisions_effective ON route_revisions (model, effective_at);
CREATE TRIGGER note_change BEFORE INSERT OR UPDATE ON route_revisions FOR EACH ROW EXECUTE FUNCTION note_change();

-- Other names of versions. A removed one stays as a row without a version, so that whoever follows changes hears of it.
CREATE TABLE route_aliases (
    model       text NOT NULL REFERENCES models,
    -- Nothing that could be the start of a version's hash.
    alias       text NOT NULL CHECK (alias ~ '^[a-z][a-z0-9-]{0,39}$' AND alias !~ '^[0-9a-f]+$' AND alias <> 'sha256'),
    version     text,
    updated_at  timestamptz NOT NULL CHECK (is_moment(updated_at)),
    changed_in  xid8,
    PRIMARY KEY (model, alias),
    FOREIGN KEY (model, version) REFERENCES model_versions (model, version)
);
CREATE INDEX route_aliases_changed ON route_aliases (changed_in);
CREATE TRIGGER note_change BEFORE INSERT OR UPDATE ON route_aliases FOR EACH ROW EXECUTE FUNCTION note_change();

-- Every version that a route or an alias names is this model's and has run.
CREATE FUNCTION require_warmed_up() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    route constant jsonb := to_jsonb(NEW);
    named text;
BEGIN
    FOR named IN
        SELECT NEW.version WHERE NEW.version IS NOT NULL
        UNION SELECT jsonb_object_keys(route->'canaries') WHERE route ? 'canaries'
        UNION SELECT p.value FROM jsonb_each_text(route->'pins') AS p WHERE route ? 'pins'
    LOOP
        PERFORM FROM model_versions
        WHERE model = NEW.model AND version = named AND warmed_up_at IS NOT NULL
        FOR KEY SHARE;
        IF NOT FOUND THEN
            RAISE 'version % of model % is not there or has not passed its warm-up; no route may name it', named, NEW.model
                USING ERRCODE = 'check_violation';
        END IF;
    END LOOP;
    RETURN NEW;
END $$;
CREATE TRIGGER require_warmed_up BEFORE INSERT OR UPDATE ON route_revisions
    FOR EACH ROW EXECUTE FUNCTION require_warmed_up();
CREATE TRIGGER require_warmed_up BEFORE INSERT OR UPDATE ON route_aliases
    FOR EACH ROW EXECUTE FUNCTION require_warmed_up();

INSERT INTO route_revisions (model, revision, change, effective_at, version, pool, spread, price_id, actor, reason, made_at)
SELECT model, 1, 'ROUTED', updated_at, version, pool, spread, price_id, 'migration', 'older than the history', updated_at
FROM routes;
DROP TABLE routes;

-- What holds now, for whoever reads; written are revisions.
CREATE VIEW routes AS
SELECT DISTINCT ON (model) model, version, pool, spread, price_id, effective_at AS updated_at
FROM route_revisions
WHERE withdrawn_at IS NULL AND (change <> 'SCHEDULED' OR effective_at <= clock_timestamp())
ORDER BY model, effective_at DESC, revision DESC;
