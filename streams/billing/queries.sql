-- name: owed
-- Hours up to $1 whose total, usage and corrections, is not what Stripe was told; one row each.
WITH ledger AS (
    SELECT customer_id, meter, hour, sum(units)::bigint AS total_units
    FROM billable_hourly WHERE hour <= $1 AND hour >= '0001-01-01T00:00Z'
    GROUP BY customer_id, meter, hour
), told AS (
    SELECT customer_id, meter, hour, sum(delta_units) FILTER (WHERE state NOT IN ('rejected', 'lost')) AS units
    FROM stripe_reports
    GROUP BY customer_id, meter, hour
)
SELECT l.customer_id, l.meter, l.hour, l.total_units, c.customer_id IS NOT NULL AS is_known
FROM ledger l
LEFT JOIN told t USING (customer_id, meter, hour)
LEFT JOIN customers c USING (customer_id)
LEFT JOIN stripe_quarantine q USING (customer_id)
WHERE l.total_units <> coalesce(t.units, 0) AND q.customer_id IS NULL

-- name: open_sums
-- How many sums of hours after $1 are not what Stripe was told.
SELECT count(*) FROM (
    SELECT customer_id, meter, hour, sum(units) AS units FROM billable_hourly WHERE hour > $1 AND hour < '10000-01-01T00:00Z'
    GROUP BY customer_id, meter, hour
) l
WHERE l.units <> coalesce((
    SELECT sum(r.delta_units) FROM stripe_reports r
    WHERE r.customer_id = l.customer_id AND r.meter = l.meter AND r.hour = l.hour
      AND r.state NOT IN ('rejected', 'lost')
), 0)

-- name: reports_of
SELECT r.customer_id, r.meter, r.hour, r.rev, r.total_units, r.delta_units, r.state
FROM stripe_reports r
JOIN unnest($1::text[], $2::text[], $3::timestamptz[]) AS wanted (customer_id, meter, hour)
    USING (customer_id, meter, hour)

-- name: insert_intent
INSERT INTO stripe_reports (customer_id, meter, hour, rev, total_units, delta_units, identifier, state)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)

-- name: open_intents
SELECT r.customer_id, r.meter, r.hour, r.rev, r.total_units, r.delta_units, r.identifier, r.state, r.first_sent_at,
       c.name, c.stripe_customer_id,
       (SELECT coalesce(sum(p.delta_units), 0)::bigint FROM stripe_reports p
        WHERE p.customer_id = r.customer_id AND p.meter = r.meter AND p.hour = r.hour
          AND p.state IN ('delivered', 'confirmed')) AS prior_units
FROM stripe_reports r
JOIN customers c USING (customer_id)
LEFT JOIN stripe_quarantine q USING (customer_id)
WHERE r.state IN ('planned', 'sending') AND q.customer_id IS NULL
ORDER BY r.customer_id, r.meter, r.hour

-- name: begin_send
UPDATE stripe_reports SET state = 'sending', first_sent_at = coalesce(first_sent_at, $2)
WHERE identifier = $1 AND state IN ('planned', 'sending')
RETURNING first_sent_at

-- name: end_send
UPDATE stripe_reports
SET state = $2, last_error = $3, delivered_at = CASE WHEN $2 IN ('delivered', 'confirmed') THEN $4::timestamptz END
WHERE identifier = $1 AND state IN ('planned', 'sending')

-- name: note_error
UPDATE stripe_reports SET last_error = $2 WHERE identifier = $1 AND state IN ('planned', 'sending')

-- name: unconfirmed
-- Hours with deliveries that the sums have not yet proved, and none in doubt. Whole customer-meters, and only those
-- whose oldest such delivery is from before $1: a read at Stripe costs the same for one hour and for a hundred.
WITH hours AS (
    SELECT customer_id, meter, hour, sum(delta_units) FILTER (WHERE state IN ('delivered', 'confirmed'))::bigint AS told_units,
           max(delivered_at) FILTER (WHERE state = 'delivered') AS delivered_at,
           min(delivered_at) FILTER (WHERE state = 'delivered') AS oldest_at
    FROM stripe_reports r
    WHERE (customer_id, meter, hour) IN (SELECT customer_id, meter, hour FROM stripe_reports WHERE state = 'delivered')
    GROUP BY customer_id, meter, hour
    HAVING count(*) FILTER (WHERE state IN ('planned', 'sending')) = 0
), due AS (
    SELECT customer_id, meter FROM hours GROUP BY customer_id, meter HAVING min(oldest_at) <= $1
)
SELECT h.customer_id, h.meter, h.hour, h.told_units, h.delivered_at, c.stripe_customer_id
FROM hours h
JOIN due USING (customer_id, meter)
JOIN customers c USING (customer_id)
LEFT JOIN stripe_quarantine q USING (customer_id)
WHERE q.customer_id IS NULL AND c.stripe_customer_id IS NOT NULL
ORDER BY h.customer_id, h.meter, h.hour

