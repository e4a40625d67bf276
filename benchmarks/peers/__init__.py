"""`python -m benchmarks.peers`: the standing workload on other engines, side by side with ours."""
