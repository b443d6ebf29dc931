-- What gateways follow of the registry.

-- name: registry_changes
-- What transactions from $1 on have changed, and the oldest one that may still change something: all before that one have
-- ended, so this has seen them. A row may come twice, none is missed, however late it was committed. One statement, so that
-- a route never comes without its version. Of the routes only what held an hour ago, and later.
SELECT 'horizon' AS kind, to_json(pg_snapshot_xmin(pg_current_snapshot())::text) AS found
UNION ALL
SELECT 'version', json_build_object('model', model, 'version', version, 'manifest', manifest, 'artifact_uri', artifact_uri,
                                    'created_us', (extract(epoch FROM created_at) * 1000000)::bigint)
FROM model_versions
WHERE changed_in >= $1::text::xid8 AND warmed_up_at IS NOT NULL
UNION ALL
SELECT 'revision', json_build_object('model', model, 'number', revision, 'change', change, 'version', version, 'pool', pool,
                                     'spread', spread, 'price_id', price_id, 'canaries', canaries, 'pins', pins,
                                     'withdrawn', withdrawn_at IS NOT NULL,
                                     'effective_us', (extract(epoch FROM effective_at) * 1000000)::bigint)
FROM route_revisions r
WHERE changed_in >= $1::text::xid8
  AND effective_at >= coalesce((
      SELECT max(effective_at) FROM route_revisions
      WHERE model = r.model AND withdrawn_at IS NULL AND effective_at <= statement_timestamp() - interval '1 hour'
  ), '-infinity')
UNION ALL
SELECT 'alias', json_build_object('model', model, 'name', alias, 'version', version)
FROM route_aliases
WHERE changed_in >= $1::text::xid8;
