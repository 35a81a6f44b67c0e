"""Executors: what runs a StepPlan on a given kind of host."""
