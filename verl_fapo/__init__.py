"""Flawed-Aware Policy Optimization (FAPO, arXiv:2510.22543) as a plugin for veRL."""

__version__ = "0.1.0"
