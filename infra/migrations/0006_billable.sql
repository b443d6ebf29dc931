-- What is billed: what was used, and the corrections of it. Several rows an hour; whoever bills sums them.

CREATE VIEW billable_hourly AS
SELECT customer_id, meter, hour, quantity AS units FROM usage_hourly
UNION ALL
SELECT customer_id, meter, hour, units FROM billing_adjustments;
