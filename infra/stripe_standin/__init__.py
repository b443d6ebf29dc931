"""A Stripe that runs on this machine: customers, billing meters, meter events and their sums, with memory.

The official client works against it unmodified; `python -m infra.stripe_standin --help` says how to start it.
"""

from __future__ import annotations
