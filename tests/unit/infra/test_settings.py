from __future__ import annotations

from pathlib import Path

import pytest

from infra.settings import SettingsError, api_settings, home_dir, load_environment, operator_settings

ENOUGH = {
    "INFERLOG_KAFKA_BOOTSTRAP": "127.0.0.1:1",
    "INFERLOG_POSTGRES_DSN": "postgresql://u:hunter2@127.0.0.1:2/x",
    "INFERLOG_REDIS_URL": "redis://:hunter2@127.0.0.1:3/0",
    "INFERLOG_S3_ACCESS_KEY": "a",
    "INFERLOG_S3_SECRET_KEY": "hunter2",
}


def test_every_mistake_is_reported_at_once_with_what_was_expected() -> None:
    with pytest.raises(SettingsError) as caught:
        api_settings({**ENOUGH, "INFERLOG_API_PORT": "http", "INFERLOG_DEADLINE_S": "-1", "INFERLOG_NAMESPACE": "A b"})
    words = str(caught.value)
    assert "INFERLOG_API_PORT is 'http', expected a number from 0 to 65535" in words
    assert "INFERLOG_DEADLINE_S is '-1'" in words
    assert "INFERLOG_NAMESPACE is 'A b'" in words


def test_what_is_missing_is_named_with_the_command_that_provides_it() -> None:
    with pytest.raises(SettingsError, match=r"INFERLOG_KAFKA_BOOTSTRAP is not set.*inferlog up"):
        api_settings({})


def test_secrets_are_not_shown() -> None:
    assert "hunter2" not in repr(operator_settings(ENOUGH))


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "stack.env").write_text("# made\nINFERLOG_A=file\nINFERLOG_B=file=x\n")
    found = load_environment({"INFERLOG_HOME": str(tmp_path), "INFERLOG_A": "env", "OTHER": "no"})
    assert (found["INFERLOG_A"], found["INFERLOG_B"]) == ("env", "file=x")
    assert "OTHER" not in found


def test_the_home_is_found_from_any_folder_below_the_one_that_has_a_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / "docs" / "deep"
    below.mkdir(parents=True)
    monkeypatch.delenv("INFERLOG_HOME", raising=False)
    monkeypatch.chdir(below)
    assert home_dir() == below / ".inferlog"
    (tmp_path / ".inferlog").mkdir()
    assert home_dir() == below / ".inferlog"
    (tmp_path / ".inferlog" / "stack.env").write_text("")
    assert home_dir() == tmp_path / ".inferlog"
    monkeypatch.setenv("INFERLOG_HOME", str(tmp_path / "elsewhere"))
    assert home_dir() == tmp_path / "elsewhere"


@pytest.mark.parametrize("value", ["a\udcff", "a\0b", "a\nb", "x" * 5000])
def test_text_that_no_server_takes_is_refused_without_showing_it(value: str) -> None:
    with pytest.raises(SettingsError, match="INFERLOG_S3_SECRET_KEY: expected") as caught:
        operator_settings({**ENOUGH, "INFERLOG_S3_SECRET_KEY": value})
    assert value not in str(caught.value)


def test_a_file_of_settings_that_is_not_utf_8_is_told_by_the_setting(tmp_path: Path) -> None:
    (tmp_path / "stack.env").write_bytes(b"INFERLOG_KAFKA_BOOTSTRAP=\xff\n")
    with pytest.raises(SettingsError, match="INFERLOG_KAFKA_BOOTSTRAP: expected text in UTF-8"):
        operator_settings({**ENOUGH, **load_environment({"INFERLOG_HOME": str(tmp_path)})})
