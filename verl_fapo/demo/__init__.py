"""The demo: a world and two models small enough to watch FAPO work on a CPU."""
