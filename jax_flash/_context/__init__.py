"""Context parallelism: one sequence over many devices. all_gather.py, ring.py and ulysses.py are the schedules."""
