-- Which topic a position was reached in: one that is deleted and made anew under the same name has another id, and its
-- offsets mean other records.

CREATE TABLE consumer_topics (
    consumer_group  text NOT NULL,
    topic           text NOT NULL,
    topic_id        uuid NOT NULL,
    PRIMARY KEY (consumer_group, topic)
);
