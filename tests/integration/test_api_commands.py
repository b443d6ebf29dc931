"""`inferlog customers`, `keys` and `api`, as a user or a script runs them."""

from __future__ import annotations

from tests.integration.api_desk import customer, run


def test_customers_and_keys_from_creation_to_revocation(env: dict[str, str]) -> None:
    acme = customer(env, "Acme Ltd", requests_per_s=5, burst=9)
    assert acme["key"].startswith(f"il_test_{acme['key_id']}_")
    (listed,) = run(env, "customers", "list", "--json")
    assert (listed["name"], listed["requests_per_s"], listed["burst"], listed["keys"]) == ("Acme Ltd", 5, 9, 1)
    second = run(
        env, "keys", "create", "Acme Ltd", "--label", "ci", "--requests-per-s", "2", "--burst", "1",
        "--expires-in", "90d", "--json",
    )  # fmt: skip
    assert second["customer_id"] == acme["customer_id"]
    assert second["expires_at"] > second["created_at"]
    rows = {k["key_id"]: k for k in run(env, "keys", "list", acme["customer_id"], "--json")}
    assert (rows[acme["key_id"]]["requests_per_s"], rows[acme["key_id"]]["burst"]) == (5, 9)
    assert (rows[second["key_id"]]["label"], rows[second["key_id"]]["burst"]) == ("ci", 1)
    run(env, "keys", "revoke", second["key_id"], "--json")
    assert run(env, "customers", "list", "--json")[0]["keys"] == 1
    shown = str(run(env, "keys", "list", "--json"))
    assert acme["key"] not in shown
    assert second["key"] not in shown


def test_mistakes_end_with_one_line_and_no_traceback(env: dict[str, str]) -> None:
    customer(env, "Acme")
    for status, words, command in [
        (
            1,
            "there is a customer named 'Acme' already",
            ["customers", "create", "Acme", "--requests-per-s", "1", "--burst", "1"],
        ),
        (2, "1<=x<=1000000", ["customers", "create", "B", "--requests-per-s", "0", "--burst", "1"]),
        (2, "NAME: expected", ["customers", "create", "{x}", "--requests-per-s", "1", "--burst", "1"]),
        (1, "there is no customer 'nobody'", ["keys", "create", "nobody"]),
        (1, "there is no customer 'nobody'", ["keys", "list", "nobody"]),
        (2, "'--label': expected text without control characters", ["keys", "create", "Acme", "--label", "a\nb"]),
        (2, "--label: expected at most 100", ["keys", "create", "Acme", "--label", "x" * 101]),
        (2, "--expires-in: expected", ["keys", "create", "Acme", "--expires-in", "soon"]),
        (1, "there is no key with the id 'nope'", ["keys", "revoke", "nope"]),
    ]:
        said = run(env, *command, status=status)
        assert words in said, said
        assert "Traceback" not in said


def test_postgres_away_is_one_line(env: dict[str, str]) -> None:
    lost = {**env, "INFERLOG_POSTGRES_DSN": "postgresql://x:secret@127.0.0.1:9/x"}
    said = run(lost, "customers", "list", status=1)
    assert "Postgres does not answer" in said
    assert "secret" not in said


def test_settings_are_checked_without_starting(env: dict[str, str]) -> None:
    said = run({**env, "INFERLOG_MAX_QUEUED": "-1", "INFERLOG_ENVIRONMENT": "PROD!"}, "api", "--check", status=1)
    assert "INFERLOG_MAX_QUEUED" in said
    assert "INFERLOG_ENVIRONMENT" in said