-- name: confirm
UPDATE stripe_reports SET state = 'confirmed', last_error = NULL
WHERE state = 'delivered' AND customer_id = $1 AND meter = $2 AND hour = ANY($3::timestamptz[])

-- name: set_stripe_customer
UPDATE customers SET stripe_customer_id = $2 WHERE customer_id = $1 AND stripe_customer_id IS NULL

-- name: quarantine
INSERT INTO stripe_quarantine (customer_id, reason) VALUES ($1, $2) ON CONFLICT DO NOTHING

-- name: quarantined
SELECT customer_id, reason FROM stripe_quarantine ORDER BY customer_id

-- name: ledger_hours
-- Every hour's total, usage and corrections, and whether Stripe should know it by now: reported, or up to $1.
SELECT b.customer_id, b.meter, b.hour, sum(b.units)::bigint AS total_units,
       b.hour <= $1 OR EXISTS (
           SELECT 1 FROM stripe_reports r
           WHERE r.customer_id = b.customer_id AND r.meter = b.meter AND r.hour = b.hour
       ) AS is_due
FROM billable_hourly b
WHERE b.hour >= '0001-01-01T00:00Z' AND b.hour < '10000-01-01T00:00Z'
GROUP BY b.customer_id, b.meter, b.hour

-- name: hours_outside
-- The first sums of hours that no calendar has, as Postgres writes them: for these nothing can be billed.
SELECT customer_id, meter, hour::text AS hour, sum(units) AS units
FROM billable_hourly WHERE hour < '0001-01-01T00:00Z' OR hour >= '10000-01-01T00:00Z'
GROUP BY billable_hourly.hour, customer_id, meter
ORDER BY billable_hourly.hour, customer_id, meter
LIMIT 10

-- name: carried_hours
-- What is billed by other means than events, because its hour was too old for them.
SELECT customer_id, meter, hour, sum(delta_units)::bigint AS units FROM stripe_reports WHERE state = 'carried'
GROUP BY customer_id, meter, hour

-- name: customers
SELECT customer_id, name, stripe_customer_id FROM customers

-- name: earliest_report
SELECT min(hour) FROM stripe_reports

-- name: customer
-- By id or by name; an id wins.
SELECT customer_id FROM customers WHERE customer_id = $1 OR name = $1
ORDER BY (customer_id = $1) DESC LIMIT 1

-- name: lock_customer
-- Corrections of one customer take turns from here to the end of the transaction; usage and foreign keys do not wait.
SELECT created_at FROM customers WHERE customer_id = $1 FOR NO KEY UPDATE

-- name: billable
SELECT coalesce(sum(units), 0)::bigint FROM billable_hourly WHERE customer_id = $1 AND meter = $2 AND hour = $3

-- name: known_meters
-- Meters that have a price, or that the customer used in the hour.
SELECT meter FROM prices
UNION
SELECT meter FROM usage_hourly WHERE customer_id = $1 AND hour = $2

-- name: insert_adjustment
INSERT INTO billing_adjustments (adjustment_id, customer_id, hour, meter, units, actor, reason, created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, clock_timestamp())
RETURNING created_at

-- name: adjustments
SELECT adjustment_id, customer_id, hour, meter, units, actor, reason, created_at
FROM billing_adjustments
WHERE $1::text IS NULL OR customer_id = $1
ORDER BY created_at, adjustment_id

-- name: lock_prices
-- Publishers take turns from here to the end of the transaction; whoever reads prices does not wait.
LOCK TABLE prices IN SHARE ROW EXCLUSIVE MODE

-- name: price
SELECT price_id, meter, amount_micros, currency, created_at FROM prices WHERE price_id = $1 ORDER BY meter

-- name: insert_price
WITH at AS MATERIALIZED (SELECT clock_timestamp() AS now), new AS (
    INSERT INTO prices (price_id, meter, amount_micros, currency, created_at)
    SELECT $1, meter, amount_micros, $4, at.now
    FROM at, unnest($2::text[], $3::bigint[]) AS priced (meter, amount_micros)
)
SELECT now FROM at

-- name: prices
SELECT price_id, meter, amount_micros, currency, created_at FROM prices ORDER BY created_at, price_id, meter
