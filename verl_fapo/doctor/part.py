"""The process of one part: ``python -m verl_fapo.doctor.part SECONDS < request``, findings as JSON lines on stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from importlib import import_module


def main() -> None:
    """Examine, and say each finding as soon as it is known: the next one may be a crash."""
    # Ends this process even where nobody is left to do so.
    signal.alarm(int(float(sys.argv[1])) + 10)
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as out:
        # Libraries print too.
        os.dup2(2, 1)
        for found in import_module(f"verl_fapo.doctor.{request['module']}").examine(**request["arguments"]):
            print(json.dumps({type(found).__name__: asdict(found)}), file=out, flush=True)
    sys.stderr.flush()
    # No teardown: it can hang or crash, and nothing depends on it.
    os._exit(0)


if __name__ == "__main__":
    main()
