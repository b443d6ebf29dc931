"""The `inferlog` command: names and help of every command, loaded only when one is called.

Each entry is "module:attribute", so that the gateway's commands never import torch and no service is imported by
another's command.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from infra.arguments import guarded
from infra.away import unanswered

_COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("infra.local.commands:up", "Start the local stack: servers, API, worker, ledger."),
    "down": ("infra.local.commands:down", "Stop the local stack."),
    "status": (
        "infra.local.commands:status",
        "Say for each part of the local stack: where, healthy, why not.",
    ),
    "provision": ("infra.commands:provision", "Create topics, tables and the bucket, or report drift."),
    "topics": ("infra.commands:topics", "List the topics: key, record, retention, and why."),
    "api": ("api.commands:api", "Run the API gateway in the foreground."),
    "worker": ("gpu_worker.commands:worker", "Run a model worker in the foreground."),
    "customers": ("api.operators.customers_commands:customers", "Create, limit, cap and list customers."),
    "keys": ("api.operators.keys_commands:keys", "Create, list, scope, limit, rotate and revoke API keys."),
    "models": ("gpu_worker.commands:models", "Publish, list and route model versions."),
    "prices": ("streams.billing.prices_commands:price_list", "Publish and list what a unit of each meter costs."),
    "schemas": ("schemas.gate.commands:schemas", "List, check and publish the schemas of the records."),
    "usage": ("streams.usage.commands:usage", "Show what was used, by customer, hour, day or month, model and meter."),
    "outbox": ("streams.outbox.commands:outbox", "Show and publish the changes that wait to become records."),
    "dead-letters": (
        "streams.quarantine.commands:dead_letters",
        "List, redrive and discard records that could not be handled.",
    ),
    "billing": ("streams.billing.commands:billing", "Report usage to Stripe and compare totals."),
    "export": (
        "streams.replay.export_command:export_topic",
        "Write a topic to a file: JSON lines, CSV, Avro, Parquet.",
    ),
    "verify": ("streams.replay.commands:verify", "Prove the promises from the topics and tables alone."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called; the help page imports nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of a first walk through the product."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command, its texts held to what servers carry. A missing extra is explained, no traceback."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"'{cmd_name}' needs the package '{error.name}', which is not installed here; "
                "install inferlog with the extra of this process: [api], [gpu], [streams], [local], [export]"
            ) from error
        return guarded(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command list from the table above."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here:  inferlog up && inferlog status",
)
@click.version_option(package_name="inferlog")
def cli() -> None:
    """Inference you can bill: run, operate and audit inferlog."""


def _expected(error: Exception) -> str | None:
    """The one line of a failure that is no bug: a server is away, or refuses us. None for anything else."""
    words = str(error) or type(error).__name__
    for module, name, said in _FAILURES:
        # What was never imported cannot have raised.
        known = getattr(sys.modules.get(module), name, None)
        if isinstance(known, type) and isinstance(error, known):
            return said.format(words)
        if known is not None and not isinstance(known, type) and known(error):
            return said.format(words)
    return None


#: Module, its exception class or a function that recognises one, and what is said; the first that fits.
_FAILURES = (
    ("infra.settings", "SettingsError", "{}"),
    ("infra.kafka", "BusUnavailable", unanswered("Kafka", "{}")),
    ("infra.kafka", "KafkaError", unanswered("Kafka", "{}")),
    ("infra.redis", "RedisError", unanswered("Redis", "{}")),
    ("infra.s3", "StoreUnavailable", unanswered("S3", "{}")),
    ("infra.postgres", "DatabaseUnavailable", unanswered("Postgres", "{}")),
    ("builtins", "ConnectionError", unanswered("a server", "{}")),
    ("builtins", "TimeoutError", unanswered("a server", "{}", but=" in time")),
    ("asyncio.exceptions", "TimeoutError", unanswered("a server", "{}", but=" in time")),
    ("builtins", "OSError", "{}"),
    ("infra.postgres", "is_unusable", "Postgres refuses: {} (is it set up? see  inferlog provision)"),
    ("infra.postgres", "is_outage", unanswered("Postgres", "{}")),
)


def main(argv: list[str] | None = None) -> Any:
    """Entry point. Expected failures end with one line and exit status 1, without a traceback."""
    try:
        return cli.main(args=argv, prog_name="inferlog")
    except Exception as error:
        line = _expected(error)
        if line is None:
            raise
        click.echo(f"Error: {line}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
