"""The library beside its peers: ``python -m benchmarks NAME``."""
