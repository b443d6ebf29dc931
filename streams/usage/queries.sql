-- name: usage_days
-- The UTC days of which there is any usage, one look into the index for each; times that no calendar has are not among them.
WITH RECURSIVE days (hour) AS (
    SELECT min(hour) FROM usage_hourly WHERE hour >= coalesce($1::timestamptz, $3) AND hour < coalesce($2::timestamptz, $4)
    UNION ALL
    SELECT (
        SELECT min(u.hour) FROM usage_hourly u
        WHERE u.hour >= date_trunc('day', days.hour, 'UTC') + interval '1 day' AND u.hour < coalesce($2, $4::timestamptz)
    )
    FROM days WHERE days.hour IS NOT NULL
)
SELECT date_trunc('day', hour, 'UTC') AS day FROM days WHERE hour IS NOT NULL

-- name: usage
-- $1: where each period begins, in order; what lies before the first is period 0. Columns not asked for by $4 are empty.
WITH sums AS (
    SELECT width_bucket(hour, $1::timestamptz[]) AS period,
           CASE WHEN 'customer' = ANY ($4::text[]) THEN customer_id ELSE '' END AS customer_id,
           CASE WHEN 'model' = ANY ($4) THEN model ELSE '' END AS model,
           CASE WHEN 'version' = ANY ($4) THEN version ELSE '' END AS version,
           CASE WHEN 'price_id' = ANY ($4) THEN price_id ELSE '' END AS price_id,
           meter, sum(quantity) AS quantity
    FROM usage_hourly
    WHERE ($2::timestamptz IS NULL OR hour >= $2) AND ($3::timestamptz IS NULL OR hour < $3)
      AND ($5::text[] IS NULL OR customer_id = ANY ($5)) AND ($6::text IS NULL OR model = $6)
      AND ($7::text IS NULL OR starts_with(version, $7)) AND ($8::text IS NULL OR price_id = $8)
      AND ($9::text IS NULL OR meter = $9)
    GROUP BY 1, 2, 3, 4, 5, 6
)
SELECT s.period, s.customer_id, coalesce(c.name, '') AS customer, s.model, s.version, s.price_id, s.meter, s.quantity
FROM sums s LEFT JOIN customers c USING (customer_id)
ORDER BY s.period, customer, s.customer_id, s.model, s.version, s.price_id, s.meter

-- name: usage_patience
-- For one transaction: what it may take of the server, in milliseconds.
SELECT set_config('statement_timeout', $1, true), set_config('idle_in_transaction_session_timeout', $1, true)

-- name: usage_customers
-- Whom a name or an id means; usage may be of somebody who was never registered.
SELECT $1::text AS customer_id UNION SELECT customer_id FROM customers WHERE name = $1

-- name: known_names
-- Whether anybody is or was called $1, any model $2, and whether anything was counted by the meter $3.
SELECT EXISTS (SELECT 1 FROM customers WHERE customer_id = $1 OR name = $1)
       OR EXISTS (SELECT 1 FROM usage_hourly WHERE customer_id = $1) AS customer,
       EXISTS (SELECT 1 FROM models WHERE model = $2)
       OR EXISTS (SELECT 1 FROM usage_hourly WHERE model = $2) AS model,
       EXISTS (SELECT 1 FROM usage_hourly WHERE meter = $3) AS meter

-- name: meters
SELECT DISTINCT meter FROM usage_hourly ORDER BY meter

-- name: watermarks
SELECT partition, complete_until, seen_at
FROM usage_watermarks WHERE consumer_group = $1 AND topic = $2

-- name: usage_now
SELECT statement_timestamp()

-- name: move_watermarks
-- In the order of their keys, and forward only; null leaves what is known.
INSERT INTO usage_watermarks AS w (consumer_group, topic, partition, complete_until, seen_at)
SELECT $1, $2, partition, complete_until, statement_timestamp()
FROM unnest($3::integer[], $4::timestamptz[]) AS new (partition, complete_until)
ORDER BY partition
ON CONFLICT (consumer_group, topic, partition)
DO UPDATE SET complete_until = greatest(w.complete_until, excluded.complete_until),
              seen_at = greatest(w.seen_at, excluded.seen_at)
