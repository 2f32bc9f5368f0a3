"""Sweeps: many runs of one experiment, in search of its best settings."""
