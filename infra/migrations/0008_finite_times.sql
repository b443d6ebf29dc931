-- A time that no calendar has (a year below 1 becomes -infinity on its way here) would break every reader of the tables.
-- NOT VALID: rows that are there already are left for whoever looks into how they came.

ALTER TABLE usage_hourly ADD CONSTRAINT usage_hourly_hour_is_finite CHECK (isfinite(hour)) NOT VALID;
ALTER TABLE processed_requests
    ADD CONSTRAINT processed_requests_occurred_at_is_finite CHECK (isfinite(occurred_at)) NOT VALID;
