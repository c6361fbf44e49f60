"""The parts of bench/peers.py. What needs torch: inputs, reference, implementations, timing, step, worker."""
