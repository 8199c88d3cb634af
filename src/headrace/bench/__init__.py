"""Headrace beside its peers: one machine, one memory cap, one run, a process for each."""
