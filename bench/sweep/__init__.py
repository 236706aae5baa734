"""The load sweep: latency and throughput of every policy under the same requests."""
