"""A refusal as a value: which record and field, which rule, what is wrong, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One broken rule. `path` is the field, empty when the whole record (or file) is meant.

    `problem` and `remedy` are whole sentences for somebody who sees the rule for the first time.
    """

    record: str
    path: str
    rule: str
    problem: str
    remedy: str

    def text(self) -> str:
        """Three lines: where and which rule, what is wrong, what to do."""
        where = f"{self.record}: {self.path}" if self.path else self.record
        return f"{where}  [{self.rule}]\n  {self.problem}\n  Instead: {self.remedy}"


class Refused(ValueError):
    """What was asked for may not be; `findings` say why."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(f.text() for f in findings))
        self.findings = tuple(findings)

    @classmethod
    def because(cls, record: str, rule: str, problem: str, remedy: str) -> Refused:
        """For one reason that concerns the whole record."""
        return cls([Finding(record=record, path="", rule=rule, problem=problem, remedy=remedy)])
