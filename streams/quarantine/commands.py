"""`inferlog dead-letters`: the records that could not be handled, and what an operator does about them."""

from __future__ import annotations

import click

from streams.quarantine.list_command import list_command
from streams.quarantine.settling_commands import discard_command, redrive_command
from streams.quarantine.show_command import show_command


@click.group(epilog="Example:  inferlog dead-letters list && inferlog dead-letters show usage/3/41")
def dead_letters() -> None:
    """List, redrive and discard records that could not be handled.

    A letter is called by the place of its record on the log: topic/partition/offset, like usage/3/41.
    """


for _command in (list_command, show_command, redrive_command, discard_command):
    dead_letters.add_command(_command)
