"""What the demo claims, as comparisons: pure functions from what was seen to a table, and the ids that disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One table: what is claimed, its rows, and the ids or names that disagree (none when the claim holds)."""

    claim: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    disagree: Sequence[str] = field(default_factory=tuple)

    @property
    def holds(self) -> bool:
        """True when nothing disagrees."""
        return not self.disagree


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answered request: its id and the vectors it returned, one per item."""

    request_id: str
    vectors: Sequence[Sequence[float]]


def equal_answers(
    name: str, answers: Sequence[Answer], expected: Sequence[Sequence[float]], *, tolerance: float
) -> Check:
    """Every vector the API returned against the same model run here, by largest absolute difference."""
    flat = [(answer.request_id, vector) for answer in answers for vector in answer.vectors]
    worst = 0.0
    wrong: list[str] = []
    if len(flat) != len(expected):
        wrong.append(f"{len(flat)} vectors answered, {len(expected)} expected")
    for (request_id, got), want in zip(flat, expected, strict=False):
        difference = max((abs(a - b) for a, b in zip(got, want, strict=True)), default=0.0)
        worst = max(worst, difference)
        if not difference <= tolerance:
            wrong.append(request_id)
    return Check(
        claim=f"{name}: answers equal local torch",
        columns=("model", "items", "largest absolute difference", "allowed"),
        rows=[(name, str(len(flat)), f"{worst:.2e}", f"{tolerance:.0e}")],
        disagree=wrong,
    )


def equal_accuracy(answers: Sequence[Answer], expected: Sequence[Sequence[float]], labels: Sequence[int]) -> Check:
    """Digits recognised through the API against digits recognised by the same model run here."""

    def best(vector: Sequence[float]) -> int:
        return max(range(len(vector)), key=lambda i: vector[i])

    flat = [(answer.request_id, best(vector)) for answer in answers for vector in answer.vectors]
    local = [best(vector) for vector in expected]
    right = sum(guess == label for (_, guess), label in zip(flat, labels, strict=False))
    right_local = sum(guess == label for guess, label in zip(local, labels, strict=True))
    return Check(
        claim="digits: accuracy through the API = accuracy locally",
        columns=("model", "held-out digits", "right through the API", "right locally"),
        rows=[("digits", str(len(labels)), f"{right} ({right / len(labels):.2%})", f"{right_local}")],
        disagree=[rid for (rid, guess), want in zip(flat, local, strict=False) if guess != want],
    )


def equal_totals(
    claim: str,
    left_name: str,
    right_name: str,
    left: Mapping[tuple[str, str], int],
    right: Mapping[tuple[str, str], int],
) -> Check:
    """Two sets of totals per (customer, meter), to the unit."""
    rows = []
    wrong = []
    for key in sorted(left.keys() | right.keys()):
        a, b = left.get(key, 0), right.get(key, 0)
        rows.append((*key, str(a), str(b), str(b - a)))
        if a != b:
            wrong.append(f"{key[0]} {key[1]}: {left_name} {a}, {right_name} {b}")
    return Check(
        claim=claim, columns=("customer", "meter", left_name, right_name, "difference"), rows=rows, disagree=wrong
    )


def refused_free(refused: Mapping[str, int], billed: Mapping[str, int], accepted: Mapping[str, int]) -> Check:
    """Refused calls per customer: what was billed beyond the accepted calls must be nothing."""
    rows = []
    wrong = []
    for customer in sorted(refused):
        extra = billed.get(customer, 0) - accepted.get(customer, 0)
        rows.append((customer, str(refused[customer]), str(extra)))
        if extra:
            wrong.append(f"{customer}: {extra} of {refused[customer]} refused calls billed")
    if not any(refused.values()):
        wrong.append("no call was refused, so nothing was shown")
    return Check(
        claim="refused calls billed 0", columns=("customer", "refused (429)", "billed"), rows=rows, disagree=wrong
    )
