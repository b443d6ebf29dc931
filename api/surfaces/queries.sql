-- name: usage
-- $2: where each period begins, in order; $3: where the last one ends. Beside a page come the totals of the whole range, as
-- period 0. Columns that are not asked for by $4 are empty.
WITH sums AS MATERIALIZED (
    SELECT width_bucket(hour, $2::timestamptz[]) AS period,
           CASE WHEN 'model' = ANY ($4::text[]) THEN model ELSE '' END AS model,
           CASE WHEN 'version' = ANY ($4) THEN version ELSE '' END AS version,
           CASE WHEN 'price_id' = ANY ($4) THEN price_id ELSE '' END AS price_id,
           meter, sum(quantity) AS quantity
    FROM usage_hourly
    WHERE customer_id = $1 AND hour >= ($2::timestamptz[])[1] AND hour < $3
      AND ($5::text IS NULL OR model = $5) AND ($6::text IS NULL OR starts_with(version, $6))
      AND ($7::text IS NULL OR price_id = $7) AND ($8::text IS NULL OR meter = $8)
    GROUP BY 1, 2, 3, 4, 5
), page AS (
    SELECT * FROM sums
    WHERE (period, model, version, price_id, meter) > ($9::int, $10::text, $11::text, $12::text, $13::text)
    ORDER BY period, model, version, price_id, meter
    LIMIT $14
)
SELECT * FROM page
UNION ALL
SELECT 0, '', '', '', meter, sum(quantity) FROM sums GROUP BY meter
ORDER BY period, model, version, price_id, meter;

-- name: usage_watermark
-- Of one partition: others move at their own pace and say nothing about it.
SELECT statement_timestamp() AS as_of, w.complete_until, w.seen_at
FROM (SELECT) AS always LEFT JOIN usage_watermarks w ON w.consumer_group = $1 AND w.topic = $2 AND w.partition = $3;
