"""The worked example: real models, real input, and the bill, checked against a second opinion at every step."""

from __future__ import annotations
