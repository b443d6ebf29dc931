-- What the reporter learned it needs: at most one open intent per hour, a word for "never arrived", and quarantine.

ALTER TABLE stripe_reports DROP CONSTRAINT stripe_reports_state_check;
ALTER TABLE stripe_reports ADD CONSTRAINT stripe_reports_state_check
    CHECK (state IN ('planned', 'sending', 'delivered', 'confirmed', 'rejected', 'lost', 'carried'));

-- Two open intents of one hour could both be in doubt, and one sum cannot resolve two doubts.
CREATE UNIQUE INDEX stripe_reports_one_open ON stripe_reports (customer_id, meter, hour)
    WHERE state IN ('planned', 'sending');
CREATE INDEX stripe_reports_delivered ON stripe_reports (customer_id, meter, hour) WHERE state = 'delivered';

-- Customers whose usage is kept back because Stripe no longer knows them; a person settles these.
CREATE TABLE stripe_quarantine (
    customer_id  text PRIMARY KEY REFERENCES customers,
    reason       text NOT NULL,
    since        timestamptz NOT NULL DEFAULT now()
);
