"""The request router: one address for all replicas of the judge, which loses nothing when one of them fails."""

from verl_fapo.router.proxy import Router

__all__ = ["Router"]
