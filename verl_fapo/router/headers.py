"""The HTTP headers on which the router and its clients agree."""

from __future__ import annotations

import math
import time
from email.utils import parsedate_to_datetime

TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds that the caller waits, as a number."""

IDEMPOTENCY_HEADER = "Idempotency-Key"
"""Requests with the same key run once at a time."""

VIA = "1.1 verl-fapo"
"""In every answer that came through the router (RFC 9110, section 7.6.3): a failure with it was tried again already."""


def retry_after_seconds(text: str | None) -> float | None:
    """Seconds of a ``Retry-After``, which is a number or a date (RFC 9110, section 10.2.3); None if it is neither."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError, IndexError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
