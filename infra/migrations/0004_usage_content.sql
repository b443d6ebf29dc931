-- What a billed usage record said, so that another one with the same request id and other content is told apart from a
-- repetition, however far apart the two are read.

ALTER TABLE processed_requests ADD COLUMN content_digest bytea  -- null: written before this column; equal to anything
    CHECK (length(content_digest) = 16);
