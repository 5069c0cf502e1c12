"""Judge servers that run elsewhere: do they answer, and do they serve that model."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

from verl_fapo.doctor.findings import Finding, reason
from verl_fapo.settings import JudgeSettings

ANSWER_SECONDS = 5.0
MAX_ANSWER_BYTES = 2**20


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None


def ask_endpoints(endpoints: Iterable[str], judge: JudgeSettings) -> Iterator[Finding]:
    """Ask each server for its models, directly and without following it elsewhere, as the judge's client does."""
    for endpoint in endpoints:
        url = f"{endpoint.rstrip('/')}/v1/models"
        try:
            models = {str(model["id"]): model for model in _get(url)["data"]}
        except urllib.error.HTTPError as exc:
            yield Finding("judge", "problem", f"{url} answers HTTP {exc.code}", "correct fapo.genrm.endpoints")
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as exc:
            what = f"{url} gives no list of models: {reason(exc)}"
            yield Finding("judge", "problem", what, "start the server, or correct fapo.genrm.endpoints")
        else:
            yield _served(url, models, judge)


def _served(url: str, models: dict[str, Any], judge: JudgeSettings) -> Finding:
    if judge.model not in models:
        way_out = f"set fapo.judge.model to one of these, or start the server with --served-model-name {judge.model}"
        return Finding("judge", "problem", f"{url} serves {', '.join(models)}, not {judge.model!r}", way_out)
    context = models[judge.model].get("max_model_len")
    if isinstance(context, int) and judge.max_tokens >= context:
        what = f"fapo.judge.max_tokens={judge.max_tokens} leaves no room for a prompt in {url}'s context of {context}"
        return Finding("judge", "problem", what, "lower fapo.judge.max_tokens")
    return Finding("judge", "ok", f"{url} serves {judge.model}")


def _get(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    with opener.open(url, timeout=ANSWER_SECONDS) as response:
        return json.loads(response.read(MAX_ANSWER_BYTES))
