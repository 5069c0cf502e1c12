"""The recipe files, installed as ``verl_fapo.recipes``."""
