"""Every command explains itself by an example, and whatever prints data can print JSON."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from infra.cli import cli

# These run a process in the foreground, or start and stop parts; their output is progress, not data.
WITHOUT_DATA = {"up", "down", "api", "worker", "outbox relay"}


def _leaves(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _leaves(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


LEAVES = dict(_leaves(cli))


@pytest.mark.parametrize("name", LEAVES)
def test_help_says_what_it_does_and_shows_an_example_of_itself(name: str) -> None:
    command = LEAVES[name]
    assert command.help
    assert command.epilog is not None
    assert f"inferlog {name}" in command.epilog
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


@pytest.mark.parametrize("name", ["customers", "keys", "models", "billing", "outbox", "dead-letters"])
def test_help_of_a_group_shows_an_example_of_its_commands(name: str) -> None:
    group = cli.get_command(click.Context(cli), name)
    assert isinstance(group, click.Group)
    assert set(re.findall(rf"inferlog ({name} [a-z]+)", group.epilog or "")) & LEAVES.keys()


@pytest.mark.parametrize("name", LEAVES)
def test_the_example_names_only_options_that_exist(name: str) -> None:
    command = LEAVES[name]
    known = {o for p in command.params for o in p.opts + p.secondary_opts} | {"--help"}
    example = (command.epilog or "").partition("Example:")[2].partition("&&")[0]
    assert {word for word in example.split() if word.startswith("--")} <= known


@pytest.mark.parametrize("name", sorted(set(LEAVES) - WITHOUT_DATA))
def test_data_can_be_had_as_json(name: str) -> None:
    assert any("--json" in p.opts for p in LEAVES[name].params)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("infra.cli", ("torch", "faust", "aiohttp", "stripe", "api", "gpu_worker", "streams")),
        ("api.app", ("torch", "faust", "stripe")),
        ("api.commands", ("torch", "faust", "stripe")),
        ("api.operators.keys_commands", ("torch", "faust", "stripe")),
        ("streams.billing.prices_commands", ("torch", "faust", "stripe")),
        ("streams.replay.commands", ("torch", "faust", "stripe")),
        ("gpu_worker.commands", ("faust", "stripe", "api")),
    ],
)
def test_a_process_loads_only_what_it_needs(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(sorted(set({absent!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
