"""The request router: one address for all replicas of the judge, which loses nothing when one of them fails."""

from verl_fapo.router.proxy import Router
from verl_fapo.router.serve import allow_many_connections, serve

__all__ = ["Router", "allow_many_connections", "serve"]
