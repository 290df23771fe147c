"""Benchmarks: what a step costs here, against what one would do instead."""
