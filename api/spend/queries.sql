-- name: spend_price
SELECT meter, currency, amount_micros FROM prices WHERE price_id = $1;

-- name: spend
-- Of each account: what its usage from `since` on costs in its currency, in the hours before `cut` and in those from it on; a price
-- id of that usage which nobody published; up to when the ledger is complete for it, and how long ago a ledger last said so. One
-- statement, hence one snapshot.
SELECT w.complete_until,
       greatest(0, extract(epoch FROM statement_timestamp() - w.seen_at))::float8 AS said_age_s,
       coalesce(s.closed_micros, 0) AS closed_micros, coalesce(s.open_micros, 0) AS open_micros, s.unpriced
FROM unnest($3::text[], $4::integer[], $5::text[], $6::timestamptz[], $7::timestamptz[], $8::timestamptz[])
     WITH ORDINALITY AS a (customer_id, partition, currency, since, cut, until, place)
LEFT JOIN usage_watermarks w ON w.consumer_group = $1 AND w.topic = $2 AND w.partition = a.partition
CROSS JOIN LATERAL (
    SELECT sum(u.quantity * p.amount_micros) FILTER (WHERE u.is_closed) AS closed_micros,
           sum(u.quantity * p.amount_micros) FILTER (WHERE NOT u.is_closed) AS open_micros,
           min(u.price_id) FILTER (WHERE NOT EXISTS (SELECT FROM prices known WHERE known.price_id = u.price_id)) AS unpriced
    FROM (
        SELECT price_id, meter, hour < a.cut AS is_closed, sum(quantity) AS quantity FROM usage_hourly
        WHERE customer_id = a.customer_id AND hour >= a.since AND hour < a.until
        GROUP BY price_id, meter, is_closed
    ) u LEFT JOIN prices p ON p.price_id = u.price_id AND p.meter = u.meter AND p.currency = a.currency
) s
ORDER BY a.place;
